"""Oracles for the tests, sharing no code with what they judge.

Every number here is a dyadic rational, so exact arithmetic is integer arithmetic over one common
denominator, 2**1200. :class:`Exact` lists the values of a grid by counting up from zero and finds
neighbours by bisection; :class:`Table` is the same list as a sorted array, for millions of points.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import torch

import halfulp as hu
from halfulp.kernels import reference
from halfulp.numbers import float_grid

ONE = 1 << 1200

NUMPY = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float16: np.dtype(np.float16),
}
CONTAINERS = list(NUMPY)


# ---- exact numbers ----------------------------------------------------------------------------


def exact(x: float) -> int:
    """A finite float in units of 2**-1200."""
    numerator, denominator = float(x).as_integer_ratio()
    return numerator * (ONE // denominator)


class Exact:
    """A grid's values, from its declared mantissa, exponent and limits alone."""

    def __init__(self, grid: hu.Grid, scale: float = 1.0) -> None:
        assert grid.emin is not None
        assert grid.largest is not None
        gap = ONE * 2**grid.emin // 2**grid.mantissa if grid.emin >= 0 else ONE >> (grid.mantissa - grid.emin)
        top = exact(grid.largest)
        low = top if grid.lowest is None else -exact(grid.lowest)
        sizes, value = [], 0
        while value <= max(top, low):
            sizes.append(value)
            if value == gap << (grid.mantissa + 1):  # a binade is full
                gap *= 2
            value += gap
        factor = exact(scale)
        scaled = sizes if factor == ONE else [v * factor // ONE for v in sizes]
        self.up = scaled[: bisect_right(sizes, top)]
        self.down = scaled[: bisect_right(sizes, low)]
        self.values = [-v for v in self.down[:0:-1]] + self.up

    def nearest(self, x: float) -> float:
        """Nearest value, ties to the even index, beyond the ends the end, with the sign of x."""
        side = self.down if math.copysign(1.0, x) < 0 else self.up
        a = min(abs(exact(x)), side[-1])
        i = bisect_right(side, a) - 1
        if i + 1 < len(side):
            excess = 2 * a - side[i] - side[i + 1]
            i += excess > 0 or (excess == 0 and i % 2 == 1)
        return math.copysign(side[i] / ONE, x)

    def below(self, x: float) -> float:
        i = bisect_left(self.values, exact(x))
        return self.values[i - 1] / ONE if i else -math.inf

    def above(self, x: float) -> float:
        i = bisect_right(self.values, exact(x))
        return self.values[i] / ONE if i < len(self.values) else math.inf

    def floats(self) -> np.ndarray:
        """Every value, in increasing order, as float64."""
        return self._floats.copy()

    @cached_property
    def _floats(self) -> np.ndarray:
        up, down = ([v / ONE for v in side] for side in (self.up, self.down))
        return np.array([-v for v in down[:0:-1]] + up)

    def midpoints(self) -> np.ndarray:
        """Every midpoint of neighbours, exact in float64 for grids of at most 16 bits."""
        return np.array([(a + b) / (2 * ONE) for a, b in pairwise(self.values)])


class Table:
    """The same by search in sorted arrays."""

    def __init__(self, grid: Exact) -> None:
        self.values, self.middles = grid.floats(), grid.midpoints()
        self.odd = np.abs(np.arange(len(self.values)) - (len(grid.down) - 1)) % 2 == 1

    def nearest(self, x: np.ndarray) -> np.ndarray:
        """Nearest values of float64s; what is not finite comes back."""
        i = np.searchsorted(self.middles, x, side="left")  # on a midpoint: the lower neighbour
        inside = np.minimum(i, len(self.middles) - 1)
        tied = (self.middles[inside] == x) & self.odd[i]
        r = np.copysign(self.values[np.minimum(i + tied, len(self.values) - 1)], x)
        return np.where(np.isfinite(x), r, x)


@cache
def oracle_of(grid: hu.Grid, scale: float = 1.0) -> Exact:
    return Exact(grid, scale)


# ---- grids to try -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A grid whose values are fixed: without a scale of its own, or with one given for all of it."""

    label: str
    grid: hu.Grid
    scale: float | None = None

    def within(self, dtype: torch.dtype) -> Case | None:
        """The case in a container, or None if it does not fit, or its values under the scale do not."""
        if not fits(self.grid, dtype):
            return None
        g = self.grid.within(dtype)
        if g.mantissa == 0 and g.emin != (-1022 if dtype == torch.float64 else -126):
            return None  # kernels round m0 only with the exponents of float64 or float32
        scale = self.scale
        if g.scaling is not None and not g.scaling.moves:
            scale = float(g.scales(torch.ones(1, dtype=dtype))[0])
        case = Case(self.label, g, scale)
        values = torch.from_numpy(case.exact.floats())
        return case if torch.equal(values.to(dtype).double(), values) else None

    @property
    def exact(self) -> Exact:
        return oracle_of(self.grid, 1.0 if self.scale is None else self.scale)

    def scales(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        if self.scale is None or self.grid.scaling is None:
            return None
        return torch.full((self.grid.scaling.segments(shape),), self.scale, dtype=torch.float64)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        return self.grid.round(x, scale=self.scales(tuple(x.shape)))

    def reference(self, x: np.ndarray) -> np.ndarray:
        scales = self.scales(x.shape)
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs, and what saturates
            return reference.round(x, self.grid, scale=None if scales is None else scales.numpy())


def fits(grid: hu.Grid | str, dtype: torch.dtype) -> bool:
    """Whether a container can hold a grid."""
    try:
        hu.grid(grid).within(dtype)
    except hu.UsageError:
        return False
    return True


def _cases() -> list[Case]:
    floats = (
        "bf16 fp16 e5m2 float8_e5m2fnuz e4m3 float8_e4m3 float8_e4m3fnuz float8_e4m3b11fnuz e4m3@128 "
        "e5m2@0.25 bf16@4 e3m4 e2m3 e3m2 e2m1 m0 m1 m2 m3 m4 m5 m6 m7"
    )
    integers = (
        "int2@1 int3@4 int4@16 int5@0.5 int6@1024 int7@2 int8@128 int3@8/asym int8@64/asym "
        "int8@100 int4@10 int2@7 int3@3/asym"
    )
    made = {
        "two bits": float_grid(mantissa=1, emin=0, largest=0.5),
        "no normals": float_grid(mantissa=3, emin=0, largest=0.5),
        "e6m9": float_grid(mantissa=9, emin=-30, largest=2.0**32),
        "near float32's smallest": float_grid(mantissa=9, emin=-124, largest=1.5 * 2.0**-100),
        "near float32's largest": float_grid(mantissa=3, emin=-60, largest=1.875 * 2.0**127),
    }
    # the element sets of grids whose scales move, under scales that their rules could give
    scales = [("mxfp8_e4m3", 2.0**-7), ("mxfp8_e5m2", 2.0**-20), ("mxfp6_e2m3", 1.0), ("mxfp6_e3m2", 2.0**9)]
    scales += [
        ("mxfp4", 2.0**-5),
        ("nvfp4", 13 * 2.0**-12),
        ("int4/g128", 0.3046875),
        ("int8", 40503 * 2.0**-20),
    ]
    scales += [("int3/dqt", 77777 * 2.0**-21)]
    return [
        *(Case(n, hu.grid(n)) for n in f"{floats} {integers}".split()),
        *(Case(n, g) for n, g in made.items()),
        *(Case(f"{n} scale {s:g}", hu.grid(n), s) for n, s in scales),
    ]


CASES = {c.label: c for c in _cases()}


# ---- arrays and tensors -------------------------------------------------------------------------


def tensor(x: np.ndarray) -> torch.Tensor:
    """An array as a tensor of the same bits."""
    x = np.asarray(x)  # an operation on arrays without dimensions gives a scalar
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor as an array of the same bits; bfloat16 as ml_dtypes has it."""
    x = x.contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def bits(x: Any) -> np.ndarray:
    """The bit patterns of an array or tensor of floats; anything else as it is."""
    x = array(x) if isinstance(x, torch.Tensor) else np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.kind in "fV" else x


def assert_same(got: Any, expected: Any, what: str = "") -> None:
    """Equal to the last bit: signs of zero count, the payloads of NaNs do not."""
    g, e = (array(v) if isinstance(v, torch.Tensor) else np.asarray(v) for v in (got, expected))
    assert g.dtype == e.dtype, what
    assert g.shape == e.shape, what
    wrong = bits(g) != bits(e)
    if g.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):  # ml_dtypes warns of signalling NaNs
            wrong &= ~(np.isnan(g) & np.isnan(e))
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.size} differ, first at {np.argwhere(wrong)[0].tolist()}: "
        f"got {g[wrong][:5]}, expected {e[wrong][:5]}"
    )


def every(dtype: torch.dtype) -> np.ndarray:
    """Every bit pattern of a 16-bit container, non-finite ones included."""
    return np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype])


def patterns(n: int, seed: int) -> np.ndarray:
    """Float32s drawn by bit pattern: every exponent, subnormals, NaNs and infinities alike."""
    drawn = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    drawn[: 2 * len(special)] = [*special, *(s | 0x80000000 for s in special)]
    return drawn.view(np.float32)
