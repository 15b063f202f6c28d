"""Track on a device which coordinates ever moved; the CPU kernel does this in its single pass.

On a GPU the counts of a step come from Triton, which does not follow coordinates over steps. This module
follows them, using Triton for the rounding and torch operations for the bits:

    q = Q(w),   r = Q(q + d),   moved |= not frozen (r == q, or by code where scales move)

which is bitwise equal to ``moved`` in :func:`halfulp.kernels.reference.audit`. A coordinate that is not
finite counts as having no proposal. This takes a few passes over the tensor per grid, and one bit per weight
and grid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfulp import kernels
from halfulp.kernels import AUDIT_COUNTS, TILE, Audited, tiles_of
from halfulp.kernels.plan import on_gpu
from halfulp.kernels.unchanged import unchanged
from halfulp.numbers.grids import Grid

NEVER = AUDIT_COUNTS.index("never_moved")


def audit(
    before: torch.Tensor,
    after: torch.Tensor,
    grids: Sequence[Grid],
    *,
    moved: torch.Tensor | None,
    stay: torch.Tensor | None,
    phase: bool = True,
) -> Audited:
    """Return what each grid would do to one step, coordinates followed wherever the tensors are."""
    if moved is None or not on_gpu(before):
        return kernels.audit(before, after, grids, after=True, phase=phase, moved=moved, stay=stay)
    counted = kernels.audit(before, after, grids, after=True, phase=phase)
    counted.counts[:, :, NEVER] = follow(before, after, grids, moved)
    return counted


def follow(
    before: torch.Tensor, after: torch.Tensor, grids: Sequence[Grid], moved: torch.Tensor
) -> torch.Tensor:
    """Mark what a step moves in ``moved`` (grids x bytes); how many never moved, (tiles, grids)."""
    work = torch.float64 if before.dtype == torch.float64 else torch.float32
    d = after.to(work) - before.to(work)
    ok = torch.isfinite(before) & torch.isfinite(d)
    w, d = torch.where(ok, before, 0), torch.where(ok, d, 0)
    never = torch.zeros((tiles_of(w.numel()), len(grids)), dtype=torch.int32, device=w.device)
    for k, grid in enumerate(grids):
        s = grid.scaling
        now = kernels.scales(w, grid) if s is not None else None
        q = kernels.round(w, grid, scale=now)
        z = (q.to(work) + d).to(w.dtype)
        then = kernels.scales(q if s.from_old else z, grid) if s is not None else None
        r = kernels.round(z, grid, scale=then)
        moved[k] |= packed(~unchanged(q, r, d == 0, grid, now, then).reshape(-1))
        never[:, k] = _tile_counts(~unpacked(moved[k], w.numel()))
    return never


def packed(flags: torch.Tensor) -> torch.Tensor:
    """Pack flags, one bit each, the lowest of a byte first."""
    rows = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    return (rows << _places(flags.device)).sum(dim=1, dtype=torch.uint8)


def unpacked(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Unpack flags."""
    return ((bits[:, None] >> _places(bits.device)) & 1).to(torch.bool).reshape(-1)[:count]


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _tile_counts(flags: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(flags, (0, -flags.numel() % TILE))
    return padded.view(-1, TILE).sum(dim=1, dtype=torch.int32)
