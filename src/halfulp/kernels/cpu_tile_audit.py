"""One tile under audit: what each grid would do to a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels.cpu_tile import ONE, changes
from halfulp.kernels.cpu_tile_arrival import LEFT, arrival, arrived_of
from halfulp.kernels.params import (
    CUT,
    EMIN,
    HALF,
    KEEP,
    KIND,
    MAGIC,
    ODD,
    POINTS,
    SHIFT,
    T_SUB,
    T_ZERO,
    UP,
)  # fmt: skip
from halfulp.kernels.reference import LOG2_POLYNOMIAL, TILE
from halfulp.kernels.simd import (
    JIT,
    bits_of,
    float_from,
    float_like,
    greater,
    inline,
    kernel,
    lesser,
    ones,
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
def fused_bits(
    size: Any, sized: Any, turned: Any, emin: Any, up: Any, exponent: Any, half: Any, cut: Any, odd: Any,
    keep: Any, one: Any,
) -> Any:  # fmt: skip
    """Frozen by code and by symmetric spacing, where nothing comes near the largest code."""
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


class Numbers(NamedTuple):
    """What the audit of lanes needs to know of a grid and its working type: see params."""

    magic: Any
    emin: Any
    shift: Any
    up: Any
    half: Any
    cut: Any
    odd: Any
    keep: Any
    points: Any
    zero: Any
    normal: Any
    exponent: Any


@inline
def _greater(a: Any, least: Any) -> Any:
    return lanes.select(a > least, a, least)


@kernel
def _audit_lanes(
    size: Any, sized: Any, turned: Any, ratio: Any, phase: Any, tiny: Any, scale: Any, g: Any, bits: Any,
    left: Any,
) -> Any:  # fmt: skip
    changed, symmetric, zeros, smalls = 0, 0, 0, 0
    total, none = lanes.splat(lanes.load(ratio, 0), 0), lanes.splat(lanes.load(size, 0), 0.0)
    for c in range(0, LEFT, lanes.COUNT):  # the order of cpu_tile_arrival, for its sums
        dot1 = sq1 = none
        for k1 in range(c, c + 2 * LEFT, LEFT):
            dot2 = sq2 = none
            for k2 in range(k1, k1 + 4 * LEFT, 2 * LEFT):
                dot4 = sq4 = none
                for k4 in range(k2, k2 + 8 * LEFT, 4 * LEFT):
                    dot8 = sq8 = none
                    for j in range(k4, k4 + 16 * LEFT, 8 * LEFT):
                        a, b, turn = lanes.load(size, j), lanes.load(sized, j), lanes.load(turned, j)
                        u = lanes.bits_of(a)
                        e = _greater(u & g.exponent, g.emin)
                        if g.magic:
                            m = lanes.floats_of(e + g.shift)
                            q = (a + m) - m
                            z = q + turn
                            m = lanes.floats_of(_greater(lanes.bits_of(z) & g.exponent, g.emin) + g.shift)
                            r = (z + m) - m
                        else:
                            q = lanes.floats_of((u + g.half + ((u >> g.cut) & g.odd)) & g.keep)
                            u = lanes.bits_of(q + turn)
                            r = lanes.floats_of((u + g.half + ((u >> g.cut) & g.odd)) & g.keep)
                        differs = lanes.mask(r != q)
                        bits[j >> 4] = differs
                        changed += ones(differs)
                        change = r - q
                        shifted = change * scale
                        dot8 = dot8 + shifted * turn
                        sq8 = sq8 + shifted * change
                        symmetric += ones(lanes.mask(b * g.up < lanes.floats_of(e)))
                        if tiny:
                            zeros += ones(lanes.mask(a < g.zero))
                            smalls += ones(lanes.mask(a < g.normal))
                        if phase:
                            v = _greater(lanes.load(ratio, j) - g.points, 0)
                            v = lanes.select(v < 65536, v, 65536)
                            v = lanes.select(a == 0.0, lanes.splat(v, 0), v)
                            total = total + lanes.select(b == 0.0, lanes.splat(v, 65536), v)
                    dot4, sq4 = dot4 + dot8, sq4 + sq8
                dot2, sq2 = dot2 + dot4, sq2 + sq4
            dot1, sq1 = dot1 + dot2, sq1 + sq2
        lanes.store(left, c, dot1)
        lanes.store(left, LEFT + c, sq1)
    return changed, symmetric, zeros, smalls, total


def audit_inside(
    size: Any, sized: Any, turned: Any, ratio: Any, n: Any, phase: Any, tiny: Any, scale: Any, f: Any, k: Any,
    exponent: Any, q: Any, z: Any, r: Any, bits: Any, sums: Any, left: Any, buffer: Any, one: Any,
) -> Any:  # fmt: skip
    """One grid on a tile, filled up with zeros after n, where nothing comes near its largest code: how many
    of the n change (and which, as bits), how many are frozen by symmetric spacing, how many weights round to
    zero and to less than the smallest normal (counted if one is ``tiny``), the phase sum, and what arrives of
    the proposals: two sums."""
    raise TypeError("for compiled code only")


@overload(audit_inside, jit_options=JIT)
def _audit_inside(
    size: Any, sized: Any, turned: Any, ratio: Any, n: Any, phase: Any, tiny: Any, scale: Any, f: Any, k: Any,
    exponent: Any, q: Any, z: Any, r: Any, bits: Any, sums: Any, left: Any, buffer: Any, one: Any,
) -> Any:  # fmt: skip
    if size.dtype == types.float32:

        def in_lanes(
            size: Any, sized: Any, turned: Any, ratio: Any, n: Any, phase: Any, tiny: Any, scale: Any, f: Any,
            k: Any, exponent: Any, q: Any, z: Any, r: Any, bits: Any, sums: Any, left: Any, buffer: Any,
            one: Any,
        ) -> Any:  # fmt: skip
            g = Numbers(
                k[KIND] == MAGIC, k[EMIN], k[SHIFT], f[UP], k[HALF], k[CUT], k[ODD], k[KEEP], k[POINTS],
                f[T_ZERO], f[T_SUB], exponent,
            )  # fmt: skip
            changed, symmetric, zeros, smalls, total = _audit_lanes(
                size, sized, turned, ratio, phase, tiny, scale, g, bits, left
            )
            dot, square = arrived_of(left, scale, buffer)
            lanes.store(sums, 0, total)
            whole = np.int64(0)
            for i in range(lanes.COUNT):
                whole += sums[i]
            rest = TILE - n  # zeros: they do not change, and are frozen by the other measures
            if tiny:
                zeros, smalls = zeros - rest, smalls - rest
            return changed, symmetric - rest, zeros, smalls, whole - rest * 65536, dot, square

        return in_lanes

    def in_passes(
        size: Any, sized: Any, turned: Any, ratio: Any, n: Any, phase: Any, tiny: Any, scale: Any, f: Any,
        k: Any, exponent: Any, q: Any, z: Any, r: Any, bits: Any, sums: Any, left: Any, buffer: Any, one: Any,
    ) -> Any:  # fmt: skip
        a, b, c = size[:n], sized[:n], turned[:n]
        symmetric = kept(a, b, c, q[:n], z[:n], r[:n], f, k, exponent, one)
        total = phase_sum(a, b, ratio[:n], k[POINTS]) if phase else 0
        zeros, smalls = count_small(a, f[T_ZERO], f[T_SUB], one) if tiny else (np.int32(0), np.int32(0))
        q[n:] = 0
        r[n:] = 0
        dot, square = arrival(q, r, turned, scale, left, buffer)
        return changes(q, r, n, bits), symmetric, zeros, smalls, total, dot, square

    return in_passes


@kernel
def kept(
    size: Any, sized: Any, turned: Any, q: Any, z: Any, r: Any, f: Any, k: Any, exponent: Any, one: Any
) -> Any:
    """Q(|w|), the proposal from there and what it is rounded to, where nothing comes near the largest
    code; and how many are frozen by symmetric spacing."""
    if k[KIND] == MAGIC:
        return kept_magic(size, sized, turned, q, z, r, k[EMIN], k[SHIFT], f[UP], exponent, one)
    return kept_bits(
        size, sized, turned, q, z, r, k[EMIN], f[UP], exponent, k[HALF], k[CUT], k[ODD], k[KEEP], one
    )


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
