"""The obvious kernels: NumPy, one idea a line, no speed. They define the others.

Everything is done on magnitudes by *index* (see :mod:`halfulp.grids`): the codes around a
value are ``value_of(n)`` and ``value_of(n + 1)`` with ``n = index_of(value)``. Arithmetic is
in float64, in which every step below is exact for float32, bfloat16 and float16 containers,
and for float64 containers wherever the element set itself is used (no moving scale).

Tiles are runs of consecutive coordinates; counts and sums come per tile. A float sum over a
tile is a *halving tree* over the tile padded with zeros (:func:`tile_sum`): a fixed order that
NumPy, a CPU vector unit and a GPU can all follow, so results are equal to the last bit everywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.elements import index_of, value_of
from halfulp.errors import UsageError
from halfulp.grids import Container, Grid, Scaling, container
from halfulp.streams import Stream

Array = npt.NDArray[Any]

TILE = 768
"""Coordinates of a tile: of those that audits and write-backs count by, always, since there it is only a unit
of work; of those that are scored, chosen by a mask and given masters, unless another size is asked for."""

NEAREST, STOCHASTIC, DEADZONE = 0, 1, 2
MODES = {"nearest": NEAREST, "stochastic": STOCHASTIC, "deadzone": DEADZONE}

AUDIT_COUNTS = ("frozen", "symmetric", "endpoint", "subnormal", "zero_code", "never_moved")
"""Per tile and grid: proposals that nearest rounding throws away; that the symmetric half-gap
would throw away; codes at the ends of the range, below the smallest normal but not zero, zero;
coordinates that no step so far has moved (zero unless they are followed)."""
SHARED_COUNTS = ("zero_proposal", "nonfinite")
"""Per tile, for all grids: proposals equal to zero; coordinates with a non-finite weight or proposal."""
AUDIT_SUMS = ("weight_sq", "proposal_sq")
WRITE_COUNTS = ("frozen", "zero_proposal", "endpoint", "nonfinite", "never_moved")
WRITE_SUMS = ("weight_abs", "proposal_abs", "proposal_sq", "arrived", "written_sq")
ARRIVED = ("arrived", "written_sq")
"""With u the change that is written: <u, d> and <u, u>. Over <d, d>, the first is the gain."""
SCORES = ("F", "L", "C", "G", "U", "W", "T", "P")
"""Freeze, leverage max(0, -g u), combined freeze * leverage, |g|, |u|, |w|, |g w|, |g u|."""

PHASE_ONE = 1 << 16
"""Fixed-point one of the uniform-phase sum."""


# ---- the element set ----------------------------------------------------------------------


def _exponent_of(magnitude: Array) -> Array:
    return np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)


def _limits(x: Array, grid: Grid) -> tuple[Array, Array]:
    """Clamped magnitude, and the largest magnitude on that side of zero."""
    limit = np.where(np.signbit(x), -grid.lo, grid._fixed()[1])
    return np.minimum(np.abs(x), limit), limit


def round_elements(x: Array, grid: Grid, mode: int = NEAREST, stream: Stream | None = None) -> Array:
    """Round float64 values to the element set; non-finite values are handed back."""
    finite = np.isfinite(x)
    a, limit = _limits(np.where(finite, x, 0.0), grid)
    n = index_of(a, grid)
    low, high = value_of(n, grid), value_of(n + 1, grid)
    if mode == NEAREST:
        up = (a - low > high - a) | ((a - low == high - a) & (n % 2 == 1))
    else:
        assert stream is not None
        up = _stochastic_up((a - low) / (high - low), stream)
    r = np.where(up, high, low)
    assert bool(np.all(r <= limit))
    return np.where(finite, np.copysign(r, x), x)


def _stochastic_up(fraction: Array, stream: Stream) -> Array:
    """U < fraction, digit by digit of the stream's base: see :mod:`halfulp.streams`."""
    up = np.zeros(fraction.shape, dtype=bool)
    open_ = np.flatnonzero(fraction > 0)
    rest = fraction.reshape(-1)[open_]
    level = 0
    while open_.size:
        scaled = rest * 2.0**stream.bits
        digit = np.floor(scaled)
        words = stream.words_of(open_, level).astype(np.float64)
        up.reshape(-1)[open_[words < digit]] = True
        tied = (words == digit) & (scaled > digit)
        open_, rest, level = open_[tied], (scaled - digit)[tied], level + 1
    return up


# ---- scales ----------------------------------------------------------------------------------


def segment_ids(shape: tuple[int, ...], scaling: Scaling) -> Array:
    """The segment of every element of a flattened tensor."""
    row, length = scaling.segment_length(shape)
    per_row = math.ceil(row / length)
    i = np.arange(math.prod(shape), dtype=np.int64)
    return i // row * per_row + i % row // length


def segment_stats(x: Array, scaling: Scaling) -> Array:
    """Per segment: largest magnitude, largest value, sum of magnitudes, count; finite values only."""
    ids = segment_ids(x.shape, scaling)
    flat = x.reshape(-1).astype(np.float64)
    stats = np.zeros((scaling.segments(x.shape), 4))
    stats[:, 1] = -np.inf
    keep = np.isfinite(flat)
    np.maximum.at(stats[:, 0], ids[keep], np.abs(flat[keep]))
    np.maximum.at(stats[:, 1], ids[keep], flat[keep])
    np.add.at(stats[:, 2], ids[keep], np.abs(flat[keep]))
    np.add.at(stats[:, 3], ids[keep], 1.0)
    return stats


def scales_from(stats: Array, grid: Grid, dtype: Any) -> Array:
    """The rule of a moving grid: statistics of segments to scales. Every kernel calls this one.

    A segment without a non-zero value has scale 1: all its codes are zero.
    """
    assert grid.scaling is not None and grid.largest is not None
    s, top = grid.scaling, grid.largest
    biggest, signed, total, count = stats.T
    if s.rule == "given":
        return np.full(len(stats), _short(np.array(s.scale), grid, dtype))
    if s.rule == "mx":
        emax = math.frexp(top)[1] - 1
        exponent = np.clip(_exponent_of(biggest) - 1 - emax, -127, 127)
        exponent = np.where(biggest > 0, exponent, -127)
        return np.asarray(np.ldexp(1.0, exponent))
    if s.rule == "nv":
        return _nv_scales(biggest, grid, container(dtype))
    if s.rule == "absmax":
        scale = biggest / top
    elif s.rule == "absmean":  # a mean is at most the largest, also where a sum of doubles has no room
        scale = np.where(np.isinf(total), biggest, total / np.maximum(count, 1.0)) / top
    else:  # dqt: the signed maximum; where it is not positive, the largest magnitude
        scale = np.where(signed > 0, signed, biggest) / top
    return np.where(scale > 0, _short(scale, grid, dtype), 1.0)


def _short(scale: Array, grid: Grid, dtype: Any) -> Array:
    """The scale rounded (nearest even) to so few bits that element * scale is exact in the container.

    Where the container's smallest number leaves fewer bits than that, it is rounded down instead, to at least
    one: then the largest magnitude still gets the largest code, and rounding twice is rounding once. So it is
    where the largest code would be beyond the container's largest number: finite values stay finite.
    """
    box = container(dtype)
    assert grid.largest is not None
    most = box.largest / max(grid.largest, -grid.lo)
    scale = np.minimum(scale, most)
    bits = min(box.mantissa + 1, 24) - grid._needed_bits
    exponent = np.frexp(scale)[1] - bits
    unit = np.maximum(exponent, box.emin - box.mantissa)
    scaled, nearest = np.ldexp(scale, -unit), np.rint(np.ldexp(scale, -unit))
    with np.errstate(over="ignore"):
        near = (exponent == unit) & (np.ldexp(nearest, unit) <= most)
    whole = np.where(near, nearest, np.maximum(np.floor(scaled), 1.0))
    return np.asarray(np.ldexp(whole, unit))


def _nv_scales(biggest: Array, grid: Grid, box: Container) -> Array:
    """e4m3 block scales under a power-of-two tensor factor that lets the largest block just fit."""
    from halfulp.grids import grid as named

    e4m3 = named("e4m3")
    assert e4m3.largest is not None and grid.largest is not None
    top = grid.largest
    peak = float(np.max(biggest, initial=0.0))
    if peak == 0.0:
        return np.ones(len(biggest))
    factor = math.ldexp(1.0, math.frexp(e4m3.largest * top / peak)[1] - 1)
    # Two choices make rounding twice rounding once. The tensor factor is the one that the *rounded* largest
    # block asks for; and a subnormal block scale is rounded down, to at least one quantum, so that the
    # largest magnitude of a block gets the largest code, as it does with a normal scale.
    if float(round_elements(np.array(peak * factor / top), e4m3)) <= e4m3.largest / 2:
        factor *= 2.0
    finest = math.ldexp(1.0, box.emin - box.mantissa)  # the container must hold every element * scale
    factor = min(factor, e4m3.quantum * grid.quantum / finest)
    wanted = biggest * factor / top
    small = np.maximum(np.floor(wanted / e4m3.quantum), 1.0) * e4m3.quantum
    normal = round_elements(wanted, e4m3)
    # Near the container's largest number, a block scale that was rounded up would make the largest code
    # infinite; the one below never does.
    below = value_of(np.maximum(index_of(normal, e4m3) - 1, 0), e4m3)
    normal = np.where(normal * top > box.largest * factor, below, normal)
    return np.where(wanted >= e4m3.smallest_normal, normal, small) / factor


def scales(x: Array, grid: Grid) -> Array:
    """The scales of a tensor, one a segment."""
    assert grid.scaling is not None
    return scales_from(segment_stats(x, grid.scaling), grid, x.dtype)


# ---- rounding -------------------------------------------------------------------------------


def round(
    x: Array,
    grid: Grid,
    mode: int = NEAREST,
    stream: Stream | None = None,
    scale: Array | None = None,
) -> Array:
    """Round a tensor; same shape and dtype."""
    g = grid.within(x.dtype)
    if g.scaling is None:
        r = round_elements(x.astype(np.float64), g, mode, stream)
    else:
        scale = scales(x, g) if scale is None else scale
        each = scale[segment_ids(x.shape, g.scaling)].reshape(x.shape)
        r = _round_scaled(x.astype(np.float64), each, g, mode, stream)
    return r.astype(x.dtype)


def _round_scaled(x: Array, scale: Array, grid: Grid, mode: int, stream: Stream | None) -> Array:
    """Round x to element * scale. The float64 quotient can only hide on which side of a midpoint
    x lies by landing on the midpoint itself; there, midpoint * scale decides. With the scales that a
    grid makes (24 bits at most) that cannot happen; a given scale of all 53 bits leaves a tie where the
    rounded product is x."""
    with np.errstate(over="ignore"):
        ratio = x / scale
    beyond = np.isfinite(x) & np.isinf(ratio)  # it saturates like any other large value
    ratio = np.where(beyond, np.copysign(np.finfo(np.float64).max, ratio), ratio)
    r = round_elements(ratio, grid, mode, stream)
    if mode == NEAREST:
        a, _ = _limits(np.where(np.isfinite(ratio), ratio, 0.0), grid)
        n = index_of(a, grid)
        low, high = value_of(n, grid), value_of(n + 1, grid)
        middle = (a == (low + high) / 2) & (a == np.abs(ratio))
        side = np.abs(x) - a * scale
        r = np.where(middle & (side < 0), np.copysign(low, x), r)
        r = np.where(middle & (side > 0), np.copysign(high, x), r)
    return np.where(np.isfinite(x), r * scale, x)


def encode(x: Array, grid: Grid, scale: Array | None = None) -> Array:
    """Codes as int64: sign and index for floats, two's complement for integers."""
    bad = ~np.isfinite(x)
    if bad.any():
        raise UsageError(
            f"cannot encode {int(bad.sum())} non-finite value(s), the first at flat index "
            f"{int(np.flatnonzero(bad)[0])}: grid {grid.name} has no code for them."
        )
    if grid.scaling is not None:
        scale = scales(x, grid) if scale is None else scale
        x = x / scale[segment_ids(x.shape, grid.scaling)].reshape(x.shape)
    r = round_elements(x, grid)
    if grid.integer:
        return np.asarray(np.rint(r / grid.quantum).astype(np.int64) & (2**grid.bits - 1))
    return np.asarray(index_of(np.abs(r), grid) | (np.signbit(r).astype(np.int64) << (grid.bits - 1)))


def is_code(codes: Array, grid: Grid) -> Array:
    """Which integers are codes of the grid."""
    half = 1 << (grid.bits - 1)
    x = _decoded(codes, grid)
    return np.asarray((codes >= 0) & (codes < 2 * half) & (x >= grid.lo) & (x <= grid._fixed()[1]))


def _decoded(codes: Array, grid: Grid) -> Array:
    half = 1 << (grid.bits - 1)
    if grid.integer:
        return np.where(codes >= half, codes - 2 * half, codes) * grid.quantum
    return value_of(codes & (half - 1), grid) * np.where(codes & half, -1.0, 1.0)


def decode(codes: Array, grid: Grid, scale: Array | None = None) -> Array:
    """Values as float64; a code outside the grid is refused."""
    codes = codes.astype(np.int64)
    wrong = ~is_code(codes, grid)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise UsageError(
            f"{int(wrong.sum())} code(s) are not of grid {grid.name}; the first is "
            f"{int(codes.reshape(-1)[at])} at flat index {at}."
        )
    x = _decoded(codes, grid)
    if grid.scaling is not None and scale is not None:
        x = x * scale[segment_ids(x.shape, grid.scaling)].reshape(x.shape)
    return np.asarray(x)


# ---- sums over tiles --------------------------------------------------------------------------


def tiles_of(n: int, tile: int = TILE) -> int:
    """How many tiles cover n coordinates."""
    return -(-n // tile)


def tree_size(tile: int) -> int:
    """What a tile is padded to before it is summed: the next 3 * 2**k.

    >>> [tree_size(n) for n in (1, 5, 96, 100, 768)]
    [3, 6, 96, 192, 768]
    """
    return int(3 * 2 ** (-(-tile // 3) - 1).bit_length())


def tiled(x: Array, tile: int = TILE) -> Array:
    """A flattened array as (tiles, tile), padded with zeros."""
    flat = x.reshape(-1)
    padded = np.zeros(tiles_of(flat.size, tile) * tile, dtype=x.dtype)
    padded[: flat.size] = flat
    return padded.reshape(-1, tile)


def tile_sum(x: Array, tile: int = TILE) -> Array:
    """Sum of every tile in float64: halve and add from 3 * 2**k down to 3, then left to right."""
    rows = tiled(x.astype(np.float64), tile)
    t = np.zeros((len(rows), tree_size(tile)))  # more zeros would change nothing: the first half stays
    t[:, :tile] = rows
    while t.shape[1] > 3:
        half = t.shape[1] // 2
        t = t[:, :half] + t[:, half:]
    return np.asarray(t[:, 0] + t[:, 1] + t[:, 2])


def arrival(q: Array, r: Array, d: Array) -> Array:
    """How much of the proposals d arrives where r is written over q: (tiles, ARRIVED).

    The change r - q and the products are of the working type. One factor is first multiplied by a power of
    two, the inverse of the binade of the tile's largest proposal, so that no product leaves the range. The
    halving tree of :func:`tile_sum` adds in the working type down to 48 partial sums, and in float64 from
    there.
    """
    u = tiled(r - q)
    proposed = tiled(d.astype(u.dtype))
    bias = 127 if u.dtype == np.float32 else 1023
    widest = np.abs(proposed).max(axis=1, keepdims=True).astype(np.float64)
    binade = np.clip(np.frexp(widest)[1] - 1, -bias, bias - 1)
    scale = np.where(widest == 0, 1.0, np.ldexp(1.0, -binade))
    shifted = u * scale.astype(u.dtype)
    sums = []
    for t in (shifted * proposed, shifted * u):
        while t.shape[1] > 3:
            half = t.shape[1] // 2
            t = t[:, :half] + t[:, half:]
            t = t.astype(np.float64) if half == 48 else t
        sums.append((t[:, 0] + t[:, 1] + t[:, 2] + 0.0) * (1.0 / scale[:, 0]))  # never -0
    return np.stack(sums, axis=1)


def tile_count(x: Array) -> Array:
    return np.asarray(tiled(x.astype(np.int32)).sum(axis=1, dtype=np.int32))


# ---- audit ------------------------------------------------------------------------------------


def written(q: Array, z: Array, grid: Grid, scale: Array | None = None) -> Array:
    """Nearest write-back of z over q: the scale of a moving grid follows its rule."""
    g = grid.within(q.dtype)
    if g.scaling is not None and scale is None:
        scale = scales(q if g.scaling.from_old else z, g)
    return round(z, g, scale=scale)


def audit(
    w: Array,
    d: Array,
    grids: list[Grid],
    phase: bool = True,
    moved: Array | None = None,
    stay: Array | None = None,
) -> dict[str, Array]:
    """What each grid would do to proposals d at weights w: counts and sums per tile.

    ``counts`` is (tiles, grids, AUDIT_COUNTS), ``shared`` (tiles, SHARED_COUNTS), ``sums``
    (tiles, AUDIT_SUMS), ``arrived`` (tiles, grids, ARRIVED) and ``phase`` (tiles, grids), in units of
    1 / PHASE_ONE.
    A coordinate with a non-finite weight or proposal enters only the non-finite count.

    ``moved`` (grids, bytes of bits) and ``stay`` (grids, coordinates) follow every coordinate over the
    steps and are updated in place: which ones nearest rounding ever moved, and with what probability
    stochastic rounding never did. The sums of ``stay`` per tile come as ``expected``.
    """
    flat_w, flat_d = w.reshape(-1), d.reshape(-1)
    ok = np.isfinite(flat_w) & np.isfinite(flat_d)
    safe_w, safe_d = np.where(ok, flat_w, 0).astype(w.dtype), np.where(ok, flat_d, 0).astype(d.dtype)
    n_tiles = tiles_of(flat_w.size)
    counts = np.zeros((n_tiles, len(grids), len(AUDIT_COUNTS)), dtype=np.int32)
    phases = np.zeros((n_tiles, len(grids)), dtype=np.int64)
    expected = np.zeros((n_tiles, len(grids)))
    arrived = np.zeros((n_tiles, len(grids), len(ARRIVED)))
    for k, grid in enumerate(grids):
        g = grid.within(w.dtype)
        shaped = safe_w.reshape(w.shape)
        scale = None if g.scaling is None else scales(shaped, g)
        q = round(shaped, g, scale=scale)
        with np.errstate(over="ignore"):
            z = (q + safe_d.reshape(w.shape)).astype(w.dtype)
        r = written(q, z, g)
        frozen = r.reshape(-1) == q.reshape(-1)
        work = np.float64 if w.dtype == np.float64 else np.float32
        arrived[:, k] = arrival(q.reshape(-1).astype(work), r.reshape(-1).astype(work), safe_d)
        unit = _unit_at(safe_w, g, scale, w.shape)
        element = np.abs(q.reshape(-1).astype(np.float64)) / _each(scale, g, w.shape)
        top = np.where(np.signbit(q.reshape(-1)), -g.lo, g._fixed()[1])
        columns = (
            frozen,
            np.abs(safe_d.astype(np.float64)) < unit / 2,
            element >= top,
            (element > 0) & (element < (0.0 if g.integer else g.smallest_normal)),
            element == 0,
        )
        for c, column in enumerate(columns):
            counts[:, k, c] = tile_count(column & ok)
        if moved is not None:
            moved[k] |= np.packbits(~frozen, bitorder="little")
            counts[:, k, 5] = tile_count(np.unpackbits(moved[k], count=frozen.size, bitorder="little") == 0)
        if stay is not None:
            stay[k] *= stay_probability(q, z, g).reshape(-1).astype(stay.dtype)
            expected[:, k] = tile_sum(stay[k])
        if phase:
            phases[:, k] = tiled(phase_points(safe_w, safe_d, g.mantissa) * ok).sum(axis=1)
    wide_w, wide_d = safe_w.astype(np.float64), safe_d.astype(np.float64)
    return {
        "counts": counts,
        "shared": np.stack([tile_count((flat_d == 0) & ok), tile_count(~ok)], axis=1),
        "sums": np.stack([tile_sum(wide_w * wide_w), tile_sum(wide_d * wide_d)], axis=1),
        "arrived": arrived,
        "phase": phases,
        "expected": expected,
    }


def stay_probability(q: Array, z: Array, grid: Grid) -> Array:
    """The probability that stochastic rounding of z stores q again, in float64."""
    g = grid.within(q.dtype)
    each: Any = 1.0
    if g.scaling is not None:
        scale = scales(q if g.scaling.from_old else z, g)
        each = scale[segment_ids(q.shape, g.scaling)].reshape(q.shape)
    v = z.astype(np.float64) / each
    a, _ = _limits(v, g)
    n = index_of(a, g)
    low, high = value_of(n, g), value_of(n + 1, g)
    part = (a - low) / (high - low)
    at = np.where(v < 0, -1.0, 1.0) * q.astype(np.float64) / each
    return np.where(at == low, 1.0 - part, np.where(at == high, part, 0.0))


def _each(scale: Array | None, grid: Grid, shape: tuple[int, ...]) -> Array | float:
    return 1.0 if scale is None or grid.scaling is None else scale[segment_ids(shape, grid.scaling)]


def _unit_at(w: Array, grid: Grid, scale: Array | None, shape: tuple[int, ...]) -> Array:
    """The symmetric spacing u(w) = 2**(max(floor(log2 |w|), emin) - m), times the scale."""
    emin, _ = grid._fixed()
    each = _each(scale, grid, shape)
    exponent = _exponent_of(w.astype(np.float64) / each) - 1
    exponent = np.where(w == 0, emin, np.maximum(exponent, emin))
    return np.asarray(np.ldexp(1.0, exponent - grid.mantissa) * each)


def log2_ratio(w: Array, d: Array) -> Array:
    """log2(|w| / |d|) in fixed point, units of 1 / PHASE_ONE, for finite non-zero values.

    Done in float32 by exponent and a polynomial in the mantissa, without fused multiply-add, so
    that every kernel gives the same integer; the error is below 1.6e-5, about one unit.
    """
    return _log2_fixed(w) - _log2_fixed(d)


LOG2_POLYNOMIAL = (
    1.4426898956298828, -0.7211657762527466, 0.4786836802959442, -0.34730100631713867,
    0.24186457693576813, -0.13752110302448273, 0.05205884575843811, -0.009309123270213604,
)  # fmt: skip
"""Coefficients of log2(1 + t) / t on [0, 1): a minimax fit, exact in float32."""


def _log2_fixed(x: Array) -> Array:
    fraction, exponent = np.frexp(np.abs(x).astype(np.float64))
    t = (2.0 * fraction - 1.0).astype(np.float32)  # mantissa - 1, in [0, 1]
    p = np.full(x.shape, LOG2_POLYNOMIAL[-1], dtype=np.float32)
    for coefficient in reversed(LOG2_POLYNOMIAL[:-1]):
        p = p * t + np.float32(coefficient)
    points = np.rint(p * t * np.float32(PHASE_ONE)).astype(np.int64)
    return np.asarray((exponent.astype(np.int64) - 1) * PHASE_ONE + points)


def phase_points(w: Array, d: Array, mantissa: int) -> Array:
    """clip(-log2 rho_i, 0, 1) in fixed point, with rho_i = |d| / (2**-(m+1) |w|).

    A zero proposal is surely frozen (1); a proposal at a zero weight surely not (0).
    """
    both = (w != 0) & (d != 0)
    ratio = log2_ratio(np.where(both, w, 1), np.where(both, d, 1)) - (mantissa + 1) * PHASE_ONE
    points = np.clip(ratio, 0, PHASE_ONE)
    return np.where(both, points, np.where(d == 0, PHASE_ONE, 0)).astype(np.int64)


# ---- write-back ---------------------------------------------------------------------------------


def write_back(
    q: Array,
    z: Array,
    grid: Grid,
    mode: int = NEAREST,
    stream: Stream | None = None,
    moved: Array | None = None,
    scale: Array | None = None,
    carry: Array | None = None,
    carry_in: bool = True,
) -> tuple[Array, dict[str, Array]]:
    """The next stored value of every coordinate, and what happened, per tile.

    ``q`` is stored, ``z`` proposed. Deadzone mode is nearest, except where a non-zero proposal
    would leave the code unchanged: there it is stochastic. A non-finite proposal leaves the
    stored value as it is and is counted. ``moved`` (one bit a coordinate, the lowest bit of a
    byte first) is updated in place; without it nothing counts as never moved. ``carry`` takes what
    was not written, except beyond the ends of the range, where it could never be; with ``carry_in``
    it is first added to the proposal.
    """
    g = grid.within(q.dtype)
    ok = np.isfinite(z)
    if carry is not None and carry_in:
        with np.errstate(over="ignore", invalid="ignore"):
            z = np.where(np.isfinite(z + carry), z + carry, z)
    if g.scaling is not None and scale is None:
        scale = scales(q if g.scaling.from_old else z, g)
    safe = np.where(ok, z, q)
    r = round(safe, g, NEAREST if mode == DEADZONE else mode, stream, scale)
    if mode == DEADZONE:
        dead = (r == q) & (safe != q)
        r = np.where(dead, round(safe, g, STOCHASTIC, stream, scale), r)
    r = np.where(ok, r, q)
    flat_q, flat_r, flat_ok = q.reshape(-1), r.reshape(-1), ok.reshape(-1)
    same = flat_r == flat_q
    if moved is None:
        never = np.zeros(flat_q.size, dtype=bool)
    else:
        moved |= np.packbits(~same & flat_ok, bitorder="little")
        never = np.unpackbits(moved, count=flat_q.size, bitorder="little") == 0
    element = np.abs(flat_r.astype(np.float64)) / _each(scale, g, q.shape)
    top = np.where(np.signbit(flat_r), -g.lo, g._fixed()[1])
    if carry is not None:
        end = ((element >= top) & (np.abs(safe) >= np.abs(r)).reshape(-1)).reshape(q.shape)
        carry[ok] = np.where(end, 0, safe - r)[ok]
    columns = (same & flat_ok, (safe == q).reshape(-1) & flat_ok, (element >= top) & flat_ok, ~flat_ok, never)
    d = np.where(ok, safe.astype(np.float64) - q.astype(np.float64), 0.0)
    u = np.where(ok, r.astype(np.float64) - q.astype(np.float64), 0.0)
    sums = (np.where(ok, np.abs(q), 0.0), np.abs(d), d * d, u * d, u * u)
    return r, {
        "counts": np.stack([tile_count(c) for c in columns], axis=1),
        "sums": np.stack([tile_sum(s) for s in sums], axis=1),
    }


# ---- scores ---------------------------------------------------------------------------------------


def score(w: Array, g: Array, u: Array, grid: Grid, tile: int = TILE) -> Array:
    """The per-tile sums behind every allocation score (paper, appendix E): (tiles, SCORES).

    A coordinate with a non-finite weight, gradient or proposal contributes nothing.
    """
    ok = np.isfinite(w) & np.isfinite(g) & np.isfinite(u)
    w, g, u = (np.where(ok, v, 0).astype(v.dtype) for v in (w, g, u))
    resolved = grid.within(w.dtype)
    q = round(w, resolved)
    with np.errstate(over="ignore"):
        z = (q + u).astype(w.dtype)
    b = ((written(q, z, resolved) == q) & ok).astype(np.float64)
    w64, g64, u64 = (v.astype(np.float64) for v in (w, g, u))
    gain = np.where(g64 * u64 < 0, -(g64 * u64), 0.0)
    columns = (b, gain, b * gain, np.abs(g64), np.abs(u64), np.abs(w64), np.abs(g64 * w64), np.abs(g64 * u64))
    return np.stack([tile_sum(c, tile) for c in columns], axis=1)
