"""Kernels on tensors: rounding, audit, write-back, scores.

One call, any shape, stride, size and device; the work is done by the NumPy-defined twins in
:mod:`~halfulp.kernels.cpu` (numba) or :mod:`~halfulp.kernels.gpu` (Triton), which agree with
:mod:`~halfulp.kernels.reference` to the last bit. Containers are float64, float32, bfloat16
and float16 (the last through a float32 copy).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.grids import Grid, container
from halfulp.grids import grid as named
from halfulp.kernels import params as _params
from halfulp.kernels import reference
from halfulp.kernels.pool import run
from halfulp.kernels.reference import AUDIT_COUNTS, MODES, SCORES, SHARED_COUNTS, TILE, WRITE_COUNTS, tiles_of
from halfulp.streams import MAX_ELEMENTS, Stream

__all__ = [
    "AUDIT_COUNTS", "SCORES", "SHARED_COUNTS", "TILE", "WRITE_COUNTS",
    "Audit", "Written", "audit", "decode", "encode", "round", "score", "steps", "tiles_of", "write_back",
]  # fmt: skip

Array = npt.NDArray[Any]
Mode = Literal["nearest", "stochastic", "deadzone"]
SPAN = 85 * TILE  # how much of a whole-tensor segment is one unit of work
GRAIN_ELEMENTS = 128 * TILE
_NO_KEY = (np.uint32(0), np.uint32(0), 0)


@dataclass(frozen=True)
class Audit:
    """What :func:`audit` found, per tile.

    ``counts`` (tiles, grids, AUDIT_COUNTS) and ``shared`` (tiles, SHARED_COUNTS) are int32,
    ``sums`` (tiles; squares of weights and proposals) float64, ``phase`` (tiles, grids) int64
    in units of 2**-16, ``expected`` (tiles, grids) float64: the sums of the followed probabilities.
    """

    counts: torch.Tensor
    shared: torch.Tensor
    sums: torch.Tensor
    phase: torch.Tensor
    expected: torch.Tensor
    numel: int

    def frozen(self) -> torch.Tensor:
        """The fraction of coordinates that each grid leaves unchanged."""
        return self.counts[:, :, 0].sum(dim=0, dtype=torch.int64) / max(self.numel, 1)


@dataclass(frozen=True)
class Written:
    """What :func:`write_back` did: the new values, and per tile (WRITE_COUNTS) and sums."""

    out: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor


# ---- tensors as flat arrays ---------------------------------------------------------------------


def _checked(x: torch.Tensor, what: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise UsageError(f"{what} must be a tensor, not {type(x).__name__}.")
    container(x.dtype)
    if x.device.type == "meta":
        raise UsageError(f"{what} is on the meta device: it has no values to work on.")
    return x.detach()


def _same_shape(**tensors: torch.Tensor) -> None:
    first, *rest = tensors.items()
    for name, x in rest:
        if x.shape != first[1].shape or x.device != first[1].device:
            raise UsageError(
                f"{name} and {first[0]} must match: {name} has shape {tuple(x.shape)} on {x.device}, "
                f"{first[0]} has {tuple(first[1].shape)} on {first[1].device}."
            )


def _flat(x: torch.Tensor) -> Array:
    """A tensor's values as one contiguous array: its own memory where possible. bfloat16 comes as
    bit patterns, float16 as a float32 copy."""
    x = x.detach().cpu().contiguous().reshape(-1)
    if x.dtype == torch.bfloat16:
        return np.asarray(x.view(torch.int16).numpy().view(np.uint16))
    return np.asarray(x.float().numpy() if x.dtype == torch.float16 else x.numpy())


def _deliver(result: Array, out: torch.Tensor) -> torch.Tensor:
    """Put a flat result where the caller wants it, unless it is there already."""
    if result.dtype == np.uint16:
        made = torch.from_numpy(result.view(np.int16)).view(torch.bfloat16)
    else:
        made = torch.from_numpy(result)
    if made.data_ptr() != out.data_ptr():
        out.copy_(made.reshape(out.shape))
    return out


def _destination(out: torch.Tensor) -> Array:
    """A flat array to write results for ``out`` into: its own memory where possible."""
    direct = out.device.type == "cpu" and out.is_contiguous() and out.dtype != torch.float16
    if direct:
        return _flat(out)
    return _flat(torch.empty(out.shape, dtype=out.dtype))


def _key(stream: Stream | None, mode: int, numel: int) -> tuple[Any, Any, int]:
    if mode == reference.NEAREST:
        return _NO_KEY
    if not isinstance(stream, Stream):
        raise UsageError(
            "stochastic rounding needs a stream: pass halfulp.Stream(seed=..., name=..., step=...), "
            f"not {stream!r}."
        )
    if stream.offset + numel > MAX_ELEMENTS:
        raise UsageError(f"a stream has 2**58 elements; {stream.offset} + {numel} are too many.")
    k0, k1 = stream.key
    return np.uint32(k0), np.uint32(k1), stream.offset


# ---- grids as numbers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """A resolved grid in the working type of a container."""

    grid: Grid
    work: str
    scaled: bool
    floats: Array
    ints: Array

    @property
    def masks(self) -> Array:
        return _params.masks(self.work)

    @property
    def empty(self) -> Array:
        """An array that tells kernels the working type."""
        return np.empty(0, dtype=self.work)

    def layout(self, shape: tuple[int, ...]) -> tuple[int, int]:
        if self.grid.scaling is None:
            return max(math.prod(shape), 1), max(math.prod(shape), 1)
        return self.grid.scaling.segment_length(shape)


@lru_cache(maxsize=1024)
def _plan(grid: Grid | str | torch.dtype, dtype: torch.dtype) -> _Plan:
    g = named(grid).within(dtype)
    work = _params.working(container(dtype).name)
    p = _params.params(g, work)
    if p.kind != _params.SCALED:
        return _Plan(g, work, False, p.floats, p.ints)
    element = _params.params(replace(g, scaling=None), "float64")
    return _Plan(g, work, True, element.floats, element.ints)


def _narrowing(dtype: torch.dtype) -> int:
    return {torch.bfloat16: 1, torch.float16: 2}.get(dtype, 0)


def _fixed_steps(plan: _Plan, shape: tuple[int, ...], dtype: torch.dtype) -> Array | None:
    """Steps that need no data."""
    s = plan.grid.scaling
    if s is None:
        return np.ones(1)
    if s.moves:
        return None
    return reference.steps_from(np.zeros((s.segments(shape), 4)), plan.grid, dtype)


def _spans(plan: _Plan, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(row, span length, number of spans) over which statistics are gathered."""
    row, length = plan.layout(shape)
    sums = plan.grid.scaling is not None and plan.grid.scaling.rule == "absmean"
    span = SPAN if length == math.prod(shape) and not sums else length
    return row, span, math.prod(shape) // row * math.ceil(row / span) if math.prod(shape) else 0


def _combine(stats: Array, segments: int) -> Array:
    if len(stats) == segments:
        return stats
    top = stats[:, :2].max(axis=0, initial=-np.inf)
    return np.array([[max(top[0], 0.0), top[1], stats[:, 2].sum(), stats[:, 3].sum()]])


def _wanted(grid: Grid) -> int:
    """What the rule of a moving grid needs beside the largest magnitude."""
    from halfulp.kernels import cpu_scaled

    assert grid.scaling is not None
    wants = {"dqt": cpu_scaled.SIGNED, "absmean": cpu_scaled.TOTAL}
    return wants.get(grid.scaling.rule, cpu_scaled.MAGNITUDE)


def _blank_stats(spans: int) -> Array:
    stats = np.zeros((spans, 4))
    stats[:, 1] = -np.inf
    return stats


def _steps_of(x: Array, plan: _Plan, shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    from halfulp.kernels import cpu_scaled

    fixed = _fixed_steps(plan, shape, dtype)
    if fixed is not None:
        return fixed
    assert plan.grid.scaling is not None
    row, span, spans = _spans(plan, shape)
    stats = _blank_stats(spans)
    want = _wanted(plan.grid)
    grain = max(GRAIN_ELEMENTS // span, 1)
    run(cpu_scaled.span_stats, spans, x, row, span, want, plan.masks, plan.empty, stats, grain=grain)
    return reference.steps_from(_combine(stats, plan.grid.scaling.segments(shape)), plan.grid, dtype)


def _given(step: torch.Tensor | None, plan: _Plan, shape: tuple[int, ...]) -> Array | None:
    if step is None:
        return None
    if plan.grid.scaling is None:
        raise UsageError(f"grid {plan.grid.name} has no steps of its own; leave step out.")
    expected = plan.grid.scaling.segments(shape)
    given = np.asarray(step.detach().double().cpu().numpy()).reshape(-1)
    if given.size != expected:
        raise UsageError(
            f"grid {plan.grid.name} has {expected} step(s) for shape {shape}, but {given.size} were given."
        )
    return given


# ---- the four kernels -------------------------------------------------------------------------------


def steps(x: torch.Tensor, grid: Grid | str | torch.dtype) -> torch.Tensor:
    """The steps that a grid's rule takes from a tensor, one a segment, float64 on the CPU."""
    x = _checked(x, "x")
    plan = _plan(grid, x.dtype)
    return torch.from_numpy(_steps_of(_flat(x), plan, tuple(x.shape), x.dtype))


def round(
    x: torch.Tensor,
    grid: Grid | str | torch.dtype,
    stochastic: Stream | None = None,
    *,
    step: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round to the nearest grid value, or stochastically with a stream; non-finite values stay."""
    x = _checked(x, "x")
    plan = _plan(grid, x.dtype)
    mode = reference.NEAREST if stochastic is None else reference.STOCHASTIC
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _same_shape(x=x, out=out)
    shape = tuple(x.shape)
    key = _key(stochastic, mode, x.numel())
    given = _given(step, plan, shape)
    if _on_gpu(x):
        from halfulp.kernels import gpu

        return gpu.round_(x, out, plan.grid, mode, stochastic, given)
    from halfulp.kernels import cpu, cpu_scaled

    flat, result = _flat(x), _destination(out)
    n = tiles_of(flat.size)
    if plan.scaled:
        s = _steps_of(flat, plan, shape, x.dtype) if given is None else given
        run(
            cpu_scaled.round_tiles_scaled, n, flat, result, s, *plan.layout(shape), mode,
            plan.floats, plan.ints, plan.empty, *key,
        )  # fmt: skip
    elif mode == reference.NEAREST and flat.dtype == plan.floats.dtype:
        run(cpu.round_direct, n, flat, result, plan.floats, plan.ints, plan.masks)
    else:
        run(cpu.round_tiles, n, flat, result, mode, plan.floats, plan.ints, plan.masks, *key)
    return _deliver(result, out)


def audit(
    w: torch.Tensor,
    d: torch.Tensor,
    grids: list[Grid] | list[str] | tuple[Grid, ...],
    *,
    after: bool = False,
    phase: bool = True,
    moved: torch.Tensor | None = None,
    stay: torch.Tensor | None = None,
) -> Audit:
    """What each grid would do to one step, all grids in one pass: see :class:`Audit`.

    ``w`` are the weights before the step; ``d`` the proposals or, with ``after=True``, the
    weights after it. ``phase=False`` skips the uniform-phase sums. ``moved`` (uint8, grids x bytes, a bit
    a coordinate) and ``stay`` (grids x coordinates, of the working type, ones at the start) follow every
    coordinate over the steps and are updated in place.
    """
    w, d = _checked(w, "w"), _checked(d, "d")
    _same_shape(w=w, d=d)
    plans = [_plan(g, w.dtype) for g in grids]
    _check_followed(w, len(plans), moved, stay)
    work = _params.working(container(w.dtype).name)
    if _on_gpu(w):
        from halfulp.kernels import gpu

        if moved is not None or stay is not None:
            raise UsageError("following coordinates over steps is a CPU feature: move the tensors there.")
        return Audit(*gpu.audit(w, d, after, [p.grid for p in plans], phase), w.numel())
    from halfulp.kernels import cpu

    flat_w, flat_d = _flat(w), _flat(d)
    n, g = tiles_of(flat_w.size), len(plans)
    counts = np.zeros((n, g, len(AUDIT_COUNTS)), dtype=np.int32)
    shared, sums = np.zeros((n, 2), dtype=np.int32), np.zeros((n, 2))
    phases, expected = np.zeros((n, g), dtype=np.int64), np.zeros((n, g))
    bits = np.empty((0, 0), dtype=np.uint8) if moved is None else moved.numpy()
    odds = np.empty((0, 0), dtype=work) if stay is None else stay.numpy()
    # The phase sum depends on the mantissa alone: the row of a moving grid is there for nothing else.
    rows = [i for i, p in enumerate(plans) if phase or not p.scaled]
    floats, ints = _params.table(tuple(plans[i].grid for i in rows), work)
    run(
        cpu.audit_tiles, n, flat_w, flat_d, after, floats, ints, np.array(rows, dtype=np.int64),
        _params.masks(work), _narrowing(w.dtype), phase, bits, odds, np.int32(1), counts, shared, sums, phases,
        expected,
    )  # fmt: skip
    for i, plan in enumerate(plans):
        if plan.scaled:
            own = (bits[i] if bits.size else bits.reshape(-1), odds[i] if odds.size else odds.reshape(-1))
            counts[:, i], expected[:, i] = _audit_moving(flat_w, flat_d, after, plan, w, *own)
    return Audit(*(torch.from_numpy(a) for a in (counts, shared, sums, phases, expected)), flat_w.size)


def _check_followed(
    w: torch.Tensor, grids: int, moved: torch.Tensor | None, stay: torch.Tensor | None
) -> None:
    work = torch.float64 if w.dtype == torch.float64 else torch.float32
    for what, x, shape, dtype in (
        ("moved", moved, (grids, (w.numel() + 7) // 8), torch.uint8),
        ("stay", stay, (grids, w.numel()), work),
    ):
        if x is not None and (tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous()):
            raise UsageError(
                f"{what} must be a contiguous {dtype} tensor of shape {shape}, not {x.dtype} of {tuple(x.shape)}."
            )


def _steps_of_step(
    w: Array, g: Array, d: Array, after: bool, plan: _Plan, like: torch.Tensor
) -> tuple[Array, Array]:
    """The steps under which w is stored, and those of the write-back of Q(w) + d."""
    from halfulp.kernels import cpu_scaled

    shape = tuple(like.shape)
    fixed = _fixed_steps(plan, shape, like.dtype)
    if fixed is not None:
        return fixed, fixed
    s = plan.grid.scaling
    assert s is not None
    row, span, spans = _spans(plan, shape)

    def gathered(proposed: bool, now: Array, d: Array, after: bool) -> Array:
        stats = _blank_stats(spans)
        run(
            cpu_scaled.step_stats, spans, w, g, d, after, proposed, now, *plan.layout(shape), span, plan.floats,
            plan.ints, plan.masks, _narrowing(like.dtype), _wanted(plan.grid), plan.empty, stats,
            grain=max(GRAIN_ELEMENTS // span, 1),
        )  # fmt: skip
        return reference.steps_from(_combine(stats, s.segments(shape)), plan.grid, like.dtype)

    now = gathered(False, np.ones(1), d, after)
    if s.from_old:  # the steps of Q(w) itself
        still = np.where(np.isfinite(_as_floats(d)), 0, np.nan).astype(plan.work)
        return now, gathered(True, now, still, False)
    return now, gathered(True, now, d, after)


def _as_floats(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def _audit_moving(
    w: Array, d: Array, after: bool, plan: _Plan, like: torch.Tensor, moved: Array, stay: Array
) -> tuple[Array, Array]:
    from halfulp.kernels import cpu_scaled

    now, then = _steps_of_step(w, w, d, after, plan, like)
    counts, expected = np.zeros((tiles_of(w.size), len(AUDIT_COUNTS)), dtype=np.int32), np.zeros(tiles_of(w.size))
    run(
        cpu_scaled.audit_tiles_scaled, len(counts), w, d, after, now, then, *plan.layout(tuple(like.shape)),
        plan.floats, plan.ints, plan.masks, _narrowing(like.dtype), plan.empty, moved, stay, counts, expected,
    )  # fmt: skip
    return counts, expected


def write_back(
    q: torch.Tensor,
    z: torch.Tensor,
    grid: Grid | str | torch.dtype,
    mode: Mode = "nearest",
    stream: Stream | None = None,
    *,
    moved: torch.Tensor | None = None,
    sums: bool | int = False,
    step: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    carry_in: bool = True,
    out: torch.Tensor | None = None,
) -> Written:
    """Replace stored values q by what a policy makes of the proposed ones z, and count.

    ``nearest``, ``stochastic``, or ``deadzone`` (stochastic only where nearest would throw a
    non-zero proposal away). The result goes to ``out``, by default over ``z``. A proposal that is
    not finite leaves the stored value as it is and is counted. ``moved`` is a bit a coordinate
    (``torch.zeros((numel + 7) // 8, dtype=torch.uint8)``), updated in place. ``sums`` adds the
    sums of |q| and |z - q| per tile; a number asks for every so manieth tile only. ``carry`` (of q's shape and dtype) takes what was not written
    and, with ``carry_in``, is added to the proposal first: compensated summation.
    """
    q, z = _checked(q, "q"), _checked(z, "z")
    out = z if out is None else out
    _same_shape(q=q, z=z, out=out)
    if z.dtype != q.dtype or out.dtype != q.dtype:
        raise UsageError(f"q, z and out must have one dtype, not {q.dtype}, {z.dtype} and {out.dtype}.")
    if mode not in MODES:
        raise UsageError(f"unknown write-back mode {mode!r}: expected one of {', '.join(MODES)}.")
    plan, shape, code = _plan(grid, q.dtype), tuple(q.shape), MODES[mode]
    key = _key(stream, code, q.numel())
    size = (q.numel() + 7) // 8
    if moved is not None and (moved.dtype != torch.uint8 or moved.numel() != size or not moved.is_contiguous()):
        raise UsageError(f"moved must be a contiguous uint8 tensor of {size} bytes for {q.numel()} coordinates.")
    if carry is not None:
        _same_shape(q=q, carry=carry)
        if carry.dtype != q.dtype or not carry.is_contiguous() or q.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"carry must be a contiguous tensor of q's dtype, float32 or float64; they are {carry.dtype} "
                f"and {q.dtype}."
            )
    given = _given(step, plan, shape)
    if _on_gpu(q):
        return _write_back_gpu(q, z, out, plan.grid, code, stream, moved, bool(sums), given, carry, carry_in)
    from halfulp.kernels import cpu, cpu_scaled

    flat_q, flat_z, result = _flat(q), _flat(z), _destination(out)
    n = tiles_of(flat_q.size)
    counts, totals = np.zeros((n, len(WRITE_COUNTS)), dtype=np.int32), np.zeros((n, 2))
    bits = np.empty(0, dtype=np.uint8) if moved is None else moved.numpy()
    rest = np.empty(0, dtype=plan.work) if carry is None else _flat(carry)
    tail = (bits, int(sums), rest, carry is not None and carry_in, np.int32(1), counts, totals)
    if plan.scaled:
        if given is None:
            old = plan.grid.scaling is not None and plan.grid.scaling.from_old
            source = flat_z if carry is None or not carry_in else _flat(z + torch.where(torch.isfinite(z + carry), carry, 0))
            given = _steps_of(flat_q if old else source, plan, shape, q.dtype)
        run(
            cpu_scaled.write_tiles_scaled, n, flat_q, flat_z, result, given, *plan.layout(shape), code,
            plan.floats, plan.ints, plan.masks, plan.empty, *key, *tail,
        )  # fmt: skip
    else:
        run(
            cpu.write_tiles, n, flat_q, flat_z, result, code, plan.floats, plan.ints, plan.masks, *key, *tail
        )
    return Written(_deliver(result, out), torch.from_numpy(counts), torch.from_numpy(totals))


def _write_back_gpu(
    q: torch.Tensor, z: torch.Tensor, out: torch.Tensor, grid: Grid, code: int, stream: Stream | None,
    moved: torch.Tensor | None, sums: bool, given: Array | None, carry: torch.Tensor | None, carry_in: bool,
) -> Written:  # fmt: skip
    from halfulp.kernels import gpu

    if carry is None:
        return Written(out, *gpu.write_back(q, z, out, grid, code, stream, moved, sums, given))
    fine = torch.isfinite(z)
    whole = torch.where(torch.isfinite(z + carry), z + carry, z) if carry_in else z.clone()
    done = Written(out, *gpu.write_back(q, whole, out, grid, code, stream, moved, sums, given))
    below, above = out.new_tensor([grid.lo, grid._fixed()[1]])
    beyond = ((out >= above) & (whole > out)) | ((out <= below) & (whole < out))
    carry.copy_(torch.where(fine, torch.where(beyond, 0, whole - out), carry))
    return done


def score(
    w: torch.Tensor,
    g: torch.Tensor,
    u: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    after: bool = False,
) -> torch.Tensor:
    """The per-tile sums behind every allocation score of one step: (tiles, SCORES), float64.

    ``w`` weights, ``g`` gradients, ``u`` proposals (or, with ``after=True``, weights after the step).
    """
    w, g, u = _checked(w, "w"), _checked(g, "g"), _checked(u, "u")
    _same_shape(w=w, g=g, u=u)
    plan = _plan(grid, w.dtype)
    if _on_gpu(w):
        from halfulp.kernels import gpu

        return gpu.score(w, g, u, after, plan.grid)
    from halfulp.kernels import cpu, cpu_scaled

    flat_w, flat_g, flat_u = _flat(w), _flat(g), _flat(u)
    out = np.zeros((tiles_of(flat_w.size), len(SCORES)))
    to = _narrowing(w.dtype)
    if plan.scaled:
        now, then = _steps_of_step(flat_w, flat_g, flat_u, after, plan, w)
        run(
            cpu_scaled.score_tiles_scaled, len(out), flat_w, flat_g, flat_u, after, now, then,
            *plan.layout(tuple(w.shape)), plan.floats, plan.ints, plan.masks, to, plan.empty, out,
        )  # fmt: skip
    else:
        run(
            cpu.score_tiles, len(out), flat_w, flat_g, flat_u, after, plan.floats, plan.ints, plan.masks, to, out
        )
    return torch.from_numpy(out)


# ---- codes ------------------------------------------------------------------------------------------


def encode(
    x: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    step: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Codes of the nearest grid values: uint8 for grids of at most eight bits, int32 otherwise."""
    from halfulp.kernels import cpu

    x = _checked(x, "x")
    plan = _plan(grid, x.dtype)
    shape = tuple(x.shape)
    given = _given(step, plan, shape)
    flat = _flat(x)
    if plan.scaled:
        s = _steps_of(flat, plan, shape, x.dtype) if given is None else given
        rounded = round(x.cpu(), plan.grid, step=None if plan.grid.scaling is None else torch.from_numpy(s))
        each = _expand(s, plan, shape)
        flat = _flat(rounded.double().reshape(-1) / torch.from_numpy(each))
        plan = _Plan(replace(plan.grid, scaling=None), "float64", False, plan.floats, plan.ints)
    dtype = torch.uint8 if plan.grid.bits <= 8 else torch.int32
    if out is not None:
        _same_shape(x=x, out=out)
    direct = out is not None and out.dtype == dtype and out.is_contiguous() and out.device.type == "cpu"
    codes = out if out is not None and direct else torch.empty(shape, dtype=dtype)
    args = (flat, codes.reshape(-1).numpy(), plan.floats, plan.ints, plan.masks, plan.grid.bits, plan.grid.integer)
    bad = sum(run(cpu.encode_tiles, tiles_of(flat.size), *args))
    if bad:
        at = int(torch.nonzero(~torch.isfinite(x.reshape(-1)))[0])
        raise UsageError(
            f"cannot encode {bad} non-finite value(s), the first at flat index {at}: "
            f"grid {plan.grid.name} has no code for them."
        )
    if out is None:
        return codes.to(x.device)
    return out if codes is out else out.copy_(codes)


def _expand(steps: Array, plan: _Plan, shape: tuple[int, ...]) -> Array:
    from halfulp.kernels import cpu_scaled

    each = np.empty(math.prod(shape))
    cpu_scaled.expand(steps, 0, *plan.layout(shape), each)
    return each


def decode(
    codes: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    step: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values of codes, in a container; codes outside the grid are refused."""
    from halfulp.kernels import cpu

    plan = _plan(grid, dtype)
    shape = tuple(codes.shape)
    g = plan.grid if plan.grid.scaling is None else replace(plan.grid, scaling=None)
    if g.bits > 16:
        raise UsageError(f"grid {g.name} has {g.bits} bits; codes are for grids of at most 16.")
    if g.scaling is None and plan.grid.scaling is not None and step is None:
        raise UsageError(f"grid {g.name} needs the steps that its codes were made with.")
    table = _code_table(g)
    flat = codes.detach().cpu().contiguous().reshape(-1).numpy()
    if flat.dtype not in (np.uint8, np.int16, np.int32, np.int64):
        raise UsageError(f"codes must be integers, not {codes.dtype}.")
    low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    out = np.empty(flat.size)
    if 0 <= low and high < table.size:
        bad = sum(run(cpu.decode_tiles, tiles_of(flat.size), flat, table, out))
    else:
        bad = -1
    if bad:
        raise UsageError(
            f"not codes of grid {g.name}: they lie in [{low}, {high}], the grid's are those of "
            f"{g.bits} bits that decode to {g.lo:g} .. {g.largest:g}."
        )
    given = _given(step, plan, shape)
    if given is not None:
        out = out * _expand(given, plan, shape)
    return torch.from_numpy(out).to(dtype).reshape(shape).to(codes.device)


def _code_table(g: Grid) -> Array:
    codes = np.arange(2**g.bits, dtype=np.int64)
    values = np.full(codes.size, np.nan)
    values[reference.is_code(codes, g)] = reference.decode(codes[reference.is_code(codes, g)], g)
    return values


def _on_gpu(x: torch.Tensor) -> bool:
    return x.device.type == "cuda"
