"""Kernels on tensors: rounding, audit, write-back, scores.

One call, any shape, stride, size and device; the work is done by the NumPy-defined twins in
:mod:`~halfulp.kernels.cpu` (numba) or :mod:`~halfulp.kernels.gpu` (Triton), which agree with
:mod:`~halfulp.kernels.reference` to the last bit. Containers are float64, float32, bfloat16
and float16 (the last through a float32 copy).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.grids import OPERATIONS, Grid, container
from halfulp.kernels import params as _params
from halfulp.kernels import reference
from halfulp.kernels.codes import decode, encode
from halfulp.kernels.plan import (
    GRAIN_ELEMENTS,
    Plan,
    as_floats,
    blank_stats,
    checked,
    checked_tile,
    combine,
    deliver,
    destination,
    fixed_scales,
    flat_of,
    given_scales,
    key_of,
    narrowing,
    on_gpu,
    plan_for,
    proposals,
    same_shape,
    scales_of,
    spans_of,
    wanted,
    writable,
    writes_directly,
)
from halfulp.kernels.pool import GRAIN, run
from halfulp.kernels.reference import (
    ARRIVED,
    AUDIT_COUNTS,
    MODES,
    SCORES,
    SHARED_COUNTS,
    TILE,
    WRITE_COUNTS,
    WRITE_SUMS,
    tiles_of,
)
from halfulp.streams import Stream

__all__ = [
    "ARRIVED", "AUDIT_COUNTS", "SCORES", "SHARED_COUNTS", "TILE", "WRITE_COUNTS", "WRITE_SUMS",
    "Audited", "Written", "audit", "check_followed", "checked_tile", "decode", "encode", "round", "scales",
    "score", "set_aside", "tiles_of", "write_back",
]  # fmt: skip

Array = npt.NDArray[Any]
Mode = Literal["nearest", "stochastic", "deadzone"]
Queue = list[Callable[[], Any]]


@dataclass(frozen=True)
class Audited:
    """What :func:`audit` found, per tile.

    ``counts`` (tiles, grids, AUDIT_COUNTS) and ``shared`` (tiles, SHARED_COUNTS) are int32,
    ``sums`` (tiles; squares of weights and proposals) float64, ``phase`` (tiles, grids) int64
    in units of 2**-16, ``expected`` (tiles, grids) float64: the sums of the followed probabilities.
    ``arrived`` (tiles, grids, ARRIVED) float64: with u the change that is written, <u, d> and <u, u>.
    """

    counts: torch.Tensor
    shared: torch.Tensor
    sums: torch.Tensor
    phase: torch.Tensor
    expected: torch.Tensor
    arrived: torch.Tensor
    numel: int

    def frozen(self) -> torch.Tensor:
        """The fraction of coordinates that each grid leaves unchanged."""
        return self.counts[:, :, 0].sum(dim=0, dtype=torch.float64) / max(self.numel, 1)

    def gain(self) -> torch.Tensor:
        """How much of the proposals arrives on each grid: <written, proposed> / |proposed|**2."""
        return self.arrived[:, :, 0].sum(dim=0) / self.sums[:, 1].sum()


@dataclass(frozen=True)
class Written:
    """What :func:`write_back` did: the new values, and per tile (WRITE_COUNTS) and sums."""

    out: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor


# ---- the four kernels -------------------------------------------------------------------------------


def scales(x: torch.Tensor, grid: Grid | str | torch.dtype) -> torch.Tensor:
    """The scales that a grid's rule takes from a tensor, one a segment, float64."""
    x = checked(x, "x")
    plan = plan_for(grid, x.dtype)
    if on_gpu(x) and plan.grid.scaling is not None:
        from halfulp.kernels import gpu

        return gpu.scales(x, plan.grid)
    return torch.from_numpy(scales_of(flat_of(x), plan, tuple(x.shape), x.dtype))


def round(
    x: torch.Tensor,
    grid: Grid | str | torch.dtype,
    stochastic: Stream | None = None,
    *,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round to the nearest grid value, or stochastically with a stream; non-finite values stay."""
    x = checked(x, "x")
    plan = plan_for(grid, x.dtype)
    mode = reference.NEAREST if stochastic is None else reference.STOCHASTIC
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    same_shape(x=x, out=out)
    writable(out, x)
    shape = tuple(x.shape)
    key = key_of(stochastic, mode, x.numel())
    given = given_scales(scale, plan, shape)
    if on_gpu(x):
        from halfulp.kernels import gpu

        return gpu.round_(x, out, plan.grid, mode, stochastic, given)
    from halfulp.kernels import cpu, cpu_scaled

    flat, result = flat_of(x), destination(out)
    n = tiles_of(flat.size)
    if plan.scaled:
        s = scales_of(flat, plan, shape, x.dtype) if given is None else given
        run(
            cpu_scaled.round_tiles_scaled, n, flat, result, s, *plan.layout(shape), mode,
            plan.floats, plan.ints, plan.empty, *key,
        )  # fmt: skip
    elif mode == reference.NEAREST and flat.dtype == plan.floats.dtype:
        run(cpu.round_direct, n, flat, result, plan.floats, plan.ints, plan.masks)
    else:
        run(cpu.round_tiles, n, flat, result, mode, plan.floats, plan.ints, plan.masks, *key)
    return deliver(result, out)


def audit(
    w: torch.Tensor,
    d: torch.Tensor,
    grids: Sequence[Grid | str],
    *,
    after: bool = False,
    phase: bool = True,
    moved: torch.Tensor | None = None,
    stay: torch.Tensor | None = None,
) -> Audited:
    """What each grid would do to one step, all grids in one pass: see :class:`Audited`.

    ``w`` are the weights before the step; ``d`` the proposals or, with ``after=True``, the
    weights after it. ``phase=False`` skips the uniform-phase sums. ``moved`` (uint8, grids x bytes, a bit
    a coordinate) and ``stay`` (grids x coordinates, of the working type, ones at the start) follow every
    coordinate over the steps and are updated in place. For many tensors in one call:
    :mod:`halfulp.kernels.auditing`.
    """
    w, d = checked(w, "w"), checked(d, "d")
    same_shape(w=w, d=d)
    proposals(d, w, "d")
    plans = [plan_for(g, w.dtype) for g in grids]
    check_followed(w, len(plans), moved, stay)
    if on_gpu(w):
        from halfulp.kernels import gpu

        if moved is not None or stay is not None:
            raise UsageError("following coordinates over steps is a CPU feature: move the tensors there.")
        made = gpu.audit(w, d, after, [p.grid for p in plans], phase)
        return Audited(made[0], made[1], made[2], made[3], made[4], made[5], w.numel())
    from halfulp.kernels.auditing import Call

    flat_w, flat_d = flat_of(w), flat_of(d)
    found = Call(flat_w, flat_d, after, plans, w.dtype, phase, moved, stay)()
    counts, arrived, expected = (x.numpy() for x in (found.counts, found.arrived, found.expected))
    work = _params.working(container(w.dtype).name)
    bits = np.empty((0, 0), dtype=np.uint8) if moved is None else moved.numpy()
    odds = np.empty((0, 0), dtype=work) if stay is None else stay.numpy()
    for i, plan in enumerate(plans):
        if plan.scaled:
            own = (bits[i] if bits.size else bits.reshape(-1), odds[i] if odds.size else odds.reshape(-1))
            counts[:, i], arrived[:, i], expected[:, i] = _audit_moving(flat_w, flat_d, after, plan, w, *own)
    return found


def check_followed(
    w: torch.Tensor, grids: int, moved: torch.Tensor | None, stay: torch.Tensor | None
) -> None:
    work = torch.float64 if w.dtype == torch.float64 else torch.float32
    for what, x, shape, dtype in (
        ("moved", moved, (grids, (w.numel() + 7) // 8), torch.uint8),
        ("stay", stay, (grids, w.numel()), work),
    ):
        if x is not None and (tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous()):
            raise UsageError(
                f"{what} must be a contiguous {dtype} tensor of shape {shape}, "
                f"not {x.dtype} of {tuple(x.shape)}."
            )


def _scales_of_step(
    w: Array, g: Array, d: Array, after: bool, plan: Plan, like: torch.Tensor
) -> tuple[Array, Array]:
    """The scales under which w is stored, and those of the write-back of Q(w) + d."""
    from halfulp.kernels import cpu_scaled

    shape = tuple(like.shape)
    fixed = fixed_scales(plan, shape, like.dtype)
    if fixed is not None:
        return fixed, fixed
    s = plan.grid.scaling
    assert s is not None
    _, span, spans = spans_of(plan, shape)

    def gathered(proposed: bool, now: Array, d: Array, after: bool) -> Array:
        stats = blank_stats(spans)
        run(
            cpu_scaled.step_stats, spans, w, g, d, after, proposed, now, *plan.layout(shape), span,
            plan.floats, plan.ints, plan.masks, narrowing(like.dtype), wanted(plan.grid), plan.empty, stats,
            grain=max(GRAIN_ELEMENTS // span, 1),
        )  # fmt: skip
        return reference.scales_from(combine(stats, s.segments(shape)), plan.grid, like.dtype)

    now = gathered(False, np.ones(1), d, after)
    if s.from_old:  # the scales of Q(w) itself
        still = np.where(np.isfinite(as_floats(d)), 0, np.nan).astype(plan.work)
        return now, gathered(True, now, still, False)
    return now, gathered(True, now, d, after)


def _audit_moving(
    w: Array, d: Array, after: bool, plan: Plan, like: torch.Tensor, moved: Array, stay: Array
) -> tuple[Array, Array, Array]:
    from halfulp.kernels import cpu_scaled

    now, then = _scales_of_step(w, w, d, after, plan, like)
    n = tiles_of(w.size)
    counts, arrived = np.zeros((n, len(AUDIT_COUNTS)), dtype=np.int32), np.zeros((n, len(ARRIVED)))
    expected = np.zeros(n)
    run(
        cpu_scaled.audit_tiles_scaled, len(counts), w, d, after, now, then, *plan.layout(tuple(like.shape)),
        plan.floats, plan.ints, plan.masks, narrowing(like.dtype), plan.empty, moved, stay, counts, arrived,
        expected,
    )  # fmt: skip
    return counts, arrived, expected


def write_back(
    q: torch.Tensor,
    z: torch.Tensor,
    grid: Grid | str | torch.dtype,
    mode: Mode = "nearest",
    stream: Stream | None = None,
    *,
    moved: torch.Tensor | None = None,
    sums: bool | int = False,
    scale: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    carry_in: bool = True,
    out: torch.Tensor | None = None,
    queue: Queue | None = None,
) -> Written:
    """Replace stored values q by what a policy makes of the proposed ones z, and count.

    ``nearest``, ``stochastic``, or ``deadzone`` (stochastic only where nearest would throw a
    non-zero proposal away). The result goes to ``out``, by default over ``z``. A proposal that is
    not finite leaves the stored value as it is and is counted. ``moved`` is a bit a coordinate
    (``torch.zeros((numel + 7) // 8, dtype=torch.uint8)``), updated in place. ``sums`` adds WRITE_SUMS per
    tile, of sizes and of what arrives; a number n asks for every n-th tile only. ``carry`` takes what was not
    written and, with ``carry_in``, is added to the proposal first: compensated summation in float32 or
    float64, whose carry may be kept in another dtype. Beside float32, q may be bfloat16
    (:func:`set_aside`). With a ``queue`` everything is prepared and checked, and the work itself is put
    there, to be called: for many tensors, faster than to go back and forth between Python and kernels.
    """
    q, z = checked(q, "q"), checked(z, "z")
    same_shape(q=q, z=z)
    if out is None:
        out = z
    else:
        same_shape(z=z, out=out)
    narrow = q.dtype == torch.bfloat16 and z.dtype == torch.float32
    if (z.dtype != q.dtype and not narrow) or out.dtype != z.dtype:
        raise UsageError(f"q, z and out must have one dtype, not {q.dtype}, {z.dtype} and {out.dtype}.")
    writable(out, z)
    if mode not in MODES:
        raise UsageError(f"unknown write-back mode {mode!r}: expected one of {', '.join(MODES)}.")
    plan, shape, code = plan_for(grid, z.dtype), tuple(q.shape), MODES[mode]
    if narrow and (plan.scaled or not q.is_cpu):
        q = q.float()
    key = key_of(stream, code, q.numel())
    size = (q.numel() + 7) // 8
    if moved is not None and (
        moved.dtype != torch.uint8 or moved.numel() != size or not moved.is_contiguous()
    ):
        raise UsageError(
            f"moved must be a contiguous uint8 tensor of {size} bytes for {q.numel()} coordinates."
        )
    if carry is not None:
        same_shape(q=q, carry=carry)
        if (
            not carry.is_floating_point()
            or not carry.is_contiguous()
            or z.dtype not in (torch.float32, torch.float64)
        ):
            raise UsageError(
                "carry must be a contiguous tensor of floats beside float32 or float64; they are "
                f"{carry.dtype} and {z.dtype}."
            )
        short = carry.dtype == torch.bfloat16 and z.dtype == torch.float32 and z.is_cpu and not plan.scaled
        if carry.dtype != z.dtype and not short:
            wide = carry.to(z.dtype)
            written = write_back(
                q, z, grid, mode, stream, moved=moved, sums=sums, scale=scale, carry=wide, carry_in=carry_in,
                out=out, queue=queue,
            )  # fmt: skip
            _do(partial(carry.copy_, wide), queue)
            return written
    given = given_scales(scale, plan, shape)
    if on_gpu(q):
        from halfulp.kernels import gpu

        # A device has a queue of its own.
        made = gpu.write_back(q, z, out, plan.grid, code, stream, moved, bool(sums), given, carry, carry_in)
        return Written(out, *made)
    from halfulp.kernels import cpu, cpu_scaled

    flat_q, flat_z = flat_of(q), flat_of(z)
    # Not over q itself: what is stored is still read while results are written.
    direct = writes_directly(out) and out.data_ptr() != q.data_ptr()
    result = (flat_z if out is z else flat_of(out)) if direct else np.empty_like(flat_z)
    n = tiles_of(flat_q.size)
    counts, totals = np.zeros((n, len(WRITE_COUNTS)), dtype=np.int32), np.zeros((n, len(WRITE_SUMS)))
    bits = np.empty(0, dtype=np.uint8) if moved is None else moved.numpy()
    rest = plan.empty if carry is None else flat_of(carry)
    carry_in = carry is not None and carry_in
    if plan.scaled:
        if given is None:
            old = plan.grid.scaling is not None and plan.grid.scaling.from_old
            source = flat_z
            if carry is not None and carry_in:
                source = flat_of(z + torch.where(torch.isfinite(z + carry), carry, 0))
            given = scales_of(flat_q if old else source, plan, shape, q.dtype)
        work = partial(
            run, cpu_scaled.write_tiles_scaled, n, flat_q, flat_z, result, given, *plan.layout(shape), code,
            plan.floats, plan.ints, plan.masks, plan.empty, *key, bits, int(sums), rest, carry_in, counts,
            totals,
        )  # fmt: skip
    else:
        kernel = cpu.write_tiles(code, carry is not None, carry_in, z.dtype == torch.float32)
        work = partial(
            run, kernel, n, flat_q, flat_z, result, plan.floats, plan.ints, plan.masks, *key, bits, int(sums),
            rest, counts, totals,
        )  # fmt: skip
    _do(work, queue)
    if not direct:
        _do(partial(deliver, result, out), queue)
    return Written(out, torch.from_numpy(counts), torch.from_numpy(totals))


def _do(work: Callable[[], Any], queue: Queue | None) -> None:
    if queue is None:
        work()
    else:
        queue.append(work)


def set_aside(x: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> list[bool]:
    """Copy float32 tensors on the CPU into contiguous bfloat16 ones: of each, whether all its values fit."""
    from halfulp.kernels import cpu

    work = []
    for wide, narrow in zip(x, out, strict=True):
        kinds = wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16 and narrow.is_contiguous()
        if not (kinds and wide.is_cpu and narrow.is_cpu and wide.shape == narrow.shape):
            raise UsageError(
                "set_aside copies float32 into contiguous bfloat16 of the same shape on the CPU, not "
                f"{wide.dtype} of {tuple(wide.shape)} on {wide.device} into {narrow.dtype} of "
                f"{tuple(narrow.shape)} on {narrow.device}."
            )
        work.append((tiles_of(wide.numel()), flat_of(wide), flat_of(narrow)))
    # From the last to the first, which whoever comes next then finds in the caches.
    return [run(cpu.set_aside_tiles, *args) == 0 for args in reversed(work)][::-1]


def score(
    w: torch.Tensor,
    g: torch.Tensor,
    u: torch.Tensor,
    grid: Grid | str | torch.dtype,
    *,
    after: bool = False,
    tile: int = TILE,
) -> torch.Tensor:
    """The per-tile sums behind every allocation score of one step: (tiles, SCORES), float64.

    ``w`` weights, ``g`` gradients, ``u`` proposals (or, with ``after=True``, weights after the step).
    ``tile``: how many consecutive coordinates are one tile; the last one may be short.
    """
    w, g, u = checked(w, "w"), checked(g, "g"), checked(u, "u")
    same_shape(w=w, g=g, u=u)
    proposals(g, w, "g")
    proposals(u, w, "u")
    plan = plan_for(grid, w.dtype)
    tile = min(checked_tile(tile), max(w.numel(), 1))  # zeros behind the end would change no sum
    if on_gpu(w):
        from halfulp.kernels import gpu

        return gpu.score(w, g, u, after, plan.grid, tile)
    from halfulp.kernels import cpu, cpu_scaled

    flat_w, flat_g, flat_u = flat_of(w), flat_of(g), flat_of(u)
    out = np.zeros((tiles_of(flat_w.size, tile), len(SCORES)))
    to, half = narrowing(w.dtype), max(reference.tree_size(tile) // 2, 3)
    grain = max(GRAIN * TILE // tile, 1)
    if plan.scaled:
        now, then = _scales_of_step(flat_w, flat_g, flat_u, after, plan, w)
        run(
            cpu_scaled.score_tiles_scaled, len(out), flat_w, flat_g, flat_u, after, tile, half, now, then,
            *plan.layout(tuple(w.shape)), plan.floats, plan.ints, plan.masks, to, plan.empty, out,
            grain=grain,
        )  # fmt: skip
    else:
        run(
            cpu.score_tiles, len(out), flat_w, flat_g, flat_u, after, tile, half,
            plan.floats, plan.ints, plan.masks, to, out, grain=grain,
        )  # fmt: skip
    return torch.from_numpy(out)


OPERATIONS.round, OPERATIONS.scales, OPERATIONS.encode, OPERATIONS.decode = round, scales, encode, decode
