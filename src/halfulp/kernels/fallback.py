"""The reference on tensors: what serves where the library of the CPU kernels is missing.

It gives the same numbers and takes many times as long; see :func:`halfulp.kernels.native.library`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from halfulp.kernels import coded_moments, onepass_reference, reference
from halfulp.kernels.plan import Plan, as_floats, flat_of, keyed
from halfulp.kernels.reference import NEAREST, TILE
from halfulp.numbers.streams import Stream

if TYPE_CHECKING:
    from halfulp.kernels.onepass import Case, Job
    from halfulp.kernels.writing import Writing

Array = npt.NDArray[Any]
P = ParamSpec("P")
R = TypeVar("R")


def _quiet(function: Callable[P, R]) -> Callable[P, R]:
    @wraps(function)
    def called(*given: P.args, **more: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*given, **more)

    return called


@_quiet
def onepass(
    case: Case, jobs: Sequence[Job], grads: Sequence[torch.Tensor], rates: Array, keys: Array
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make one step of every tensor: see :class:`halfulp.kernels.onepass.Jobs`."""
    results = []
    for job, grad, row, key in zip(jobs, grads, rates, keys.tolist(), strict=True):
        numbers = onepass_reference.RateRow(case.rule, tuple(row.tolist()), case.small, case.torchs_root)
        grid, n = case.grid.within(torch.float32), job.size
        q, codes = as_floats(flat_of(job.stored)), job.stored.dtype == torch.uint8
        if codes:
            q = reference.decode(_unpacked(q, grid.bits, n), grid).astype(np.float32)
        moments = [flat_of(x) for x in (job.first, job.second) if x is not None]
        scales = [flat_of(x) for x in job.scales]
        drawing = keyed(key[2:], job.offset, 16) if case.drawn else None
        policy = onepass_reference.Policy(
            case.mode, case.keeps, None if job.kept is None else flat_of(job.kept),
            keyed(key[:2], job.offset, 16 if case.short else 32), None if scales else drawing,
        )  # fmt: skip
        now = [coded_moments.decoded(*x) for x in zip(moments, scales, strict=True)] if scales else moments
        first, second = (*now, None, None)[:2]
        r, m, v, counted = onepass_reference.step(
            q, as_floats(flat_of(grad)), first, second, grid, numbers, policy, plain=job.plain,
            moved=None if job.moved is None else job.moved.numpy(),
        )  # fmt: skip
        for i, (kept, value) in enumerate(zip(moments, (m, v), strict=False)):
            if scales:
                assert drawing is not None
                kept[:], scales[i][:] = coded_moments.encoded(value, drawing.words(n), second=i == 1)
            else:
                kept[:] = value
        if codes:
            _pack(reference.encode(r, grid), grid.bits, job.stored.numpy().reshape(-1))
        else:
            job.stored.reshape(-1).copy_(torch.from_numpy(r))
        results.append(
            (torch.from_numpy(counted["counts"]), torch.from_numpy(_sampled(counted["sums"], job.sums)))
        )
    return results


def _sampled(sums: Array, every: int) -> Array:
    return np.where((np.arange(len(sums)) % max(every, 1) == 0)[:, None] & (every > 0), sums, 0.0)


def _unpacked(stored: Array, bits: int, n: int) -> Array:
    """Codes of a byte each, or packed to the bit, the lowest first."""
    if stored.size == n:
        return stored
    parts = np.unpackbits(stored, count=n * bits, bitorder="little").reshape(n, bits)
    return np.asarray((parts.astype(np.int64) << np.arange(bits)).sum(axis=1))


def _pack(codes: Array, bits: int, out: Array) -> None:
    if out.size == codes.size:
        out[:] = codes
    else:
        parts = (codes[:, None] >> np.arange(bits)) & 1
        out[:] = np.packbits(parts.astype(np.uint8).reshape(-1), bitorder="little")


@_quiet
def audit(
    w: Array,
    d: Array,
    after: bool,
    plans: Sequence[Plan],
    box: torch.dtype,
    phase: bool,
    followed: tuple[Array | None, Array | None],
) -> tuple[Array, ...]:
    """Audit one tensor: counts, shared counts, sums, phases, expected and arrived, per tile."""
    w, d = as_floats(w), as_floats(d)
    d = d - w if after else d
    audited = reference.audit(w, d, [p.grid for p in plans], phase, *followed, box)
    return tuple(audited[k] for k in ("counts", "shared", "sums", "phase", "expected", "arrived"))


def set_aside(tensors: Sequence[torch.Tensor], starts: Sequence[int], into: Array) -> None:
    """Copy tensors side by side, each from the beginning of a tile on."""
    for x, start in zip(tensors, starts, strict=True):
        into[start * TILE : start * TILE + x.numel()] = flat_of(x)


def put(out: Array, values: Array) -> None:
    """Write values into a flat array of their container; bfloat16 takes its patterns, to the nearest."""
    if out.dtype == np.uint16:
        u = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(-1)
        even = (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[:] = np.where((u & 0x7F800000) == 0x7F800000, u >> np.uint32(16), even)
    else:
        out[:] = values.reshape(-1)


@_quiet
def round_(
    x: Array,
    out: Array,
    plan: Plan,
    box: torch.dtype,
    mode: int,
    stream: Stream | None,
    scale: Array | None,
) -> None:
    """Round values into a flat array."""
    values = as_floats(x)
    if plan.grid.scaling is not None and scale is None:
        scale = reference.scales(values, plan.grid, box)
    put(out, reference.round(values, plan.grid, mode, stream, scale))


@_quiet
def write(job: Writing) -> None:
    """Write back one tensor: see :func:`halfulp.kernels.reference.write_back`."""
    q, z = (as_floats(x).reshape(job.shape) for x in (job.q, job.z))
    rest = None if job.carry is None else as_floats(job.carry).reshape(job.shape)
    stream = None if job.mode == NEAREST else keyed(job.key[:2], job.key[2])
    r, counted = reference.write_back(
        q, z, job.plan.grid, job.mode, stream, job.moved, job.scale, rest, job.carry_in, job.stored, job.dtype
    )
    put(job.out, r)
    if job.carry is not None and rest is not None:
        put(job.carry, rest)
    job.counts[:], job.totals[:] = counted["counts"], _sampled(counted["sums"], job.every)


def aside(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Copy float32 values into bfloat16; tell whether all of them fit."""
    u = flat_of(x).view(np.uint32)
    flat_of(out)[:] = u >> np.uint32(16)
    return not bool((u & np.uint32(0xFFFF)).any())


@_quiet
def score(step: tuple[Array, ...], after: bool, plan: Plan, like: torch.Tensor, tile: int) -> torch.Tensor:
    """Score one tensor, ``like`` its weights."""
    w, g, u = (as_floats(x).reshape(tuple(like.shape)) for x in step)
    return torch.from_numpy(reference.score(w, g, u - w if after else u, plan.grid, tile, like.dtype))


def add_tiles(parts: Sequence[Array], starts: Array, each: int, rows: Array) -> None:
    """Add up what an audit found: see :func:`halfulp.kernels.auditing.add_tiles`."""
    counts, shared, phase, expected, arrived, sums = parts
    tiles, grids, kinds = counts.shape
    per_grid = rows[:, : grids * each].reshape(len(starts), grids, each)
    for i, start in enumerate(starts.tolist()):
        for t in range(start, int(starts[i + 1]) if i + 1 < len(starts) else tiles):
            per_grid[i, :, :kinds] += counts[t]
            per_grid[i, :, kinds] += phase[t]
            per_grid[i, :, kinds + 1] += expected[t]
            per_grid[i, :, kinds + 2 : kinds + 4] += arrived[t]
            rows[i, grids * each :] += (*shared[t], *sums[t])
