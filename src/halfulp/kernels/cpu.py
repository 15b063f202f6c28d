"""The CPU kernels: numba, one pass over memory, a tile at a time.

A tile (768 coordinates) is loaded once into buffers that stay in the first-level cache; every
grid then works on the buffers. Threads take ranges of tiles: each function here does the
tiles [t0, t1) and releases the interpreter lock, and :mod:`halfulp.kernels.pool` runs ranges
on torch's worker threads. (numba's own thread layers are not used: the default one aborts the process
when two Python threads meet in it, the OpenMP one when a forked worker does.)

The pieces that work on one tile are in ``cpu_tile``, ``cpu_tile_audit`` and ``cpu_tile_write``. Grids with
a fixed scale are here; those whose scale moves with the data are in :mod:`halfulp.kernels.cpu_scaled`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from halfulp.kernels.cpu_tile import (
    WORDS,
    add_in_container,
    changes,
    count_ends,
    difference,
    load,
    merge,
    nearest,
    nonfinite,
    padded,
    stochastic_exact,
    store,
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
from halfulp.kernels.cpu_tile_score import clean_three, score_sums
from halfulp.kernels.cpu_tile_write import (
    finish_write,
    keep_stored,
    prefer_nearest,
    put_carry,
    take_carry,
    whole_proposal,
)  # fmt: skip
from halfulp.kernels.cpu_write_run import no_run, upper_halves, write_run
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
from halfulp.kernels.reference import DEADZONE, NEAREST, TILE
from halfulp.kernels.simd import LANES, bits_of, float_like, kernel, shr, span, specialised


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
) -> Any:
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
def decode_tiles(codes: Any, values: Any, out: Any, t0: Any, t1: Any) -> Any:
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
    w: Any, d: Any, after: Any, extents: Any, f: Any, k: Any, slots: Any, masks: Any, to: Any, phase: Any,
    moved: Any, stay: Any, one: Any, counts: Any, shared: Any, sums: Any, arrived: Any, phases: Any,
    expected: Any, t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Every static grid on every tile. ``after``: d holds the weights after the step; ``one``: 1.

    ``slots`` says where the results of a table row go; the row of a moving grid is there for the phase
    sum only. ``moved`` (a row of bits a grid) and ``stay`` (a row of probabilities a grid), where not
    empty, follow every coordinate over the steps. ``extents``, where not empty: how much of every tile is
    in use, for several tensors that each begin at a tile.
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
    rows, columns, wholes = f.shape[0], f.shape[1], k.shape[1]
    follow, odds = moved.shape[0] > 0, stay.shape[0] > 0
    moved_row = moved.shape[1] if follow else 0
    floats, ints, ever = f.reshape(-1), k.reshape(-1), moved.reshape(-1)
    for t in range(t0, t1):
        first = t * TILE
        n = extents[t] if extents.size else min(TILE, w.size - first)
        last = first + n
        if n < TILE:
            size_[:] = 0
            sized_[:] = 0
            turned_[:] = 0
        size, sized, turned = size_[:n], sized_[:n], turned_[:n]
        q, z, r = q_[:n], z_[:n], r_[:n]
        x = tile_of(span(w, first, last), w_)
        if after:
            y = d_[:n]
            difference(span(d, first, last), x, y)
        else:
            y = tile_of(span(d, first, last), d_)
        zeros, bad, least, most, widest = survey(x, y, size, sized, turned, exponent, sign)
        if bad > 0:
            load(x, w_[:n])
            load(y, d_[:n])
            x, y = w_[:n], d_[:n]
            clean(x, y, exponent)
            zeros, _, least, most, widest = survey(x, y, size, sized, turned, exponent, sign)
        shared[t, 0] = zeros - bad
        shared[t, 1] = bad
        sums[t, 0] = sum_squares(size_, buffer)
        sums[t, 1] = sum_squares(sized_, buffer)
        scale = binade_of(widest, exponent)
        if phase:
            log2_points(size, log_w[:n])
            log2_points(sized, log_d[:n])
            for i in range(n):
                log_w[i] -= log_d[i]
        for g in range(rows):
            o = slots[g]
            fg = span(floats, g * columns, (g + 1) * columns)
            kg = span(ints, g * wholes, (g + 1) * wholes)
            inside = to == 0 and most + most + widest < fg[HI] and fg[LO] == -fg[HI]
            plain = inside and kg[KIND] != SCALED and not odds
            if phase and not plain:
                phases[t, o] = phase_sum(size, sized, log_w[:n], kg[POINTS]) - bad * 65536
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
                if inside:
                    symmetric = kept(size, sized, turned, q, z, r, fg, kg, exponent, one)
                else:
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
                chance = stay[o, first:last]
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


MODE, CARRIES, CARRY_IN, RUN = NEAREST, False, False, no_run  # and otherwise, in copies of the function below


def _write_tiles(
    stored: Any, proposed: Any, out: Any, f: Any, k: Any, masks: Any, k0: Any, k1: Any,
    offset: Any, moved: Any, want_sums: Any, carry: Any, counts: Any, sums: Any,
    t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Write-back of every tile; ``out`` may be ``proposed``. Beside float32, what is stored and the carry may
    be bfloat16."""
    exponent, sign = masks[0], masks[1]
    q_, z_, r = np.empty(TILE, f.dtype), np.empty(TILE, f.dtype), np.empty(TILE, f.dtype)
    near, buffer = np.empty(TILE, f.dtype), np.empty(TILE // 2, np.float64)
    words, bits = np.empty(WORDS, np.uint32), np.empty(TILE // LANES, np.uint16)
    kept, held, carry_ = np.empty(TILE, f.dtype), np.empty(TILE, carry.dtype), np.empty(TILE, f.dtype)
    given = (
        stored, proposed, out, carry, k0, k1, offset, moved, want_sums, counts, sums,
        kept, held, z_, q_, words, bits, buffer,
    )  # fmt: skip
    whole = min(t1, stored.size // TILE) if offset % 32 == 0 else t0
    t = t0
    while t < t1:
        if t < whole:
            t = RUN(f, k, masks, given, t, whole)
            if t == t1:
                break
        first = t * TILE
        last = min(first + TILE, stored.size)
        n = last - first
        source = span(proposed, first, last)
        rest = span(carry, first, last) if CARRIES else carry
        q, held_back = padded(span(stored, first, last), q_), tile_of(rest, carry_)
        z, bad = whole_proposal(source, q, held_back, CARRY_IN, z_, exponent)
        if MODE == NEAREST:
            nearest(z, r, f, k, exponent, sign)
        else:
            stochastic_exact(z, r, words, f, k, exponent, sign, k0, k1, offset + first)
            if MODE == DEADZONE:
                nearest(z, near, f, k, exponent, sign)
                prefer_nearest(q, z, near, r)
        if bad > 0:
            keep_stored(source, q, r, exponent)
        if CARRIES:
            take_carry(z, r, f[LO], f[HI], source, bad, exponent, held_back)
            put_carry(held_back, rest)
        finish_write(
            q, z, r, n, bad, source, f[LO], f[HI], exponent, moved, want_sums, bits, buffer, counts, sums, t
        )
        store(r, span(out, first, last))
        t += 1


@cache
def write_tiles(mode: int, carries: bool, carry_in: bool, in_lanes: bool) -> Any:
    """The write-back kernel of a mode. With ``carries`` a carry takes what is not written and, with
    ``carry_in``, is added to the proposal first. ``in_lanes``: proposals are float32."""
    run = write_run(mode, carries, carry_in) if in_lanes else no_run
    name = f"{mode}_{carries}_{carry_in}_{in_lanes}"
    return specialised(_write_tiles, name, MODE=mode, CARRIES=carries, CARRY_IN=carry_in, RUN=run)


@kernel
def set_aside_tiles(x: Any, out: Any, t0: Any, t1: Any) -> Any:
    """The bfloat16 patterns of float32 values; returns how many tiles have a value that is not one."""
    off = 0
    for t in range(t0, t1):
        first = t * TILE
        source = span(x, first, min(first + TILE, x.size))
        off += upper_halves(source, span(out, first, first + source.size))
    return off


@kernel
def score_tiles(
    w: Any, g: Any, u: Any, after: Any, tile: Any, half: Any, f: Any, k: Any, masks: Any, to: Any, out: Any,
    t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Scores of tiles of any size; ``half``: half of what a tile is padded to in sums."""
    many = max(TILE // tile, 1)
    room = many * tile
    floats, flags, sums = np.empty(6 * room, f.dtype), np.empty(2 * room, np.uint8), np.empty(room + half)
    for t in range(t0, t1, many):
        first, last = t * tile, min(min(t + many, t1) * tile, w.size)
        score_stretch(
            span(w, first, last), span(g, first, last), span(u, first, last), after, tile, half, f, k, masks,
            to, room, floats, flags, sums, out[t : min(t + many, t1)],
        )  # fmt: skip


@kernel
def score_stretch(
    w: Any, g: Any, u: Any, after: Any, tile: Any, half: Any, f: Any, k: Any, masks: Any, to: Any, room: Any,
    floats: Any, flags: Any, sums: Any, out: Any,
) -> None:  # fmt: skip
    exponent, sign = masks[0], masks[1]
    n = w.size
    x, y, v = span(floats, 0, n), span(floats, room, room + n), span(floats, 2 * room, 2 * room + n)
    q, z = span(floats, 3 * room, 3 * room + n), span(floats, 4 * room, 4 * room + n)
    r = span(floats, 5 * room, 5 * room + n)
    b, keep = span(flags, 0, n), span(flags, room, room + n)
    load(w, x)
    load(g, y)
    if after:
        difference(u, x, v)
    else:
        load(u, v)
    clean_three(x, y, v, keep, exponent)
    nearest(x, q, f, k, exponent, sign)
    add_in_container(q, v, z, to)
    nearest(z, r, f, k, exponent, sign)
    for i in range(n):
        b[i] = np.uint8(r[i] == q[i]) & keep[i]
    score_sums(b, x, y, v, tile, half, span(sums, half, half + n), span(sums, 0, half), out)
