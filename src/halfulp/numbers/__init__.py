"""Stored numbers: the grids they lie on, their names and elements, and the random streams of rounding."""

from halfulp.numbers.grids import Grid, float_grid, grid, integer_grid
from halfulp.numbers.streams import Stream

__all__ = ["Grid", "Stream", "float_grid", "grid", "integer_grid"]
