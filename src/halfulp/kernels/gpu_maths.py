"""Rounding on a GPU: Triton functions on blocks of values. The kernels are in gpu_tiles.

The arithmetic is that of :mod:`halfulp.kernels.params`, for float32 and float64 as working types:
``f`` and ``k`` are a grid's row of the float and of the integer table, indexed by the names of their
columns. Grids with scales are rounded as quotients, in float64.

Results must not depend on the device, so: a multiplication is never fused with an addition (every
launch says so); the one division is in float64, where Triton's is IEEE's (in float32 it is not); a
bfloat16 travels as its bit pattern, because a cast may alter a NaN; and nothing flushes subnormals
(``floor`` may, but of a non-negative number, to the same zero).

Stochastic rounding compares 31 digits of U with 31 digits of the fraction of the gap. Where these
are equal, about once in 2**31 elements, the whole block goes through the words of the reference,
one level at a time, until no element of it is open.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from halfulp.kernels import params, reference
from halfulp.numbers import streams

# Triton reads globals only as constexpr.
PARITY = tl.constexpr(streams.PARITY)
NEAREST, STOCHASTIC = tl.constexpr(reference.NEAREST), tl.constexpr(reference.STOCHASTIC)
BITS = tl.constexpr(params.BITS)
LO, HI = tl.constexpr(params.LO), tl.constexpr(params.HI)
KIND, EMIN, SHIFT = tl.constexpr(params.KIND), tl.constexpr(params.EMIN), tl.constexpr(params.SHIFT)
CUT, TOP, HALF = tl.constexpr(params.CUT), tl.constexpr(params.TOP), tl.constexpr(params.HALF)
ODD, KEEP, MANT = tl.constexpr(params.ODD), tl.constexpr(params.KEEP), tl.constexpr(params.MANT)
INVERSE = tl.constexpr(params.INVERSE)
LEFT, RIGHT = tl.constexpr(params.LEFT), tl.constexpr(params.RIGHT)
TO_BF16, TO_FP16 = tl.constexpr(1), tl.constexpr(2)
P0, P1, P2, P3, P4, P5, P6, P7 = (tl.constexpr(c) for c in reference.LOG2_POLYNOMIAL)
PHASE_ONE = tl.constexpr(reference.PHASE_ONE)


# ---- reading tables ------------------------------------------------------------------------------


@triton.jit
def floats_at(p: tl.tensor, row: tl.tensor) -> Any:
    """Load a row of the table of floats."""
    p += 8 * row
    return (
        tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3),
        tl.load(p + 4), tl.load(p + 5), tl.load(p + 6), tl.load(p + 7),
    )  # fmt: skip


@triton.jit
def ints_at(p: tl.tensor, row: tl.tensor) -> Any:
    """Load a row of the table of integers."""
    p += 13 * row
    return (
        tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4), tl.load(p + 5),
        tl.load(p + 6), tl.load(p + 7), tl.load(p + 8), tl.load(p + 9), tl.load(p + 10), tl.load(p + 11),
        tl.load(p + 12),
    )  # fmt: skip


# ---- numbers as bits -----------------------------------------------------------------------------


@triton.jit
def bits(x: tl.tensor) -> Any:
    """Return the bits of a float as an integer of its width."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(u: tl.tensor) -> Any:
    """Return the float that has these bits."""
    if u.dtype == tl.int64:
        return u.to(tl.float64, bitcast=True)
    else:
        return u.to(tl.float32, bitcast=True)


@triton.jit
def exponent(u: tl.tensor) -> Any:
    """Return the exponent field, in place."""
    if u.dtype == tl.int64:
        return u & 0x7FF0000000000000
    else:
        return u & 0x7F800000


@triton.jit
def magnitude(u: tl.tensor) -> Any:
    """Return the bits without the sign."""
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
    """Return True where a value is neither infinite nor NaN."""
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
    """Container values in the working type."""
    x = tl.load(p + i, mask=mask, other=0)
    if x.dtype == tl.int16:  # bfloat16
        return as_float(x.to(tl.int32) << 16)
    elif x.dtype == tl.float16:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def store(p: tl.tensor, i: tl.tensor, x: tl.tensor, mask: tl.tensor) -> None:
    """Values that the container has."""
    if p.dtype.element_ty == tl.int16:
        tl.store(p + i, (bits(x) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(p + i, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def log2_points(a: tl.tensor) -> Any:
    """log2 of positive values in fixed point: reference.log2_ratio's digits."""
    if a.dtype == tl.float64:
        small = a < 2.2250738585072014e-308  # subnormal: the exponent field does not tell
        u = bits(tl.where(small, a * 18014398509481984.0, a))
        e = (u >> 52).to(tl.int32) - tl.where(small, 1023 + 54, 1023)
        t = as_float((u & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float32) - 1.0
    else:
        small = a < 1.1754943508222875e-38
        u = bits(tl.where(small, a * 16777216.0, a))
        e = (u >> 23) - tl.where(small, 127 + 24, 127)
        t = as_float((u & 0x7FFFFF) | 0x3F800000) - 1.0
    p = ((((((P7 * t + P6) * t + P5) * t + P4) * t + P3) * t + P2) * t + P1) * t + P0
    points = (p * t * 65536.0 + 12582912.0) - 12582912.0  # to the nearest integer, ties to even
    return e * PHASE_ONE + points.to(tl.int32)


# ---- words ---------------------------------------------------------------------------------------


@triton.jit
def four_rounds(
    x0: tl.tensor, x1: tl.tensor, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr
) -> Any:
    """Mix two words by four Threefry rounds with the given rotations."""
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
def blocks(key: tl.tuple, i: tl.tensor, level: tl.tensor) -> Any:
    """Both words of the Threefry blocks of elements i (int64, global): see halfulp.numbers.streams."""
    block = ((i >> 5) << 4) + (i & 15)
    high = (block >> 32).to(tl.uint32) | (level.to(tl.uint32) << 26)
    return threefry(
        key[0].to(tl.uint32, bitcast=True), key[1].to(tl.uint32, bitcast=True), block.to(tl.uint32), high
    )


@triton.jit
def short_blocks(key: tl.tuple, i: tl.tensor, level: tl.tensor) -> Any:
    """The same of the short stream, after thirteen rounds."""
    k0, k1 = key[0].to(tl.uint32, bitcast=True), key[1].to(tl.uint32, bitcast=True)
    k2 = k0 ^ k1 ^ PARITY
    block = ((i >> 6) << 4) + (i & 15)
    high = (block >> 32).to(tl.uint32) | (level.to(tl.uint32) << 26)
    x0, x1 = four_rounds(block.to(tl.uint32) + k0, high + k1, 13, 15, 26, 6)
    x0, x1 = four_rounds(x0 + k1, x1 + (k2 + 1), 17, 29, 16, 24)
    x0, x1 = four_rounds(x0 + k2, x1 + (k0 + 2), 13, 15, 26, 6)
    x0, x1 = x0 + k0, x1 + (k1 + 3)
    x0 += x1
    return x0, ((x1 << 17) | (x1 >> 15)) ^ x0


@triton.jit
def word(key: tl.tuple, i: tl.tensor, level: tl.tensor) -> Any:
    """Return the random word of element ``i`` at ``level``."""
    first, second = blocks(key, i, level)
    return tl.where(((i >> 4) & 1) == 1, second, first)


@triton.jit
def words(key: tl.tuple, i: tl.tensor, ALIGNED: tl.constexpr) -> Any:
    """The first words of elements i and i + 16. ``ALIGNED``: they share their blocks."""
    level = tl.full((), 0, tl.int32)
    if ALIGNED:
        return blocks(key, i, level)
    else:  # a shard that does not begin with a group of 32
        return word(key, i, level), word(key, i + 16, level)


# ---- nearest -------------------------------------------------------------------------------------


@triton.jit
def nearest_bits(v: tl.tensor, k: tl.tuple) -> Any:
    """Round to nearest even on the bits."""
    a = magnitude(bits(v))
    r = (a + k[HALF] + ((a >> k[CUT]) & k[ODD])) & k[KEEP]
    return as_float(tl.minimum(r, k[TOP]))


@triton.jit
def nearest_magic(v: tl.tensor, f: tl.tuple, k: tl.tuple) -> Any:
    """Round to nearest even by adding a constant and taking it away."""
    a = tl.where(v < f[LO], f[LO], v)
    a = tl.where(a > f[HI], f[HI], a)
    c = as_float(tl.maximum(exponent(bits(a)), k[EMIN]) + k[SHIFT])
    return (a + c) - c


@triton.jit
def nearest(v: tl.tensor, f: tl.tuple, k: tl.tuple) -> Any:
    """Nearest even; keeps signs, hands non-finite values back."""
    if k[KIND] == BITS:
        r = nearest_bits(v, k)
    else:
        r = nearest_magic(v, f, k)
    return tl.where(finite(v), signed(r, v), v)


# ---- stochastic ----------------------------------------------------------------------------------


@triton.jit
def clamped(v: tl.tensor, f: tl.tuple) -> Any:
    """|v|, but at most the largest magnitude on that side of zero."""
    limit = tl.where(bits(v) < 0, -f[LO], f[HI])
    a = tl.abs(v)
    return tl.where(a > limit, limit, a)


@triton.jit
def around_bits(a: tl.tensor, k: tl.tuple) -> Any:
    """Return the codes below and above, and the digits between them, on the bits."""
    u = bits(a)
    low = u & k[KEEP]
    high = low + (tl.full((), 1, low.dtype) << k[CUT])
    digits = ((u & ~k[KEEP]) << k[LEFT]) >> k[RIGHT]
    return as_float(low), as_float(high), digits.to(tl.int32)


@triton.jit
def around_magic(a: tl.tensor, k: tl.tuple) -> Any:
    """Return the codes below and above, and the digits between them, by arithmetic."""
    e = tl.maximum(exponent(bits(a)), k[EMIN])
    s = a * as_float(k[INVERSE] - e)
    n = tl.floor(s)
    unit = as_float(e - k[MANT])
    return n * unit, (n + 1.0) * unit, ((s - n) * 2147483648.0).to(tl.int32)


@triton.jit
def around(a: tl.tensor, k: tl.tuple) -> Any:
    """The code not above a clamped magnitude, the next one, and 31 digits of the fraction between."""
    if k[KIND] == BITS:
        low, high, digits = around_bits(a, k)
    else:
        low, high, digits = around_magic(a, k)
    return low, high, digits


@triton.jit
def any_of(flags: tl.tensor) -> Any:
    """Return True if a flag of the block is set."""
    return tl.max(flags.to(tl.int32)) > 0


@triton.jit
def digit(key: tl.tuple, i: tl.tensor, level: tl.tensor, SHORT: tl.constexpr) -> Any:
    """One digit of each element: of 16 bits in the short stream, else of 32."""
    if SHORT:
        first, second = short_blocks(key, i, level)
        drawn = tl.where(((i >> 5) & 1) == 1, second, first)
        half = tl.where(((i >> 4) & 1) == 1, drawn >> 16, drawn & 0xFFFF)
        return half.to(tl.int32) ^ 0xFFFF
    else:
        return word(key, i, level)


@triton.jit
def settle(fraction: tl.tensor, tied: tl.tensor, key: tl.tuple, i: tl.tensor, SHORT: tl.constexpr) -> Any:
    """U < fraction, to the last digit, where the first digits tied: reference.stochastic_up."""
    up = tied & ~tied
    tied = tied & (fraction > 0)
    level = tl.full((), 0, tl.int32)
    while any_of(tied):
        scaled = fraction * (65536.0 if SHORT else 4294967296.0)
        whole = tl.floor(scaled)
        drawn = digit(key, i, level, SHORT).to(tl.float64)
        up = up | (tied & (drawn < whole))
        tied = tied & (drawn == whole) & (scaled > whole)
        fraction = scaled - whole
        level += 1
    return up


@triton.jit
def stochastic(
    v: tl.tensor, drawn: tl.tensor, f: tl.tuple, k: tl.tuple, key: tl.tuple, i: tl.tensor,
    SHORT: tl.constexpr = False,
) -> Any:  # fmt: skip
    """The code above with the probability of the fraction of the gap; ``drawn``: the first digits."""
    a = clamped(v, f)
    low, high, digits = around(a, k)
    first = drawn if SHORT else (drawn >> 1).to(tl.int32)
    digits = digits >> (15 if SHORT else 0)
    up = first < digits
    tied = first == digits
    if any_of(tied):
        below = low.to(tl.float64)
        up = up | settle((a.to(tl.float64) - below) / (high.to(tl.float64) - below), tied, key, i, SHORT)
    return tl.where(finite(v), signed(tl.where(up, high, low), v), v)


# ---- with scales, in float64 ----------------------------------------------------------------------


@triton.jit
def scales_at(segments: tl.tuple, i: tl.tensor, mask: tl.tensor) -> Any:
    """The scale of each element: reference.segment_ids. Scales, row length, segments a row, their length."""
    scales, row, per_row, length = segments
    return tl.load(scales + (i // row * per_row + i % row // length), mask=mask, other=1.0)


@triton.jit
def nearest_scaled(x: tl.tensor, scale: tl.tensor, f: tl.tuple, k: tl.tuple) -> Any:
    """Nearest element * scale. Where the quotient lands on a midpoint, the product decides."""
    ratio = x / scale
    a = clamped(ratio, f)
    low, high, _ = around(a, k)
    middle = a == (low + high) * 0.5
    side = tl.abs(x) - a * scale
    r = nearest(ratio, f, k)
    r = tl.where(middle & (side < 0), low, r)
    r = tl.where(middle & (side > 0), high, r)
    return tl.where(finite(x), signed(r, x) * scale, x)


@triton.jit
def place(
    v: tl.tensor, scale: tl.tensor, drawn: tl.tensor, f: tl.tuple, k: tl.tuple, key: tl.tuple, i: tl.tensor,
    MODE: tl.constexpr, SCALES: tl.constexpr, TO: tl.constexpr,
) -> Any:  # fmt: skip
    """Any of the roundings, to values that the container has."""
    if SCALES:
        x = v.to(tl.float64)
        if MODE == NEAREST:
            r = nearest_scaled(x, scale, f, k)
        else:
            r = tl.where(finite(x), stochastic(x / scale, drawn, f, k, key, i) * scale, x)
        return fit(r.to(v.dtype), TO)
    elif MODE == NEAREST:
        return nearest(v, f, k)
    else:
        return stochastic(v, drawn, f, k, key, i)
