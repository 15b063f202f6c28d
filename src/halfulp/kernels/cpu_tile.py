"""One tile: the pieces from which the CPU kernels are made.

A tile is 768 coordinates, small enough that its buffers stay in the first-level cache. Every function
here takes slices that start at zero, which is what numba vectorises, and works in the *working type*
(float32, or float64 for float64 containers).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from halfulp.kernels import lanes
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
    UNIT,
)  # fmt: skip
from halfulp.kernels.reference import TILE
from halfulp.kernels.simd import (
    LANES,
    bits_of,
    exact_up,
    fill_words,
    float_like,
    inline,
    kernel,
    lesser,
    narrow,
    ones,
    round_bits,
    shl,
    shr,
    tally,
    widen,
)  # fmt: skip

ONE = np.int32(1)
TO_BF16, TO_FP16 = 1, 2
WORDS = TILE + 64


# ---- one tile: moving values ------------------------------------------------------------------


@kernel
def load(source: Any, tile: Any) -> None:
    """Copy, widened. (Assigning slices would have numba compile the words of an error: seconds.)"""
    for i in range(source.size):
        tile[i] = widen(source[i])


def tile_of(source: Any, buffer: Any) -> Any:
    """The stretch itself where its type is the working type, else a widened copy in the buffer."""
    raise TypeError("for compiled code only")


@overload(tile_of, jit_options={"nogil": True})
def _tile_of(source: Any, buffer: Any) -> Any:
    if source.dtype == buffer.dtype:

        def itself(source: Any, buffer: Any) -> Any:
            return source

        return itself

    def widened(source: Any, buffer: Any) -> Any:
        load(source, buffer)
        return buffer[: source.size]

    return widened


@kernel
def padded(source: Any, buffer: Any) -> Any:
    """A whole tile: the stretch itself if it is one and of the working type, else a copy filled up with
    zeros in the buffer."""
    tile = tile_of(source, buffer)
    if source.size == TILE:
        return tile
    load(tile, buffer[: source.size])
    buffer[source.size :] = 0
    return buffer


@kernel
def store(tile: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = narrow(out[i], tile[i])


@kernel
def difference(after: Any, before: Any, tile: Any) -> None:
    for i in range(after.size):
        tile[i] = widen(after[i]) - before[i]


@kernel
def add_in_container(q: Any, d: Any, z: Any, to: Any) -> None:
    """z = q + d, rounded to the container where it is narrower than the working type."""
    for i in range(q.size):
        z[i] = q[i] + d[i]
    if to == TO_BF16:
        for i in range(z.size):
            u = bits_of(z[i])
            r = (u + 0x7FFF + ((u >> 16) & 1)) & ~0xFFFF
            z[i] = float_like(z[i], r) if (u & 0x7F800000) != 0x7F800000 else z[i]
    elif to == TO_FP16:
        for i in range(z.size):
            a = abs(z[i])
            c = float_like(a, max(bits_of(a) & 0x7F800000, 113 << 23) + ((13 << 23) | (1 << 22)))
            r = (a + c) - c if a < np.float32(65520.0) else np.float32(np.inf)
            z[i] = float_like(r, bits_of(r) | (bits_of(z[i]) & np.int32(-(2**31)))) if a == a else z[i]


# ---- one tile: rounding -------------------------------------------------------------------------


@kernel
def nearest(x: Any, out: Any, f: Any, k: Any, exponent: Any, sign: Any) -> None:
    """Nearest even; keeps signs, hands non-finite values back."""
    if k[KIND] == MAGIC:
        lo, hi, emin, shift = f[LO], f[HI], k[EMIN], k[SHIFT]
        for i in range(x.size):
            v = x[i]
            a = lo if v < lo else v
            a = hi if a > hi else a
            c = float_like(v, max(bits_of(a) & exponent, emin) + shift)
            r = (a + c) - c
            u = bits_of(v)
            r = float_like(v, (bits_of(r) & ~sign) | (u & sign))
            out[i] = r if (u & exponent) != exponent else v
    else:
        cut, half, odd, keep, top = k[CUT], k[HALF], k[ODD], k[KEEP], k[TOP]
        for i in range(x.size):
            v = x[i]
            u = bits_of(v)
            a = u & ~sign
            r = lesser(bits_of(float_like(v, round_bits(bits_of(abs(v)), half, cut, odd, keep))), top)
            out[i] = float_like(v, r | (u & sign)) if a < exponent else v


@kernel
def stochastic(x: Any, out: Any, words: Any, f: Any, k: Any, exponent: Any, sign: Any) -> Any:
    """Stochastic neighbour by the first 31 digits of U; returns how many of them were not enough."""
    ties = np.int32(0)
    if k[KIND] == MAGIC:
        hi, low, emin, inverse, mant = f[HI], -f[LO], k[EMIN], k[INVERSE], k[MANT]
        one, two31 = f[UNIT], f[TWO31]
        for i in range(x.size):
            v = x[i]
            u = bits_of(v)
            limit = low if u < 0 else hi
            a = abs(v)
            a = limit if a > limit else a
            e = max(bits_of(a) & exponent, emin)
            s = a * float_like(v, inverse - e)
            n = np.floor(s)
            digits = np.int32((s - n) * two31)
            drawn = np.int32(words[i] >> np.uint32(1))
            ties = tally(ties, drawn == digits, ONE)
            r = (n + one if drawn < digits else n) * float_like(v, e - mant)
            r = float_like(v, bits_of(r) | (u & sign))
            out[i] = r if (u & exponent) != exponent else v
    else:
        cut, keep, top, left, right = k[CUT], k[KEEP], k[TOP], k[LEFT], k[RIGHT]
        unit = shl(k[ODD], cut)
        for i in range(x.size):
            v = x[i]
            u = bits_of(v)
            a = lesser(bits_of(abs(v)), top)
            rest = bits_of(float_like(v, a & ~keep))
            digits = np.int32(shr(shl(rest, left), right))
            drawn = np.int32(words[i] >> np.uint32(1))
            ties = tally(ties, drawn == digits, ONE)
            r = (a & keep) + (unit if drawn < digits else 0)
            out[i] = float_like(v, r | (u & sign)) if (u & exponent) != exponent else v
    return ties


@kernel
def settle(
    x: Any, out: Any, f: Any, k: Any, exponent: Any, sign: Any, k0: Any, k1: Any, first: Any,
    short: Any = False,
) -> None:  # fmt: skip
    """Stochastic rounding to the last digit, for the one tile in millions that needs more than 31."""
    for i in range(x.size):
        v = x[i]
        u = bits_of(v)
        if (u & exponent) == exponent:
            out[i] = v
            continue
        if k[KIND] == MAGIC:
            limit = -f[LO] if u < 0 else f[HI]
            a = min(abs(v), limit)
            e = max(bits_of(a) & exponent, k[EMIN])
            s = a * float_like(v, k[INVERSE] - e)
            n = np.floor(s)
            up = exact_up(np.float64(s - n), k0, k1, first + i, short)
            r = (n + f[UNIT] if up else n) * float_like(v, e - k[MANT])
            out[i] = float_like(v, bits_of(r) | (u & sign))
        else:
            b = min(u & ~sign, k[TOP])
            up = exact_up(np.float64(b & ~k[KEEP]) * 2.0 ** -np.float64(k[CUT]), k0, k1, first + i, short)
            out[i] = float_like(v, ((b & k[KEEP]) + (np.int64(up) << k[CUT])) | (u & sign))


@kernel
def stochastic_exact(
    x: Any, out: Any, words: Any, f: Any, k: Any, exponent: Any, sign: Any, k0: Any, k1: Any, first: Any
) -> None:
    fill_words(words, k0, k1, first, x.size)
    if stochastic(x, out, words[first & 31 :], f, k, exponent, sign) > 0:
        settle(x, out, f, k, exponent, sign, k0, k1, first)


# ---- one tile: sums and counts --------------------------------------------------------------------


@inline
def _halve(buffer: Any, half: Any) -> None:
    for i in range(half):
        buffer[i] = buffer[i] + buffer[i + half]


@kernel
def tree(buffer: Any) -> Any:
    """The halving tree from 384 entries down; overwrites them. Constant lengths vectorise best."""
    _halve(buffer, 192)
    _halve(buffer, 96)
    _halve(buffer, 48)
    _halve(buffer, 24)
    _halve(buffer, 12)
    _halve(buffer, 6)
    _halve(buffer, 3)
    return float(buffer[0] + buffer[1] + buffer[2])


@kernel
def tree_from(buffer: Any, length: Any) -> Any:
    """The halving tree from any 3 * 2**k entries down."""
    while length > 384:
        length >>= 1
        _halve(buffer, length)
    if length > 192:
        _halve(buffer, 192)
    if length > 96:
        _halve(buffer, 96)
    if length > 48:
        _halve(buffer, 48)
    if length > 24:
        _halve(buffer, 24)
    if length > 12:
        _halve(buffer, 12)
    if length > 6:
        _halve(buffer, 6)
    if length > 3:
        _halve(buffer, 3)
    return float(buffer[0] + buffer[1] + buffer[2])


@kernel
def sum_squares(x: Any, buffer: Any) -> Any:
    a, b = x[: TILE // 2], x[TILE // 2 :]
    for i in range(TILE // 2):
        u, v = np.float64(a[i]), np.float64(b[i])
        buffer[i] = u * u + v * v
    return tree(buffer)


@kernel
def sum_abs(x: Any, buffer: Any) -> Any:
    a, b = x[: TILE // 2], x[TILE // 2 :]
    for i in range(TILE // 2):
        buffer[i] = abs(np.float64(a[i])) + abs(np.float64(b[i]))
    return tree(buffer)


@kernel
def count_ends(x: Any, lo: Any, hi: Any) -> Any:
    count = np.int32(0)
    for i in range(x.size):
        count = tally(count, (x[i] >= hi) | (x[i] <= lo), ONE)
    return count


@kernel
def count_equal(x: Any, y: Any) -> Any:
    count = np.int32(0)
    for i in range(x.size):
        count = tally(count, x[i] == y[i], ONE)
    return count


@kernel
def nonfinite(x: Any, exponent: Any) -> Any:
    count = np.int32(0)
    for i in range(x.size):
        count = tally(count, (bits_of(x[i]) & exponent) == exponent, ONE)
    return count


# ---- one tile: what changed ----------------------------------------------------------------


@kernel
def changes(q: Any, r: Any, n: Any, bits: Any) -> Any:
    """A bit for each of the n values that differ, in whole tiles, lowest first; returns how many."""
    count = np.int32(0)
    for g in range(TILE // LANES):
        bits[g] = lanes.mask(lanes.load(q, g * LANES) != lanes.load(r, g * LANES))
    if n < TILE:
        bits[(n + LANES - 1) // LANES :] = 0
        if n % LANES:
            bits[n // LANES] &= np.uint16((1 << (n % LANES)) - 1)
    for word in bits.view(np.uint64):
        count += np.int32(ones(word))
    return count


@kernel
def merge(bits: Any, moved: Any) -> Any:
    """Add the bits of what moved now to those of what moved before; returns how many have ever."""
    now = bits.view(np.uint8)
    for j in range(moved.size):
        now[j] |= moved[j]
        moved[j] = now[j]
    ever = np.int64(0)
    for word in bits.view(np.uint64):
        ever += np.int64(ones(word))
    return ever
