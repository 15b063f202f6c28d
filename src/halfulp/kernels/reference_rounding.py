"""The obvious rounding: NumPy, one idea a line, no speed. It defines the others.

Everything is done on magnitudes by *index* (see :mod:`halfulp.numbers.grids`): the codes around a
value are ``value_of(n)`` and ``value_of(n + 1)`` with ``n = index_of(value)``. Arithmetic is
in float64, in which every step below is exact for float32, bfloat16 and float16 containers,
and for float64 containers wherever the element set itself is used (no moving scale).
:mod:`halfulp.kernels.reference` stands on it: audits, write-backs and scores.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError
from halfulp.numbers.containers import Container, container
from halfulp.numbers.elements import index_of, value_of
from halfulp.numbers.grids import Grid
from halfulp.numbers.scaling import Scaling
from halfulp.numbers.streams import Stream

Array = npt.NDArray[Any]

NEAREST, STOCHASTIC, DEADZONE = 0, 1, 2
MODES = {"nearest": NEAREST, "stochastic": STOCHASTIC, "deadzone": DEADZONE}


# ---- the element set ----------------------------------------------------------------------


def exponent_of(magnitude: Array) -> Array:
    """Return e of m * 2**e with m in [0.5, 1)."""
    return np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)


def limits(x: Array, grid: Grid) -> tuple[Array, Array]:
    """Clamped magnitude, and the largest magnitude on that side of zero."""
    limit = np.where(np.signbit(x), -grid.lo, grid._fixed()[1])
    return np.minimum(np.abs(x), limit), limit


def round_elements(x: Array, grid: Grid, mode: int = NEAREST, stream: Stream | None = None) -> Array:
    """Round float64 values to the element set; non-finite values are handed back."""
    finite = np.isfinite(x)
    a, limit = limits(np.where(finite, x, 0.0), grid)
    n = index_of(a, grid)
    low, high = value_of(n, grid), value_of(n + 1, grid)
    if mode == NEAREST:
        up = (a - low > high - a) | ((a - low == high - a) & (n % 2 == 1))
    else:
        assert stream is not None
        up = stochastic_up((a - low) / (high - low), stream)
    r = np.where(up, high, low)
    assert bool(np.all(r <= limit))
    return np.where(finite, np.copysign(r, x), x)


def stochastic_up(fraction: Array, stream: Stream) -> Array:
    """U < fraction, digit by digit of the stream's base: see :mod:`halfulp.numbers.streams`."""
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
        exponent = np.clip(exponent_of(biggest) - 1 - emax, -127, 127)
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
    from halfulp.numbers.grids import grid as named

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


def scales(x: Array, grid: Grid, box: Any = None) -> Array:
    """The scales of a tensor, one a segment. ``box``: its container, if not that of the array."""
    assert grid.scaling is not None
    return scales_from(segment_stats(x, grid.scaling), grid, box or x.dtype)


def contained(x: Array, box: Any = None) -> Array:
    """Float32 values rounded to their container; NumPy has no bfloat16 of its own."""
    if box is None or container(box).name != "bfloat16":
        return x if box is None else x.astype(container(box).name).astype(x.dtype)
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    even = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), even.view(np.float32), x)


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
        r = round_scaled(x.astype(np.float64), each, g, mode, stream)
    return r.astype(x.dtype)


def round_scaled(x: Array, scale: Array, grid: Grid, mode: int, stream: Stream | None) -> Array:
    """Round x to element * scale.

    The float64 quotient can only hide on which side of a midpoint x lies by landing on the midpoint itself;
    there, midpoint * scale decides. With the scales that a grid makes (24 bits at most) that cannot happen; a
    given scale of all 53 bits leaves a tie where the rounded product is x.
    """
    with np.errstate(over="ignore"):
        ratio = x / scale
    beyond = np.isfinite(x) & np.isinf(ratio)  # it saturates like any other large value
    ratio = np.where(beyond, np.copysign(np.finfo(np.float64).max, ratio), ratio)
    r = round_elements(ratio, grid, mode, stream)
    if mode == NEAREST:
        a, _ = limits(np.where(np.isfinite(ratio), ratio, 0.0), grid)
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
    """Find the integers that are codes of the grid."""
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
