"""The CPU kernels: numba, one pass over memory, a tile at a time.

A tile (768 coordinates) is loaded once into buffers that stay in the first-level cache; every
grid then works on the buffers. Threads take ranges of tiles: each function here does the
tiles [t0, t1) and releases the interpreter lock, and :mod:`halfulp.kernels.pool` runs ranges
on torch's worker threads. (numba's own thread layers are not used: the default one aborts the process
when two Python threads meet in it, the OpenMP one when a forked worker does.)

The pieces that work on one tile are in ``cpu_tile``, ``cpu_tile_score`` and ``cpu_tile_write``. Grids with a
fixed scale are here; those whose scale moves with the data are in :mod:`halfulp.kernels.cpu_scaled`, and
audits in :mod:`halfulp.kernels.auditing`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from halfulp.kernels.cpu_tile import (
    WORDS,
    add_in_container,
    difference,
    load,
    nearest,
    nonfinite,
    padded,
    stochastic_exact,
    store,
    tile_of,
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
from halfulp.kernels.params import CUT, EMIN, HI, INVERSE, KIND, LO, MAGIC
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
