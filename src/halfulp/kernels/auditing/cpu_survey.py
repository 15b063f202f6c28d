"""What all grids of an audit share of a tile, sixteen lanes at a time and in one sweep.

Sizes and directions of weights and proposals, their extremes, and the logarithm of their ratio.
:mod:`~halfulp.kernels.reference` defines every bit. (Sums of squares in the same sweep were slower: their
accumulators in float64 leave no registers for the rest.)

What is rare in a tile (a value that is not finite or is subnormal, a short tile) is left to the loops of
:mod:`~halfulp.kernels.cpu_tile_audit`, and so is float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels.cpu_tile import sum_squares
from halfulp.kernels.cpu_tile_audit import P0, P1, P2, P3, P4, P5, P6, P7, POINT
from halfulp.kernels.reference import TILE
from halfulp.kernels.simd import JIT, float_like, inline, kernel_of, ones

kernel = kernel_of(__file__)
MAGNITUDE, MANTISSA, ONE_BITS, SUBNORMAL = 0x7FFFFFFF, 0x7FFFFF, 0x3F800000, 0x7FFFFF
ROUNDING = np.float32(1.5 * 2**23)
"""Added to a smaller number, it leaves the nearest whole one in the lowest bits."""
EXTREMES = 4 * lanes.COUNT


@inline
def _points(u: Any) -> Any:
    """log2 of positive normal numbers, from their patterns, in fixed point and with one constant added: the
    digits of :func:`halfulp.kernels.reference.log2_ratio`."""
    t = lanes.floats_of((u & MANTISSA) | ONE_BITS) - 1.0
    p = ((((((t * P7 + P6) * t + P5) * t + P4) * t + P3) * t + P2) * t + P1) * t + P0
    return ((u >> 7) & -65536) + lanes.bits_of(p * t * POINT + ROUNDING)


@inline
def _less(a: Any, b: Any) -> Any:
    return lanes.select(a < b, a, b)


@inline
def _more(a: Any, b: Any) -> Any:
    return lanes.select(a > b, a, b)


@kernel
def _sweep(
    w: Any, d: Any, after: Any, phase: Any, sign: Any, size: Any, sized: Any, turned: Any, ratio: Any,
    extremes: Any,
) -> Any:  # fmt: skip
    """How many proposals are zero. ``extremes``: in sixteen lanes each the least and the largest weight, the
    largest proposal, and the least of all that are not zero, less 1."""
    zeros = 0
    widest = lanes.splat(lanes.bits_of(lanes.load(size, 0)), 0)
    most, least = widest, lanes.splat(widest, MAGNITUDE)
    lowest = least
    for j in range(0, TILE, lanes.COUNT):
        x, y = lanes.widened(lanes.load(w, j)), lanes.widened(lanes.load(d, j))
        if after:
            y = y - x
        u, v = lanes.bits_of(x) & MAGNITUDE, lanes.bits_of(y) & MAGNITUDE
        lanes.store(size, j, lanes.floats_of(u))
        lanes.store(sized, j, lanes.floats_of(v))
        lanes.store(turned, j, lanes.floats_of(lanes.bits_of(y) ^ (lanes.bits_of(x) & sign)))
        if phase:
            lanes.store(ratio, j, _points(u) - _points(v))
        zeros += ones(lanes.mask(v == 0))
        least, most, widest = _less(least, u), _more(most, u), _more(widest, v)
        lowest = _less(lowest, _less((u - 1) & MAGNITUDE, (v - 1) & MAGNITUDE))
    lanes.store(extremes, 0, least)
    lanes.store(extremes, lanes.COUNT, most)
    lanes.store(extremes, 2 * lanes.COUNT, widest)
    lanes.store(extremes, 3 * lanes.COUNT, lowest)
    return zeros


def survey_whole(
    w: Any, d: Any, after: Any, phase: Any, masks: Any, size: Any, sized: Any, turned: Any, ratio: Any,
    buffer: Any, extremes: Any,
) -> Any:  # fmt: skip
    """A whole tile: whether it was done, how many proposals are zero, the least and the largest weight, the
    largest proposal, and the sums of squares. |w|, |d| and d as seen from w's side of zero are written, and
    with ``phase`` log2(|w| / |d|)."""
    raise TypeError("for compiled code only")


@overload(survey_whole, jit_options=JIT)
def _survey_whole(
    w: Any, d: Any, after: Any, phase: Any, masks: Any, size: Any, sized: Any, turned: Any, ratio: Any,
    buffer: Any, extremes: Any,
) -> Any:  # fmt: skip
    if size.dtype != types.float32:

        def nothing(
            w: Any, d: Any, after: Any, phase: Any, masks: Any, size: Any, sized: Any, turned: Any,
            ratio: Any, buffer: Any, extremes: Any,
        ) -> Any:  # fmt: skip
            return False, np.int64(0), size[0], size[0], size[0], 0.0, 0.0

        return nothing

    def in_lanes(
        w: Any, d: Any, after: Any, phase: Any, masks: Any, size: Any, sized: Any, turned: Any, ratio: Any,
        buffer: Any, extremes: Any,
    ) -> Any:  # fmt: skip
        zeros = np.int64(_sweep(w, d, after, phase, masks[1], size, sized, turned, ratio, extremes))
        least, most, widest, lowest = extremes[0], extremes[16], extremes[32], extremes[48]
        for i in range(1, lanes.COUNT):
            least, most = min(least, extremes[i]), max(most, extremes[16 + i])
            widest, lowest = max(widest, extremes[32 + i]), min(lowest, extremes[48 + i])
        done = most < masks[0] and widest < masks[0] and lowest >= SUBNORMAL
        like = size[0]
        return (
            done, zeros, float_like(like, least), float_like(like, most), float_like(like, widest),
            sum_squares(size, buffer), sum_squares(sized, buffer),
        )  # fmt: skip

    return in_lanes
