"""The GPU kernels, seen from the host: Triton on CUDA tensors, equal to the reference bit by bit.

Same operations as :mod:`halfulp.kernels.reference`, whose results define these: ``round_``, ``audit``,
``write_back``, ``score``, and ``scales`` for grids whose scale moves with the data. What one program
does to one tile is in :mod:`~halfulp.kernels.gpu_tiles`, the arithmetic in
:mod:`~halfulp.kernels.gpu_maths`. Tensors are float32, bfloat16, float16 or float64, all on one
device; grids are resolved (``grid.within(x.dtype)``).

Grids without a moving scale share one compiled kernel: their numbers (:mod:`halfulp.kernels.params`)
are rows of a small table in device memory, so an audit of eight grids reads the weights once. A
moving scale needs a reduction between the proposal and its rounding, hence passes of its own.

The invariant is equality, so nothing here may depend on the device: no fused multiply-add, no
approximate division, no atomics, no reduction whose order the compiler picks. Why not
``torch.compile``? It promises none of these, and compiles again for every list of grids.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.kernels import gpu_tiles as device
from halfulp.kernels import reference
from halfulp.kernels.params import SCALED, params, table, working
from halfulp.kernels.writing import Carry, Scales
from halfulp.numbers.grids import Grid
from halfulp.numbers.scaling import Scaling
from halfulp.numbers.streams import Stream

Array = npt.NDArray[Any]

# So few warps, and yet every value stays in a register (see tests/gpu_compiled.py). Told nothing, the
# assembler would spill some values of write_tile to reach a rounder number of registers.
OPTIONS: dict[str, dict[str, Any]] = {
    name: {"enable_fp_fusion": False, "num_warps": warps, "maxnreg": most}
    for name, warps, most in (
        ("round_tile", 1, None),
        ("write_tile", 1, 255),
        ("audit_tile", 4, None),
        ("audit_scaled_tile", 8, None),
        ("score_tile", 4, None),
        ("step_tile", 4, None),
    )
}
NO_SCALES = Scales(None)
TO = {torch.float32: 0, torch.float64: 0, torch.bfloat16: 1, torch.float16: 2}


# ---- scales --------------------------------------------------------------------------------------


def scales(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The scales of a tensor, one a segment, float64 on its device: the reference's, exactly."""
    assert grid.scaling is not None
    stats = _stats(x, grid.scaling)
    values = reference.scales_from(stats, grid, x.dtype)
    if grid.scaling.rule == "absmean":
        # The reference adds from left to right. If all sums within the rounding errors of both
        # orders give one scale, that is the reference's scale; otherwise the reference must tell.
        error = stats[:, 3] * 2.0**-51
        low, high = stats.copy(), stats.copy()
        low[:, 2] *= 1.0 - error
        high[:, 2] *= 1.0 + error
        if (reference.scales_from(low, grid, x.dtype) != reference.scales_from(high, grid, x.dtype)).any():
            exact = reference.segment_stats(x.double().cpu().numpy(), grid.scaling)
            values = reference.scales_from(exact, grid, x.dtype)
    return torch.from_numpy(values).to(x.device)


def _stats(x: torch.Tensor, scaling: Scaling) -> Array:
    """reference.segment_stats, but only the columns that the rule reads."""
    stats = np.zeros((scaling.segments(tuple(x.shape)), 4))
    if not scaling.moves:
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
    elif scaling.rule == "absmean":
        stats[:, 2] = size.sum(1, dtype=torch.float64).cpu().numpy()
        stats[:, 3] = segments(keep.double(), 0.0).sum(1).cpu().numpy()
    return stats


# ---- what kernels are called with ---------------------------------------------------------------


@lru_cache(maxsize=256)
def _tables(grids: tuple[Grid, ...], work: str, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    floats, ints = table(grids, work)
    return torch.from_numpy(floats.copy()).to(where), torch.from_numpy(ints.copy()).to(where)


def _work(x: torch.Tensor) -> str:
    return working(str(x.dtype).removeprefix("torch."))


def _has_scales(grid: Grid, x: torch.Tensor) -> bool:
    """Return True if the grid is rounded as a quotient, in float64."""
    return params(grid, _work(x)).kind == SCALED


def _row(grid: Grid, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _tables((grid,), "float64" if _has_scales(grid, x) else _work(x), x.device)


def _memory(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a kernel reads it: contiguous, bfloat16 as its bit pattern."""
    x = x.detach().contiguous()
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _segments(x: torch.Tensor, grid: Grid) -> tuple[int, int, int]:
    """Return the row length, the segments per row and the segment length."""
    if grid.scaling is None:
        return max(x.numel(), 1), 1, max(x.numel(), 1)
    row, length = grid.scaling.segment_length(tuple(x.shape))
    return row, math.ceil(row / length), length


def _scales_or(given: Array | torch.Tensor | None, x: torch.Tensor, grid: Grid) -> torch.Tensor:
    if given is not None:
        return torch.as_tensor(given, dtype=torch.float64, device=x.device).contiguous()
    if grid.scaling is None:  # a static grid that the working type cannot round
        return torch.ones(1, dtype=torch.float64, device=x.device)
    return scales(x, grid)


def _from_old(grid: Grid) -> bool:
    return grid.scaling is not None and grid.scaling.from_old


def _key(stream: Stream | None, mode: int) -> tuple[int, int, int]:
    """Key words as signed integers, so that their type does not depend on their value; offset."""
    if mode == reference.NEAREST:
        return 0, 0, 0
    assert stream is not None
    k0, k1 = (word - ((word >> 31) << 32) for word in stream.key)
    return k0, k1, stream.offset


def _run(
    kernel: Any, like: torch.Tensor, *arguments: Any, programs: int | None = None, **constants: Any
) -> None:
    programs = reference.tiles_of(like.numel()) if programs is None else programs
    if programs:
        with torch.cuda.device_of(like):
            kernel[(programs,)](*arguments, **constants, **_options(kernel.__name__, constants))


def _options(name: str, constants: dict[str, Any]) -> dict[str, Any]:
    """Choose launch options: more warps for larger tiles, so that values stay in registers."""
    rows = constants.get("K", 0) * constants.get("MANY", 0)
    more = max(min(rows // 256, 4), 1)  # with still more warps, each has too few registers
    if constants.get("MANY", 1) > 1 and constants.get("SCALES"):  # several small tiles, each with its scales
        more *= 2
    if name == "write_tile" and constants.get("SUMS"):  # a whole tile is held until it is written
        more *= 4
    return OPTIONS[name] | {"num_warps": OPTIONS[name]["num_warps"] * more}


def score_shape(tile: int) -> dict[str, int]:
    """Compute the layout of a program that scores tiles of a size: see :mod:`~halfulp.kernels.gpu_tiles`."""
    rows = reference.tree_size(tile) // 3
    return {"SIZE": tile, "K": rows, "LEVELS": rows.bit_length() - 1, "MANY": max(256 // rows, 1)}


# ---- the operations -----------------------------------------------------------------------------


def round_(
    x: torch.Tensor,
    out: torch.Tensor,
    grid: Grid,
    mode: int = reference.NEAREST,
    stream: Stream | None = None,
    scales: Array | torch.Tensor | None = None,
) -> torch.Tensor:
    """Round x into ``out`` (which may be x)."""
    scaled = _has_scales(grid, x)
    f, k = _row(grid, x)
    k0, k1, offset = _key(stream, mode)
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    _run(
        device.round_tile, x,
        _memory(x), _memory(target), f, k, _scales_or(scales, x, grid) if scaled else f, *_segments(x, grid),
        x.numel(), k0, k1, offset,
        MODE=mode, SCALES=scaled, TO=TO[x.dtype], ALIGNED=offset % 32 == 0,
    )  # fmt: skip
    return out if target is out else out.copy_(target)


def write_back(
    q: torch.Tensor,
    z: torch.Tensor,
    out: torch.Tensor,
    grid: Grid,
    mode: int = reference.NEAREST,
    stream: Stream | None = None,
    moved: torch.Tensor | None = None,
    want_sums: bool = True,
    scale: Scales = NO_SCALES,
    carry: Carry | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next stored values into ``out`` (which may be q or z); counts and sums per tile.

    ``moved`` (uint8, one bit a coordinate) and the carry (of q's type, float32 or float64) are
    contiguous and updated in place. Sums that are not wanted are zero.
    """
    scales, stored = scale
    rest, add = (None, False) if carry is None else carry
    scaled = _has_scales(grid, q)
    moves = grid.scaling is not None and grid.scaling.moves
    f, k = _row(grid, q)
    each = old = f
    if moves:
        old = _scales_or(scales if stored is None else stored, q, reference.rule_of_stored(grid))
    if scaled:
        whole = z
        if rest is not None and add:
            whole = torch.where(torch.isfinite(z + rest), z + rest, z)
        each = _scales_or(scales, q if _from_old(grid) else whole, grid)
    k0, k1, offset = _key(stream, mode)
    tiles = reference.tiles_of(q.numel())
    counts = torch.empty((tiles, len(reference.WRITE_COUNTS)), dtype=torch.int32, device=q.device)
    sums = torch.zeros((tiles, len(reference.WRITE_SUMS)), dtype=torch.float64, device=q.device)
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    _run(
        device.write_tile, q,
        _memory(q), _memory(z), _memory(target), f, k, each, old, *_segments(q, grid),
        counts if moved is None else moved, counts if rest is None else rest, counts, sums,
        q.numel(), k0, k1, offset,
        MODE=mode, SCALES=scaled, MOVES=moves, TO=TO[q.dtype], ALIGNED=offset % 32 == 0,
        MARK=moved is not None, CARRY=0 if rest is None else 2 if add else 1, SUMS=want_sums,
    )  # fmt: skip
    if target is not out:
        out.copy_(target)
    return counts, sums


def _project(
    w: torch.Tensor, d: torch.Tensor, after: bool, grid: Grid, *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For a grid with scales: stored and proposed values, and the scales of both.

    Zero where a weight, a proposal or one of the others is not finite.
    """
    work = torch.float64 if w.dtype == torch.float64 else torch.float32
    proposal = d.to(work) - w.to(work) if after else d.to(work)
    ok = torch.isfinite(w) & torch.isfinite(proposal)
    for x in others:
        ok &= torch.isfinite(x)
    safe = torch.where(ok, w, 0)
    first = _scales_or(None, safe, grid)
    q = round_(safe, torch.empty_like(safe), grid, scales=first)
    z = (q.to(work) + torch.where(ok, proposal, 0)).to(w.dtype)
    return q, z, first, _scales_or(None, q if _from_old(grid) else z, grid)


def audit(
    w: torch.Tensor, d: torch.Tensor, after: bool, grids: list[Grid] | tuple[Grid, ...], phase: bool = True
) -> tuple[torch.Tensor, ...]:
    """Count what each grid would do to proposals d at weights w: the six parts of the reference's result.

    With ``after``, d holds the weights after the step. Without ``phase``, phases are zero. Coordinates are
    not followed over steps here, so the expected sums are always zero.
    """
    tiles, where = reference.tiles_of(w.numel()), w.device
    counts = torch.zeros((tiles, len(grids), len(reference.AUDIT_COUNTS)), dtype=torch.int32, device=where)
    shared = torch.empty((tiles, len(reference.SHARED_COUNTS)), dtype=torch.int32, device=where)
    sums = torch.empty((tiles, len(reference.AUDIT_SUMS)), dtype=torch.float64, device=where)
    phases = torch.zeros((tiles, len(grids)), dtype=torch.int64, device=where)
    arrived = torch.zeros((tiles, len(grids), len(reference.ARRIVED)), dtype=torch.float64, device=where)
    pair = _memory(w), _memory(d)
    _run(
        device.audit_tile, w,
        *pair, *_tables(tuple(grids), _work(w), where), counts, shared, sums, arrived, phases,
        w.numel(), len(grids),
        AFTER=after, PHASE=phase, TO=TO[w.dtype],
    )  # fmt: skip
    for number, grid in enumerate(grids):
        if _has_scales(grid, w):
            q, z, now, then = _project(w, d, after, grid)
            _run(
                device.audit_scaled_tile, w,
                *pair, _memory(q), _memory(z), *_row(grid, w), now, then, *_segments(w, grid),
                counts, arrived, w.numel(), len(grids), number,
                AFTER=after, TO=TO[w.dtype],
            )  # fmt: skip
    return counts, shared, sums, phases, torch.zeros_like(phases, dtype=torch.float64), arrived


def score(
    w: torch.Tensor, g: torch.Tensor, u: torch.Tensor, after: bool, grid: Grid, tile: int = reference.TILE
) -> torch.Tensor:
    """The sums behind every allocation score, (tiles, 8); ``after``: u is the weights after the step."""
    scaled = _has_scales(grid, w)
    f, k = _row(grid, w)
    q, z, now, then = w, w, f, f
    if scaled:
        q, z, now, then = _project(w, u, after, grid, g)
    tiles, shape = reference.tiles_of(w.numel(), tile), score_shape(tile)
    scores = torch.empty((tiles, len(reference.SCORES)), dtype=torch.float64, device=w.device)
    _run(
        device.score_tile, w,
        _memory(w), _memory(g), _memory(u), _memory(q), _memory(z), f, k, now, then,
        *_segments(w, grid), scores, w.numel(),
        programs=-(-tiles // shape["MANY"]), **shape, AFTER=after, SCALES=scaled, TO=TO[w.dtype],
    )  # fmt: skip
    return scores
