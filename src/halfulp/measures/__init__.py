"""Measures of updates: which are lost and by how much, crossings, forecasts, groups of tensors."""

from halfulp.measures.events import frozen, margin, phase, rho, symmetric_frozen

__all__ = ["frozen", "margin", "phase", "rho", "symmetric_frozen"]
