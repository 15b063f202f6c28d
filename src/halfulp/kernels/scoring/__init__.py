"""Scores of all tensors of a step, added to those of the steps before: what an audit calls.

:func:`halfulp.kernels.score` is of one tensor of any kind on any device. Here float32 tensors on the CPU and
grids with fixed scales are done in one call (:mod:`~halfulp.kernels.scoring.cpu_lanes`), because a small
model has dozens of tensors and a call costs as much as some of them; whatever else is done one by one. The
numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.kernels import SCORES, TILE, checked_tile, score, tiles_of
from halfulp.kernels.plan import plan_for
from halfulp.kernels.pool import GRAIN, run
from halfulp.kernels.reference import tree_size

LANES = 16


class Scored(NamedTuple):
    """One tensor of a step: weights, gradient, weights after it, and the scores that are added to."""

    w: torch.Tensor
    g: torch.Tensor
    after: torch.Tensor
    scores: torch.Tensor

    def plain(self) -> bool:
        """Whether all of it is memory that can be read as it is."""
        shape = self.w.shape
        return self.scores.is_contiguous() and all(
            x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() and x.shape == shape for x in self[:3]
        )


def add_scores(tensors: Sequence[Scored], grid: Grid | str, tile: int = TILE) -> None:
    """Add the scores of one step, as :func:`halfulp.kernels.score` has them, to those of every tensor."""
    # Zeros behind the end of a tensor would change no sum.
    tile = min(checked_tile(tile), max((one.w.numel() for one in tensors), default=1))
    for one in tensors:
        expected = (tiles_of(one.w.numel(), tile), len(SCORES))
        if tuple(one.scores.shape) != expected or one.scores.dtype != torch.float64 or not one.scores.is_cpu:
            raise UsageError(
                f"scores of {one.w.numel()} weights in tiles of {tile} are float64 of {expected} on the CPU, "
                f"not {one.scores.dtype} of {tuple(one.scores.shape)} on {one.scores.device}."
            )
    quarter = tree_size(tile) // 4
    table, n = [], 0
    for one in tensors:
        plain = tile % LANES == quarter % LANES == 0 and one.plain()
        if plain and not plan_for(grid, torch.float32).scaled:
            table.append((*(x.data_ptr() for x in one), one.w.numel(), n))
            n += len(one.scores)
        else:
            one.scores.add_(score(one.w, one.g, one.after, grid, after=True, tile=tile).cpu())
    if not table:
        return
    from halfulp.kernels.scoring.cpu_lanes import score_tiles

    plan = plan_for(grid, torch.float32)
    run(
        score_tiles, n, np.empty(0, np.float32), np.empty(0), np.array(table, dtype=np.int64), tile, quarter,
        plan.floats, plan.ints, plan.masks, grain=max(GRAIN * TILE // tile, 1),
    )  # fmt: skip
