"""The Triton kernels: what one program does to one tile. Launched by :mod:`halfulp.kernels.gpu`.

A tile is 768 = 3 * 256 coordinates, no power of two, and is laid out in one of two ways.

*For sums*, coordinate i = 3 k + j is at [k, j] of a 256 x 4 block whose last column is empty. The
halving tree of :func:`halfulp.kernels.reference.tile_sum` adds i and i + 384, then i and i + 192, ...:
k and k + 128, then k and k + 64, ... So it is eight sums over an axis of two, which no compiler can
put in another order, and then three columns from left to right.

*For words*, a tile is three runs of 256, a run is eight groups of 32, and the two halves of a group
take the two words of the same sixteen Threefry blocks (:mod:`halfulp.streams`). A program handles
the halves as two 8 x 16 blocks: no block is computed twice and no word changes its thread.

bfloat16 travels as its bit pattern, because a cast may alter a NaN. The arithmetic is that of
:mod:`halfulp.kernels.params`; fusing a multiplication with an addition would change its results,
so every launch sets ``enable_fp_fusion=False``. A float64 quotient compiles to IEEE division (a
float32 one would not, and there is none).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from halfulp import streams
from halfulp.kernels import params, reference

TILE = tl.constexpr(reference.TILE)
PARITY = tl.constexpr(streams.PARITY)
NEAREST, DEADZONE = tl.constexpr(reference.NEAREST), tl.constexpr(reference.DEADZONE)
BITS, SCALED = tl.constexpr(params.BITS), tl.constexpr(params.SCALED)
FLOATS, INTS = tl.constexpr(8), tl.constexpr(13)  # columns of the tables
LO, HI, UP = tl.constexpr(params.LO), tl.constexpr(params.HI), tl.constexpr(params.UP)
T_SUB, T_ZERO = tl.constexpr(params.T_SUB), tl.constexpr(params.T_ZERO)
KIND, EMIN, SHIFT = tl.constexpr(params.KIND), tl.constexpr(params.EMIN), tl.constexpr(params.SHIFT)
CUT, TOP, POINTS = tl.constexpr(params.CUT), tl.constexpr(params.TOP), tl.constexpr(params.POINTS)
HALF, ODD, KEEP = tl.constexpr(params.HALF), tl.constexpr(params.ODD), tl.constexpr(params.KEEP)
INVERSE, MANT = tl.constexpr(params.INVERSE), tl.constexpr(params.MANT)
LEFT, RIGHT = tl.constexpr(params.LEFT), tl.constexpr(params.RIGHT)
P0, P1, P2, P3, P4, P5, P6, P7 = (tl.constexpr(c) for c in reference.LOG2_POLYNOMIAL)
PHASE_ONE = tl.constexpr(reference.PHASE_ONE)

TO_BF16, TO_FP16 = tl.constexpr(1), tl.constexpr(2)


# ---- a grid's numbers: one row of each table, indexed by the columns' names ----------------------


@triton.jit
def floats_at(p: tl.tensor, g: tl.tensor) -> Any:
    p += g * FLOATS
    return (
        tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3),
        tl.load(p + 4), tl.load(p + 5), tl.load(p + 6), tl.load(p + 7),
    )  # fmt: skip


@triton.jit
def ints_at(p: tl.tensor, g: tl.tensor) -> Any:
    p += g * INTS
    return (
        tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4),
        tl.load(p + 5), tl.load(p + 6), tl.load(p + 7), tl.load(p + 8), tl.load(p + 9),
        tl.load(p + 10), tl.load(p + 11), tl.load(p + 12),
    )  # fmt: skip


# ---- numbers as bits --------------------------------------------------------------------------


@triton.jit
def bits(x: tl.tensor) -> Any:
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(u: tl.tensor) -> Any:
    if u.dtype == tl.int64:
        return u.to(tl.float64, bitcast=True)
    else:
        return u.to(tl.float32, bitcast=True)


@triton.jit
def exponent(u: tl.tensor) -> Any:
    if u.dtype == tl.int64:
        return u & 0x7FF0000000000000
    else:
        return u & 0x7F800000


@triton.jit
def magnitude(u: tl.tensor) -> Any:
    if u.dtype == tl.int64:
        return u & 0x7FFFFFFFFFFFFFFF
    else:
        return u & 0x7FFFFFFF


@triton.jit
def signed(r: tl.tensor, like: tl.tensor) -> Any:
    """The magnitude of one with the sign of the other."""
    u = bits(like)
    return as_float(magnitude(bits(r)) | (u ^ magnitude(u)))


@triton.jit
def finite(x: tl.tensor) -> Any:
    return tl.abs(x) < float("inf")


@triton.jit
def fit(x: tl.tensor, TO: tl.constexpr) -> Any:
    """Rounded to the container where that is narrower than the working type."""
    if TO == TO_BF16:
        u = bits(x)
        r = (u + 0x7FFF + ((u >> 16) & 1)) & -65536
        return tl.where(finite(x), as_float(r), x)
    elif TO == TO_FP16:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def load(p: tl.tensor, i: tl.tensor, mask: tl.tensor) -> Any:
    x = tl.load(p + i, mask=mask, other=0)
    if x.dtype == tl.int16:  # bfloat16
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def store(p: tl.tensor, i: tl.tensor, x: tl.tensor, mask: tl.tensor) -> None:
    """Values that fit the container, or are not finite."""
    if p.dtype.element_ty == tl.int16:
        tl.store(p + i, (bits(x) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(p + i, x.to(p.dtype.element_ty), mask=mask)


# ---- words ------------------------------------------------------------------------------------


@triton.jit
def four_rounds(x0: tl.tensor, x1: tl.tensor, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr) -> Any:
    x0 += x1
    x1 = ((x1 << a) | (x1 >> (32 - a))) ^ x0
    x0 += x1
    x1 = ((x1 << b) | (x1 >> (32 - b))) ^ x0
    x0 += x1
    x1 = ((x1 << c) | (x1 >> (32 - c))) ^ x0
    x0 += x1
    x1 = ((x1 << d) | (x1 >> (32 - d))) ^ x0
    return x0, x1


@triton.jit
def threefry(k0: tl.tensor, k1: tl.tensor, c0: tl.tensor, c1: tl.tensor) -> Any:
    """Threefry-2x32-20 on unsigned words."""
    k2 = k0 ^ k1 ^ PARITY
    x0, x1 = four_rounds(c0 + k0, c1 + k1, 13, 15, 26, 6)
    x0, x1 = four_rounds(x0 + k1, x1 + (k2 + 1), 17, 29, 16, 24)
    x0, x1 = four_rounds(x0 + k2, x1 + (k0 + 2), 13, 15, 26, 6)
    x0, x1 = four_rounds(x0 + k0, x1 + (k1 + 3), 17, 29, 16, 24)
    x0, x1 = four_rounds(x0 + k1, x1 + (k2 + 4), 13, 15, 26, 6)
    return x0 + k2, x1 + (k0 + 5)


@triton.jit
def blocks(k0: tl.tensor, k1: tl.tensor, i: tl.tensor, level: tl.tensor) -> Any:
    """Both words of the blocks that elements i (int64, global) own."""
    block = ((i >> 5) << 4) + (i & 15)
    high = (block >> 32).to(tl.uint32) | (level << 26).to(tl.uint32)
    return threefry(
        k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True), block.to(tl.uint32), high
    )


@triton.jit
def word(k0: tl.tensor, k1: tl.tensor, i: tl.tensor, level: tl.tensor) -> Any:
    first, second = blocks(k0, k1, i, level)
    return tl.where(((i >> 4) & 1) == 1, second, first)


@triton.jit
def words(k0: tl.tensor, k1: tl.tensor, i: tl.tensor, ALIGNED: tl.constexpr) -> Any:
    """First words of elements i and i + 16, where i are the first halves of groups of 32."""
    level = (k0 & 0).to(tl.int32)
    if ALIGNED:
        return blocks(k0, k1, i, level)
    else:  # a shard that does not begin with a group
        return word(k0, k1, i, level), word(k0, k1, i + 16, level)


# ---- rounding: v, and a row of each table -------------------------------------------------------


@triton.jit
def nearest_bits(v: tl.tensor, k: tl.tensor) -> Any:
    u = bits(v)
    a = magnitude(u)
    r = (a + k[HALF] + ((a >> k[CUT]) & k[ODD])) & k[KEEP]
    return as_float(tl.minimum(r, k[TOP]))


@triton.jit
def nearest_magic(v: tl.tensor, f: tl.tensor, k: tl.tensor) -> Any:
    lo, hi = f[LO], f[HI]
    a = tl.where(v < lo, lo, v)
    a = tl.where(a > hi, hi, a)
    c = as_float(tl.maximum(exponent(bits(a)), k[EMIN]) + k[SHIFT])
    return (a + c) - c


@triton.jit
def nearest(v: tl.tensor, f: tl.tensor, k: tl.tensor) -> Any:
    """Nearest even; keeps signs, hands non-finite values back."""
    if k[KIND] == BITS:
        r = nearest_bits(v, k)
    else:
        r = nearest_magic(v, f, k)
    return tl.where(finite(v), signed(r, v), v)


@triton.jit
def clamped(v: tl.tensor, f: tl.tensor) -> Any:
    """|v|, but at most the largest magnitude on that side of zero."""
    limit = tl.where(bits(v) < 0, -f[LO], f[HI])
    a = tl.abs(v)
    return tl.where(a > limit, limit, a)


@triton.jit
def around_bits(a: tl.tensor, k: tl.tensor) -> Any:
    u, keep = bits(a), k[KEEP]
    low = u & keep
    digits = ((u & ~keep) << k[LEFT]) >> k[RIGHT]
    one = (keep & 0) + 1
    return as_float(low), as_float(low + (one << k[CUT])), digits.to(tl.int32)


@triton.jit
def around_magic(a: tl.tensor, k: tl.tensor) -> Any:
    e = tl.maximum(exponent(bits(a)), k[EMIN])
    s = a * as_float(k[INVERSE] - e)
    n = tl.floor(s)
    unit = as_float(e - k[MANT])
    return n * unit, (n + 1.0) * unit, ((s - n) * 2147483648.0).to(tl.int32)


@triton.jit
def around(a: tl.tensor, k: tl.tensor) -> Any:
    """The codes below (or at) and above clamped magnitudes, and 31 digits of the fraction between."""
    if k[KIND] == BITS:
        low, high, digits = around_bits(a, k)
    else:
        low, high, digits = around_magic(a, k)
    return low, high, digits


@triton.jit
def any_of(flags: tl.tensor) -> Any:
    return tl.max(tl.max(flags.to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def settle(fraction: tl.tensor, tied: tl.tensor, k0: tl.tensor, k1: tl.tensor, i: tl.tensor) -> Any:
    """U < fraction where the first digits tied: word by word, as the reference does everywhere."""
    up = tied & (fraction < 0)
    open_ = tied & (fraction > 0)
    level = (k0 & 0).to(tl.int32)
    while any_of(open_):
        scaled = fraction * 4294967296.0
        digit = tl.floor(scaled)
        drawn = word(k0, k1, i, level).to(tl.float64)
        up = up | (open_ & (drawn < digit))
        open_ = open_ & (drawn == digit) & (scaled > digit)
        fraction = scaled - digit
        level += 1
    return up


@triton.jit
def stochastic(v: tl.tensor, drawn: tl.tensor, f: tl.tensor, k: tl.tensor, k0: tl.tensor, k1: tl.tensor, i: tl.tensor) -> Any:
    """The code above with the probability of the fraction of the gap, to the last digit."""
    a = clamped(v, f)
    low, high, digits = around(a, k)
    drawn = (drawn >> 1).to(tl.int32)
    up = drawn < digits
    tied = drawn == digits
    if any_of(tied):
        wide = low.to(tl.float64)
        fraction = (a.to(tl.float64) - wide) / (high.to(tl.float64) - wide)
        up = up | settle(fraction, tied, k0, k1, i)
    return tl.where(finite(v), signed(tl.where(up, high, low), v), v)


# ---- rounding with steps, in float64 --------------------------------------------------------------


@triton.jit
def steps_at(steps: tl.tensor, i: tl.tensor, mask: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor) -> Any:
    """The step of each element: reference.segment_ids."""
    return tl.load(steps + (i // row * per_row + i % row // length), mask=mask, other=1.0)


@triton.jit
def nearest_scaled(x: tl.tensor, step: tl.tensor, f: tl.tensor, k: tl.tensor) -> Any:
    """Nearest element * step. Where the quotient lands on a midpoint, the product decides."""
    ratio = x / step
    a = clamped(ratio, f)
    low, high, _ = around(a, k)
    middle = a == (low + high) * 0.5
    side = tl.abs(x) - a * step
    r = tl.abs(nearest(ratio, f, k))
    r = tl.where(middle & (side < 0), low, r)
    r = tl.where(middle & (side > 0), high, r)
    return tl.where(finite(x), signed(r, x) * step, x)


@triton.jit
def stochastic_scaled(x: tl.tensor, step: tl.tensor, drawn: tl.tensor, f: tl.tensor, k: tl.tensor, k0: tl.tensor, k1: tl.tensor, i: tl.tensor) -> Any:
    return tl.where(finite(x), stochastic(x / step, drawn, f, k, k0, k1, i) * step, x)


@triton.jit
def place(
    v: tl.tensor, step: tl.tensor, drawn: tl.tensor, f: tl.tensor, k: tl.tensor, k0: tl.tensor, k1: tl.tensor, i: tl.tensor,
    MODE: tl.constexpr, MOVING: tl.constexpr, TO: tl.constexpr,
) -> Any:  # fmt: skip
    """One rounding, nearest or stochastic, with or without steps, in the container's values."""
    if MOVING:
        x = v.to(tl.float64)
        if MODE == NEAREST:
            r = nearest_scaled(x, step, f, k)
        else:
            r = stochastic_scaled(x, step, drawn, f, k, k0, k1, i)
        return fit(r.to(v.dtype), TO)
    else:
        if MODE == NEAREST:
            return nearest(v, f, k)
        else:
            return stochastic(v, drawn, f, k, k0, k1, i)


# ---- layouts, sums, counts ------------------------------------------------------------------------


@triton.jit
def run_of(tile: tl.tensor, run: tl.tensor) -> Any:
    """First halves of the eight groups of a run, 8 x 16; the second halves are 16 further on."""
    group, lane = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    return tile * TILE + (256 * run + 32 * group + lane)


@triton.jit
def columns_of(tile: tl.tensor, n: tl.tensor) -> Any:
    """Coordinates of a tile for sums, 256 x 4, and which of them exist."""
    k, j = tl.arange(0, 256)[:, None], tl.arange(0, 4)[None, :]
    i = tile * TILE + (3 * k + j)
    return i, (i < n) & (j < 3)


@triton.jit
def tree(x: tl.tensor) -> Any:
    """The halving tree over a tile laid out by columns."""
    x = tl.reshape(x, (2, 2, 2, 2, 2, 2, 2, 2, 4))
    for _ in tl.static_range(8):
        x = tl.sum(x, axis=0)
    j = tl.arange(0, 4)
    first, second, third = (
        tl.sum(tl.where(j == 0, x, 0.0)), tl.sum(tl.where(j == 1, x, 0.0)), tl.sum(tl.where(j == 2, x, 0.0))
    )  # fmt: skip
    return first + second + third


@triton.jit
def total(x: tl.tensor) -> Any:
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def packed(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> Any:
    """Three flags as one integer whose sum over a tile holds three counts (768 < 2**10)."""
    return a.to(tl.int32) + (b.to(tl.int32) << 10) + (c.to(tl.int32) << 20)


@triton.jit
def store_three(p: tl.tensor, sum_: tl.tensor) -> None:
    tl.store(p, sum_ & 1023)
    tl.store(p + 1, (sum_ >> 10) & 1023)
    tl.store(p + 2, sum_ >> 20)


@triton.jit
def store_two(p: tl.tensor, sum_: tl.tensor) -> None:
    tl.store(p, sum_ & 1023)
    tl.store(p + 1, (sum_ >> 10) & 1023)


@triton.jit
def log2_points(a: tl.tensor) -> Any:
    """log2 of positive values in fixed point: reference.log2_ratio's digits."""
    if a.dtype == tl.float64:
        small = a < 2.2250738585072014e-308
        u = bits(tl.where(small, a * 18014398509481984.0, a))
        e = (u >> 52).to(tl.int32) - tl.where(small, 1023 + 54, 1023)
        t = as_float((u & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float32) - 1.0
    else:
        small = a < 1.1754943508222875e-38
        u = bits(tl.where(small, a * 16777216.0, a))
        e = (u >> 23) - tl.where(small, 127 + 24, 127)
        t = as_float((u & 0x7FFFFF) | 0x3F800000) - 1.0
    p = ((((((P7 * t + P6) * t + P5) * t + P4) * t + P3) * t + P2) * t + P1) * t + P0
    r = (p * t * 65536.0 + 12582912.0) - 12582912.0  # nearest integer, ties to even
    return e * PHASE_ONE + r.to(tl.int32)


# ---- kernels ----------------------------------------------------------------------------------------


@triton.jit
def round_some(
    x: tl.tensor, out: tl.tensor, drawn: tl.tensor, f: tl.tensor, k: tl.tensor, steps: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor,
    i: tl.tensor, n: tl.tensor, k0: tl.tensor, k1: tl.tensor, offset: tl.tensor,
    MODE: tl.constexpr, MOVING: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    mask = i < n
    step = steps_at(steps, i, mask, row, per_row, length) if MOVING else 1.0
    r = place(load(x, i, mask), step, drawn, f, k, k0, k1, offset + i, MODE, MOVING, TO)
    store(out, i, r, mask)


@triton.jit(do_not_specialize=["row", "per_row", "length", "k0", "k1", "offset"])
def round_tile(
    x: tl.tensor, out: tl.tensor, f: tl.tensor, k: tl.tensor, steps: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor,
    n: tl.tensor, k0: tl.tensor, k1: tl.tensor, offset: tl.tensor,
    MODE: tl.constexpr, MOVING: tl.constexpr, TO: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    f, k = floats_at(f, 0), ints_at(k, 0)
    for run in range(3):
        i = run_of(tile, run)
        first, second = (i, i) if MODE == NEAREST else words(k0, k1, offset + i, ALIGNED)
        round_some(x, out, first, f, k, steps, row, per_row, length, i, n, k0, k1, offset, MODE, MOVING, TO)
        round_some(
            x, out, second, f, k, steps, row, per_row, length, i + 16, n, k0, k1, offset, MODE, MOVING, TO
        )


@triton.jit
def mark_moved(moved: tl.tensor, i: tl.tensor, n: tl.tensor, now: tl.tensor) -> Any:
    """Set the bits of coordinates that move now; returns which have never moved."""
    byte = tl.reshape(i, (8, 2, 8)) >> 3
    byte = tl.min(byte, axis=2)
    place_ = tl.arange(0, 8)[None, None, :]
    new = tl.sum(tl.reshape(now.to(tl.int32), (8, 2, 8)) << place_, axis=2)
    mask = byte * 8 < n
    new = new | tl.load(moved + byte, mask=mask, other=0).to(tl.int32)
    tl.store(moved + byte, new.to(tl.uint8), mask=mask)
    return tl.reshape((new[:, :, None] >> place_) & 1, (8, 16)) == 0


@triton.jit
def write_some(
    stored: tl.tensor, proposed: tl.tensor, out: tl.tensor, drawn: tl.tensor, f: tl.tensor, k: tl.tensor,
    steps: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor, moved: tl.tensor,
    i: tl.tensor, n: tl.tensor, k0: tl.tensor, k1: tl.tensor, offset: tl.tensor,
    MODE: tl.constexpr, MOVING: tl.constexpr, TO: tl.constexpr, MARK: tl.constexpr,
) -> Any:  # fmt: skip
    """Write back one block; returns its counts, packed."""
    mask = i < n
    step = steps_at(steps, i, mask, row, per_row, length) if MOVING else 1.0
    q, z = load(stored, i, mask), load(proposed, i, mask)
    ok = finite(z)
    z = tl.where(ok, z, q)
    if MODE == DEADZONE:
        r = place(z, step, drawn, f, k, k0, k1, offset + i, 0, MOVING, TO)
        dead = (r == q) & (z != q)
        r = tl.where(dead, place(z, step, drawn, f, k, k0, k1, offset + i, 1, MOVING, TO), r)
    else:
        r = place(z, step, drawn, f, k, k0, k1, offset + i, MODE, MOVING, TO)
    r = tl.where(ok, r, q)
    store(out, i, r, mask)
    ok = ok & mask
    element = r.to(tl.float64) / step if MOVING else r
    end = (element >= f[HI]) | (element <= f[LO])
    never = mask & (i < 0)
    if MARK:
        never = mask & mark_moved(moved, i, n, ok & (r != q))
    return packed(ok & (r == q), ok & (z == q), ok & end), packed(mask & ~ok, never, i < 0)


@triton.jit
def sum_sizes(stored: tl.tensor, proposed: tl.tensor, sums: tl.tensor, tile: tl.tensor, n: tl.tensor) -> None:
    i, mask = columns_of(tile, n)
    q, z = load(stored, i, mask).to(tl.float64), load(proposed, i, mask).to(tl.float64)
    ok = mask & finite(z)
    tl.store(sums, tree(tl.where(ok, tl.abs(q), 0.0)))
    tl.store(sums + 1, tree(tl.where(ok, tl.abs(z - q), 0.0)))


@triton.jit(do_not_specialize=["row", "per_row", "length", "k0", "k1", "offset"])
def write_tile(
    stored: tl.tensor, proposed: tl.tensor, out: tl.tensor, f: tl.tensor, k: tl.tensor, steps: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor,
    moved: tl.tensor, counts: tl.tensor, sums: tl.tensor, n: tl.tensor, k0: tl.tensor, k1: tl.tensor, offset: tl.tensor,
    MODE: tl.constexpr, MOVING: tl.constexpr, TO: tl.constexpr, ALIGNED: tl.constexpr,
    MARK: tl.constexpr, SUMS: tl.constexpr,
) -> None:  # fmt: skip
    """Write-back of a tile; ``out`` may be ``proposed`` or ``stored``."""
    tile = tl.program_id(0).to(tl.int64)
    f, k = floats_at(f, 0), ints_at(k, 0)
    if SUMS:
        sum_sizes(stored, proposed, sums + 2 * tile, tile, n)
        tl.debug_barrier()  # before anything is written over what other threads still read
    one = tl.zeros((8, 16), tl.int32)
    two = tl.zeros((8, 16), tl.int32)
    for run in range(3):
        i = run_of(tile, run)
        first, second = (i, i) if MODE == NEAREST else words(k0, k1, offset + i, ALIGNED)
        a, b = write_some(
            stored, proposed, out, first, f, k, steps, row, per_row, length, moved,
            i, n, k0, k1, offset, MODE, MOVING, TO, MARK,
        )  # fmt: skip
        c, d = write_some(
            stored, proposed, out, second, f, k, steps, row, per_row, length, moved,
            i + 16, n, k0, k1, offset, MODE, MOVING, TO, MARK,
        )  # fmt: skip
        one += a + c
        two += b + d
    store_three(counts + 5 * tile, total(one))
    store_two(counts + 5 * tile + 3, total(two))


@triton.jit
def pair_at(w: tl.tensor, d: tl.tensor, i: tl.tensor, mask: tl.tensor, AFTER: tl.constexpr) -> Any:
    """Weights and proposals in the working type; ``AFTER``: d holds the weights after the step."""
    x = load(w, i, mask)
    y = load(d, i, mask).to(x.dtype)
    if AFTER:
        y = y - x
    return x, y


@triton.jit(do_not_specialize=["n_grids"])
def audit_tile(
    w: tl.tensor, d: tl.tensor, f: tl.tensor, k: tl.tensor, counts: tl.tensor, shared: tl.tensor, sums: tl.tensor, phases: tl.tensor, n: tl.tensor, n_grids: tl.tensor,
    AFTER: tl.constexpr, PHASE: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """Shared counts, sums and phases of every grid; the counts of grids without steps."""
    tile = tl.program_id(0).to(tl.int64)
    i, mask = columns_of(tile, n)
    x, y = pair_at(w, d, i, mask, AFTER)
    ok = mask & finite(x) & finite(y)
    x, y = tl.where(ok, x, 0.0), tl.where(ok, y, 0.0)
    store_two(shared + 2 * tile, total(packed(ok & (y == 0), mask & ~ok, ok & ~ok)))
    wide = x.to(tl.float64)
    tl.store(sums + 2 * tile, tree(wide * wide))
    wide = y.to(tl.float64)
    tl.store(sums + 2 * tile + 1, tree(wide * wide))
    size, sized = tl.abs(x), tl.abs(y)
    if PHASE:
        ratio = log2_points(size) - log2_points(sized)
    for g in range(n_grids):
        fg, kg = floats_at(f, g), ints_at(k, g)
        at = tile * n_grids + g
        if PHASE:
            points = ratio - kg[POINTS].to(tl.int32)
            points = tl.minimum(tl.maximum(points, 0), PHASE_ONE)
            points = tl.where(y == 0, PHASE_ONE, tl.where(x == 0, 0, points))
            tl.store(phases + at, total(tl.where(ok, points, 0)).to(tl.int64))
        if kg[KIND] != SCALED:
            q = nearest(x, fg, kg)
            frozen = nearest(fit(q + y, TO), fg, kg) == q
            unit = as_float(tl.maximum(exponent(bits(size)), kg[EMIN]))
            symmetric = sized * fg[UP] < unit
            end = (q >= fg[HI]) | (q <= fg[LO])
            zero = size < fg[T_ZERO]
            small = (size < fg[T_SUB]) & ~zero
            store_three(counts + 5 * at, total(packed(ok & frozen, ok & symmetric, ok & end)))
            store_two(counts + 5 * at + 3, total(packed(ok & small, ok & zero, ok & ~ok)))


@triton.jit(do_not_specialize=["row", "per_row", "length", "n_grids", "g"])
def audit_scaled_tile(
    w: tl.tensor, d: tl.tensor, stored: tl.tensor, proposed: tl.tensor, f: tl.tensor, k: tl.tensor, steps: tl.tensor, next_steps: tl.tensor,
    row: tl.tensor, per_row: tl.tensor, length: tl.tensor, counts: tl.tensor, n: tl.tensor, n_grids: tl.tensor, g: tl.tensor,
    AFTER: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """The counts of grid g, which has steps: before and after the proposals are ``stored``, ``proposed``."""
    tile = tl.program_id(0).to(tl.int64)
    f, k = floats_at(f, 0), ints_at(k, 0)
    i, mask = columns_of(tile, n)
    x, y = pair_at(w, d, i, mask, AFTER)
    ok = mask & finite(x) & finite(y)
    q, z = load(stored, i, mask), load(proposed, i, mask)
    step = steps_at(steps, i, mask, row, per_row, length)
    later = steps_at(next_steps, i, mask, row, per_row, length)
    frozen = place(z, later, i, f, k, 0, 0, i, 0, True, TO) == q
    e = tl.maximum(exponent(bits(x.to(tl.float64) / step)), k[EMIN])
    unit = as_float(e - k[MANT]) * step
    symmetric = tl.abs(y).to(tl.float64) < unit * 0.5
    element = q.to(tl.float64) / step
    end = (element >= f[HI]) | (element <= f[LO])
    zero = element == 0
    normal = as_float(k[EMIN])
    small = (tl.abs(element) < normal) & ~zero & (f[T_ZERO] < f[T_SUB])  # not integers
    at = counts + 5 * (tile * n_grids + g)
    store_three(at, total(packed(ok & frozen, ok & symmetric, ok & end)))
    store_two(at + 3, total(packed(ok & small, ok & zero, ok & ~ok)))


@triton.jit(do_not_specialize=["row", "per_row", "length"])
def score_tile(
    w: tl.tensor, g: tl.tensor, u: tl.tensor, stored: tl.tensor, proposed: tl.tensor, f: tl.tensor, k: tl.tensor, next_steps: tl.tensor,
    row: tl.tensor, per_row: tl.tensor, length: tl.tensor, scores: tl.tensor, n: tl.tensor,
    AFTER: tl.constexpr, MOVING: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    f, k = floats_at(f, 0), ints_at(k, 0)
    i, mask = columns_of(tile, n)
    x, y = pair_at(w, u, i, mask, AFTER)
    slope = load(g, i, mask).to(x.dtype)
    ok = mask & finite(x) & finite(y) & finite(slope)
    x, y, slope = tl.where(ok, x, 0.0), tl.where(ok, y, 0.0), tl.where(ok, slope, 0.0)
    if MOVING:
        later = steps_at(next_steps, i, mask, row, per_row, length)
        q = load(stored, i, mask)
        frozen = place(load(proposed, i, mask), later, i, f, k, 0, 0, i, 0, True, TO) == q
    else:
        q = nearest(x, f, k)
        frozen = nearest(fit(q + y, TO), f, k) == q
    b = tl.where(ok & frozen, 1.0, 0.0).to(tl.float64)
    x, y, slope = x.to(tl.float64), y.to(tl.float64), slope.to(tl.float64)
    product = slope * y
    gain = tl.where(product < 0, -product, 0.0)
    at = scores + 8 * tile
    tl.store(at, tree(b))
    tl.store(at + 1, tree(gain))
    tl.store(at + 2, tree(b * gain))
    tl.store(at + 3, tree(tl.abs(slope)))
    tl.store(at + 4, tree(tl.abs(y)))
    tl.store(at + 5, tree(tl.abs(x)))
    tl.store(at + 6, tree(tl.abs(slope * x)))
    tl.store(at + 7, tree(tl.abs(product)))
