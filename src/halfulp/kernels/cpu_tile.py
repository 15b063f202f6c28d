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
    LANES,
    bits_of,
    differing,
    exact_up,
    fill_words,
    float_from,
    float_like,
    greater,
    inline,
    kernel,
    lesser,
    narrow,
    ones,
    round_bits,
    shl,
    shr,
    span,
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
def padded(source: Any, buffer: Any) -> Any:
    """A whole tile: the stretch itself if it is one and of the working type, else a copy filled up with
    zeros in the buffer."""
    tile = tile_of(source, buffer)
    if source.size == TILE:
        return tile
    buffer[: source.size] = tile
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


def log2_points(x: Any, out: Any) -> None:
    """log2 of positive values in fixed point: reference.log2_ratio's digits. Of zeros: anything."""
    raise TypeError("for compiled code only")


@overload(log2_points, jit_options={"nogil": True, "error_model": "numpy", "boundscheck": False})
def _log2_points(x: Any, out: Any) -> Any:
    """In the integers of the values' own width: a float32 has all its digits there."""
    single = x.dtype.bitwidth == 32
    whole, integer = (np.float32, np.int32) if single else (np.float64, np.int64)
    cut, bias, lift = (23, 127, 24) if single else (52, 1023, 64)
    normal, scale = whole(np.finfo(whole).smallest_normal), whole(2.0**lift)
    mantissa, exponent = integer((1 << cut) - 1), integer(bias << cut)
    shift, one, plain, lifted = integer(cut), whole(1.0), np.int32(bias), np.int32(bias + lift)

    def points(x: Any, out: Any) -> None:
        for i in range(x.size):
            v = x[i]
            tiny = v < normal
            u = bits_of(v * scale if tiny else v)
            t = np.float32(float_like(v, (u & mantissa) | exponent) - one)
            p = ((((((P7 * t + P6) * t + P5) * t + P4) * t + P3) * t + P2) * t + P1) * t + P0
            e = np.int32(np.int32(shr(u, shift)) - (lifted if tiny else plain))
            out[i] = np.int32(e * 65536) + np.int32(np.rint(p * t * POINT))

    return points


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
def kept_magic(
    size: Any, sized: Any, turned: Any, q: Any, z: Any, r: Any, emin: Any, shift: Any, up: Any, exponent: Any,
    one: Any,
) -> Any:  # fmt: skip
    """As fused_magic, keeping Q(|w|), the proposal from there and what it is rounded to."""
    symmetric = np.int32(0)
    for i in range(size.size):
        a = size[i]
        e = max(bits_of(a) & exponent, emin)
        c = float_like(a, e + shift)
        q[i] = (a + c) - c
        z[i] = q[i] + turned[i]
        c = float_like(a, max(bits_of(z[i]) & exponent, emin) + shift)
        r[i] = (z[i] + c) - c
        symmetric = tally(symmetric, sized[i] * up < float_like(a, e), one)
    return symmetric


@kernel
def kept_bits(
    size: Any, sized: Any, turned: Any, q: Any, z: Any, r: Any, emin: Any, up: Any, exponent: Any, half: Any,
    cut: Any, odd: Any, keep: Any, one: Any,
) -> Any:  # fmt: skip
    symmetric = np.int32(0)
    for i in range(size.size):
        a = size[i]
        u = bits_of(a)
        q[i] = float_like(a, round_bits(u, half, cut, odd, keep))
        z[i] = q[i] + turned[i]
        r[i] = float_like(a, round_bits(bits_of(z[i]), half, cut, odd, keep))
        symmetric = tally(symmetric, sized[i] * up < float_like(a, max(u & exponent, emin)), one)
    return symmetric


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
    share = one / float_from(one, gap)
    for i in range(q.size):
        v = z[i]
        a = lesser(bits_of(abs(v)), top)
        low, high = float_like(v, a & keep), float_like(v, (a & keep) + gap)
        part = float_from(v, bits_of(float_like(v, a & ~keep))) * share  # patterns are evenly spaced
        at = -q[i] if v < 0 else q[i]
        here = part if at == high else one - one
        stay[i] = stay[i] * (one - part if at == low else here)


# ---- one tile: write-back ---------------------------------------------------------------------


@kernel
def changes(q: Any, r: Any, n: Any, bits: Any) -> Any:
    """A bit for each of the n values that differ, in whole tiles, lowest first; returns how many."""
    count = np.int32(0)
    for g in range(TILE // LANES):
        bits[g] = differing(q, r, g * LANES)
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
    still = n - changes(q, z, n, bits)
    same = n - changes(q, r, n, bits)
    ends = count_ends(r[:n], lo, hi)
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
        counts[t, 4] = n - merge(bits, span(moved, start, start + (n + 7) // 8))
    if want_sums and t % want_sums == 0:
        sums[t, 1] = sum_changes(q, z, buffer)
        sums[t, 0] = sum_abs(q, buffer) if bad == 0 else sum_proposed(q, proposed, exponent, buffer)


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
