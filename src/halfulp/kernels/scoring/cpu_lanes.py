"""The scores of whole float32 tiles, sixteen lanes at a time, of all tensors of a step in one call.

:func:`halfulp.kernels.reference.score` defines every bit of it: seven sums and a count of a tile, where a sum
halves and adds from 3 * 2**k entries down. What is added first lies half a tree apart, what is added next a
quarter: so four lanes of coordinates, each as far from the next, are read, weighed and added up in registers,
and a quarter of the tree is written. Magnitudes are what is summed: the product of two float32 is exact in
float64, so |g||u| is |g u|, and where the signs differ it is a gain.

What is rare (a value that is not finite, weights near the end of the grid's range, a short last tile) is left
to :func:`halfulp.kernels.cpu.score_stretch`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfulp.kernels import lanes
from halfulp.kernels.cpu import score_stretch
from halfulp.kernels.params import CUT, EMIN, HALF, HI, KEEP, KIND, LO, MAGIC, ODD, SHIFT
from halfulp.kernels.reference import SCORES
from halfulp.kernels.simd import array_at, bits_of, inline, kernel_of, ones, span

kernel = kernel_of(__file__)
COLUMNS = len(SCORES)
SUMS = COLUMNS - 1
TAIL = 48
"""Entries of a tree that fit into registers."""
TABLE = ("w", "g", "after", "scores", "size", "start")
"""A tensor's row of the table: addresses, coordinates, and its first tile among those of all."""


class Numbers(NamedTuple):
    """What lanes need to know of a grid: see params."""

    magic: Any
    emin: Any
    shift: Any
    half: Any
    cut: Any
    odd: Any
    keep: Any
    exponent: Any
    sign: Any


doubles = lanes._unary("Floats as doubles.", types.float64, lambda b, x, wide: b.fpext(x, wide))


@intrinsic
def sum_tail(_ctx: Any, buffer: Any, first: Any) -> Any:
    """The halving tree over buffer[first : first + 48], in registers: six vectors become three by addition,
    and these six of half the width."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        width, index = 8, ir.IntType(32)
        start = builder.gep(context.make_array(sig.args[0])(context, builder, args[0]).data, [args[1]])
        place = builder.bitcast(start, ir.VectorType(ir.DoubleType(), width).as_pointer())
        parts = [
            builder.load(builder.gep(place, [ir.Constant(index, i)]), align=8) for i in range(TAIL // width)
        ]
        while True:
            parts = [builder.fadd(a, b) for a, b in zip(parts[:3], parts[3:], strict=True)]
            if width == 1:
                break
            width //= 2
            picks = [
                ir.Constant(ir.VectorType(index, width), list(range(at, at + width))) for at in (0, width)
            ]
            parts = [builder.shuffle_vector(part, part, pick) for part in parts for pick in picks]
        a, b, c = (builder.extract_element(part, ir.Constant(index, 0)) for part in parts)
        return builder.fadd(builder.fadd(a, b), c)

    return types.float64(buffer, types.intp), build


@inline
def _larger(a: Any, b: Any) -> Any:
    return lanes.select(a > b, a, b)


@inline
def _nearest(x: Any, k: Any) -> Any:
    """Nearest even, of what is finite and not near the ends of the range."""
    u = lanes.bits_of(x)
    if k.magic:
        e = u & k.exponent
        c = lanes.floats_of(_larger(e, lanes.splat(e, k.emin)) + k.shift)
        return (x + c) - c
    return lanes.floats_of((u + k.half + ((u >> k.cut) & k.odd)) & k.keep)


@inline
def _added(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6]


@inline
def _weighed(w: Any, g: Any, after: Any, i: Any, k: Any) -> Any:
    """Of sixteen coordinates what is summed (SCORES without F), which are frozen, and how large they are."""
    x, y = lanes.load(w, i), lanes.bits_of(lanes.load(g, i))
    u = lanes.bits_of(lanes.load(after, i) - x)
    size, slope, change = lanes.bits_of(x) & ~k.sign, y & ~k.sign, u & ~k.sign
    q = _nearest(lanes.floats_of(size), k)
    turned = lanes.floats_of(u ^ (lanes.bits_of(x) & k.sign))  # seen from the weight's side of zero
    same = _nearest(q + turned, k) == q
    at, by = doubles(lanes.floats_of(size)), doubles(lanes.floats_of(slope))
    to = doubles(lanes.floats_of(change))
    product = by * to
    gain = lanes.select((y ^ u) < 0, product, 0.0)
    lost = lanes.select(same, gain, 0.0)
    return (gain, lost, by, to, at, by * at, product), lanes.mask(same), _larger(size, change), slope


@kernel
def _tile_sums(
    w: Any, g: Any, after: Any, first: Any, tile: Any, quarter: Any, k: Any, limit: Any, buffer: Any,
    out: Any, at: Any,
) -> Any:  # fmt: skip
    """Add the scores of a whole tile to out[at:]; False, and nothing is added, if a coordinate is rare."""
    half, frozen = 2 * quarter, 0
    most = lanes.splat(lanes.bits_of(lanes.load(w, first)), 0)
    steepest = most
    for i in range(0, quarter, lanes.COUNT):
        sums, same, size, slope = _weighed(w, g, after, first + i, k)
        frozen += ones(same)
        most, steepest = _larger(most, size), _larger(steepest, slope)
        if i + half < tile:
            more, same, size, slope = _weighed(w, g, after, first + i + half, k)
            sums = _added(sums, more)
            frozen += ones(same)
            most, steepest = _larger(most, size), _larger(steepest, slope)
        others, same, size, slope = _weighed(w, g, after, first + i + quarter, k)
        frozen += ones(same)
        most, steepest = _larger(most, size), _larger(steepest, slope)
        if i + half + quarter < tile:
            more, same, size, slope = _weighed(w, g, after, first + i + half + quarter, k)
            others = _added(others, more)
            frozen += ones(same)
            most, steepest = _larger(most, size), _larger(steepest, slope)
        sums = _added(sums, others)
        lanes.store(buffer, i, sums[0])
        lanes.store(buffer, i + quarter, sums[1])
        lanes.store(buffer, i + 2 * quarter, sums[2])
        lanes.store(buffer, i + 3 * quarter, sums[3])
        lanes.store(buffer, i + 4 * quarter, sums[4])
        lanes.store(buffer, i + 5 * quarter, sums[5])
        lanes.store(buffer, i + 6 * quarter, sums[6])
    if lanes.mask(most >= limit) | lanes.mask(steepest >= k.exponent):
        return False
    length = quarter
    while length > TAIL:
        length >>= 1
        for c in range(0, SUMS * quarter, quarter):
            for i in range(c, c + length, lanes.COUNT):
                lanes.store(buffer, i, lanes.load(buffer, i) + lanes.load(buffer, i + length))
    out[at] += frozen
    for c in range(SUMS):
        out[at + 1 + c] += sum_tail(buffer, c * quarter)
    return True


@kernel
def score_tiles(
    values: Any, scores: Any, table: Any, tile: Any, quarter: Any, f: Any, ints: Any, masks: Any, t0: Any,
    t1: Any,
) -> None:  # fmt: skip
    """Add to the scores of the tiles [t0, t1) of those of all tensors, one after the other.

    ``values`` and ``scores`` are empty, for their types; ``table``: a row a tensor, TABLE."""
    half = 2 * quarter
    k = Numbers(
        ints[KIND] == MAGIC, ints[EMIN], ints[SHIFT], ints[HALF], ints[CUT], ints[ODD], ints[KEEP], masks[0],
        masks[1],
    )  # fmt: skip
    # A weight rounds to at most twice itself: three times the largest of all is beyond any proposal.
    limit = bits_of(f[HI] * np.float32(0.33)) if f[LO] == -f[HI] else np.int32(0)
    buffer, row = np.empty(SUMS * quarter), np.empty((1, COLUMNS))
    floats, flags, sums = np.empty(6 * tile, np.float32), np.empty(2 * tile, np.uint8), np.empty(tile + half)
    for i in range(len(table)):
        size, start = table[i, 4], table[i, 5]
        a, b = max(t0 - start, 0), min(t1 - start, (size + tile - 1) // tile)
        if a >= b:
            continue
        w, g = array_at(values, table[i, 0], size), array_at(values, table[i, 1], size)
        after, out = array_at(values, table[i, 2], size), array_at(scores, table[i, 3], b * COLUMNS)
        for t in range(a, b):
            first, last, at = t * tile, min((t + 1) * tile, size), t * COLUMNS
            whole = last - first == tile
            if whole and _tile_sums(w, g, after, first, tile, quarter, k, limit, buffer, out, at):
                continue
            score_stretch(
                span(w, first, last), span(g, first, last), span(after, first, last), True, tile, half, f,
                ints, masks, 0, tile, floats, flags, sums, row,
            )  # fmt: skip
            for c in range(COLUMNS):
                out[at + c] += row[0, c]
