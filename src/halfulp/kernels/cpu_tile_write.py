"""One tile written back: the proposal with its carry, and what is counted of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels.cpu_tile import changes, count_ends, merge, nonfinite, padded, sum_abs, tree
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
)  # fmt: skip
from halfulp.kernels.reference import NEAREST, TILE
from halfulp.kernels.simd import (
    JIT,
    bits_of,
    inline,
    kernel,
    ones,
    span,
    two_threefry,
    widen,
)  # fmt: skip

# ---- a whole float32 tile, in one pass ------------------------------------------------------------
#
# Memory is what a write-back waits for, unless every load has work beside it: so the common tile is read,
# rounded, counted and written in one loop. What is rare (values that are not finite, a draw that needs more
# than 31 digits) is only noticed; the tile is then done again by the functions below.


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


@kernel
def _whole(
    q: Any, z: Any, out: Any, draws: Any, g: Any, carries: Any, carry: Any, carry_in: Any, kept: Any,
    held: Any, words: Any, bits: Any, k0: Any, k1: Any, first: Any,
) -> Any:  # fmt: skip
    changed, proposed, ends, rare = 0, 0, 0, 0
    for start in range(0, TILE, 64):
        if draws:
            a, b, c, d = two_threefry(k0, k1, first + start)
            lanes.store(words, 0, a)
            lanes.store(words, 16, b)
            lanes.store(words, 32, c)
            lanes.store(words, 48, d)
        for at in range(0, 64, lanes.COUNT):
            j = start + at
            v = lanes.load(z, j)
            lanes.store(kept, j, v)
            if carries:
                rest = lanes.load(carry, j)
                lanes.store(held, j, rest)
                if carry_in:
                    v = v + rest
            odd = (lanes.bits_of(v) & g.exponent) == g.exponent
            if draws:
                r, undecided = _stochastic(v, lanes.load(words, at), g)
                odd = odd | undecided
            else:
                r = _nearest(v, g)
            if carries:  # see take_carry
                past = ((r >= g.hi) & (v > r)) | ((r <= g.lo) & (v < r))
                lanes.store(carry, j, lanes.select(past, lanes.splat(v, 0.0), v - r))
            lanes.store(out, j, r)
            stored = lanes.load(q, j)
            differs = lanes.mask(r != stored)
            bits[j >> 4] = differs
            changed += ones(differs)
            proposed += ones(lanes.mask(v != stored))
            ends += ones(lanes.mask((r >= g.hi) | (r <= g.lo)))
            rare |= lanes.mask(odd)
    return changed, proposed, ends, rare


def write_whole(
    q: Any, z: Any, out: Any, mode: Any, f: Any, k: Any, exponent: Any, sign: Any, carry: Any, carry_in: Any,
    kept: Any, held: Any, words: Any, bits: Any, k0: Any, k1: Any, first: Any,
) -> Any:  # fmt: skip
    """Round a whole tile of a float32 container over ``out``, the bits of what changed beside it: how many
    changed, were proposed and are at the ends, and whether anything was rare. Then proposals and carry are
    as they were, and the tile is still to be written."""
    raise TypeError("for compiled code only")


@overload(write_whole, jit_options=JIT)
def _write_whole(
    q: Any, z: Any, out: Any, mode: Any, f: Any, k: Any, exponent: Any, sign: Any, carry: Any, carry_in: Any,
    kept: Any, held: Any, words: Any, bits: Any, k0: Any, k1: Any, first: Any,
) -> Any:  # fmt: skip
    if z.dtype == types.float32:

        def whole(
            q: Any, z: Any, out: Any, mode: Any, f: Any, k: Any, exponent: Any, sign: Any, carry: Any,
            carry_in: Any, kept: Any, held: Any, words: Any, bits: Any, k0: Any, k1: Any, first: Any,
        ) -> Any:  # fmt: skip
            g = Numbers(
                k[KIND] == MAGIC, f[LO], f[HI], f[TWO31], k[EMIN], k[SHIFT], k[INVERSE], k[MANT], k[CUT],
                k[HALF], k[ODD], k[KEEP], k[TOP], k[LEFT], k[RIGHT], exponent, sign,
            )  # fmt: skip
            found = _whole(
                q, z, out, mode != NEAREST, g, carry.size > 0, carry, carry_in, kept, held, words, bits, k0,
                k1, first,
            )  # fmt: skip
            if found[3]:
                out[:] = kept  # it may be z
                if carry.size:
                    carry[:] = held
            return found

        return whole

    def never(
        q: Any, z: Any, out: Any, mode: Any, f: Any, k: Any, exponent: Any, sign: Any, carry: Any,
        carry_in: Any, kept: Any, held: Any, words: Any, bits: Any, k0: Any, k1: Any, first: Any,
    ) -> Any:  # fmt: skip
        return 0, 0, 0, 1

    return never


@kernel
def sum_changes(q: Any, z: Any, buffer: Any) -> Any:
    """Sum of |z - q| over a padded tile."""
    for i in range(TILE // 2):
        a = abs(np.float64(z[i]) - np.float64(q[i]))
        b = abs(np.float64(z[i + TILE // 2]) - np.float64(q[i + TILE // 2]))
        buffer[i] = a + b
    return tree(buffer)


@kernel
def finish_write(
    q: Any, z: Any, r: Any, n: Any, bad: Any, proposed: Any, lo: Any, hi: Any, exponent: Any, moved: Any,
    want_sums: Any, bits: Any, buffer: Any, counts: Any, sums: Any, t: Any,
) -> None:  # fmt: skip
    """Counts and sums of one written tile; z and r equal q wherever the proposal was not finite."""
    proposals = changes(q, z, n, bits)
    changed = changes(q, r, n, bits)
    ends = count_ends(r[:n], lo, hi)
    if bad > 0:
        for i in range(n):
            if (bits_of(widen(proposed[i])) & exponent) == exponent and (r[i] >= hi or r[i] <= lo):
                ends -= 1
    put_counts(changed, proposals, ends, bad, n, bits, moved, counts, t)
    if want_sums and t % want_sums == 0:
        sums[t, 1] = sum_changes(q, z, buffer)
        sums[t, 0] = sum_abs(q, buffer) if bad == 0 else sum_proposed(q, proposed, exponent, buffer)


@kernel
def put_counts(
    changed: Any, proposals: Any, ends: Any, bad: Any, n: Any, bits: Any, moved: Any, counts: Any, t: Any
) -> None:
    """The row of one tile, and the bits of what changed added to those of what ever has."""
    counts[t, 0] = n - changed - bad
    counts[t, 1] = n - proposals - bad
    counts[t, 2] = ends
    counts[t, 3] = bad
    counts[t, 4] = 0
    if moved.size:
        start = t * (TILE // 8)
        counts[t, 4] = n - merge(bits, span(moved, start, start + (n + 7) // 8))


@kernel
def sum_proposed(q: Any, proposed: Any, exponent: Any, buffer: Any) -> Any:
    """Sum of |q| where the proposal is finite."""
    kept = np.zeros(TILE, q.dtype)
    for i in range(proposed.size):
        if (bits_of(widen(proposed[i])) & exponent) != exponent:
            kept[i] = q[i]
    return sum_abs(kept, buffer)


@kernel
def whole_proposal(proposed: Any, q: Any, carry: Any, carry_in: Any, z_: Any, exponent: Any) -> Any:
    """What is to be written, with its carry, as a whole tile; and how many proposals were not finite, which
    become the stored value."""
    z = padded(proposed, z_)
    bad = nonfinite(z, exponent)
    if carry_in:
        add_carry(z[: proposed.size], carry, z_, exponent)
        z_[proposed.size :] = 0
        z = z_
    elif bad > 0:
        z_[:] = z
        z = z_
    if bad > 0:
        keep_stored(proposed, q, z, exponent)
    return z, bad


@kernel
def add_carry(z: Any, carry: Any, out: Any, exponent: Any) -> None:
    """z + carry, wherever that is finite."""
    for i in range(z.size):
        whole = z[i] + carry[i]
        fine = (bits_of(whole) & exponent) != exponent
        out[i] = whole if fine else z[i]


@kernel
def take_carry(z: Any, r: Any, lo: Any, hi: Any, proposed: Any, bad: Any, exponent: Any, carry: Any) -> None:
    """What was not written, z - r: exact, for r is a neighbour of z. Nothing is carried beyond the ends
    of the range (it could never be written), and nothing changes where the proposal was not finite."""
    for i in range(carry.size):
        past = ((r[i] >= hi) & (z[i] > r[i])) | ((r[i] <= lo) & (z[i] < r[i]))
        rest = z[i] - r[i]
        rest = z[i] - z[i] if past else rest
        if bad == 0 or (bits_of(widen(proposed[i])) & exponent) != exponent:
            carry[i] = rest


@kernel
def keep_stored(proposed: Any, q: Any, r: Any, exponent: Any) -> None:
    """Put q back, whatever it was, where the proposal was not finite."""
    for i in range(proposed.size):
        if (bits_of(widen(proposed[i])) & exponent) == exponent:
            r[i] = q[i]


@kernel
def prefer_nearest(q: Any, z: Any, near: Any, r: Any) -> None:
    """Dead-zone write-back: the stochastic r only where nearest throws a proposal away."""
    for i in range(r.size):
        dead = (near[i] == q[i]) & (z[i] != q[i])
        r[i] = r[i] if dead else near[i]
