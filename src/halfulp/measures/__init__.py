"""Formulas of the paper on arrays: crossings, the quality of a forecast, and which tensors make a scope."""
