"""Whole float32 tiles of a rehearsal, sixteen lanes at a time, for every policy.

Codes are rounded to, not values: the code of a rounded magnitude is its place in its binade and the number of
that binade, both at hand when it is rounded. What is rare (what is not finite, a draw that needs more than 31
digits) is only noticed; such a tile is left to the passes of :mod:`~halfulp.kernels.rehearse.cpu`, which
define what is done here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from halfulp.kernels import lanes
from halfulp.kernels.cpu_write_run import put_lanes
from halfulp.kernels.reference import DEADZONE, NEAREST, TILE
from halfulp.kernels.rehearse.reference import CARRY, MASTER, NOTHING
from halfulp.kernels.simd import bits_of, float_like, inline, kernel_of, ones, special_case, two_threefry

kernel = kernel_of(__file__)
OF, START, EXTENT = range(3)
"""Columns of the table of tiles: the tensor (-1: none), its first tile, the coordinates in use."""


class Coding(NamedTuple):
    """What codes are, beside the numbers of their grid."""

    top: Any
    """The bit of the sign."""
    up: Any
    """How far it is below that of a float."""
    normal: Any
    """The first code of a full mantissa."""
    base: Any
    """The bits of a value with a full mantissa, less those of its code."""
    quantum: Any
    """The value of code 1, where codes are not cut patterns."""


@kernel
def coding(f: Any, g: Any, top: Any) -> Any:
    """Of a grid in float32."""
    one = g.exponent & -g.exponent  # the unit of the exponent field
    unit = float_like(f[0], g.inverse - g.emin)
    quantum = float_like(f[0], (254 << 23) - bits_of(unit)) if g.magic else unit
    up = 0
    while (top << up) != 1 << 31:
        up += 1
    return Coding(top, up, one >> g.cut, g.emin - one, quantum)


@intrinsic
def put_codes(_ctx: Any, into: Any, i: Any, x: Any) -> Any:
    """into[i:i + 16] = x, cut to the width of codes."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = context.get_value_type(lanes.Lanes(into.dtype))
        place = lanes._place(context, builder, sig.args[0], *args[:2])
        builder.store(builder.trunc(args[2], kind), place, align=into.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(into, types.intp, x), build


@inline
def _value(c: Any, g: Any, k: Any) -> Any:
    """Codes to values."""
    n = c & (k.top - 1)
    if g.magic:
        small = lanes.bits_of(lanes.to_float(n) * k.quantum)
        n = lanes.select(n < k.normal, small, (n << g.cut) + k.base)
    else:
        n = n << g.cut
    return lanes.floats_of(n | ((c & k.top) << k.up))


@inline
def _near(v: Any, g: Any, k: Any) -> Any:
    """The codes of cpu_tile.nearest, of finite lanes."""
    u = lanes.bits_of(v)
    a = u & ~g.sign
    if g.magic:
        x = lanes.floats_of(a)
        x = lanes.select(x > g.hi, lanes.splat(x, g.hi), x)
        e = lanes.bits_of(x) & g.exponent
        e = lanes.select(e > g.emin, e, g.emin)
        shift = e + g.shift
        a = (lanes.bits_of(x + lanes.floats_of(shift)) - shift) + ((e - g.emin) >> g.cut)
    else:
        a = (a + g.half + ((a >> g.cut) & g.odd)) & g.keep
        a = lanes.select(a < g.top, a, g.top) >> g.cut
    return a | ((u & g.sign) >> k.up)


@inline
def _drawn(v: Any, word: Any, g: Any, k: Any) -> Any:
    """The codes of cpu_tile.stochastic, of finite lanes, and where 31 digits do not decide."""
    u = lanes.bits_of(v)
    a = u & ~g.sign
    drawn = lanes.signed(word >> 1)
    if g.magic:
        x = lanes.floats_of(a)
        x = lanes.select(x > g.hi, lanes.splat(x, g.hi), x)
        e = lanes.bits_of(x) & g.exponent
        e = lanes.select(e > g.emin, e, g.emin)
        s = x * lanes.floats_of(g.inverse - e)
        n = lanes.floor(s)
        digits = lanes.to_int((s - n) * g.two31)
        a = lanes.to_int(n) + ((e - g.emin) >> g.cut)
    else:
        a = lanes.select(a < g.top, a, g.top)
        digits = ((a & ~g.keep) << g.left) >> g.right
        a = a >> g.cut
    a = lanes.select(drawn < digits, a + g.odd, a)
    return a | ((u & g.sign) >> k.up), drawn == digits


@inline
def _differ(a: Any, b: Any, k: Any) -> Any:
    """Whether codes are of different values: both zeros are one."""
    return (a != b) & (((a | b) & (k.top - 1)) != 0)


MODE, KEEPS, BESIDE = NEAREST, NOTHING, False  # and otherwise, in copies of the function below


def _run(
    w: Any, after: Any, tiles: Any, keys: Any, offsets: Any, pulls: Any, back: Any, g: Any, k: Any,
    held: Any, kept: Any, chosen: Any, moved: Any, counts: Any, words: Any, old_: Any, before_: Any,
    bits: Any, size: Any, row: Any, first: Any, last: Any,
) -> Any:  # fmt: skip
    """Move the rows [first, last), counted tile after tile and in each from row to row, up to one that is not
    of a whole tile or has something rare, which is left as it was; returns the first that is still to be
    moved. The arguments are those of ``_move_tiles``, flat, then buffers, and how far apart rows are in what
    is held and in what has moved."""
    rows = counts.shape[1]
    now, packed = bits.view(np.uint8), bits.view(np.uint64)
    for u in range(first, last):
        t, j = u // rows, u % rows
        of = tiles[t, OF]
        if of < 0:
            continue
        place = offsets[of] + (t - tiles[t, START]) * TILE
        if tiles[t, EXTENT] < TILE or (MODE != NEAREST and place & 31):
            return u
        if MODE != NEAREST and (j == 0 or u == first):
            for at in range(0, TILE, 64):
                a, b, c, d = two_threefry(keys[of, 0], keys[of, 1], place + at)
                lanes.store(words, at, a)
                lanes.store(words, at + 16, b)
                lanes.store(words, at + 32, c)
                lanes.store(words, at + 48, d)
        pull, again, fresh = pulls[of, j], back[of, 0], back[of, 1]
        here, mark = j * size + t * TILE, j * row + t * (TILE // 8)
        changed = 0
        rare = (lanes.bits_of(lanes.widened(lanes.load(w, t * TILE))) & 0) != 0
        for i in range(0, TILE, lanes.COUNT):
            x = lanes.widened(lanes.load(w, t * TILE + i))
            proposed = lanes.widened(lanes.load(after, t * TILE + i)) - x
            was = lanes.load(held, here + i)
            lanes.store(old_, i, was)
            if KEEPS == MASTER:
                q = was
                old = _near(q, g, k)
            else:
                old = lanes.from_unsigned(was)
                q = _value(old, g, k)
            v = q + (proposed + (x - q) * pull)
            if BESIDE:
                beside = lanes.load(kept, here + i)
                lanes.store(before_, i, beside)
                v = v + lanes.widened(beside)
            rare = rare | ((lanes.bits_of(v) & g.exponent) == g.exponent)
            if MODE == NEAREST:
                new = _near(v, g, k)
            else:
                new, undecided = _drawn(v, lanes.load(words, i), g, k)
                rare = rare | undecided
            if MODE == DEADZONE:  # see prefer_nearest
                near = _near(v, g, k)
                new = lanes.select(_differ(near, old, k), near, lanes.select(v != q, new, near))
            differs = lanes.mask(_differ(new, old, k))
            bits[i >> 4] = differs
            changed += ones(differs)
            if BESIDE:  # see left_over
                r = _value(new, g, k)
                past = ((r >= g.hi) & (v > r)) | ((r <= g.lo) & (v < r))
                left = lanes.select(past, lanes.splat(v, 0.0), v - r)
                if KEEPS == CARRY:
                    put_lanes(kept, here + i, left)
                else:
                    put_lanes(kept, here + i, lanes.widened(beside) * again + left * fresh)
            if KEEPS == MASTER:
                if chosen.size:
                    which = lanes.from_unsigned(lanes.load(chosen, t * TILE + i)) != 0
                    v = lanes.select(which, v, _value(new, g, k))
                lanes.store(held, here + i, v)
            else:
                put_codes(held, here + i, new)
        if lanes.mask(rare):
            for i in range(0, TILE, lanes.COUNT):
                lanes.store(held, here + i, lanes.load(old_, i))
                if BESIDE:
                    lanes.store(kept, here + i, lanes.load(before_, i))
            return u
        never = TILE
        for i in range(0, TILE // 8, lanes.COUNT):
            ever = lanes.load(now, i) | lanes.load(moved, mark + i)
            lanes.store(now, i, ever)
            lanes.store(moved, mark + i, ever)
        for word in packed:
            never -= ones(word)
        counts[t, j, 0] = TILE - changed
        counts[t, j, 1] = never
        counts[t, j, 2] = 0
    return last


def run_of(mode: int, keeps: int, beside: bool) -> Any:
    """The compiled loop of a case."""
    values = {"MODE": mode, "KEEPS": keeps, "BESIDE": beside}
    return kernel(special_case(_run, f"{mode}_{keeps}", values))
