"""Turn pairs of tensors, before and after, into rows of counts; no optimizer, no disk."""
