"""The CPU kernels: numba, one pass over memory, a tile at a time.

A tile (768 coordinates) is loaded once into buffers that stay in the first-level cache; every
grid then works on the buffers. Threads take ranges of tiles: each function here does the
tiles [t0, t1) and releases the interpreter lock, and :mod:`halfulp.kernels.pool` runs ranges
on plain threads. (numba's own thread layers are not used: the default one aborts the process
when two Python threads meet in it, the OpenMP one when a forked worker does.)

Grids with a fixed step are here; those whose step moves with the data are in
:mod:`halfulp.kernels.cpu_scaled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from halfulp.kernels.params import (
    BITS, CUT, EMIN, HALF, HI, INVERSE, KEEP, KIND, LEFT, LO, MAGIC, MANT, ODD, POINTS, RIGHT, SHIFT,
    T_END, T_SUB, T_ZERO, TOP, TWO31, UNIT, UP,
)  # fmt: skip
from halfulp.kernels.reference import DEADZONE, LOG2_POLYNOMIAL, NEAREST, TILE
from halfulp.kernels.simd import (
    bits_of, exact_up, fill_words, float_like, greater, inline, kernel, lesser, narrow, round_bits, shl, shr,
    tally, widen,
)  # fmt: skip

P0, P1, P2, P3, P4, P5, P6, P7 = (np.float32(c) for c in LOG2_POLYNOMIAL)
POINT = np.float32(65536.0)
ONE = np.int32(1)
TO_BF16, TO_FP16 = 1, 2
WORDS = TILE + 64


# ---- one tile: moving values ------------------------------------------------------------------


@kernel
def load(source: Any, tile: Any) -> None:
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
def stochastic(x: Any, out: Any, words: Any, f: Any, k: Any, exponent: Any, sign: Any) -> int:
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
    x: Any, out: Any, f: Any, k: Any, exponent: Any, sign: Any, k0: Any, k1: Any, first: Any
) -> None:
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
            up = exact_up(np.float64(s - n), k0, k1, first + i)
            r = (n + f[UNIT] if up else n) * float_like(v, e - k[MANT])
            out[i] = float_like(v, bits_of(r) | (u & sign))
        else:
            b = min(u & ~sign, k[TOP])
            up = exact_up(np.float64(b & ~k[KEEP]) * 2.0 ** -np.float64(k[CUT]), k0, k1, first + i)
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
def tree(buffer: Any) -> float:
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
def sum_squares(x: Any, buffer: Any) -> float:
    a, b = x[: TILE // 2], x[TILE // 2 :]
    for i in range(TILE // 2):
        u, v = np.float64(a[i]), np.float64(b[i])
        buffer[i] = u * u + v * v
    return tree(buffer)


@kernel
def sum_abs(x: Any, buffer: Any) -> float:
    a, b = x[: TILE // 2], x[TILE // 2 :]
    for i in range(TILE // 2):
        buffer[i] = abs(np.float64(a[i])) + abs(np.float64(b[i]))
    return tree(buffer)


@kernel
def count_small(size: Any, zero: Any, normal: Any, one: Any) -> Any:
    """How many magnitudes round to zero, and to less than the smallest normal."""
    zeros, smalls = np.int32(0), np.int32(0)
    for i in range(size.size):
        zeros = tally(zeros, size[i] < zero, one)
        smalls = tally(smalls, size[i] < normal, one)
    return zeros, smalls


@kernel
def count_ends(x: Any, lo: Any, hi: Any) -> int:
    count = np.int32(0)
    for i in range(x.size):
        count = tally(count, (x[i] >= hi) | (x[i] <= lo), ONE)
    return count


@kernel
def count_equal(x: Any, y: Any) -> int:
    count = np.int32(0)
    for i in range(x.size):
        count = tally(count, x[i] == y[i], ONE)
    return count


@kernel
def nonfinite(x: Any, exponent: Any) -> int:
    count = np.int32(0)
    for i in range(x.size):
        count = tally(count, (bits_of(x[i]) & exponent) == exponent, ONE)
    return count


@kernel
def survey(w: Any, d: Any, size: Any, sized: Any, turned: Any, exponent: Any, sign: Any) -> Any:
    """|w|, |d| and d seen from w's side of zero; zero proposals, non-finites, extremes."""
    zeros, bad = np.int32(0), np.int32(0)
    least, most, widest = bits_of(abs(w[0])), bits_of(abs(w[0])), bits_of(abs(d[0]))
    for i in range(w.size):
        x, y = w[i], d[i]
        a, b = abs(x), abs(y)
        size[i] = a
        sized[i] = b
        turned[i] = float_like(y, bits_of(y) ^ (bits_of(x) & sign))
        zeros = tally(zeros, y == 0, ONE)
        bad = tally(bad, (bits_of(a) >= exponent) | (bits_of(b) >= exponent), ONE)
        least = lesser(least, bits_of(a))
        most = greater(most, bits_of(a))
        widest = greater(widest, bits_of(b))
    return zeros, bad, float_like(w[0], least), float_like(w[0], most), float_like(w[0], widest)


@kernel
def log2_points(x: Any, out: Any) -> None:
    """log2 of positive values in fixed point: reference.log2_ratio's digits."""
    for i in range(x.size):
        v = np.float64(x[i])
        u = bits_of(v)
        t = np.float32(float_like(v, (u & 0x000FFFFFFFFFFFFF) | (1023 << 52)) - 1.0)
        p = ((((((P7 * t + P6) * t + P5) * t + P4) * t + P3) * t + P2) * t + P1) * t + P0
        out[i] = np.int32(((u >> 52) - 1023) * 65536) + np.int32(np.rint(p * t * POINT))


@kernel
def phase_sum(w: Any, d: Any, ratio: Any, points: Any) -> int:
    total, one, none = np.int32(0), np.int32(65536), np.int32(0)  # 768 * 65536 < 2**31
    for i in range(w.size):
        v = lesser(greater(np.int32(ratio[i] - points), none), one)
        v = none if w[i] == 0 else v
        total = np.int32(total + (one if d[i] == 0 else v))
    return total


@kernel
def fused_magic(
    size: Any, sized: Any, turned: Any, emin: Any, shift: Any, up: Any, exponent: Any, one: Any
) -> Any:
    """Frozen by code and by symmetric spacing, where nothing comes near the largest code."""
    frozen, symmetric = np.int32(0), np.int32(0)
    for i in range(size.size):
        a = size[i]
        e = max(bits_of(a) & exponent, emin)
        c = float_like(a, e + shift)
        q = (a + c) - c
        z = q + turned[i]
        c = float_like(a, max(bits_of(z) & exponent, emin) + shift)
        frozen = tally(frozen, (z + c) - c == q, one)
        symmetric = tally(symmetric, sized[i] * up < float_like(a, e), one)
    return frozen, symmetric


@kernel
def fused_bits(
    size: Any, sized: Any, turned: Any, emin: Any, up: Any, exponent: Any, half: Any, cut: Any, odd: Any,
    keep: Any, one: Any,
) -> Any:  # fmt: skip
    frozen, symmetric = np.int32(0), np.int32(0)
    for i in range(size.size):
        a = size[i]
        u = bits_of(a)
        q = float_like(a, round_bits(u, half, cut, odd, keep))
        r = float_like(a, round_bits(bits_of(q + turned[i]), half, cut, odd, keep))
        frozen = tally(frozen, r == q, one)
        symmetric = tally(symmetric, sized[i] * up < float_like(a, max(u & exponent, emin)), one)
    return frozen, symmetric


@kernel
def count_symmetric(size: Any, sized: Any, up: Any, emin: Any, exponent: Any) -> int:
    count = np.int32(0)
    for i in range(size.size):
        e = float_like(size[i], max(bits_of(size[i]) & exponent, emin))
        count = tally(count, sized[i] * up < e, ONE)
    return count


@kernel
def clean(x: Any, y: Any, exponent: Any) -> None:
    """Zero both where either is not finite."""
    for i in range(x.size):
        if (bits_of(x[i]) & exponent) == exponent or (bits_of(y[i]) & exponent) == exponent:
            x[i] = 0
            y[i] = 0


# ---- ranges of tiles ----------------------------------------------------------------------------------


@kernel
def round_tiles(
    x: Any, out: Any, mode: Any, f: Any, k: Any, masks: Any, k0: Any, k1: Any, offset: Any, t0: Any, t1: Any
) -> None:
    exponent, sign = masks[0], masks[1]
    a_, r_ = np.empty(TILE, f.dtype), np.empty(TILE, f.dtype)
    words = np.empty(WORDS, np.uint32)
    for t in range(t0, t1):
        first = t * TILE
        source = x[first : min(first + TILE, x.size)]
        n = source.size
        a, r = a_[:n], r_[:n]
        load(source, a)
        if mode == NEAREST:
            nearest(a, r, f, k, exponent, sign)
        else:
            stochastic_exact(a, r, words, f, k, exponent, sign, k0, k1, offset + first)
        store(r, out[first : first + n])


@kernel
def round_direct(x: Any, out: Any, f: Any, k: Any, masks: Any, t0: Any, t1: Any) -> None:
    """Nearest rounding without buffers, where the container is the working type."""
    a, b = t0 * TILE, min(t1 * TILE, x.size)
    nearest(x[a:b], out[a:b], f, k, masks[0], masks[1])


@kernel
def encode_tiles(
    x: Any, out: Any, f: Any, k: Any, masks: Any, bits: Any, integer: Any, t0: Any, t1: Any
) -> int:
    """Codes of the nearest values; returns how many values were not finite (their code is 0)."""
    exponent, sign = masks[0], masks[1]
    a_, r_ = np.empty(TILE, f.dtype), np.empty(TILE, f.dtype)
    emin, cut, top = k[EMIN], k[CUT], np.int32(1 << (bits - 1))
    one = exponent & -exponent  # the unit of the exponent field
    unit = float_like(f[0], k[INVERSE] - emin)
    bad = 0
    for t in range(t0, t1):
        first = t * TILE
        last = min(first + TILE, x.size)
        v, r, o = tile_of(x[first:last], a_), r_[: last - first], out[first:last]
        bad += nonfinite(v, exponent)
        nearest(v, r, f, k, exponent, sign)
        if integer:
            for i in range(r.size):
                o[i] = np.int32(r[i] * unit) & (2 * top - 1)
        elif k[KIND] == MAGIC:
            for i in range(r.size):
                a = bits_of(abs(r[i]))
                normal = np.int32(shr(bits_of(float_like(r[i], a - emin + one)), cut))
                small = np.int32(abs(r[i]) * unit)
                o[i] = (normal if a >= emin else small) | (top if bits_of(r[i]) < 0 else 0)
        else:
            for i in range(r.size):
                code = np.int32(shr(bits_of(abs(r[i])), cut))
                o[i] = code | (top if bits_of(r[i]) < 0 else 0)
    return bad


@kernel
def decode_tiles(codes: Any, values: Any, out: Any, t0: Any, t1: Any) -> int:
    """Values by table; returns how many codes are outside the grid (NaN in the table)."""
    bad = 0
    for t in range(t0, t1):
        first = t * TILE
        source = codes[first : min(first + TILE, codes.size)]
        o = out[first : first + source.size]
        for i in range(source.size):
            v = values[source[i]]
            o[i] = v
            bad += v != v
    return bad


@kernel
def audit_tiles(
    w: Any, d: Any, after: Any, f: Any, k: Any, masks: Any, to: Any, phase: Any,
    one: Any, counts: Any, shared: Any, sums: Any, phases: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Every static grid on every tile. ``after``: d holds the weights after the step; ``one``: 1."""
    exponent, sign = masks[0], masks[1]
    w_, d_ = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    size_, sized_, turned_ = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    q_, z_, r_ = np.empty(TILE, f.dtype), np.empty(TILE, f.dtype), np.empty(TILE, f.dtype)
    log_w, log_d = np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    buffer = np.empty(TILE // 2, np.float64)
    for t in range(t0, t1):
        first = t * TILE
        last = min(first + TILE, w.size)
        n = last - first
        if n < TILE:
            size_[:] = 0
            sized_[:] = 0
        size, sized, turned = size_[:n], sized_[:n], turned_[:n]
        q, z, r = q_[:n], z_[:n], r_[:n]
        x = tile_of(w[first:last], w_)
        if after:
            y = d_[:n]
            difference(d[first:last], x, y)
        else:
            y = tile_of(d[first:last], d_)
        zeros, bad, least, most, widest = survey(x, y, size, sized, turned, exponent, sign)
        if bad > 0:
            w_[:n] = x
            d_[:n] = y
            x, y = w_[:n], d_[:n]
            clean(x, y, exponent)
            zeros, _, least, most, widest = survey(x, y, size, sized, turned, exponent, sign)
        shared[t, 0] = zeros - bad
        shared[t, 1] = bad
        sums[t, 0] = sum_squares(size_, buffer)
        sums[t, 1] = sum_squares(sized_, buffer)
        if phase:
            log2_points(size, log_w[:n])
            log2_points(sized, log_d[:n])
            for i in range(n):
                log_w[i] -= log_d[i]
        for g in range(f.shape[0]):
            inside = to == 0 and most + most + widest < f[g, HI] and f[g, LO] == -f[g, HI]
            if inside:
                if k[g, KIND] == MAGIC:
                    frozen, symmetric = fused_magic(
                        size, sized, turned, k[g, EMIN], k[g, SHIFT], f[g, UP], exponent, one
                    )
                else:
                    frozen, symmetric = fused_bits(
                        size, sized, turned, k[g, EMIN], f[g, UP], exponent, k[g, HALF], k[g, CUT], k[g, ODD],
                        k[g, KEEP], one,
                    )  # fmt: skip
                ends = 0
            else:
                nearest(x, q, f[g], k[g], exponent, sign)
                add_in_container(q, y, z, to)
                ends = count_ends(q, f[g, LO], f[g, HI])
                nearest(z, r, f[g], k[g], exponent, sign)
                frozen = count_equal(r, q)
                symmetric = count_symmetric(size, sized, f[g, UP], k[g, EMIN], exponent)
            zero, small = np.int32(0), np.int32(0)
            if least < f[g, T_SUB]:
                zero, small = count_small(size, f[g, T_ZERO], f[g, T_SUB], one)
            counts[t, g, 0] = frozen - bad
            counts[t, g, 1] = symmetric - bad
            counts[t, g, 2] = ends
            counts[t, g, 3] = small - zero
            counts[t, g, 4] = zero - bad
            if phase:
                phases[t, g] = phase_sum(size, sized, log_w[:n], k[g, POINTS]) - bad * 65536


@kernel
def mark_moved(q: Any, r: Any, flags: Any, moved: Any) -> int:
    """Set the bits of coordinates that moved; returns how many never have. ``flags`` is scratch."""
    n = q.size
    for i in range(n):
        flags[i] = np.uint8(q[i] != r[i])
    flags[n:TILE] = 0
    groups = flags[:TILE].view(np.uint64)
    packed = flags[TILE : TILE + TILE // 8]
    for j in range(TILE // 8):  # eight bytes of 0 or 1 to eight bits, lowest first
        packed[j] = np.uint8((groups[j] * np.uint64(0x0102040810204080)) >> np.uint64(56))
    for j in range(moved.size):
        packed[j] = np.uint8(packed[j] | moved[j])
        moved[j] = packed[j]
    still = n
    bits = packed.view(np.uint64)
    for j in range(bits.size):
        v = bits[j]
        v = v - ((v >> np.uint64(1)) & np.uint64(0x5555555555555555))
        v = (v & np.uint64(0x3333333333333333)) + ((v >> np.uint64(2)) & np.uint64(0x3333333333333333))
        v = (v + (v >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
        still -= np.int64((v * np.uint64(0x0101010101010101)) >> np.uint64(56))
    return still


@kernel
def count_write(q: Any, z: Any, r: Any, lo: Any, hi: Any, one: Any) -> Any:
    same, still, ends = np.int32(0), np.int32(0), np.int32(0)
    for i in range(q.size):
        same = tally(same, r[i] == q[i], one)
        still = tally(still, z[i] == q[i], one)
        ends = tally(ends, (r[i] >= hi) | (r[i] <= lo), one)
    return same, still, ends


@kernel
def sum_changes(q: Any, z: Any, buffer: Any) -> float:
    """Sum of |z - q| over a padded tile."""
    for i in range(TILE // 2):
        a = abs(np.float64(z[i]) - np.float64(q[i]))
        b = abs(np.float64(z[i + TILE // 2]) - np.float64(q[i + TILE // 2]))
        buffer[i] = a + b
    return tree(buffer)


@kernel
def finish_write(
    q_: Any, z_: Any, r_: Any, n: Any, bad: Any, proposed: Any, lo: Any, hi: Any, exponent: Any, moved: Any,
    want_sums: Any, flags: Any, buffer: Any, one: Any, counts: Any, sums: Any, t: Any,
) -> None:  # fmt: skip
    """Counts and sums of one written tile; z and r equal q wherever the proposal was not finite."""
    q, z, r = q_[:n], z_[:n], r_[:n]
    same, still, ends = count_write(q, z, r, lo, hi, one)
    if bad > 0:
        for i in range(n):
            if (bits_of(widen(proposed[i])) & exponent) == exponent and (r[i] >= hi or r[i] <= lo):
                ends -= 1
    counts[t, 0] = same - bad
    counts[t, 1] = still - bad
    counts[t, 2] = ends
    counts[t, 3] = bad
    counts[t, 4] = 0
    if moved.size:
        start = t * (TILE // 8)
        counts[t, 4] = mark_moved(q, r, flags, moved[start : start + (n + 7) // 8])
    if want_sums:
        if n < TILE:
            q_[n:] = 0
            z_[n:] = 0
        sums[t, 1] = sum_changes(q_, z_, buffer)
        if bad > 0:
            for i in range(n):
                if (bits_of(widen(proposed[i])) & exponent) == exponent:
                    q_[i] = 0
        sums[t, 0] = sum_abs(q_, buffer)


@kernel
def load_write(stored: Any, proposed: Any, q: Any, z: Any, exponent: Any) -> int:
    """Stored and proposed values of one tile; a proposal that is not finite becomes the stored one."""
    load(stored, q)
    load(proposed, z)
    bad = nonfinite(z, exponent)
    if bad > 0:
        for i in range(z.size):
            if (bits_of(z[i]) & exponent) == exponent:
                z[i] = q[i]
    return bad


@kernel
def add_carry(z: Any, carry: Any, exponent: Any) -> None:
    """z + carry, wherever that is finite."""
    for i in range(z.size):
        whole = z[i] + carry[i]
        fine = (bits_of(whole) & exponent) != exponent
        z[i] = whole if fine else z[i]


@kernel
def take_carry(z: Any, r: Any, lo: Any, hi: Any, proposed: Any, bad: Any, exponent: Any, carry: Any) -> None:
    """What was not written, z - r: exact, for r is a neighbour of z. Nothing is carried beyond the ends
    of the range (it could never be written), and nothing changes where the proposal was not finite."""
    for i in range(z.size):
        beyond = ((r[i] >= hi) & (z[i] > r[i])) | ((r[i] <= lo) & (z[i] < r[i]))
        rest = z[i] - r[i]
        rest = z[i] - z[i] if beyond else rest
        if bad == 0 or (bits_of(widen(proposed[i])) & exponent) != exponent:
            carry[i] = rest


@kernel
def keep_stored(proposed: Any, q: Any, r: Any, exponent: Any) -> None:
    """Put q back, whatever it was, where the proposal was not finite."""
    for i in range(q.size):
        if (bits_of(widen(proposed[i])) & exponent) == exponent:
            r[i] = q[i]


@kernel
def prefer_nearest(q: Any, z: Any, near: Any, r: Any) -> None:
    """Dead-zone write-back: the stochastic r only where nearest throws a proposal away."""
    for i in range(q.size):
        dead = (near[i] == q[i]) & (z[i] != q[i])
        r[i] = r[i] if dead else near[i]


@kernel
def write_tiles(
    stored: Any, proposed: Any, out: Any, mode: Any, f: Any, k: Any, masks: Any, k0: Any, k1: Any,
    offset: Any, moved: Any, want_sums: Any, carry: Any, carry_in: Any, one: Any, counts: Any, sums: Any,
    t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Write-back of every tile; ``out`` may be ``proposed``. A carry of any size takes what is not
    written and, with ``carry_in``, is added to the proposal first."""
    exponent, sign = masks[0], masks[1]
    q_, z_, r_ = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype), np.empty(TILE, f.dtype)
    near_, buffer = np.empty(TILE, f.dtype), np.empty(TILE // 2, np.float64)
    words, flags = np.empty(WORDS, np.uint32), np.empty(TILE + TILE // 8, np.uint8)
    for t in range(t0, t1):
        first = t * TILE
        last = min(first + TILE, stored.size)
        n = last - first
        q, z, r = q_[:n], z_[:n], r_[:n]
        bad = load_write(stored[first:last], proposed[first:last], q, z, exponent)
        if carry_in:
            add_carry(z, carry[first:last], exponent)
            if bad > 0:
                keep_stored(proposed[first:last], q, z, exponent)
        if mode == NEAREST:
            nearest(z, r, f, k, exponent, sign)
        else:
            stochastic_exact(z, r, words, f, k, exponent, sign, k0, k1, offset + first)
            if mode == DEADZONE:
                nearest(z, near_[:n], f, k, exponent, sign)
                prefer_nearest(q, z, near_[:n], r)
        if bad > 0:
            keep_stored(proposed[first:last], q, r, exponent)
        if carry.size:
            take_carry(z, r, f[LO], f[HI], proposed[first:last], bad, exponent, carry[first:last])
        finish_write(
            q_, z_, r_, n, bad, proposed[first:last], f[LO], f[HI], exponent, moved, want_sums, flags, buffer,
            one, counts, sums, t,
        )  # fmt: skip
        store(r, out[first:last])


@kernel
def score_sums(b_: Any, w_: Any, g_: Any, u_: Any, product: Any, buffer: Any, out: Any) -> None:
    """The eight sums of one padded tile, from the freeze flags and the three vectors."""
    flagged = 0
    for i in range(TILE):
        flagged += b_[i]
    out[0] = flagged
    out[3] = sum_abs(g_, buffer)
    out[4] = sum_abs(u_, buffer)
    out[5] = sum_abs(w_, buffer)
    for i in range(TILE):
        product[i] = np.float64(g_[i]) * np.float64(w_[i])
    out[6] = sum_abs(product, buffer)
    for i in range(TILE):
        product[i] = np.float64(g_[i]) * np.float64(u_[i])
    out[7] = sum_abs(product, buffer)
    for i in range(TILE):
        product[i] = -product[i] if product[i] < 0 else 0.0
    out[1] = sum_abs(product, buffer)
    for i in range(TILE):
        product[i] = product[i] if b_[i] else 0.0
    out[2] = sum_abs(product, buffer)


@kernel
def clean_three(w: Any, g: Any, u: Any, keep: Any, exponent: Any) -> None:
    for i in range(w.size):
        ok = (
            (bits_of(w[i]) & exponent) != exponent
            and (bits_of(g[i]) & exponent) != exponent
            and (bits_of(u[i]) & exponent) != exponent
        )
        keep[i] = ok
        if not ok:
            w[i] = 0
            g[i] = 0
            u[i] = 0


@kernel
def score_tiles(
    w: Any, g: Any, u: Any, after: Any, f: Any, k: Any, masks: Any, to: Any, out: Any, t0: Any, t1: Any
) -> None:
    exponent, sign = masks[0], masks[1]
    w_, g_, u_ = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    q_, z_, r_ = np.empty(TILE, f.dtype), np.empty(TILE, f.dtype), np.empty(TILE, f.dtype)
    b_ = np.zeros(TILE, np.uint8)
    keep_ = np.ones(TILE, np.uint8)
    product, buffer = np.empty(TILE, np.float64), np.empty(TILE // 2, np.float64)
    for t in range(t0, t1):
        first = t * TILE
        last = min(first + TILE, w.size)
        n = last - first
        if n < TILE:
            w_[:] = 0
            g_[:] = 0
            u_[:] = 0
            b_[:] = 0
        x, y, v, q, z, b, keep = w_[:n], g_[:n], u_[:n], q_[:n], z_[:n], b_[:n], keep_[:n]
        load(w[first:last], x)
        load(g[first:last], y)
        if after:
            difference(u[first:last], x, v)
        else:
            load(u[first:last], v)
        clean_three(x, y, v, keep, exponent)
        nearest(x, q, f, k, exponent, sign)
        add_in_container(q, v, z, to)
        r = r_[:n]
        nearest(z, r, f, k, exponent, sign)
        for i in range(n):
            b[i] = np.uint8(r[i] == q[i]) & keep[i]
        score_sums(b_, w_, g_, u_, product, buffer, out[t])
