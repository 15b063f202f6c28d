"""The audit of tiles on the CPU: every grid whose scale is fixed, in one pass over memory.

A tile is read into buffers that stay in the first-level cache, where every grid then works on it. Weights as
they were lie side by side; what they are compared with is read where it is, tile by tile at its address.

Allocation scores are not summed here. In the same pass, with weights in the first-level cache, they took as
long as in a pass of their own: their float64 sums are the time, not the reading.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfulp.kernels.auditing import ahead, cpu_survey
from halfulp.kernels.auditing.ahead import fetch
from halfulp.kernels.auditing.cpu_survey import EXTREMES, survey_whole
from halfulp.kernels.cpu_tile import (
    add_in_container,
    changes,
    count_ends,
    difference,
    load,
    merge,
    nearest,
    padded,
    sum_abs,
    sum_squares,
    tile_of,
)  # fmt: skip
from halfulp.kernels.cpu_tile_arrival import LEFT, arrival, binade_of
from halfulp.kernels.cpu_tile_audit import (
    audit_inside,
    clean,
    count_small,
    count_symmetric,
    kept,
    log2_points,
    phase_sum,
    stay_bits,
    stay_magic,
    survey,
)  # fmt: skip
from halfulp.kernels.params import (
    CUT,
    EMIN,
    HI,
    INVERSE,
    KEEP,
    KIND,
    LO,
    MAGIC,
    ODD,
    POINTS,
    SCALED,
    T_SUB,
    T_ZERO,
    TOP,
    UNIT,
    UP,
)  # fmt: skip
from halfulp.kernels.reference import TILE
from halfulp.kernels.simd import LANES, array_at, kernel_of, span

kernel = kernel_of(__file__, ahead.__file__, cpu_survey.__file__)
PLACES = ("values", "used")
"""A row a tile: the address of the values that it is compared with, and how much of it is in use."""


@kernel
def audit_tiles(
    w: Any, d: Any, after: Any, places: Any, f: Any, k: Any, slots: Any, masks: Any, to: Any, phase: Any,
    moved: Any, stay: Any, one: Any, counts: Any, shared: Any, sums: Any, arrived: Any, phases: Any,
    expected: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Every static grid on every tile. ``after``: d holds the weights after the step; ``one``: 1.

    ``slots`` says where the results of a table row go; the row of a moving grid is there for the phase
    sum only. ``moved`` (a row of bits a grid) and ``stay`` (a row of probabilities a grid), where not
    empty, follow every coordinate over the steps. ``places``, where not empty: PLACES of every tile, for
    several tensors that each begin at a tile; then d is empty, for its type.
    """
    exponent, sign = masks[0], masks[1]
    w_, d_ = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    size_, sized_, turned_ = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    q_, z_, r_ = np.empty(TILE, f.dtype), np.empty(TILE, f.dtype), np.empty(TILE, f.dtype)
    s_, bits = np.empty(TILE, f.dtype), np.empty(TILE // LANES, np.uint16)
    log_w, log_d = np.empty(TILE, np.int32), np.empty(TILE, np.int32)
    buffer, lanes, left = (
        np.empty(TILE // 2, np.float64),
        np.empty(LANES, np.int32),
        np.empty(2 * LEFT, f.dtype),
    )
    extremes = np.empty(EXTREMES, np.int32)
    rows, columns, wholes = f.shape[0], f.shape[1], k.shape[1]
    follow, odds = moved.shape[0] > 0, stay.shape[0] > 0
    moved_row = moved.shape[1] if follow else 0
    floats, ints, ever = f.reshape(-1), k.reshape(-1), moved.reshape(-1)
    for t in range(t0, t1):
        first = t * TILE
        n = places[t, 1] if places.shape[0] else min(TILE, w.size - first)
        last = first + n
        before = span(w, first, last)
        now = array_at(d, places[t, 0], n) if places.shape[0] else span(d, first, last)
        if t + 1 < t1:  # the values that it is compared with are asked for later: not too much at once
            fetch(span(w, first + TILE, min(first + 2 * TILE, w.size)))
        x, y, bad, ready = w_, d_, 0, False
        done, zeros, least, most, widest, square_w, square_d = False, 0, f[0, 0], f[0, 0], f[0, 0], 0.0, 0.0
        if n == TILE:
            done, zeros, least, most, widest, square_w, square_d = survey_whole(
                before, now, after, phase, masks, size_, sized_, turned_, log_w, buffer, extremes
            )
        if not done:
            ready = True
            size_[n:] = 0
            sized_[n:] = 0
            turned_[n:] = 0
            size, sized, turned = size_[:n], sized_[:n], turned_[:n]
            x = tile_of(before, w_)
            if after:
                y = d_[:n]
                difference(now, x, y)
            else:
                y = tile_of(now, d_)
            zeros, bad, least, most, widest = survey(x, y, size, sized, turned, exponent, sign)
            if bad > 0:
                load(x, w_[:n])
                load(y, d_[:n])
                x, y = w_[:n], d_[:n]
                clean(x, y, exponent)
                zeros, _, least, most, widest = survey(x, y, size, sized, turned, exponent, sign)
            square_w, square_d = sum_squares(size_, buffer), sum_squares(sized_, buffer)
            if phase:
                log2_points(size, log_w[:n])
                log2_points(sized, log_d[:n])
                for i in range(n):
                    log_w[i] -= log_d[i]
        shared[t, 0] = zeros - bad
        shared[t, 1] = bad
        sums[t, 0] = square_w
        sums[t, 1] = square_d
        scale = binade_of(widest, exponent)
        if t + 1 < t1:
            if places.shape[0]:
                fetch(array_at(d, places[t + 1, 0], places[t + 1, 1]))
            else:
                fetch(span(d, first + TILE, min(first + 2 * TILE, d.size)))
        for g in range(rows):
            o = slots[g]
            fg = span(floats, g * columns, (g + 1) * columns)
            kg = span(ints, g * wholes, (g + 1) * wholes)
            inside = to == 0 and most + most + widest < fg[HI] and fg[LO] == -fg[HI]
            plain = inside and kg[KIND] != SCALED and not odds
            if phase and not plain:
                phases[t, o] = phase_sum(size_[:n], sized_[:n], log_w[:n], kg[POINTS]) - bad * 65536
            if kg[KIND] == SCALED:
                continue
            ends, tiny = 0, least < fg[T_SUB]
            if plain:
                changed, symmetric, zero, small, whole, arrived[t, o, 0], arrived[t, o, 1] = audit_inside(
                    size_, sized_, turned_, log_w, n, phase, tiny, scale, fg, kg, exponent, q_, z_, r_, bits,
                    lanes, left, buffer, one,
                )  # fmt: skip
                if phase:
                    phases[t, o] = whole - bad * 65536
            else:
                size, sized, q, z, r = size_[:n], sized_[:n], q_[:n], z_[:n], r_[:n]
                if inside:
                    symmetric = kept(size, sized, turned_[:n], q, z, r, fg, kg, exponent, one)
                else:
                    if not ready:
                        ready = True
                        x = tile_of(before, w_)
                        if after:
                            difference(now, x, d_)
                        else:
                            y = tile_of(now, d_)
                    nearest(x, q, fg, kg, exponent, sign)
                    add_in_container(q, y, z, to)
                    ends = count_ends(q, fg[LO], fg[HI])
                    nearest(z, r, fg, kg, exponent, sign)
                    symmetric = count_symmetric(size, sized, fg[UP], kg[EMIN], exponent)
                if n < TILE:
                    q_[n:] = 0
                    r_[n:] = 0
                d_all = turned_ if inside else padded(y, d_)
                arrived[t, o, 0], arrived[t, o, 1] = arrival(q_, r_, d_all, scale, left, buffer)
                changed = changes(q_, r_, n, bits)
                zero, small = (
                    count_small(size, fg[T_ZERO], fg[T_SUB], one) if tiny else (np.int32(0), np.int32(0))
                )
            if follow:
                start = o * moved_row + t * (TILE // 8)
                counts[t, o, 5] = n - merge(bits, span(ever, start, start + (n + 7) // 8))
            if odds:
                chance, q, z = stay[o, first:last], q_[:n], z_[:n]
                if kg[KIND] == MAGIC:
                    stay_magic(q, z, chance, kg[EMIN], kg[INVERSE], fg[LO], fg[HI], fg[UNIT], exponent)
                else:
                    stay_bits(q, z, chance, kg[CUT], kg[ODD], kg[KEEP], kg[TOP], fg[UNIT])
                expected[t, o] = sum_abs(padded(chance, s_), buffer)
            counts[t, o, 0] = n - changed - bad
            counts[t, o, 1] = symmetric - bad
            counts[t, o, 2] = ends
            counts[t, o, 3] = small - zero
            counts[t, o, 4] = zero - bad
