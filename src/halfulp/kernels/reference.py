"""Define all kernels by slow and obvious NumPy code, one idea per line.

They round as :mod:`~halfulp.kernels.reference_rounding` does, whose names are here too. Tiles are runs of
consecutive coordinates; counts and sums come per tile. A float sum over a tile is a *halving tree* over the
tile padded with zeros (:func:`tile_sum`): a fixed order that NumPy, a CPU vector unit and a GPU can all
follow, so results are equal to the last bit everywhere.

**When an update is lost.** A step proposes d at the stored value q and writes r. The coordinate is *frozen*
if nothing of the proposal is written:

* where scales are fixed, if the decoded value stays, r == q (-0 equals +0);
* where scales are computed from the data (``grid.scaling.moves``), if the *code* stays, that is the element
  value / scale, each value divided by its own scale. A scale that moves changes every decoded value, whether
  or not anything was written to it. Two more coordinates are frozen there. One whose decoded value stays:
  an MX block whose exponent moved has another code for the same value. And one whose proposal is zero:
  whatever the scale does to it is no update.

An update is *lost* if its proposal is not zero and the coordinate is frozen. Zero proposals are frozen on
every grid, so lost = frozen - zero proposals, exactly. *Dragged* are frozen coordinates whose decoded value
changed all the same (r != q), because the scale moved: frozen - dragged counts equal decoded values.
:func:`unchanged` is this definition; every count, event, bit and score asks it or its twins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.kernels.reference_rounding import (
    DEADZONE,
    MODES,
    NEAREST,
    STOCHASTIC,
    contained,
    decode,
    encode,
    exponent_of,
    is_code,
    limits,
    round,
    round_elements,
    round_scaled,
    scales,
    scales_from,
    segment_ids,
    segment_stats,
    stochastic_up,
)
from halfulp.numbers.elements import index_of, value_of
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream

__all__ = [
    "ARRIVED", "AUDIT_COUNTS", "AUDIT_SUMS", "DEADZONE", "LOG2_POLYNOMIAL", "MODES", "NEAREST", "PHASE_ONE",
    "SCORES", "SHARED_COUNTS", "STOCHASTIC", "TILE", "WRITE_COUNTS", "WRITE_SUMS", "arrival", "audit",
    "contained", "decode", "encode", "is_code", "log2_ratio", "phase_points", "round", "round_elements",
    "rule_of_stored", "scales", "scales_from", "score", "segment_ids", "segment_stats", "stay_probability",
    "stochastic_up", "tile_count", "tile_sum", "tiled", "tiles_of", "tree_size", "unchanged", "write_back",
]  # fmt: skip

Array = npt.NDArray[Any]

TILE = 768
"""Coordinates of a tile: of those that audits and write-backs count by, always, since there it is only a unit
of work; of those that are scored, chosen by a mask and given masters, unless another size is asked for."""

AUDIT_COUNTS = ("frozen", "symmetric", "endpoint", "subnormal", "zero_code", "never_moved", "dragged")
"""Per tile and grid: coordinates that nearest rounding leaves frozen; that the symmetric half-gap
would; codes at the ends of the range, below the smallest normal but not zero, zero; coordinates
that were frozen at every step so far (zero unless they are followed); frozen ones whose decoded value
changed because the scale moved."""
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


# ---- the event --------------------------------------------------------------------------------


def rule_of_stored(grid: Grid) -> Grid:
    """The grid whose rule finds the scales of stored values.

    It is the grid itself: the scale of rounded values is the one they were rounded with. Only the mean of
    rounded values is another mean; but a mean is at most the largest magnitude, so the largest code is always
    there, and tells.
    """
    if grid.scaling is None or grid.scaling.rule != "absmean":
        return grid
    return replace(grid, scaling=replace(grid.scaling, rule="absmax"))


def stored_scales(q: Array, grid: Grid, box: Any = None) -> Array:
    """The scales of values that are stored on a moving grid: what packing them would keep beside the codes.

    Values that were drawn by stochastic rounding may have lost the largest code of a segment; they are then
    taken for the nearest codes under the scale that they themselves give, and so are those of ``dqt``, whose
    next write-back has the same scale.
    """
    return scales(q, rule_of_stored(grid), box)


def elements(x: Array, grid: Grid, scale: Array) -> Array:
    """The codes of values under a moving grid's scales, as float64 elements: x / scale, to the nearest."""
    assert grid.scaling is not None
    each = scale[segment_ids(x.shape, grid.scaling)].reshape(x.shape)
    return np.asarray(round_scaled(x.astype(np.float64), each, grid, NEAREST, None) / each)


def unchanged(
    q: Array, r: Array, idle: Array, grid: Grid, scale: Array | None, next_scale: Array | None
) -> Array:
    """Find the coordinates that are frozen when r is written over q, as defined at the top of this module.

    ``idle`` marks zero proposals. ``scale`` and ``next_scale`` are the scales of q and of r.
    """
    same = np.asarray(r == q)
    if grid.scaling is None or not grid.scaling.moves:
        return same
    assert scale is not None and next_scale is not None
    return np.asarray(same | idle | (elements(q, grid, scale) == elements(r, grid, next_scale)))


# ---- sums over tiles --------------------------------------------------------------------------


def tiles_of(n: int, tile: int = TILE) -> int:
    """Return the number of tiles that cover n coordinates."""
    return -(-n // tile)


def tree_size(tile: int) -> int:
    """Return the size to which a tile is padded before it is summed: the next 3 * 2**k.

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
    """Measure how much of the proposals d arrives when r is written over q: (tiles, ARRIVED).

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
    """Count the true elements of each tile."""
    return np.asarray(tiled(x.astype(np.int32)).sum(axis=1, dtype=np.int32))


# ---- audit ------------------------------------------------------------------------------------


def next_scales(q: Array, z: Array, grid: Grid, box: Any = None) -> Array | None:
    """The scales of a write-back of z over q, by the grid's rule."""
    return None if grid.scaling is None else scales(q if grid.scaling.from_old else z, grid, box)


def audit(
    w: Array,
    d: Array,
    grids: list[Grid],
    phase: bool = True,
    moved: Array | None = None,
    stay: Array | None = None,
    box: Any = None,
) -> dict[str, Array]:
    """Count what each grid would do to proposals d at weights w, per tile.

    ``counts`` is (tiles, grids, AUDIT_COUNTS), ``shared`` (tiles, SHARED_COUNTS), ``sums``
    (tiles, AUDIT_SUMS), ``arrived`` (tiles, grids, ARRIVED) and ``phase`` (tiles, grids), in units of
    1 / PHASE_ONE.
    A coordinate with a non-finite weight or proposal enters only the non-finite count.

    ``moved`` (grids, bytes of bits) and ``stay`` (grids, coordinates) follow every coordinate over the
    steps and are updated in place: the coordinates that nearest rounding ever moved, and the probability
    that stochastic rounding never did. The sums of ``stay`` per tile are ``expected``. ``box`` is the
    container, if not that of the arrays.
    """
    flat_w, flat_d = w.reshape(-1), d.reshape(-1)
    ok = np.isfinite(flat_w) & np.isfinite(flat_d)
    safe_w, safe_d = np.where(ok, flat_w, 0).astype(w.dtype), np.where(ok, flat_d, 0).astype(d.dtype)
    shape = (tiles_of(flat_w.size), len(grids))
    counts, arrived = np.zeros((*shape, len(AUDIT_COUNTS)), dtype=np.int32), np.zeros((*shape, len(ARRIVED)))
    phases, expected = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    for k, grid in enumerate(grids):
        of_grid = _Audit(safe_w.reshape(w.shape), safe_d.reshape(w.shape), grid.within(box or w.dtype), box)
        for c, column in of_grid.columns().items():
            counts[:, k, c] = tile_count(column.reshape(-1) & ok)
        arrived[:, k] = of_grid.arrived()
        if moved is not None:
            moved[k] |= np.packbits(~of_grid.frozen.reshape(-1), bitorder="little")
            counts[:, k, 5] = tile_count(np.unpackbits(moved[k], count=ok.size, bitorder="little") == 0)
        if stay is not None:
            stay[k] *= of_grid.odds().reshape(-1).astype(stay.dtype)
            expected[:, k] = tile_sum(stay[k])
        if phase:
            phases[:, k] = tiled(phase_points(safe_w, safe_d, grid.mantissa) * ok).sum(axis=1)
    wide_w, wide_d = safe_w.astype(np.float64), safe_d.astype(np.float64)
    return {
        "counts": counts,
        "shared": np.stack([tile_count((flat_d == 0) & ok), tile_count(~ok)], axis=1),
        "sums": np.stack([tile_sum(wide_w * wide_w), tile_sum(wide_d * wide_d)], axis=1),
        "arrived": arrived,
        "phase": phases,
        "expected": expected,
    }


class _Audit:
    """The audit of one grid, for finite proposals d at finite weights w."""

    def __init__(self, w: Array, d: Array, grid: Grid, box: Any) -> None:
        self.w, self.d, self.grid = w, d, grid
        self.scale = None if grid.scaling is None else scales(w, grid, box)
        self.q = round(w, grid, scale=self.scale)
        with np.errstate(over="ignore"):
            self.z = contained((self.q + d).astype(w.dtype), box)
        self.next_scale = next_scales(self.q, self.z, grid, box)
        self.r = round(self.z, grid, scale=self.next_scale)
        self.idle = d == 0
        self.frozen = unchanged(self.q, self.r, self.idle, grid, self.scale, self.next_scale)

    def columns(self) -> dict[int, Array]:
        """Return what is counted, by its place in AUDIT_COUNTS."""
        g, q = self.grid, self.q
        unit = _unit_at(self.w.reshape(-1), g, self.scale, q.shape)
        element = np.abs(q.reshape(-1).astype(np.float64)) / _each(self.scale, g, q.shape)
        top = np.where(np.signbit(q.reshape(-1)), -g.lo, g._fixed()[1])
        return {
            0: self.frozen,
            1: np.abs(self.d.reshape(-1).astype(np.float64)) < unit / 2,
            2: element >= top,
            3: (element > 0) & (element < (0.0 if g.integer else g.smallest_normal)),
            4: element == 0,
            6: self.frozen & (self.r != q),
        }

    def arrived(self) -> Array:
        """Return how much of the proposals arrives."""
        work = np.float64 if self.w.dtype == np.float64 else np.float32
        q, r = (x.reshape(-1).astype(work) for x in (self.q, self.r))
        return arrival(q, r, self.d.reshape(-1))

    def odds(self) -> Array:
        """Return the probability of staying under stochastic rounding."""
        return stay_probability(self.q, self.z, self.idle, self.grid, self.scale, self.next_scale)


def stay_probability(
    q: Array, z: Array, idle: Array, grid: Grid, scale: Array | None, next_scale: Array | None
) -> Array:
    """The probability that stochastic rounding of z leaves a coordinate frozen, in float64."""
    each: Any = 1.0
    if grid.scaling is not None and next_scale is not None:
        each = next_scale[segment_ids(q.shape, grid.scaling)].reshape(q.shape)
    v = z.astype(np.float64) / each
    a, _ = limits(v, grid)
    n = index_of(a, grid)
    low, high = value_of(n, grid), value_of(n + 1, grid)
    part = (a - low) / (high - low)
    side = np.where(v < 0, -1.0, 1.0)
    value = side * q.astype(np.float64) / each
    stays = [value == low, value == high]
    if grid.scaling is not None and grid.scaling.moves:
        assert scale is not None
        code = side * elements(q, grid, scale)
        stays = [idle | s | (code == x) for s, x in zip(stays, (low, high), strict=True)]
    return np.where(stays[0], 1.0 - part, 0.0) + np.where(stays[1], part, 0.0)


def _each(scale: Array | None, grid: Grid, shape: tuple[int, ...]) -> Array | float:
    return 1.0 if scale is None or grid.scaling is None else scale[segment_ids(shape, grid.scaling)]


def _unit_at(w: Array, grid: Grid, scale: Array | None, shape: tuple[int, ...]) -> Array:
    """The symmetric spacing u(w) = 2**(max(floor(log2 |w|), emin) - m), times the scale."""
    emin, _ = grid._fixed()
    each = _each(scale, grid, shape)
    element = w.astype(np.float64) / each  # zero too where the quotient of two doubles is below the smallest
    exponent = np.where(element == 0, emin, np.maximum(exponent_of(element) - 1, emin))
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
    stored: Array | None = None,
    box: Any = None,
) -> tuple[Array, dict[str, Array]]:
    """The next stored value of every coordinate, and what happened, per tile.

    ``q`` is stored, ``z`` proposed. Deadzone mode is nearest, except where a non-zero proposal
    would leave it frozen: there it is stochastic. A non-finite proposal leaves the
    stored value as it is and is counted. ``moved`` (one bit a coordinate, the lowest bit of a
    byte first) is updated in place; without it nothing counts as never moved. ``carry`` takes what
    was not written, except beyond the ends of the range, where it could never be; with ``carry_in``
    it is first added to the proposal. ``scale`` and ``stored``: the scales of what is written, and those that
    q is stored with. By default the grid's rule takes them from the values; q is taken to be stored with the
    ``scale`` that is given. ``box``: the container, if not that of the arrays.
    """
    g = grid.within(box or q.dtype)
    ok = np.isfinite(z)
    if carry is not None and carry_in:
        with np.errstate(over="ignore", invalid="ignore"):
            z = np.where(np.isfinite(z + carry), z + carry, z)
    if g.scaling is not None and stored is None:
        stored = stored_scales(q, g, box) if scale is None else scale
    scale = next_scales(q, z, g, box) if scale is None else scale
    safe = np.where(ok, z, q)
    idle = safe == q
    r = round(safe, g, NEAREST if mode == DEADZONE else mode, stream, scale)
    if mode == DEADZONE:
        dead = unchanged(q, r, idle, g, stored, scale) & ~idle
        r = np.where(dead, round(safe, g, STOCHASTIC, stream, scale), r)
    r = np.where(ok, r, q)
    flat_q, flat_r, flat_ok = q.reshape(-1), r.reshape(-1), ok.reshape(-1)
    same = unchanged(q, r, idle, g, stored, scale).reshape(-1)
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
    columns = (same & flat_ok, idle.reshape(-1) & flat_ok, (element >= top) & flat_ok, ~flat_ok, never)
    d = np.where(ok, safe.astype(np.float64) - q.astype(np.float64), 0.0)
    u = np.where(ok, r.astype(np.float64) - q.astype(np.float64), 0.0)
    sums = (np.where(ok, np.abs(q), 0.0), np.abs(d), d * d, u * d, u * u)
    return r, {
        "counts": np.stack([tile_count(c) for c in columns], axis=1),
        "sums": np.stack([tile_sum(s) for s in sums], axis=1),
    }


# ---- scores ---------------------------------------------------------------------------------------


def score(w: Array, g: Array, u: Array, grid: Grid, tile: int = TILE, box: Any = None) -> Array:
    """The per-tile sums behind every allocation score (paper, appendix E): (tiles, SCORES).

    A coordinate with a non-finite weight, gradient or proposal contributes nothing.
    """
    ok = np.isfinite(w) & np.isfinite(g) & np.isfinite(u)
    w, g, u = (np.where(ok, v, 0).astype(v.dtype) for v in (w, g, u))
    resolved = grid.within(box or w.dtype)
    scale = None if resolved.scaling is None else scales(w, resolved, box)
    q = round(w, resolved, scale=scale)
    with np.errstate(over="ignore"):
        z = contained((q + u).astype(w.dtype), box)
    then = next_scales(q, z, resolved, box)
    r = round(z, resolved, scale=then)
    b = (unchanged(q, r, u == 0, resolved, scale, then) & ok).astype(np.float64)
    w64, g64, u64 = (v.astype(np.float64) for v in (w, g, u))
    gain = np.where(g64 * u64 < 0, -(g64 * u64), 0.0)
    columns = (b, gain, b * gain, np.abs(g64), np.abs(u64), np.abs(w64), np.abs(g64 * w64), np.abs(g64 * u64))
    return np.stack([tile_sum(c, tile) for c in columns], axis=1)
