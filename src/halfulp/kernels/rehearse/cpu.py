"""Rehearsals on the CPU: numba, one pass over memory, a tile at a time, made of the other kernels' pieces.

Several tensors may lie side by side, each beginning at a tile; then a table says of every tile whose it is.
What is held is (bounds, coordinates): a tile of weights is read once, and moved under every pull.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from halfulp.kernels import params as p
from halfulp.kernels.cpu_tile import (
    WORDS,
    changes,
    difference,
    merge,
    nearest,
    nonfinite,
    settle,
    stochastic,
    tile_of,
)  # fmt: skip
from halfulp.kernels.cpu_tile_write import prefer_nearest, put_carry
from halfulp.kernels.cpu_write_run import numbers
from halfulp.kernels.reference import DEADZONE, NEAREST, TILE
from halfulp.kernels.rehearse import cpu_lanes
from halfulp.kernels.rehearse.cpu_lanes import EXTENT, OF, START, coding
from halfulp.kernels.rehearse.reference import CARRY, MASTER, NOTHING, PENDING
from halfulp.kernels.simd import (
    LANES,
    bits_of,
    fill_words,
    float_like,
    kernel_of,
    shr,
    span,
    special_case,
)  # fmt: skip

kernel = kernel_of(__file__, cpu_lanes.__file__)


@kernel
def unpack(codes: Any, values: Any, q: Any) -> None:
    """Codes to values, by table."""
    for i in range(codes.size):
        q[i] = values[codes[i]]


@kernel
def pack(r: Any, codes: Any, f: Any, k: Any, exponent: Any, top: Any) -> None:
    """Grid values of a float grid to codes: see ``encode_tiles``. ``top``: the bit of the sign."""
    emin, cut = k[p.EMIN], k[p.CUT]
    if k[p.KIND] == p.MAGIC:
        one = exponent & -exponent  # the unit of the exponent field
        unit = float_like(f[0], k[p.INVERSE] - emin)
        for i in range(codes.size):
            a = bits_of(abs(r[i]))
            normal = np.int32(shr(bits_of(float_like(r[i], a - emin + one)), cut))
            small = np.int32(abs(r[i]) * unit)
            codes[i] = (normal if a >= emin else small) | (top if bits_of(r[i]) < 0 else 0)
    else:
        for i in range(codes.size):
            code = np.int32(shr(bits_of(abs(r[i])), cut))
            codes[i] = code | (top if bits_of(r[i]) < 0 else 0)


@kernel
def pulled(q: Any, x: Any, d: Any, k: Any, z: Any) -> None:
    """z = q + (d + k (x - q)), in this order."""
    for i in range(q.size):
        z[i] = q[i] + (d[i] + k * (x[i] - q[i]))


@kernel
def with_kept(z: Any, kept: Any, exponent: Any) -> None:
    """z + kept, wherever that is finite."""
    for i in range(z.size):
        whole = z[i] + kept[i]
        z[i] = whole if (bits_of(whole) & exponent) != exponent else z[i]


@kernel
def stay_put(z: Any, q: Any, fine: Any, exponent: Any) -> None:
    """What is not finite becomes what is held; ``fine`` says where it is."""
    for i in range(z.size):
        fine[i] = (bits_of(z[i]) & exponent) != exponent
        z[i] = z[i] if fine[i] else q[i]


@kernel
def left_over(z: Any, r: Any, lo: Any, hi: Any, rest: Any) -> None:
    """What was not written; nothing beyond the ends of the range: see ``take_carry``."""
    for i in range(rest.size):
        past = ((r[i] >= hi) & (z[i] > r[i])) | ((r[i] <= lo) & (z[i] < r[i]))
        rest[i] = z[i] - z[i] if past else z[i] - r[i]


# and otherwise, in copies of the function below:
MODE, KEEPS, BESIDE, LANED = NEAREST, NOTHING, False, False
RUN: Any = None


def _move_tiles(
    w: Any, after: Any, tiles: Any, keys: Any, offsets: Any, pulls: Any, back: Any, f: Any, k: Any,
    masks: Any, values: Any, top: Any, held: Any, kept: Any, chosen: Any, moved: Any, counts: Any,
    t0: Any, t1: Any,
) -> None:  # fmt: skip
    """Move what is held of every tile, under every pull.

    ``tiles``: (tiles, 3), see OF. A row a tensor: ``keys`` of its stream and the ``offsets`` in it, ``pulls``
    and ``back``, the factors of what is pending. ``values``: of all codes; ``chosen``: a byte a coordinate,
    or empty.
    """
    exponent, sign = masks[0], masks[1]
    x_, d_, q_ = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    z_, r_, near = np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype), np.zeros(TILE, f.dtype)
    c_, fine = np.zeros(TILE, f.dtype), np.ones(TILE, np.uint8)
    words, bits = np.zeros(WORDS, np.uint32), np.zeros(TILE // LANES, np.uint16)
    old_, before_ = np.zeros(TILE, held.dtype), np.zeros(TILE, kept.dtype)
    rows, size, row = held.shape[0], held.shape[1], moved.shape[1]
    flat, beside, ever = held.reshape(-1), kept.reshape(-1), moved.reshape(-1)
    if LANED:
        g = numbers(f, k, masks)
        code = coding(f, g, top)
    u, end = t0 * rows, t1 * rows
    while u < end:
        if LANED:
            u = RUN(
                w, after, tiles, keys, offsets, pulls, back, g, code, flat, beside, chosen, ever, counts,
                words, old_, before_, bits, size, row, u, end,
            )  # fmt: skip
            if u == end:
                break
        t, b = u // rows, u % rows
        u += 1
        of, n = tiles[t, OF], tiles[t, EXTENT]
        if of < 0:
            continue
        first = t * TILE
        last = first + n
        x, d, q, z, r = tile_of(span(w, first, last), x_), d_[:n], q_[:n], z_[:n], r_[:n]
        difference(span(after, first, last), x, d)
        place = offsets[of] + (t - tiles[t, START]) * TILE
        if MODE != NEAREST:
            fill_words(words, keys[of, 0], keys[of, 1], place, n)
        here = span(flat, b * size + first, b * size + last)
        start = b * row + t * (TILE // 8)
        if KEEPS == MASTER:
            for i in range(n):
                q[i] = here[i]
        else:
            unpack(here, values, q)
        pulled(q, x, d, pulls[of, b], z)
        bad = nonfinite(z, exponent)
        if bad > 0:
            stay_put(z, q, fine, exponent)
        if BESIDE:
            rest = span(beside, b * size + first, b * size + last)
            c = tile_of(rest, c_)
            with_kept(z, c, exponent)
            if bad > 0:
                for i in range(n):
                    z[i] = z[i] if fine[i] else q[i]
        if MODE == NEAREST:
            nearest(z, r, f, k, exponent, sign)
        else:
            drawn = words[place & 31 :]
            if stochastic(z, r, drawn, f, k, exponent, sign) > 0:
                settle(z, r, f, k, exponent, sign, keys[of, 0], keys[of, 1], place)
            if MODE == DEADZONE:
                nearest(z, near[:n], f, k, exponent, sign)
                prefer_nearest(q, z, near[:n], r)
        if KEEPS == MASTER:
            nearest(q, near[:n], f, k, exponent, sign)
            changed = changes(near, r_, n, bits)
            if chosen.size:
                for i in range(n):
                    here[i] = z[i] if chosen[first + i] else r[i]
            else:
                for i in range(n):
                    here[i] = z[i]
        else:
            changed = changes(q_, r_, n, bits)
            pack(r, here, f, k, exponent, top)
        if BESIDE:
            left_over(z, r, f[p.LO], f[p.HI], near[:n])
            for i in range(n):
                new = near[i] if KEEPS == CARRY else back[of, 0] * c[i] + back[of, 1] * near[i]
                if bad == 0 or fine[i]:
                    c[i] = new
            put_carry(c, rest)
        counts[t, b, 0] = n - changed - bad
        counts[t, b, 1] = n - merge(bits, span(ever, start, start + (n + 7) // 8))
        counts[t, b, 2] = bad


@cache
def move_tiles(mode: int, keeps: int, laned: bool) -> Any:
    """The kernel of a mode and what is kept; ``laned``: in float32, on a grid whose ends are alike."""
    beside = keeps in (CARRY, PENDING)
    run = cpu_lanes.run_of(mode, keeps, beside) if laned else None
    name = f"{mode}_{keeps}_{laned}"
    values = {"MODE": mode, "KEEPS": keeps, "BESIDE": beside, "LANED": laned, "RUN": run}
    return kernel(special_case(_move_tiles, name, values))
