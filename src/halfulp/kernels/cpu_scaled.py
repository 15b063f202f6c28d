"""CPU kernels for grids whose scale is not folded away: moving integers and block formats.

The value is divided by its scale in float64 and rounded there. For float32 and bfloat16
containers the quotient can never be mistaken for a midpoint that it is not; for float64
containers it can, and then midpoint * scale, which is exact, decides (see
:func:`halfulp.kernels.reference._round_scaled`).

Scales come from statistics of *segments* (runs of values that share a scale). Statistics are
gathered over *spans*: the segments themselves, or, when one segment is the whole tensor,
pieces of it that threads can share; maxima then combine exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfulp.kernels.cpu_tile import (
    ONE,
    WORDS,
    add_in_container,
    changes,
    count_equal,
    difference,
    load,
    merge,
    padded,
    store,
    sum_abs,
)  # fmt: skip
from halfulp.kernels.cpu_tile_arrival import LEFT, arrival, binade_of
from halfulp.kernels.cpu_tile_score import clean_three, score_sums
from halfulp.kernels.cpu_tile_write import (
    finish_write,
    keep_stored,
    prefer_nearest,
    whole_proposal,
)  # fmt: skip
from halfulp.kernels.params import EMIN, HI, INVERSE, LO, MANT, SHIFT, T_SUB, T_ZERO, UP
from halfulp.kernels.reference import DEADZONE, NEAREST, TILE
from halfulp.kernels.simd import (
    LANES,
    bits_of,
    exact_up,
    fill_words,
    float_like,
    greater,
    kernel,
    tally,
    widen,
)

EXPONENT = np.int64(0x7FF << 52)
MAGNITUDE, SIGNED, TOTAL = 0, 1, 2  # what a rule wants to know of a segment


@kernel
def span_bounds(s: Any, row: Any, length: Any) -> Any:
    per_row = (row + length - 1) // length
    start = s // per_row * row + s % per_row * length
    return start, min(start + length, (s // per_row + 1) * row)


@kernel
def expand(scales: Any, first: Any, row: Any, length: Any, out: Any) -> None:
    """The scale of every coordinate of a tile."""
    per_row = (row + length - 1) // length
    i = 0
    while i < out.size:
        at = first + i
        column = at % row
        stop = i + min(length - column % length, row - column)
        scale = scales[at // row * per_row + column // length]
        out[i : min(stop, out.size)] = scale
        i = stop


@kernel
def gather(x: Any, exponent: Any, stats: Any, want: Any) -> None:
    """Fold finite values into (largest magnitude, largest value, sum of magnitudes, count); the
    second and third only if wanted, for they do not vectorise."""
    zero, count = bits_of(float_like(x[0], 0)), np.int32(0)
    most = zero
    for i in range(x.size):
        a = bits_of(abs(x[i]))
        fine = a < exponent
        count = tally(count, fine, ONE)
        most = greater(most, a if fine else zero)
    stats[0] = max(stats[0], np.float64(float_like(x[0], most)))
    stats[3] += count
    if want == SIGNED:
        signed = stats[1]
        for i in range(x.size):
            v = np.float64(x[i])
            signed = v if v > signed and v < np.inf else signed
        stats[1] = signed
    elif want == TOTAL:
        total = stats[2]
        for i in range(x.size):
            a = abs(np.float64(x[i]))
            total += a if a < np.inf else 0.0
        stats[2] = total


@kernel
def span_stats(
    x: Any, row: Any, length: Any, want: Any, masks: Any, work: Any, stats: Any, s0: Any, s1: Any
) -> None:
    buffer = np.empty(TILE, work.dtype)
    for s in range(s0, s1):
        start, stop = span_bounds(s, row, length)
        for a in range(start, stop, TILE):
            tile = buffer[: min(TILE, stop - a)]
            load(x[a : a + tile.size], tile)
            gather(tile, masks[0], stats[s], want)


@kernel
def nearest_scaled(x: Any, scale: Any, out: Any, f: Any, k: Any, cast: Any) -> None:
    """Nearest element * scale; ``f`` and ``k`` are the element set in float64, ``cast`` the working type."""
    lo, hi, emin, shift, mant = f[LO], f[HI], k[EMIN], k[SHIFT], k[MANT]
    for i in range(x.size):
        v = np.float64(x[i])
        ratio = v / scale[i]
        a = lo if ratio < lo else ratio
        a = hi if a > hi else a
        e = max(bits_of(a) & EXPONENT, emin)
        c = float_like(a, e + shift)
        r = (a + c) - c
        half = float_like(a, e - mant) * 0.5
        middle = (abs(a - r) == half) & (a == ratio)
        side = v - a * scale[i]
        r = a + half if middle & (side > 0.0) else r
        r = a - half if middle & (side < 0.0) else r
        r = np.copysign(r * scale[i], v)
        cast[0] = r
        out[i] = cast[0] if abs(v) < np.inf else x[i]


@kernel
def stochastic_scaled(
    x: Any, scale: Any, out: Any, words: Any, f: Any, k: Any, cast: Any, k0: Any, k1: Any, first: Any
) -> None:
    """Stochastic element * scale; the first 31 digits of U decide, the rare rest one by one.
    ``out`` must not be ``x``."""
    fill_words(words, k0, k1, first, x.size)
    words = words[first & 31 :]
    low, hi, emin, inverse, mant = -f[LO], f[HI], k[EMIN], k[INVERSE], k[MANT]
    ties = np.int32(0)
    for i in range(x.size):
        v = np.float64(x[i])
        limit = low if v < 0 else hi
        a = abs(v / scale[i])
        a = limit if a > limit else a
        e = max(bits_of(a) & EXPONENT, emin)
        s = a * float_like(a, inverse - e)
        n = np.floor(s)
        digits = np.int32((s - n) * 2147483648.0)
        drawn = np.int32(words[i] >> np.uint32(1))
        ties = tally(ties, drawn == digits, ONE)
        r = (n + 1.0 if drawn < digits else n) * float_like(a, e - mant)
        cast[0] = np.copysign(r * scale[i], v)
        out[i] = cast[0] if abs(v) < np.inf else x[i]
    if ties > 0:
        for i in range(x.size):
            v = np.float64(x[i])
            if abs(v) < np.inf:
                a = min(abs(v / scale[i]), low if v < 0 else hi)
                e = max(bits_of(a) & EXPONENT, emin)
                s = a * float_like(a, inverse - e)
                n = np.floor(s)
                up = exact_up(s - n, k0, k1, first + i)
                out[i] = np.copysign((n + 1.0 if up else n) * float_like(a, e - mant) * scale[i], v)


@kernel
def round_tiles_scaled(
    x: Any, out: Any, scales: Any, row: Any, length: Any, mode: Any, f: Any, k: Any, work: Any,
    k0: Any, k1: Any, offset: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    a_, r_, scale_ = np.empty(TILE, work.dtype), np.empty(TILE, work.dtype), np.empty(TILE, np.float64)
    words, cast = np.empty(WORDS, np.uint32), np.empty(1, work.dtype)
    for t in range(t0, t1):
        first = t * TILE
        source = x[first : min(first + TILE, x.size)]
        n = source.size
        a, r, scale = a_[:n], r_[:n], scale_[:n]
        load(source, a)
        expand(scales, first, row, length, scale)
        if mode == NEAREST:
            nearest_scaled(a, scale, r, f, k, cast)
        else:
            stochastic_scaled(a, scale, r, words, f, k, cast, k0, k1, offset + first)
        store(r, out[first : first + n])


@kernel
def load_step(
    w: Any,
    g: Any,
    d: Any,
    after: Any,
    first: Any,
    last: Any,
    x: Any,
    y: Any,
    v: Any,
    keep: Any,
    exponent: Any,
) -> Any:
    """Weights, gradients and proposals of one stretch, zeroed where any of the three is not finite;
    returns how many were. An audit has no gradients and passes the weights again."""
    load(w[first:last], x)
    load(g[first:last], y)
    if after:
        difference(d[first:last], x, v)
    else:
        load(d[first:last], v)
    clean_three(x, y, v, keep, exponent)
    bad = keep.size
    for i in range(keep.size):
        bad -= keep[i]
    return bad


@kernel
def step_stats(
    w: Any, g: Any, d: Any, after: Any, proposed: Any, scales: Any, row: Any, length: Any, span: Any,
    f: Any, k: Any, masks: Any, to: Any, want: Any, work: Any, stats: Any, s0: Any, s1: Any,
) -> None:  # fmt: skip
    """Statistics per span of the weights w, or of what is written next, z = Q(w) + d (``proposed``)."""
    x_, y_, v_ = np.empty(TILE, work.dtype), np.empty(TILE, work.dtype), np.empty(TILE, work.dtype)
    q_, scale_, keep_ = np.empty(TILE, work.dtype), np.empty(TILE, np.float64), np.empty(TILE, np.uint8)
    cast = np.empty(1, work.dtype)
    for s in range(s0, s1):
        start, stop = span_bounds(s, row, span)
        for a in range(start, stop, TILE):
            n = min(TILE, stop - a)
            x, y, v, q, scale = x_[:n], y_[:n], v_[:n], q_[:n], scale_[:n]
            load_step(w, g, d, after, a, a + n, x, y, v, keep_[:n], masks[0])
            if proposed:
                expand(scales, a, row, length, scale)
                nearest_scaled(x, scale, q, f, k, cast)
                add_in_container(q, v, x, to)
            gather(x, masks[0], stats[s], want)


@kernel
def stay_scaled(q: Any, z: Any, scale: Any, stay: Any, f: Any, k: Any, cast: Any) -> None:
    """As cpu_tile.stay_magic, on the grid of the next scales; a q that is not on it cannot stay."""
    for i in range(q.size):
        v = np.float64(z[i]) / scale[i]
        a = min(abs(v), -f[LO] if v < 0 else f[HI])
        gaps = float_like(a, k[INVERSE] - max(bits_of(a) & EXPONENT, k[EMIN]))
        s = a * gaps
        n = np.floor(s)
        at = (-np.float64(q[i]) if v < 0 else np.float64(q[i])) / scale[i] * gaps
        cast[0] = s - n if at == n + 1.0 else (1.0 - (s - n) if at == n else 0.0)
        stay[i] = stay[i] * cast[0]


@kernel
def audit_tiles_scaled(
    w: Any, d: Any, after: Any, scales: Any, next_scales: Any, row: Any, length: Any, f: Any, k: Any,
    masks: Any, to: Any, work: Any, moved: Any, stay: Any, counts: Any, arrived: Any, expected: Any, t0: Any,
    t1: Any,
) -> None:  # fmt: skip
    """One moving grid on every tile: reference.audit's counts, without the shared ones."""
    s_, buffer = np.zeros(TILE, work.dtype), np.empty(TILE // 2)
    bits = np.empty(TILE // LANES, np.uint16)
    x_, y_, v_ = np.empty(TILE, work.dtype), np.empty(TILE, work.dtype), np.empty(TILE, work.dtype)
    q_, scale_, keep_ = np.empty(TILE, work.dtype), np.empty(TILE, np.float64), np.empty(TILE, np.uint8)
    cast, left = np.empty(1, work.dtype), np.empty(2 * LEFT, work.dtype)
    emin, up, lo, hi = k[EMIN], f[UP], f[LO], f[HI]
    normal = float_like(hi, emin) if f[T_SUB] > f[T_ZERO] else 0.0  # integers have no subnormals
    for t in range(t0, t1):
        first = t * TILE
        n = min(TILE, w.size - first)
        x, z, d_, q, scale = x_[:n], y_[:n], v_[:n], q_[:n], scale_[:n]
        bad = load_step(w, w, d, after, first, first + n, x, z, d_, keep_[:n], masks[0])
        expand(scales, first, row, length, scale)
        nearest_scaled(x, scale, q, f, k, cast)
        add_in_container(q, d_, z, to)
        symmetric, ends, zeros, smalls = 0, 0, 0, 0
        for i in range(n):
            a = abs(np.float64(x[i]) / scale[i])
            e = float_like(a, max(bits_of(a) & EXPONENT, emin))
            symmetric += abs(np.float64(d_[i])) * up < e * scale[i]
            element = np.float64(q[i]) / scale[i]
            ends += (element >= hi) | (element <= lo)
            zeros += q[i] == 0
            smalls += (q[i] != 0) & (abs(element) < normal)
        expand(next_scales, first, row, length, scale)
        nearest_scaled(z, scale, x, f, k, cast)
        counts[t, 0] = count_equal(x, q) - bad
        widest = bits_of(abs(d_[0]))
        for i in range(n):
            widest = greater(widest, bits_of(abs(d_[i])))
        if n < TILE:
            q_[n:] = 0
            x_[n:] = 0
            v_[n:] = 0
        binade = binade_of(float_like(d_[0], widest), masks[0])
        arrived[t, 0], arrived[t, 1] = arrival(q_, x_, v_, binade, left, buffer)
        if moved.size > 0:
            start = t * (TILE // 8)
            changes(q_, x_, n, bits)
            counts[t, 5] = n - merge(bits, moved[start : start + (n + 7) // 8])
        if stay.size > 0:
            stay_scaled(q, z, scale, stay[first : first + n], f, k, cast)
            load(stay[first : first + n], s_[:n])
            s_[n:] = 0
            expected[t] = sum_abs(s_, buffer)
        counts[t, 1] = symmetric - bad
        counts[t, 2] = ends
        counts[t, 3] = smalls
        counts[t, 4] = zeros - bad


@kernel
def write_tiles_scaled(
    stored: Any, proposed: Any, out: Any, scales: Any, row: Any, length: Any, mode: Any, f: Any, k: Any,
    masks: Any, work: Any, k0: Any, k1: Any, offset: Any, moved: Any, want_sums: Any, carry: Any,
    carry_in: Any, counts: Any, sums: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    exponent = masks[0]
    q_, z_, r_ = np.zeros(TILE, work.dtype), np.zeros(TILE, work.dtype), np.empty(TILE, work.dtype)
    near_, scale_, words = np.empty(TILE, work.dtype), np.empty(TILE, np.float64), np.empty(WORDS, np.uint32)
    bits, buffer = np.empty(TILE // LANES, np.uint16), np.empty(TILE // 2, np.float64)
    cast, inf = np.empty(1, work.dtype), work.dtype.type(np.inf)
    for t in range(t0, t1):
        first = t * TILE
        last = min(first + TILE, stored.size)
        n = last - first
        source = proposed[first:last]
        q, r, scale = padded(stored[first:last], q_), r_[:n], scale_[:n]
        z, bad = whole_proposal(source, q, carry[first:last], carry_in, z_, exponent)
        expand(scales, first, row, length, scale)
        if mode == NEAREST:
            nearest_scaled(z[:n], scale, r, f, k, cast)
        else:
            stochastic_scaled(z[:n], scale, r, words, f, k, cast, k0, k1, offset + first)
            if mode == DEADZONE:
                nearest_scaled(z[:n], scale, near_[:n], f, k, cast)
                prefer_nearest(q, z, near_, r)
        if bad > 0:
            keep_stored(source, q, r, exponent)
        finish_write(
            q, z, r_, n, bad, source, -inf, inf, exponent, moved, want_sums, bits, buffer, counts, sums, t
        )
        ends = 0  # the ends of the range differ from scale to scale
        for i in range(n):
            element = np.float64(r[i]) / scale[i]
            fine = bad == 0 or (bits_of(widen(source[i])) & exponent) != exponent
            end = element >= f[HI] or element <= f[LO]
            ends += fine and end
            if carry.size and fine:
                carry[first + i] = z[i] - r[i] if not end or abs(z[i]) < abs(r[i]) else 0.0
        counts[t, 2] = ends
        store(r, out[first:last])


@kernel
def score_tiles_scaled(
    w: Any, g: Any, u: Any, after: Any, tile: Any, half: Any, scales: Any, next_scales: Any, row: Any,
    length: Any, f: Any, k: Any, masks: Any, to: Any, work: Any, out: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    many = max(TILE // tile, 1)
    room = many * tile
    w_, g_, u_ = np.empty(room, work.dtype), np.empty(room, work.dtype), np.empty(room, work.dtype)
    q_, z_, r_ = np.empty(room, work.dtype), np.empty(room, work.dtype), np.empty(room, work.dtype)
    b_, scale_, keep_ = np.empty(room, np.uint8), np.empty(room, np.float64), np.empty(room, np.uint8)
    product, sums = np.empty(room, np.float64), np.empty(half, np.float64)
    cast = np.empty(1, work.dtype)
    for t in range(t0, t1, many):
        end = min(t + many, t1)
        first = t * tile
        last = min(end * tile, w.size)
        n = last - first
        x, y, v, q, z, b, keep = w_[:n], g_[:n], u_[:n], q_[:n], z_[:n], b_[:n], keep_[:n]
        load_step(w, g, u, after, first, last, x, y, v, keep, masks[0])
        scale = scale_[:n]
        expand(scales, first, row, length, scale)
        nearest_scaled(x, scale, q, f, k, cast)
        add_in_container(q, v, z, to)
        expand(next_scales, first, row, length, scale)
        r = r_[:n]
        nearest_scaled(z, scale, r, f, k, cast)
        for i in range(n):
            b[i] = np.uint8(r[i] == q[i]) & keep[i]
        score_sums(b, x, y, v, tile, half, product[:n], sums, out[t:end])
