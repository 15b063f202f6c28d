"""Allocation scores of a tile under audit, from what the audit has in the first-level cache.

:func:`halfulp.kernels.reference.score` defines every bit; :mod:`~halfulp.kernels.scoring.cpu_lanes` does the
same from memory, and says how its sums go. Here sizes, directions and what the grid freezes are known, so
that a coordinate's gradient is all that is read in addition. A tile of scores is a part of the audit's own
tile; one in which something is not finite, and a short one, are left to
:func:`halfulp.kernels.cpu_tile_score.score_stretch`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels.cpu_tile_score import score_stretch
from halfulp.kernels.scoring import cpu_lanes as scoring
from halfulp.kernels.scoring.cpu_lanes import COLUMNS, SUMS, TAIL, sum_tail
from halfulp.kernels.simd import JIT, array_at, inline, kernel_of, ones, span

kernel = kernel_of(__file__, scoring.__file__)
_added = scoring._added


@inline
def _weighed(size: Any, sized: Any, turned: Any, w: Any, g: Any, bits: Any, i: Any, k: Any) -> Any:
    """Of sixteen coordinates what is summed (SCORES without F), and the gradient's magnitudes."""
    y = lanes.bits_of(lanes.load(g, i))
    slope = y & ~k
    against = y ^ lanes.bits_of(lanes.load(turned, i)) ^ lanes.bits_of(lanes.load(w, i))
    at, to = lanes.doubles(lanes.load(size, i)), lanes.doubles(lanes.load(sized, i))
    by = lanes.doubles(lanes.floats_of(slope))
    product = by * to
    gain = lanes.select(against < 0, product, 0.0)
    lost = lanes.select(lanes.truths(bits[i >> 4]), lanes.splat(gain, 0.0), gain)
    return (gain, lost, by, to, at, by * at, product), slope


@inline
def _more(a: Any, b: Any) -> Any:
    return lanes.select(a > b, a, b)


@kernel
def _tile_sums(
    size: Any, sized: Any, turned: Any, w: Any, g: Any, bits: Any, first: Any, tile: Any, quarter: Any,
    exponent: Any, sign: Any, buffer: Any, out: Any, at: Any,
) -> Any:  # fmt: skip
    """Add the scores of one tile of scores to out[at:]; False, and nothing is added, if a gradient is not
    finite."""
    half, changed = 2 * quarter, 0
    steepest = lanes.splat(lanes.bits_of(lanes.load(g, first)), 0)
    for i in range(first, first + quarter, lanes.COUNT):
        sums, slope = _weighed(size, sized, turned, w, g, bits, i, sign)
        steepest = _more(steepest, slope)
        if i + half < first + tile:
            more, slope = _weighed(size, sized, turned, w, g, bits, i + half, sign)
            sums, steepest = _added(sums, more), _more(steepest, slope)
        others, slope = _weighed(size, sized, turned, w, g, bits, i + quarter, sign)
        steepest = _more(steepest, slope)
        if i + half + quarter < first + tile:
            more, slope = _weighed(size, sized, turned, w, g, bits, i + half + quarter, sign)
            others, steepest = _added(others, more), _more(steepest, slope)
        sums = _added(sums, others)
        j = i - first
        lanes.store(buffer, j, sums[0])
        lanes.store(buffer, j + quarter, sums[1])
        lanes.store(buffer, j + 2 * quarter, sums[2])
        lanes.store(buffer, j + 3 * quarter, sums[3])
        lanes.store(buffer, j + 4 * quarter, sums[4])
        lanes.store(buffer, j + 5 * quarter, sums[5])
        lanes.store(buffer, j + 6 * quarter, sums[6])
    if lanes.mask(steepest >= exponent):
        return False
    length = quarter
    while length > TAIL:
        length >>= 1
        for c in range(0, SUMS * quarter, quarter):
            for i in range(c, c + length, lanes.COUNT):
                lanes.store(buffer, i, lanes.load(buffer, i) + lanes.load(buffer, i + length))
    for i in range(first >> 4, (first + tile) >> 4):
        changed += ones(bits[i])
    out[at] += tile - changed
    for c in range(SUMS):
        out[at + 1 + c] += sum_tail(buffer, c * quarter)
    return True


def add_tile(
    w: Any, d: Any, after: Any, size: Any, sized: Any, turned: Any, bits: Any, bad: Any, gradient: Any,
    scores: Any, tile: Any, f: Any, k: Any, masks: Any, buffer: Any, row: Any, floats: Any, flags: Any,
) -> None:  # fmt: skip
    """Add the scores of a tile under audit to those at the address ``scores``; its gradient is at the address
    ``gradient``. ``bits``: what the grid of f and k lets change; ``bad``: whether a weight or proposal is not
    finite; ``tile``: the size of a tile of scores, a part of the audit's; the rest are buffers."""
    raise TypeError("for compiled code only")


@overload(add_tile, jit_options=JIT)
def _add_tile(
    w: Any, d: Any, after: Any, size: Any, sized: Any, turned: Any, bits: Any, bad: Any, gradient: Any,
    scores: Any, tile: Any, f: Any, k: Any, masks: Any, buffer: Any, row: Any, floats: Any, flags: Any,
) -> Any:  # fmt: skip
    if not w.dtype == d.dtype == size.dtype == types.float32:

        def nothing(
            w: Any, d: Any, after: Any, size: Any, sized: Any, turned: Any, bits: Any, bad: Any,
            gradient: Any, scores: Any, tile: Any, f: Any, k: Any, masks: Any, buffer: Any, row: Any,
            floats: Any, flags: Any,
        ) -> None:  # fmt: skip
            return

        return nothing

    def in_lanes(
        w: Any, d: Any, after: Any, size: Any, sized: Any, turned: Any, bits: Any, bad: Any, gradient: Any,
        scores: Any, tile: Any, f: Any, k: Any, masks: Any, buffer: Any, row: Any, floats: Any, flags: Any,
    ) -> None:  # fmt: skip
        n = w.size
        many = (n + tile - 1) // tile
        g, out = array_at(w, gradient, n), array_at(buffer, scores, many * COLUMNS)
        quarter = np.int64(48)
        while 4 * quarter < tile:
            quarter *= 2
        for i in range(many):
            first, last = i * tile, min((i + 1) * tile, n)
            if last - first == tile and not bad and _tile_sums(
                size, sized, turned, w, g, bits, first, tile, quarter, masks[0], masks[1], buffer, out,
                i * COLUMNS,
            ):  # fmt: skip
                continue
            score_stretch(
                span(w, first, last), span(g, first, last), span(d, first, last), after, tile, 2 * quarter, f,
                k, masks, 0, tile, floats, flags, buffer, row,
            )  # fmt: skip
            for c in range(COLUMNS):
                out[i * COLUMNS + c] += row[0, c]

    return in_lanes
