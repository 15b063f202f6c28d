"""The elements of a fixed grid by number: which magnitude is the n-th, and which number a magnitude has.

Elements are numbered from zero up through the binades, so that adjacent ones have adjacent numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from halfulp.numbers.grids import Grid

Array = npt.NDArray[Any]


def index_of(magnitude: Array, grid: Grid) -> Array:
    """Return the index of the largest element not above a finite magnitude (unbounded by the largest)."""
    emin, _ = grid._fixed()
    m = grid.mantissa
    fraction, exponent = np.frexp(magnitude.astype(np.float64))  # 0.5 <= fraction < 1, or zero
    binade = np.where(fraction == 0, 0, np.maximum(exponent.astype(np.int64) - 1 - emin, 0))
    units = np.floor(np.ldexp(fraction, exponent - binade - emin + m)).astype(np.int64)
    return np.asarray(binade * 2**m + units)


def value_of(index: Array, grid: Grid) -> Array:
    """Return the element with this index, as float64."""
    emin, _ = grid._fixed()
    m = grid.mantissa
    binade = np.maximum((index >> m) - 1, 0)
    units = index - binade * 2**m
    with np.errstate(over="ignore"):  # beyond the largest float64 there is nothing
        return np.asarray(np.ldexp(units.astype(np.float64), (binade + emin - m).astype(np.int64)))
