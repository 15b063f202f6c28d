"""One tile: the pieces from which the CPU kernels are made.

A tile is 768 coordinates, small enough that its buffers stay in the first-level cache. Every function
here takes slices that start at zero, which is what numba vectorises, and works in the *working type*
(float32, or float64 for float64 containers).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

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
from halfulp.kernels.reference import LOG2_POLYNOMIAL, TILE
from halfulp.kernels.simd import (
    bits_of,
    exact_up,
    fill_words,
    float_like,
    greater,
    inline,
    kernel,
    lesser,
    narrow,
    round_bits,
    shl,
    shr,
    tally,
    widen,
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
def settle(x: Any, out: Any, f: Any, k: Any, exponent: Any, sign: Any, k0: Any, k1: Any, first: Any) -> None:
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
def count_small(size: Any, zero: Any, normal: Any, one: Any) -> Any:
    """How many magnitudes round to zero, and to less than the smallest normal."""
    zeros, smalls = np.int32(0), np.int32(0)
    for i in range(size.size):
        zeros = tally(zeros, size[i] < zero, one)
        smalls = tally(smalls, size[i] < normal, one)
    return zeros, smalls


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
        tiny = v < 2.2250738585072014e-308  # subnormal in float64
        u = bits_of(v * 18446744073709551616.0 if tiny else v)
        t = np.float32(float_like(v, (u & 0x000FFFFFFFFFFFFF) | (1023 << 52)) - 1.0)
        p = ((((((P7 * t + P6) * t + P5) * t + P4) * t + P3) * t + P2) * t + P1) * t + P0
        out[i] = np.int32(((u >> 52) - (1087 if tiny else 1023)) * 65536) + np.int32(np.rint(p * t * POINT))


@kernel
def phase_sum(w: Any, d: Any, ratio: Any, points: Any) -> Any:
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
def count_symmetric(size: Any, sized: Any, up: Any, emin: Any, exponent: Any) -> Any:
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


# ---- one tile: following coordinates over steps ---------------------------------------------------


@kernel
def stay_magic(
    q: Any, z: Any, stay: Any, emin: Any, inverse: Any, lo: Any, hi: Any, one: Any, exponent: Any
) -> None:
    """Multiply every probability of never having moved, under stochastic rounding, by that of staying at q
    when z is written; ``one`` is 1 in the working type."""
    for i in range(q.size):
        v = z[i]
        limit = -lo if v < 0 else hi
        a = abs(v)
        a = limit if a > limit else a
        gaps = float_like(v, inverse - max(bits_of(a) & exponent, emin))  # gaps in a unit
        s = a * gaps
        n = np.floor(s)
        at = (-q[i] if v < 0 else q[i]) * gaps
        here = one - (s - n) if at == n else one - one
        stay[i] = stay[i] * (s - n if at == n + one else here)


@kernel
def stay_bits(q: Any, z: Any, stay: Any, cut: Any, odd: Any, keep: Any, top: Any, one: Any) -> None:
    gap = shl(odd, cut)
    for i in range(q.size):
        v = z[i]
        a = lesser(bits_of(abs(v)), top)
        low = float_like(v, a & keep)
        high = float_like(v, (a & keep) + gap)
        part = (float_like(v, a) - low) / (high - low) if a != a & keep else one - one
        at = -q[i] if v < 0 else q[i]
        here = part if at == high else one - one
        stay[i] = stay[i] * (one - part if at == low else here)


# ---- one tile: write-back ---------------------------------------------------------------------


@kernel
def mark_moved(q: Any, r: Any, flags: Any, moved: Any) -> Any:
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
def sum_changes(q: Any, z: Any, buffer: Any) -> Any:
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
    if want_sums and t % want_sums == 0:
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
def load_write(stored: Any, proposed: Any, q: Any, z: Any, exponent: Any) -> Any:
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


# ---- one tile: scores -------------------------------------------------------------------------


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
