"""The GPU kernels, seen from the host: Triton on CUDA tensors, equal to the reference bit by bit.

Same operations as :mod:`halfulp.kernels.reference`, whose results define these: ``round_``, ``audit``,
``write_back``, ``score``, and ``steps`` for grids whose step moves with the data. What one program
does to one tile is in :mod:`halfulp.kernels.gpu_kernels`. Tensors are contiguous, of type float32,
bfloat16, float16 or float64, all on one device; grids are resolved (``grid.within(x.dtype)``).

Grids without a moving step share one compiled kernel: their numbers (:mod:`halfulp.kernels.params`)
are rows of a small table in device memory, so an audit of eight grids reads the weights once. A
moving step needs a reduction between the proposal and its rounding, hence passes of its own.

The invariant is equality, so nothing here may depend on the device: no fused multiply-add, no
approximate division, no atomics, no reduction whose order the compiler picks. Why not
``torch.compile``? It promises none of these, and compiles again for every list of grids.

``python -m halfulp.kernels.gpu`` compiles everything for several architectures, on a machine with
or without a GPU, and prints registers and spills.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.grids import Grid, Scaling
from halfulp.kernels import gpu_kernels as device
from halfulp.kernels import reference
from halfulp.kernels.params import SCALED, params, table, working
from halfulp.streams import Stream

ROUND_WARPS, TILE_WARPS = 1, 4
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
TO = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}


# ---- steps --------------------------------------------------------------------------------------


def steps(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The steps of a tensor, one a segment, float64 on its device: the reference's, exactly."""
    assert grid.scaling is not None
    stats = _stats(x, grid.scaling)
    found = reference.steps_from(stats, grid, x.dtype)
    if grid.scaling.rule == "absmean":
        # The reference adds from left to right. If sums that differ by the rounding errors of both
        # orders give one step, that is the reference's step; otherwise ask the reference.
        error = stats[:, 3] * 2.0**-51
        low, high = stats.copy(), stats.copy()
        low[:, 2] *= 1.0 - error
        high[:, 2] *= 1.0 + error
        if (reference.steps_from(low, grid, x.dtype) != reference.steps_from(high, grid, x.dtype)).any():
            exact = reference.segment_stats(x.double().cpu().numpy(), grid.scaling)
            found = reference.steps_from(exact, grid, x.dtype)
    return torch.from_numpy(found).to(x.device)


def _stats(x: torch.Tensor, scaling: Scaling) -> Any:
    """reference.segment_stats, but only the columns that the rule reads."""
    stats = np.zeros((scaling.segments(tuple(x.shape)), 4))
    if scaling.rule == "given":
        return stats
    row, length = scaling.segment_length(tuple(x.shape))
    keep = torch.isfinite(x)

    def segments(values: torch.Tensor, fill: float) -> torch.Tensor:
        values = torch.where(keep, values, fill).reshape(-1, row)
        return torch.nn.functional.pad(values, (0, -row % length), value=fill).reshape(-1, length)

    size = segments(x.abs(), 0.0)
    stats[:, 0] = size.amax(1).double().cpu().numpy()
    if scaling.rule == "dqt":
        stats[:, 1] = segments(x, -math.inf).amax(1).double().cpu().numpy()
    if scaling.rule == "absmean":
        stats[:, 2] = size.sum(1, dtype=torch.float64).cpu().numpy()
        stats[:, 3] = segments(keep.double(), 0.0).sum(1).cpu().numpy()
    return stats


# ---- what kernels are called with -------------------------------------------------------------------


@lru_cache(maxsize=256)
def _tables(grids: tuple[Grid, ...], work: str, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    floats, ints = table(grids, work)
    return torch.from_numpy(floats.copy()).to(where), torch.from_numpy(ints.copy()).to(where)


def _work(x: torch.Tensor) -> str:
    return working(str(x.dtype).removeprefix("torch."))


def _moving(grid: Grid, x: torch.Tensor) -> bool:
    """Whether the grid goes through float64 with steps."""
    return params(grid, _work(x)).kind == SCALED


def _memory(x: torch.Tensor) -> torch.Tensor:
    """What a kernel is given of a tensor: bfloat16 as its bit pattern."""
    if not x.is_contiguous():
        raise UsageError(f"kernels take contiguous tensors, not shape {tuple(x.shape)} with {x.stride()}.")
    return x.detach().view(torch.int16) if x.dtype == torch.bfloat16 else x.detach()


def _segments(x: torch.Tensor, grid: Grid) -> tuple[int, int, int]:
    """Row length, segments a row, segment length."""
    if grid.scaling is None:
        return max(x.numel(), 1), 1, max(x.numel(), 1)
    row, length = grid.scaling.segment_length(tuple(x.shape))
    return row, math.ceil(row / length), length


def _steps_or(given: torch.Tensor | None, x: torch.Tensor, grid: Grid) -> torch.Tensor:
    if grid.scaling is None:  # a static grid too wide for the working type
        return torch.ones(1, dtype=torch.float64, device=x.device)
    return steps(x, grid) if given is None else given.to(x.device, torch.float64).contiguous()


def _key(stream: Stream | None, mode: int) -> tuple[int, int, int]:
    """Key words as signed integers, so that their type does not depend on their value; offset."""
    if stream is None:
        assert mode == reference.NEAREST
        return 0, 0, 0
    k0, k1 = (word - ((word >> 31) << 32) for word in stream.key)
    return k0, k1, stream.offset


def _run(kernel: Any, like: torch.Tensor, warps: int, *arguments: Any, **constants: Any) -> None:
    tiles = reference.tiles_of(like.numel())
    if tiles:
        with torch.cuda.device_of(like):
            kernel[(tiles,)](*arguments, **constants, num_warps=warps, **OPTIONS)


# ---- the operations -----------------------------------------------------------------------------------


def round_(
    x: torch.Tensor,
    out: torch.Tensor,
    grid: Grid,
    mode: int = reference.NEAREST,
    stream: Stream | None = None,
    steps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round x into ``out`` (which may be x)."""
    moving = _moving(grid, x)
    f, k = _tables((grid,), "float64" if moving else _work(x), x.device)
    each = _steps_or(steps, x, grid) if moving else f
    k0, k1, offset = _key(stream, mode)
    _run(
        device.round_tile, x, ROUND_WARPS,
        _memory(x), _memory(out), f, k, each, *_segments(x, grid), x.numel(), k0, k1, offset,
        MODE=mode, MOVING=moving, TO=TO[x.dtype], ALIGNED=offset % 32 == 0,
    )  # fmt: skip
    return out


def write_back(
    q: torch.Tensor,
    z: torch.Tensor,
    out: torch.Tensor,
    grid: Grid,
    mode: int = reference.NEAREST,
    stream: Stream | None = None,
    moved: torch.Tensor | None = None,
    want_sums: bool = True,
    steps: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The next stored values into ``out`` (which may be q or z), and what happened, per tile.

    ``moved`` (uint8, one bit a coordinate) is updated in place; sums that are not wanted are zero.
    """
    moving = _moving(grid, q)
    f, k = _tables((grid,), "float64" if moving else _work(q), q.device)
    old = grid.scaling is not None and grid.scaling.from_old
    each = _steps_or(steps, q if old else z, grid) if moving else f
    k0, k1, offset = _key(stream, mode)
    tiles = reference.tiles_of(q.numel())
    counts = torch.empty((tiles, 5), dtype=torch.int32, device=q.device)
    sums = torch.zeros((tiles, 2), dtype=torch.float64, device=q.device)
    _run(
        device.write_tile, q, ROUND_WARPS,
        _memory(q), _memory(z), _memory(out), f, k, each, *_segments(q, grid),
        counts if moved is None else moved, counts, sums, q.numel(), k0, k1, offset,
        MODE=mode, MOVING=moving, TO=TO[q.dtype], ALIGNED=offset % 32 == 0,
        MARK=moved is not None, SUMS=want_sums,
    )  # fmt: skip
    return {"counts": counts, "sums": sums}


def _project(
    w: torch.Tensor, d: torch.Tensor, after: bool, grid: Grid, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For a grid with steps: stored and proposed values, and the steps of both.

    Zero where a weight, a proposal or one of the others is not finite.
    """
    work = torch.float64 if w.dtype == torch.float64 else torch.float32
    proposal = d.to(work) - w.to(work) if after else d.to(work)
    ok = torch.isfinite(w) & torch.isfinite(proposal)
    for x in others:
        ok &= torch.isfinite(x)
    safe = torch.where(ok, w, 0)
    first = _steps_or(None, safe, grid)
    q = round_(safe, torch.empty_like(safe), grid, steps=first)
    z = (q.to(work) + torch.where(ok, proposal, 0)).to(w.dtype)
    old = grid.scaling is not None and grid.scaling.from_old
    return q, z, first, _steps_or(None, q if old else z, grid)


def audit(
    w: torch.Tensor, d: torch.Tensor, after: bool, grids: tuple[Grid, ...], phase: bool = True
) -> dict[str, torch.Tensor]:
    """What each grid would do to proposals d at weights w; ``after``: d is the weights after the step."""
    tiles, where = reference.tiles_of(w.numel()), w.device
    counts = torch.empty((tiles, len(grids), 5), dtype=torch.int32, device=where)
    shared = torch.empty((tiles, 2), dtype=torch.int32, device=where)
    sums = torch.empty((tiles, 2), dtype=torch.float64, device=where)
    phases = torch.zeros((tiles, len(grids)), dtype=torch.int64, device=where)
    f, k = _tables(tuple(grids), _work(w), where)
    pair = _memory(w), _memory(d)
    _run(
        device.audit_tile, w, TILE_WARPS,
        *pair, f, k, counts, shared, sums, phases, w.numel(), len(grids),
        AFTER=after, PHASE=phase, TO=TO[w.dtype],
    )  # fmt: skip
    for g, grid in enumerate(grids):
        if _moving(grid, w):
            q, z, first, later = _project(w, d, after, grid)
            f, k = _tables((grid,), "float64", where)
            _run(
                device.audit_scaled_tile, w, TILE_WARPS,
                *pair, _memory(q), _memory(z), f, k, first, later, *_segments(w, grid),
                counts, w.numel(), len(grids), g,
                AFTER=after, TO=TO[w.dtype],
            )  # fmt: skip
    return {"counts": counts, "shared": shared, "sums": sums, "phase": phases}


def score(w: torch.Tensor, g: torch.Tensor, u: torch.Tensor, after: bool, grid: Grid) -> torch.Tensor:
    """The sums behind every allocation score, (tiles, 8); ``after``: u is the weights after the step."""
    moving = _moving(grid, w)
    f, k = _tables((grid,), "float64" if moving else _work(w), w.device)
    q, z, later = w, w, f
    if moving:
        q, z, _, later = _project(w, u, after, grid, g)
    scores = torch.empty((reference.tiles_of(w.numel()), 8), dtype=torch.float64, device=w.device)
    _run(
        device.score_tile, w, TILE_WARPS,
        _memory(w), _memory(g), _memory(u), _memory(q), _memory(z), f, k, later, *_segments(w, grid),
        scores, w.numel(),
        AFTER=after, MOVING=moving, TO=TO[w.dtype],
    )  # fmt: skip
    return scores
