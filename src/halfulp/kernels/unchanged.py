"""Find frozen coordinates on whole tensors and on any device, for callers without a fused kernel.

The definition, and the reason why it compares codes where scales move with the data, is in
:mod:`halfulp.kernels.reference`.
"""

from __future__ import annotations

import torch

from halfulp import kernels
from halfulp.numbers.grids import Grid


def unchanged(
    q: torch.Tensor,
    r: torch.Tensor,
    idle: torch.Tensor,
    grid: Grid,
    scale: torch.Tensor | None,
    next_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Find the coordinates that are frozen when r is written over q.

    Args:
        q: The stored values.
        r: The values that replace them.
        idle: A mask of zero proposals.
        grid: The grid of both.
        scale: The scales of q; read only if scales move.
        next_scale: The scales of r; read only if scales move.

    Returns:
        Booleans of the shape of q; they are meaningless where a value is not finite.
    """
    same = r == q
    if grid.scaling is None or not grid.scaling.moves:
        return same
    assert scale is not None and next_scale is not None
    old, new = (_each(s, grid, tuple(q.shape)) for s in (scale, next_scale))
    element = kernels.round(q, grid, scale=scale).double() / old
    return same | idle | (r.double() == element * new)  # element * scale is exact


def _each(scale: torch.Tensor, grid: Grid, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the scale of every coordinate."""
    assert grid.scaling is not None
    row, length = grid.scaling.segment_length(shape)
    per_row = -(-row // length)
    return scale.view(-1, per_row).repeat_interleave(length, dim=1)[:, :row].reshape(shape)
