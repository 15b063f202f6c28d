"""One tile under audit: what each grid would do to a step, and what scores sum up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from halfulp.kernels.cpu_tile import ONE, sum_abs
from halfulp.kernels.reference import LOG2_POLYNOMIAL, TILE
from halfulp.kernels.simd import (
    bits_of,
    float_from,
    float_like,
    greater,
    kernel,
    lesser,
    round_bits,
    shl,
    shr,
    tally,
)  # fmt: skip

P0, P1, P2, P3, P4, P5, P6, P7 = (np.float32(c) for c in LOG2_POLYNOMIAL)
POINT = np.float32(65536.0)


@kernel
def count_small(size: Any, zero: Any, normal: Any, one: Any) -> Any:
    """How many magnitudes round to zero, and to less than the smallest normal."""
    zeros, smalls = np.int32(0), np.int32(0)
    for i in range(size.size):
        zeros = tally(zeros, size[i] < zero, one)
        smalls = tally(smalls, size[i] < normal, one)
    return zeros, smalls


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
    share = one / float_from(one, np.int64(gap) + (gap == 0))  # a grid may cut nothing
    for i in range(q.size):
        v = z[i]
        a = lesser(bits_of(abs(v)), top)
        low, high = float_like(v, a & keep), float_like(v, (a & keep) + gap)
        part = float_from(v, bits_of(float_like(v, a & ~keep))) * share  # patterns are evenly spaced
        at = -q[i] if v < 0 else q[i]
        here = part if at == high else one - one
        stay[i] = stay[i] * (one - part if at == low else here)


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
