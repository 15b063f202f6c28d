"""The Triton kernels: one program, one tile. Launched by :mod:`halfulp.kernels.gpu`.

A tile is 768 = 3 * 256 coordinates, no power of two, and is laid out in one of two ways.

*For sums*, coordinate i = 3 k + j is at [k, j] of a 256 x 4 block whose last column is empty. The
halving tree of :func:`halfulp.kernels.reference.tile_sum` adds i and i + 384, then i and i + 192, ...:
k and k + 128, then k and k + 64, ... So it is eight sums over an axis of length two, which no
compiler can do in another order, and then three columns from left to right.

*For words*, a tile is three runs of 256, a run is eight groups of 32, and a group is two halves that
own the two words of the same sixteen Threefry blocks (:mod:`halfulp.numbers.streams`). A program takes the
halves of a run as two 8 x 16 blocks, so that no Threefry block is computed twice.

*For scores*, whose tiles have any size, a program does one tile, or as many small ones as take no more room
than a tile of 768: :func:`columns` with K in the place of 256, several blocks of it one above the other.

Counts travel packed, ten bits each (768 < 2**10): one reduction for three of them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from halfulp.kernels import params, reference
from halfulp.kernels.gpu_maths import (
    EMIN,
    HI,
    KIND,
    LO,
    MANT,
    NEAREST,
    PHASE_ONE,
    STOCHASTIC,
    as_float,
    bits,
    exponent,
    finite,
    fit,
    floats_at,
    ints_at,
    load,
    log2_points,
    nearest,
    place,
    scales_at,
    store,
    words,
)

TILE = tl.constexpr(reference.TILE)
DEADZONE = tl.constexpr(reference.DEADZONE)
SCALED = tl.constexpr(params.SCALED)
UP, POINTS = tl.constexpr(params.UP), tl.constexpr(params.POINTS)
T_SUB, T_ZERO = tl.constexpr(params.T_SUB), tl.constexpr(params.T_ZERO)
WRITE_SUMS = tl.constexpr(len(reference.WRITE_SUMS))
AUDIT_COUNTS = tl.constexpr(len(reference.AUDIT_COUNTS))  # never_moved is not of one step alone
CARRY_OUT, CARRY_IN = tl.constexpr(1), tl.constexpr(2)  # a carry is only written; also read


# ---- layouts, sums, counts -----------------------------------------------------------------------


@triton.jit
def this_tile() -> Any:
    """Return the index of this program's tile."""
    return tl.program_id(0).to(tl.int64)


@triton.jit
def half_run(start: tl.tensor) -> Any:
    """One half of each of eight groups."""
    return start + (32 * tl.arange(0, 8)[:, None] + tl.arange(0, 16)[None, :])


@triton.jit
def columns(tile: tl.tensor, n: tl.tensor) -> Any:
    """The coordinates of a tile, laid out for sums, and which of them exist."""
    k, j = tl.arange(0, 256)[:, None], tl.arange(0, 4)[None, :]
    i = tile * TILE + (3 * k + j)
    return i, (i < n) & (j < 3)


@triton.jit
def three_columns(x: tl.tensor) -> Any:
    """Add the first three of four columns, the last axis, from left to right."""
    j = tl.arange(0, 4) if len(x.shape) == 1 else tl.arange(0, 4)[None, :]
    axis: tl.constexpr = len(x.shape) - 1
    first = tl.sum(tl.where(j == 0, x, 0.0), axis=axis)
    second = tl.sum(tl.where(j == 1, x, 0.0), axis=axis)
    third = tl.sum(tl.where(j == 2, x, 0.0), axis=axis)
    return first + second + third


@triton.jit
def tree(x: tl.tensor) -> Any:
    """The halving tree over columns of float64."""
    x = tl.reshape(x, (2, 2, 2, 2, 2, 2, 2, 2, 4))
    for _ in tl.static_range(8):
        x = tl.sum(x, axis=0)
    return three_columns(x)


@triton.jit
def short_tree(x: tl.tensor) -> Any:
    """The halving tree in the working type down to 48 sums, then in float64; zero is never negative."""
    x = tl.reshape(x, (2, 2, 2, 2, 16, 4))
    for _ in tl.static_range(4):
        x = tl.sum(x, axis=0)
    x = tl.reshape(x.to(tl.float64), (2, 2, 2, 2, 4))
    for _ in tl.static_range(4):
        x = tl.sum(x, axis=0)
    return three_columns(x) + 0.0


@triton.jit
def binade_of(sized: tl.tensor) -> Any:
    """The power of two by which changes are multiplied, from the sizes of a tile's proposals."""
    widest = tl.max(tl.max(sized, axis=1), axis=0)
    if sized.dtype == tl.float64:
        field, unit = 0x7FF0000000000000, 0x10000000000000
    else:
        field, unit = 0x7F800000, 0x800000
    scale = as_float(tl.maximum(field - unit - exponent(bits(widest)), unit))
    return tl.where(widest == 0, 1.0, scale)


@triton.jit
def store_arrival(out: tl.tensor, q: tl.tensor, r: tl.tensor, y: tl.tensor, scale: tl.tensor) -> None:
    """The two sums of reference.arrival; q and r are zero wherever nothing is."""
    change = r - q
    shifted = change * scale
    back = 1.0 / scale.to(tl.float64)
    tl.store(out, short_tree(shifted * y) * back)
    tl.store(out + 1, short_tree(shifted * change) * back)


@triton.jit
def parts(n: tl.tensor, SIZE: tl.constexpr, K: tl.constexpr, MANY: tl.constexpr) -> Any:
    """The coordinates of MANY tiles of SIZE, each laid out for sums in K rows, and which of them exist."""
    r, j = tl.arange(0, MANY * K)[:, None], tl.arange(0, 4)[None, :]
    at = 3 * (r % K) + j
    i = (this_tile() * MANY + r // K) * SIZE + at
    return i, (i < n) & (j < 3) & (at < SIZE)


@triton.jit
def trees(x: tl.tensor, K: tl.constexpr, LEVELS: tl.constexpr, MANY: tl.constexpr) -> Any:
    """The halving trees of tiles that are laid out by :func:`parts`, in float64."""
    x = tl.reshape(x, (MANY, K, 4))
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (MANY, 2, K >> (level + 1), 4)), axis=1)
    return three_columns(tl.reshape(x, (MANY, 4)))


@triton.jit
def total(x: tl.tensor) -> Any:
    """Sum over a tile."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@triton.jit
def pack_two(a: tl.tensor, b: tl.tensor) -> Any:
    """Pack two counts below 1024 into a word."""
    return a.to(tl.int32) + (b.to(tl.int32) << 10)


@triton.jit
def pack_three(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> Any:
    """Pack three counts below 1024 into a word."""
    return pack_two(a, b) + (c.to(tl.int32) << 20)


@triton.jit
def store_two(p: tl.tensor, packed: tl.tensor) -> None:
    """Store the counts that ``pack_two`` packed."""
    tl.store(p, packed & 1023)
    tl.store(p + 1, (packed >> 10) & 1023)


@triton.jit
def store_three(p: tl.tensor, packed: tl.tensor) -> None:
    """Store the counts that ``pack_three`` packed."""
    store_two(p, packed)
    tl.store(p + 2, packed >> 20)


# ---- round ---------------------------------------------------------------------------------------


@triton.jit
def round_some(
    x: tl.tensor, out: tl.tensor, drawn: tl.tensor, f: tl.tuple, k: tl.tuple, segments: tl.tuple,
    start: tl.tensor, n: tl.tensor, key: tl.tuple, offset: tl.tensor,
    MODE: tl.constexpr, SCALES: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """Round one tile of ``x`` into ``out``."""
    i = half_run(start)
    mask = i < n
    scale = scales_at(segments, i, mask) if SCALES else 1.0
    store(out, i, place(load(x, i, mask), scale, drawn, f, k, key, offset + i, MODE, SCALES, TO), mask)


@triton.jit(do_not_specialize=["row", "per_row", "length", "k0", "k1", "offset"])
def round_tile(
    x: tl.tensor, out: tl.tensor, f: tl.tensor, k: tl.tensor,
    scales: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor,
    n: tl.tensor, k0: tl.tensor, k1: tl.tensor, offset: tl.tensor,
    MODE: tl.constexpr, SCALES: tl.constexpr, TO: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    """Round one tile of ``x`` into ``out``, which may be ``x``."""
    tile = this_tile()
    f, k = floats_at(f, 0), ints_at(k, 0)
    segments, key = (scales, row, per_row, length), (k0, k1)
    for run in range(3):
        start = tile * TILE + 256 * run
        i = offset + half_run(start)
        one, two = (i, i) if MODE == NEAREST else words(key, i, ALIGNED)
        round_some(x, out, one, f, k, segments, start, n, key, offset, MODE, SCALES, TO)
        round_some(x, out, two, f, k, segments, start + 16, n, key, offset, MODE, SCALES, TO)


# ---- write-back ----------------------------------------------------------------------------------


@triton.jit
def mark_moved(moved: tl.tensor, start: tl.tensor, n: tl.tensor, now: tl.tensor) -> Any:
    """Set the bits of coordinates that move now; returns which have never moved."""
    byte = start // 8 + (4 * tl.arange(0, 8)[:, None] + tl.arange(0, 2)[None, :])
    shift = tl.arange(0, 8)[None, None, :]
    mask = byte * 8 < n
    new = tl.sum(tl.reshape(now.to(tl.int32), (8, 2, 8)) << shift, axis=2)
    new = new | tl.load(moved + byte, mask=mask, other=0).to(tl.int32)
    tl.store(moved + byte, new.to(tl.uint8), mask=mask)
    return tl.reshape((new[:, :, None] >> shift) & 1, (8, 16)) == 0


@triton.jit
def carried(z: tl.tensor, carry: tl.tensor) -> Any:
    """Proposals with what earlier steps did not write, where that is a number."""
    whole = z + carry
    return tl.where(finite(whole), whole, z)


@triton.jit
def unchanged(
    q: tl.tensor, r: tl.tensor, idle: tl.tensor, element: tl.tensor, scale: tl.tensor, MOVES: tl.constexpr
) -> Any:
    """Find where r leaves q as it was, like reference.unchanged. q is element * scale, exactly."""
    same = r == q
    if MOVES:
        same = same | idle | (r.to(tl.float64) == element * scale)
    return same


@triton.jit
def write_some(
    stored: tl.tensor, proposed: tl.tensor, out: tl.tensor, drawn: tl.tensor, f: tl.tuple, k: tl.tuple,
    segments: tl.tuple, old_segments: tl.tuple, moved: tl.tensor, carry: tl.tensor, start: tl.tensor,
    n: tl.tensor, key: tl.tuple, offset: tl.tensor,
    MODE: tl.constexpr, SCALES: tl.constexpr, MOVES: tl.constexpr, TO: tl.constexpr, MARK: tl.constexpr,
    CARRY: tl.constexpr,
) -> Any:  # fmt: skip
    """Write half a run back; returns its counts, packed."""
    i = half_run(start)
    mask = i < n
    scale = scales_at(segments, i, mask) if SCALES else 1.0
    q, z = load(stored, i, mask), load(proposed, i, mask)
    ok = finite(z)
    if CARRY == CARRY_IN:
        z = carried(z, load(carry, i, mask))
    element = scale
    if MOVES:
        old = scales_at(old_segments, i, mask)
        element = place(q, old, drawn, f, k, key, offset + i, NEAREST, SCALES, TO).to(tl.float64) / old
    if MODE == DEADZONE:
        r = place(z, scale, drawn, f, k, key, offset + i, NEAREST, SCALES, TO)
        dead = unchanged(q, r, z == q, element, scale, MOVES) & (z != q)
        r = tl.where(dead, place(z, scale, drawn, f, k, key, offset + i, STOCHASTIC, SCALES, TO), r)
    else:
        r = place(z, scale, drawn, f, k, key, offset + i, MODE, SCALES, TO)
    r = tl.where(ok, r, q)
    store(out, i, r, mask)
    ok = ok & mask
    same = unchanged(q, r, z == q, element, scale, MOVES)
    element = r.to(tl.float64) / scale if SCALES else r
    end = (element >= f[HI]) | (element <= f[LO])
    if CARRY:  # beyond the ends of the range, what is not written never could be
        beyond = end & (tl.abs(z) >= tl.abs(r))
        store(carry, i, tl.where(beyond, 0.0, z - r), ok)
    never = mask & ~mask
    if MARK:
        never = mask & mark_moved(moved, start, n, ok & ~same)
    return pack_three(ok & same, ok & (z == q), ok & end), pack_two(mask & ~ok, never)


@triton.jit
def sum_sizes(
    stored: tl.tensor, proposed: tl.tensor, carry: tl.tensor, sums: tl.tensor, tile: tl.tensor, n: tl.tensor,
    CARRY: tl.constexpr,
) -> Any:  # fmt: skip
    """The sums of sizes; what is stored and proposed, for those that need what is written."""
    i, mask = columns(tile, n)
    q, z = load(stored, i, mask).to(tl.float64), load(proposed, i, mask)
    ok = mask & finite(z)
    if CARRY == CARRY_IN:
        z = carried(z, load(carry, i, mask))
    d = tl.where(ok, z.to(tl.float64) - q, 0.0)
    tl.store(sums, tree(tl.where(ok, tl.abs(q), 0.0)))
    tl.store(sums + 1, tree(tl.abs(d)))
    tl.store(sums + 2, tree(d * d))
    return q, d, ok


@triton.jit
def sum_written(
    out: tl.tensor, q: tl.tensor, d: tl.tensor, ok: tl.tensor, sums: tl.tensor, tile: tl.tensor, n: tl.tensor
) -> None:
    """The sums of what arrived, once it is written."""
    i, mask = columns(tile, n)
    change = tl.where(ok, load(out, i, mask).to(tl.float64) - q, 0.0)
    tl.store(sums + 3, tree(change * d))
    tl.store(sums + 4, tree(change * change))


@triton.jit(do_not_specialize=["row", "per_row", "length", "k0", "k1", "offset"])
def write_tile(
    stored: tl.tensor, proposed: tl.tensor, out: tl.tensor, f: tl.tensor, k: tl.tensor,
    scales: tl.tensor, old_scales: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor,
    moved: tl.tensor, carry: tl.tensor, counts: tl.tensor, sums: tl.tensor,
    n: tl.tensor, k0: tl.tensor, k1: tl.tensor, offset: tl.tensor,
    MODE: tl.constexpr, SCALES: tl.constexpr, MOVES: tl.constexpr, TO: tl.constexpr, ALIGNED: tl.constexpr,
    MARK: tl.constexpr, CARRY: tl.constexpr, SUMS: tl.constexpr,
) -> None:  # fmt: skip
    """Write one tile; ``out`` may be ``proposed`` or ``stored``. ``old_scales`` are read if MOVES."""
    tile = this_tile()
    f, k = floats_at(f, 0), ints_at(k, 0)
    segments, key = (scales, row, per_row, length), (k0, k1)
    old_segments = (old_scales, row, per_row, length)
    if SUMS:
        q, d, ok = sum_sizes(stored, proposed, carry, sums + WRITE_SUMS * tile, tile, n, CARRY)
        tl.debug_barrier()  # before anything is written over what other threads still read
    three = tl.zeros((8, 16), tl.int32)
    two = tl.zeros((8, 16), tl.int32)
    for run in range(3):
        start = tile * TILE + 256 * run
        i = offset + half_run(start)
        first, second = (i, i) if MODE == NEAREST else words(key, i, ALIGNED)
        a, b = write_some(
            stored, proposed, out, first, f, k, segments, old_segments, moved, carry, start, n, key,
            offset, MODE, SCALES, MOVES, TO, MARK, CARRY,
        )  # fmt: skip
        c, e = write_some(
            stored, proposed, out, second, f, k, segments, old_segments, moved, carry, start + 16, n, key,
            offset, MODE, SCALES, MOVES, TO, MARK, CARRY,
        )  # fmt: skip
        three += a + c
        two += b + e
    store_three(counts + 5 * tile, total(three))
    store_two(counts + 5 * tile + 3, total(two))
    if SUMS:
        tl.debug_barrier()
        sum_written(out, q, d, ok, sums + WRITE_SUMS * tile, tile, n)


# ---- audit ---------------------------------------------------------------------------------------


@triton.jit
def pair_at(w: tl.tensor, d: tl.tensor, i: tl.tensor, mask: tl.tensor, AFTER: tl.constexpr) -> Any:
    """Weights and proposals; ``AFTER``: d holds the weights after the step."""
    x = load(w, i, mask)
    y = load(d, i, mask).to(x.dtype)
    if AFTER:
        y = y - x
    return x, y


@triton.jit(do_not_specialize=["n_grids"])
def audit_tile(
    w: tl.tensor, d: tl.tensor, f: tl.tensor, k: tl.tensor,
    counts: tl.tensor, shared: tl.tensor, sums: tl.tensor, arrived: tl.tensor, phases: tl.tensor,
    n: tl.tensor, n_grids: tl.tensor,
    AFTER: tl.constexpr, PHASE: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """Shared counts and sums; phases of every grid; counts of those that need no scales."""
    tile = this_tile()
    i, mask = columns(tile, n)
    x, y = pair_at(w, d, i, mask, AFTER)
    ok = mask & finite(x) & finite(y)
    x, y = tl.where(ok, x, 0.0), tl.where(ok, y, 0.0)
    store_two(shared + 2 * tile, total(pack_two(ok & (y == 0), mask & ~ok)))
    wide = x.to(tl.float64)
    tl.store(sums + 2 * tile, tree(wide * wide))
    wide = y.to(tl.float64)
    tl.store(sums + 2 * tile + 1, tree(wide * wide))
    size, sized = tl.abs(x), tl.abs(y)
    binade = binade_of(sized)
    if PHASE:
        ratio = log2_points(size) - log2_points(sized)
    for g in range(n_grids):
        fg, kg = floats_at(f, g), ints_at(k, g)
        at = tile * n_grids + g
        if PHASE:
            points = tl.minimum(tl.maximum(ratio - kg[POINTS].to(tl.int32), 0), PHASE_ONE)
            points = tl.where(y == 0, PHASE_ONE, tl.where(x == 0, 0, points))
            tl.store(phases + at, total(tl.where(ok, points, 0)).to(tl.int64))
        if kg[KIND] != SCALED:
            q = nearest(x, fg, kg)
            r = nearest(fit(q + y, TO), fg, kg)
            frozen = r == q
            store_arrival(arrived + 2 * at, q, r, y, binade)
            symmetric = sized * fg[UP] < as_float(tl.maximum(exponent(bits(size)), kg[EMIN]))
            end = (q >= fg[HI]) | (q <= fg[LO])
            zero = size < fg[T_ZERO]
            small = (size < fg[T_SUB]) & ~zero
            store_three(counts + AUDIT_COUNTS * at, total(pack_three(ok & frozen, ok & symmetric, ok & end)))
            store_two(counts + AUDIT_COUNTS * at + 3, total(pack_two(ok & small, ok & zero)))


@triton.jit(do_not_specialize=["row", "per_row", "length", "n_grids", "number"])
def audit_scaled_tile(
    w: tl.tensor, d: tl.tensor, stored: tl.tensor, proposed: tl.tensor, f: tl.tensor, k: tl.tensor,
    scales: tl.tensor, next_scales: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor,
    counts: tl.tensor, arrived: tl.tensor, n: tl.tensor, n_grids: tl.tensor, number: tl.tensor,
    AFTER: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """Counts of one grid, which has scales: those of the ``stored`` values, and of the ``proposed``."""
    tile = this_tile()
    f, k = floats_at(f, 0), ints_at(k, 0)
    i, mask = columns(tile, n)
    x, y = pair_at(w, d, i, mask, AFTER)
    ok = mask & finite(x) & finite(y)
    q, z = load(stored, i, mask), load(proposed, i, mask)
    scale = scales_at((scales, row, per_row, length), i, mask)
    later = scales_at((next_scales, row, per_row, length), i, mask)
    r = place(z, later, i, f, k, (0, 0), i, NEAREST, True, TO)
    e = tl.maximum(exponent(bits(x.to(tl.float64) / scale)), k[EMIN])
    symmetric = tl.abs(y).to(tl.float64) < as_float(e - k[MANT]) * scale * 0.5
    element = q.to(tl.float64) / scale
    frozen = unchanged(q, r, y == 0, element, later, True)
    end = (element >= f[HI]) | (element <= f[LO])
    zero = element == 0
    normal = tl.where(f[T_ZERO] < f[T_SUB], as_float(k[EMIN]), 0.0)  # integers have no subnormals
    small = (tl.abs(element) < normal) & ~zero
    y = tl.where(ok, y, 0.0)
    at = arrived + 2 * (tile * n_grids + number)
    store_arrival(at, tl.where(mask, q, 0.0), tl.where(mask, r, 0.0), y, binade_of(tl.abs(y)))
    at = counts + AUDIT_COUNTS * (tile * n_grids + number)
    store_three(at, total(pack_three(ok & frozen, ok & symmetric, ok & end)))
    store_two(at + 3, total(pack_two(ok & small, ok & zero)))
    tl.store(at + 6, total((ok & frozen & (r != q)).to(tl.int32)))


# ---- score ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["row", "per_row", "length"])
def score_tile(
    w: tl.tensor, g: tl.tensor, u: tl.tensor, stored: tl.tensor, proposed: tl.tensor,
    f: tl.tensor, k: tl.tensor,
    scales: tl.tensor, next_scales: tl.tensor, row: tl.tensor, per_row: tl.tensor, length: tl.tensor,
    scores: tl.tensor, n: tl.tensor,
    SIZE: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, MANY: tl.constexpr,
    AFTER: tl.constexpr, SCALES: tl.constexpr, TO: tl.constexpr,
) -> None:  # fmt: skip
    """The eight sums; ``stored`` and ``proposed`` are read only for a grid with scales."""
    f, k = floats_at(f, 0), ints_at(k, 0)
    i, mask = parts(n, SIZE, K, MANY)
    x, y = pair_at(w, u, i, mask, AFTER)
    if SCALES:
        q, z = load(stored, i, mask), load(proposed, i, mask)
        element = q.to(tl.float64) / scales_at((scales, row, per_row, length), i, mask)
        later = scales_at((next_scales, row, per_row, length), i, mask)
        r = place(z, later, i, f, k, (0, 0), i, NEAREST, True, TO)
        frozen = unchanged(q, r, y == 0, element, later, True)
    slope = load(g, i, mask).to(x.dtype)
    ok = mask & finite(x) & finite(y) & finite(slope)
    x, y, slope = tl.where(ok, x, 0.0), tl.where(ok, y, 0.0), tl.where(ok, slope, 0.0)
    if not SCALES:
        q = nearest(x, f, k)
        frozen = nearest(fit(q + y, TO), f, k) == q
    b = (ok & frozen).to(tl.float64)
    x, y, slope = x.to(tl.float64), y.to(tl.float64), slope.to(tl.float64)
    product = slope * y
    gain = tl.where(product < 0, -product, 0.0)
    tile = this_tile() * MANY + tl.arange(0, MANY)
    at, there = scores + 8 * tile, tile * SIZE < n
    tl.store(at, trees(b, K, LEVELS, MANY), there)
    tl.store(at + 1, trees(gain, K, LEVELS, MANY), there)
    tl.store(at + 2, trees(b * gain, K, LEVELS, MANY), there)
    tl.store(at + 3, trees(tl.abs(slope), K, LEVELS, MANY), there)
    tl.store(at + 4, trees(tl.abs(y), K, LEVELS, MANY), there)
    tl.store(at + 5, trees(tl.abs(x), K, LEVELS, MANY), there)
    tl.store(at + 6, trees(tl.abs(slope * x), K, LEVELS, MANY), there)
    tl.store(at + 7, trees(tl.abs(product), K, LEVELS, MANY), there)
