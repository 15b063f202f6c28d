"""Find the tensors to compare: steps of optimizers, casts, moments, copies, accumulated gradients."""
