"""Whole float32 tiles written back, sixteen lanes at a time and in one pass.

Memory is what a write-back waits for, unless every load has work beside it: so the common tile is read,
rounded, counted and written in one loop, and a run of tiles in one call. What is rare (values that are not
finite, a draw that needs more than 31 digits) is only noticed; such a tile is left to
:func:`halfulp.kernels.cpu.write_tiles`, whose pieces define what is done here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels import params as p
from halfulp.kernels.cpu_tile import sum_abs, tile_of
from halfulp.kernels.cpu_tile_arrival import sum_arrival
from halfulp.kernels.cpu_tile_write import add_carry, sum_changes
from halfulp.kernels.reference import DEADZONE, NEAREST, TILE
from halfulp.kernels.simd import JIT, bits_of, inline, kernel, narrow, ones, span, specialised, two_threefry


class Numbers(NamedTuple):
    """What the rounding of lanes needs to know of a grid and its working type: see params."""

    magic: Any
    lo: Any
    hi: Any
    two31: Any
    emin: Any
    shift: Any
    inverse: Any
    mant: Any
    cut: Any
    half: Any
    odd: Any
    keep: Any
    top: Any
    left: Any
    right: Any
    exponent: Any
    sign: Any


@inline
def numbers(f: Any, k: Any, masks: Any) -> Any:
    """Those of a grid, from its tables."""
    return Numbers(
        k[p.KIND] == p.MAGIC, f[p.LO], f[p.HI], f[p.TWO31], k[p.EMIN], k[p.SHIFT], k[p.INVERSE], k[p.MANT],
        k[p.CUT], k[p.HALF], k[p.ODD], k[p.KEEP], k[p.TOP], k[p.LEFT], k[p.RIGHT], masks[0], masks[1],
    )  # fmt: skip


@inline
def _nearest(v: Any, g: Any) -> Any:
    """cpu_tile.nearest of finite lanes."""
    u = lanes.bits_of(v)
    if g.magic:
        a = lanes.select(v < g.lo, lanes.splat(v, g.lo), v)
        a = lanes.select(a > g.hi, lanes.splat(v, g.hi), a)
        e = lanes.bits_of(a) & g.exponent
        c = lanes.floats_of(lanes.select(e > g.emin, e, g.emin) + g.shift)
        r = lanes.bits_of((a + c) - c) & ~g.sign
    else:
        a = u & ~g.sign
        a = (a + g.half + ((a >> g.cut) & g.odd)) & g.keep
        r = lanes.select(a < g.top, a, g.top)
    return lanes.floats_of(r | (u & g.sign))


@inline
def _stochastic(v: Any, word: Any, g: Any) -> Any:
    """cpu_tile.stochastic of finite lanes, and where 31 digits do not decide."""
    u = lanes.bits_of(v)
    a = u & ~g.sign
    drawn = lanes.signed(word >> 1)
    if g.magic:
        limit = lanes.select(u < 0, lanes.splat(v, -g.lo), g.hi)
        x = lanes.floats_of(a)
        x = lanes.select(x > limit, limit, x)
        e = lanes.bits_of(x) & g.exponent
        e = lanes.select(e > g.emin, e, g.emin)
        s = x * lanes.floats_of(g.inverse - e)
        n = lanes.floor(s)
        digits = lanes.to_int((s - n) * g.two31)
        n = lanes.select(drawn < digits, n + 1.0, n)
        r = lanes.bits_of(n * lanes.floats_of(e - g.mant))
    else:
        a = lanes.select(a < g.top, a, g.top)
        digits = ((a & ~g.keep) << g.left) >> g.right
        r = (a & g.keep) + lanes.select(drawn < digits, lanes.splat(a, g.odd) << g.cut, 0)
    return lanes.floats_of(r | (u & g.sign)), drawn == digits


def put_lanes(out: Any, j: Any, v: Any) -> None:
    """out[j:j + 16] = v; to the nearest, in bfloat16."""
    raise TypeError("for compiled code only")


@overload(put_lanes, jit_options=JIT)
def _put_lanes(out: Any, j: Any, v: Any) -> Any:
    if out.dtype == types.uint16:

        def rounded(out: Any, j: Any, v: Any) -> None:
            u = lanes.bits_of(v)
            lanes.store(out, j, lanes.upper(u + 0x7FFF + ((u >> 16) & 1)))

        return rounded

    def plain(out: Any, j: Any, v: Any) -> None:
        lanes.store(out, j, v)

    return plain


MODE, CARRIES, CARRY_IN = NEAREST, False, False  # and otherwise, in copies of the function below


def _run(f: Any, k: Any, masks: Any, given: Any, t0: Any, t1: Any) -> Any:
    """Write the tiles [t0, t1), all of them whole, of a float32 container, up to one with something rare,
    which is left as it was; returns the first tile that is still to be written. ``given``: arguments of
    :func:`halfulp.kernels.cpu.write_tiles`, and buffers."""
    g = numbers(f, k, masks)
    stored, proposed, out, carry, k0, k1, offset, moved, want_sums, counts, sums = given[:11]
    kept, held, whole, wide, words, bits, buffer = given[11:]
    now, packed = bits.view(np.uint8), bits.view(np.uint64)
    for t in range(t0, t1):
        first = t * TILE
        changed, proposals, ends = 0, 0, 0
        rare = (lanes.bits_of(lanes.load(proposed, first)) & 0) != 0
        for start in range(0, TILE, 64):
            if MODE != NEAREST:
                a, b, c, d = two_threefry(k0, k1, offset + first + start)
                lanes.store(words, 0, a)
                lanes.store(words, 16, b)
                lanes.store(words, 32, c)
                lanes.store(words, 48, d)
            for at in range(0, 64, lanes.COUNT):
                i, j = start + at, first + start + at
                v = lanes.load(proposed, j)
                lanes.store(kept, i, v)
                if CARRIES:
                    before = lanes.load(carry, j)
                    lanes.store(held, i, before)
                    if CARRY_IN:
                        v = v + lanes.widened(before)
                q = lanes.widened(lanes.load(stored, j))
                rare = rare | ((lanes.bits_of(v) & g.exponent) == g.exponent)
                if MODE == NEAREST:
                    r = _nearest(v, g)
                else:
                    r, undecided = _stochastic(v, lanes.load(words, at), g)
                    rare = rare | undecided
                if MODE == DEADZONE:  # see prefer_nearest
                    near = _nearest(v, g)
                    r = lanes.select((near == q) & (v != q), r, near)
                at_end = lanes.mask((r >= g.hi) | (r <= g.lo))
                if CARRIES:  # see take_carry
                    rest = v - r
                    if at_end:
                        past = ((r >= g.hi) & (v > r)) | ((r <= g.lo) & (v < r))
                        rest = lanes.select(past, lanes.splat(v, 0.0), rest)
                    put_lanes(carry, j, rest)
                lanes.store(out, j, r)
                differs = lanes.mask(r != q)
                bits[i >> 4] = differs
                changed += ones(differs)
                proposals += ones(lanes.mask(v != q))
                ends += ones(at_end)
        if lanes.mask(rare):
            for i in range(0, TILE, lanes.COUNT):
                lanes.store(out, first + i, lanes.load(kept, i))  # it may be what was proposed
                if CARRIES:
                    lanes.store(carry, first + i, lanes.load(held, i))
            return t
        # put_counts, written out: a call with arrays that are owned costs a fifth of the loop.
        counts[t, 0] = TILE - changed
        counts[t, 1] = TILE - proposals
        counts[t, 2] = ends
        counts[t, 3] = 0
        counts[t, 4] = 0
        if moved.size:
            never = TILE
            for i in range(0, TILE // 8, lanes.COUNT):
                ever = lanes.load(now, i) | lanes.load(moved, first // 8 + i)
                lanes.store(now, i, ever)
                lanes.store(moved, first // 8 + i, ever)
            for word in packed:
                never -= ones(word)
            counts[t, 4] = never
        if want_sums and t % want_sums == 0:
            tile = tile_of(span(stored, first, first + TILE), wide)
            if CARRY_IN:
                add_carry(kept, held, whole, g.exponent)
            sums[t, 1] = sum_changes(tile, whole if CARRY_IN else kept, buffer)
            sums[t, 0] = sum_abs(tile, buffer)
            proposal = whole if CARRY_IN else kept
            sums[t, 2], sums[t, 3], sums[t, 4] = sum_arrival(
                tile, proposal, span(out, first, first + TILE), buffer
            )
    return t1


@kernel
def no_run(f: Any, k: Any, masks: Any, given: Any, t0: Any, t1: Any) -> Any:
    """Leave every tile to be written."""
    return t0


def write_run(mode: int, carries: bool, carry_in: bool) -> Any:
    """The compiled loop of a case."""
    name = f"{mode}_{carries}_{carry_in}"
    return specialised(_run, name, MODE=mode, CARRIES=carries, CARRY_IN=carry_in)


@kernel
def upper_halves(x: Any, out: Any) -> Any:
    """The upper halves of the patterns of float32 values; whether a lower half was not zero."""
    whole = x.size - x.size % lanes.COUNT
    lower = np.int64(0)
    for i in range(whole, x.size):
        out[i] = narrow(out[i], x[i])
        lower |= bits_of(x[i]) & 0xFFFF
    if whole:
        rest = lanes.bits_of(lanes.load(x, 0)) & 0
        for i in range(0, whole, lanes.COUNT):
            u = lanes.bits_of(lanes.load(x, i))
            lanes.store(out, i, lanes.upper(u))
            rest = rest | u
        lower |= lanes.mask((rest & 0xFFFF) != 0)
    return np.int64(lower != 0)
