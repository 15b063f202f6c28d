"""Rehearsals on the CPU: numba, one pass over memory, a tile at a time, made of the other kernels' pieces.

Several tensors may lie side by side, each beginning at a tile; then a table says of every tile whose it is.
What is held is (bounds, coordinates): a tile of weights is read once, and moved under every pull.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfulp.kernels import lanes
from halfulp.kernels.cpu_tile import (
    WORDS,
    changes,
    difference,
    merge,
    nearest,
    nonfinite,
    settle,
    stochastic,
    tile_of,
)  # fmt: skip
from halfulp.kernels.cpu_tile_write import prefer_nearest, put_carry
from halfulp.kernels.cpu_write_run import Numbers, _nearest, _stochastic
from halfulp.kernels.params import (
    CUT,
    EMIN,
    HALF,
    HI,
    INVERSE,
    KEEP,
    KIND,
    LEFT,
    LO,
    MAGIC,
    MANT,
    ODD,
    RIGHT,
    SHIFT,
    TOP,
    TWO31,
)
from halfulp.kernels.reference import DEADZONE, NEAREST, TILE
from halfulp.kernels.rehearse.reference import CARRY, MASTER, NOTHING, PENDING
from halfulp.kernels.simd import LANES, bits_of, fill_words, float_like, kernel_of, ones, shr, span

kernel = kernel_of(__file__)
OF, START, EXTENT = range(3)
"""Columns of the table of tiles: the tensor (-1: none), its first tile, the coordinates in use."""


@kernel
def unpack(codes: Any, values: Any, q: Any) -> None:
    """Codes to values, by table."""
    for i in range(codes.size):
        q[i] = values[codes[i]]


@kernel
def pack(r: Any, codes: Any, f: Any, k: Any, exponent: Any, top: Any) -> None:
    """Grid values of a float grid to codes: see ``encode_tiles``. ``top``: the bit of the sign."""
    emin, cut = k[EMIN], k[CUT]
    if k[KIND] == MAGIC:
        one = exponent & -exponent  # the unit of the exponent field
        unit = float_like(f[0], k[INVERSE] - emin)
        for i in range(codes.size):
            a = bits_of(abs(r[i]))
            normal = np.int32(shr(bits_of(float_like(r[i], a - emin + one)), cut))
            small = np.int32(abs(r[i]) * unit)
            codes[i] = (normal if a >= emin else small) | (top if bits_of(r[i]) < 0 else 0)
    else:
        for i in range(codes.size):
            code = np.int32(shr(bits_of(abs(r[i])), cut))
            codes[i] = code | (top if bits_of(r[i]) < 0 else 0)


@kernel
def pulled(q: Any, x: Any, d: Any, k: Any, z: Any) -> None:
    """z = q + (d + k (x - q)), in this order."""
    for i in range(q.size):
        z[i] = q[i] + (d[i] + k * (x[i] - q[i]))


@kernel
def with_kept(z: Any, kept: Any, exponent: Any) -> None:
    """z + kept, wherever that is finite."""
    for i in range(z.size):
        whole = z[i] + kept[i]
        z[i] = whole if (bits_of(whole) & exponent) != exponent else z[i]


@kernel
def stay_put(z: Any, q: Any, fine: Any, exponent: Any) -> None:
    """What is not finite becomes what is held; ``fine`` says where it is."""
    for i in range(z.size):
        fine[i] = (bits_of(z[i]) & exponent) != exponent
        z[i] = z[i] if fine[i] else q[i]


@kernel
def left_over(z: Any, r: Any, lo: Any, hi: Any, rest: Any) -> None:
    """What was not written; nothing beyond the ends of the range: see ``take_carry``."""
    for i in range(rest.size):
        past = ((r[i] >= hi) & (z[i] > r[i])) | ((r[i] <= lo) & (z[i] < r[i]))
        rest[i] = z[i] - z[i] if past else z[i] - r[i]


@intrinsic
def wide(_ctx: Any, codes: Any) -> Any:
    """Lanes of codes as 32-bit integers."""
    kind = lanes.Lanes(types.int32)

    def build(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.zext(args[0], context.get_value_type(kind))

    return kind(codes), build


@intrinsic
def put_codes(_ctx: Any, into: Any, i: Any, x: Any) -> Any:
    """into[i:i + 16] = x, cut to the width of codes."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = context.get_value_type(lanes.Lanes(into.dtype))
        place = lanes._place(context, builder, sig.args[0], *args[:2])
        builder.store(builder.trunc(args[2], kind), place, align=into.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(into, types.intp, x), build


@intrinsic
def to_float(_ctx: Any, x: Any) -> Any:
    """32-bit integers as floats."""
    kind = lanes.Lanes(types.float32)

    def build(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.sitofp(args[0], ir.VectorType(ir.FloatType(), lanes.COUNT))

    return kind(x), build


@kernel
def move_lanes(
    x: Any, d: Any, words: Any, k: Any, here: Any, f: Any, p: Any, masks: Any, top: Any, bits: Any, made: Any
) -> Any:  # fmt: skip
    """A whole float32 tile, sixteen lanes at a time, into ``made``; returns whether it has something rare
    (what is not finite, a draw that needs more than 31 digits), and then it is not to be believed. ``words``:
    768, or none for nearest."""
    g = Numbers(
        p[KIND] == MAGIC, f[LO], f[HI], f[TWO31], p[EMIN], p[SHIFT], p[INVERSE], p[MANT], p[CUT], p[HALF],
        p[ODD], p[KEEP], p[TOP], p[LEFT], p[RIGHT], masks[0], masks[1],
    )  # fmt: skip
    one = g.exponent & -g.exponent
    normal, base = one >> g.cut, g.emin - one
    unit = float_like(f[0], g.inverse - g.emin)
    quantum = float_like(f[0], (254 << 23) - bits_of(unit)) if g.magic else unit
    up = 0
    while (top << up) != 1 << 31:
        up += 1
    rare = (wide(lanes.load(here, 0)) & 0) != 0
    for i in range(0, TILE, lanes.COUNT):
        c = wide(lanes.load(here, i))
        n = c & (top - 1)
        if g.magic:
            small = lanes.bits_of(to_float(n) * quantum)
            n = lanes.select(n < normal, small, (n << g.cut) + base)
        else:
            n = n << g.cut
        q = lanes.floats_of(n | ((c & top) << up))
        v = q + (lanes.load(d, i) + (lanes.load(x, i) - q) * k)
        rare = rare | ((lanes.bits_of(v) & g.exponent) == g.exponent)
        if words.size:
            r, undecided = _stochastic(v, lanes.load(words, i), g)
            rare = rare | undecided
        else:
            r = _nearest(v, g)
        bits[i >> 4] = lanes.mask(r != q)
        u = lanes.bits_of(r)
        a = u & ~g.sign
        if g.magic:
            small = lanes.to_int(lanes.floats_of(a) * unit)
            a = lanes.select(a < g.emin, small, (a - base) >> g.cut)
        else:
            a = a >> g.cut
        put_codes(made, i, a | ((u & g.sign) >> up))
    return lanes.mask(rare) != 0


MODE, KEEPS, BESIDE, LANED = NEAREST, NOTHING, False, False  # and otherwise, in copies of the function below


def _move_tiles(
    w: Any, after: Any, tiles: Any, keys: Any, offsets: Any, pulls: Any, back: Any, f: Any, k: Any,
    masks: Any, values: Any, top: Any, held: Any, kept: Any, chosen: Any, moved: Any, counts: Any,
    t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Move what is held of every tile, under every pull.

    ``tiles``: (tiles, 3), see OF. A row a tensor: ``keys`` of its stream and the ``offsets`` in it, ``pulls``
    and ``back``, the factors of what is pending. ``values``: of all codes; ``chosen``: a byte a coordinate,
    or empty.
    """
    exponent, sign = masks[0], masks[1]
    x_, d_, q_ = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    z_, r_, near = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    c_, fine = np.zeros(TILE, f.dtype), np.ones(TILE, np.uint8)
    words, bits = np.zeros(WORDS, np.uint32), np.zeros(TILE // LANES, np.uint16)
    made = np.zeros(TILE, held.dtype)
    size, row = held.shape[1], moved.shape[1]
    flat, beside, ever = held.reshape(-1), kept.reshape(-1), moved.reshape(-1)
    for t in range(t0, t1):
        of, n = tiles[t, OF], tiles[t, EXTENT]
        if of < 0:
            continue
        first = t * TILE
        last = first + n
        x, d, q, z, r = tile_of(span(w, first, last), x_), d_[:n], q_[:n], z_[:n], r_[:n]
        difference(span(after, first, last), x, d)
        place = offsets[of] + (t - tiles[t, START]) * TILE
        if MODE != NEAREST:
            fill_words(words, keys[of, 0], keys[of, 1], place, n)
        for b in range(held.shape[0]):
            here = span(flat, b * size + first, b * size + last)
            start = b * row + t * (TILE // 8)
            if LANED and n == TILE and (MODE == NEAREST or place & 31 == 0):
                drawn = words[: TILE if MODE != NEAREST else 0]
                if not move_lanes(x, d, drawn, pulls[of, b], here, f, k, masks, top, bits, made):
                    changed = np.int64(0)
                    for word in bits.view(np.uint64):
                        changed += np.int64(ones(word))
                    for i in range(TILE):
                        here[i] = made[i]
                    counts[t, b, 0] = n - changed
                    counts[t, b, 1] = n - merge(bits, span(ever, start, start + TILE // 8))
                    counts[t, b, 2] = 0
                    continue
            if KEEPS == MASTER:
                for i in range(n):
                    q[i] = here[i]
            else:
                unpack(here, values, q)
            pulled(q, x, d, pulls[of, b], z)
            bad = nonfinite(z, exponent)
            if bad > 0:
                stay_put(z, q, fine, exponent)
            if BESIDE:
                rest = span(beside, b * size + first, b * size + last)
                c = tile_of(rest, c_)
                with_kept(z, c, exponent)
                if bad > 0:
                    for i in range(n):
                        z[i] = z[i] if fine[i] else q[i]
            if MODE == NEAREST:
                nearest(z, r, f, k, exponent, sign)
            else:
                drawn = words[place & 31 :]
                if stochastic(z, r, drawn, f, k, exponent, sign) > 0:
                    settle(z, r, f, k, exponent, sign, keys[of, 0], keys[of, 1], place)
                if MODE == DEADZONE:
                    nearest(z, near[:n], f, k, exponent, sign)
                    prefer_nearest(q, z, near[:n], r)
            if KEEPS == MASTER:
                nearest(q, near[:n], f, k, exponent, sign)
                changed = changes(near, r_, n, bits)
                if chosen.size:
                    for i in range(n):
                        here[i] = z[i] if chosen[first + i] else r[i]
                else:
                    for i in range(n):
                        here[i] = z[i]
            else:
                changed = changes(q_, r_, n, bits)
                pack(r, here, f, k, exponent, top)
            if BESIDE:
                left_over(z, r, f[LO], f[HI], near[:n])
                for i in range(n):
                    new = near[i] if KEEPS == CARRY else back[of, 0] * c[i] + back[of, 1] * near[i]
                    if bad == 0 or fine[i]:
                        c[i] = new
                put_carry(c, rest)
            counts[t, b, 0] = n - changed - bad
            counts[t, b, 1] = n - merge(bits, span(ever, start, start + (n + 7) // 8))
            counts[t, b, 2] = bad


@cache
def move_tiles(mode: int, keeps: int, single: bool) -> Any:
    """The kernel of a mode and what is kept; ``single``: the working type is float32."""
    laned = single and keeps == NOTHING and mode != DEADZONE
    values = {
        **_move_tiles.__globals__,
        "MODE": mode,
        "KEEPS": keeps,
        "BESIDE": keeps in (CARRY, PENDING),
        "LANED": laned,
    }
    made = FunctionType(_move_tiles.__code__, values, _move_tiles.__name__)
    made.__module__, made.__qualname__ = __name__, f"{_move_tiles.__qualname__}.{mode}_{keeps}_{laned}"
    return kernel(made)
