"""Describe a grid to a fast kernel, as numbers of the container's type.

There are three ways to round, all exact:

``MAGIC``
    Adding and subtracting 1.5 * 2**(e + mant - m), with e the exponent of the value but at
    least emin, makes the floating-point unit itself round to the grid, ties to even. Valid
    when that constant cannot overflow and the spacing is a normal number.
``BITS``
    Integer rounding of the bit pattern, for grids that share the container's exponent range
    (bf16 and m7 in float32): there subnormals are rounded by the same addition.
``SCALED``
    The value divided by its scale, in float64, then ``MAGIC`` there. For moving scales, and for
    the rare static grid that neither of the others takes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError
from halfulp.numbers.containers import CONTAINERS
from halfulp.numbers.elements import value_of
from halfulp.numbers.grids import Grid

Array = npt.NDArray[Any]

MAGIC, BITS, SCALED = 0, 1, 2

# columns of the float table
LO, HI, UP, T_END, T_SUB, T_ZERO, UNIT, TWO31 = range(8)
# columns of the integer table
KIND, EMIN, SHIFT, CUT, TOP, POINTS, HALF, ODD, KEEP, INVERSE, MANT, LEFT, RIGHT = range(13)


class Params(NamedTuple):
    """One grid in one working type: see the column names above."""

    kind: int
    floats: Array
    ints: Array


def working(container_name: str) -> str:
    """The type in which kernels compute for a container."""
    return "float64" if container_name == "float64" else "float32"


@lru_cache(maxsize=1024)
def params(grid: Grid, work: str) -> Params:
    """Numbers for a grid whose limits are explicit (``grid.within(dtype)``)."""
    box = CONTAINERS[work]
    emin, largest = grid._fixed()
    m = grid.mantissa
    emax = math.frexp(max(largest, -grid.lo))[1] - 1
    kind = SCALED
    if grid.scaling is None:
        magic = (
            1 <= m <= box.mantissa - 2  # without a mantissa the even code is not the even significand
            and emin - m - 1 > box.emin  # the spacing and its inverse are normal numbers
            and emax + box.mantissa - m <= box.emax
        )
        if magic:
            kind = MAGIC
        elif emin == box.emin and m <= box.mantissa and grid.lowest is None:
            kind = BITS
        elif work == "float64":
            raise UsageError(
                f"grid {grid.name} cannot be rounded in float64: its range is too wide, or it has no "
                "mantissa bits and not the container's exponents."
            )
    real: Any = np.float32 if work == "float32" else np.float64
    whole: Any = np.int32 if work == "float32" else np.int64
    cut = max(box.mantissa - m, 0)
    bias = box.emax
    zero, normal, end = (first_magnitude(k, grid, real) for k in _marks(grid))
    floats = [grid.lo, largest, 2.0 ** (m + 1), end, normal, zero, 1.0, 2.0**31]
    ints = [
        kind,
        max(emin + bias, 1) << box.mantissa,
        (cut << box.mantissa) | (1 << (box.mantissa - 1)),
        cut,
        int(np.array(min(largest, box.largest), dtype=real).view(whole)),
        (m + 1) << 16,
        (1 << (cut - 1)) - 1 if cut else 0,
        1 if cut else 0,
        ~((1 << cut) - 1),
        (2 * bias + m) << box.mantissa,
        m << box.mantissa,
        max(31 - cut, 0),
        max(cut - 31, 0),
    ]
    width = 8 * np.dtype(whole).itemsize  # INVERSE may not fit where it is not used: wrap it
    wrapped = [(i + (1 << (width - 1))) % (1 << width) - (1 << (width - 1)) for i in ints]
    return Params(kind, np.array(floats, dtype=real), np.array(wrapped, dtype=whole))


def _marks(grid: Grid) -> tuple[int, int, int]:
    """The indices of the first non-zero code, the first normal one and the last."""
    first_normal = 1 if grid.integer else 1 << grid.mantissa
    return 1, first_normal, grid.last_index


def first_magnitude(index: int, grid: Grid, real: Any) -> float:
    """The smallest container magnitude that nearest rounding sends to this index or beyond."""
    below, at = (float(v) for v in value_of(np.array([index - 1, index]), grid))
    middle = below + (at - below) / 2
    candidate = real(middle)
    if float(candidate) < middle or (float(candidate) == middle and index % 2 == 1):
        candidate = np.nextafter(candidate, real(np.inf))
    return float(candidate)


@lru_cache(maxsize=256)
def table(grids: tuple[Grid, ...], work: str) -> tuple[Array, Array]:
    """The tables of several grids, one row each."""
    each = [params(g, work) for g in grids]
    if not each:
        real = np.float32 if work == "float32" else np.float64
        whole = np.int32 if work == "float32" else np.int64
        return np.zeros((0, 8), dtype=real), np.zeros((0, 13), dtype=whole)
    return np.stack([p.floats for p in each]), np.stack([p.ints for p in each])
