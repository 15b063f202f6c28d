"""Score all tensors of a step, and add the scores to those of earlier steps, as an audit does.

:func:`halfulp.kernels.score` scores one tensor of any kind on any device. Here float32 tensors on the CPU, on
grids with fixed scales, are scored in one call (``native/score.cpp``), because a small model has dozens of
tensors and a call costs as much as some of them; all others are scored one by one. The numbers are the same
to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from halfulp.errors import UsageError
from halfulp.kernels import SCORES, TILE, checked_tile, native, score, tiles_of
from halfulp.kernels.plan import flat_of, plan_for
from halfulp.kernels.scaled import Step
from halfulp.numbers.grids import Grid


class Scored(NamedTuple):
    """One tensor of a step: weights, gradient, weights after the step, and the accumulated scores."""

    w: torch.Tensor
    g: torch.Tensor
    after: torch.Tensor
    scores: torch.Tensor

    def plain(self) -> bool:
        """Return True if all tensors can be read from their memory as it is."""
        shape = self.w.shape
        return self.scores.is_contiguous() and all(
            x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() and x.shape == shape for x in self[:3]
        )


def add_scores(tensors: Sequence[Scored], grid: Grid | str, tile: int = TILE) -> None:
    """Add the scores of one step, as by :func:`halfulp.kernels.score`, to those of every tensor."""
    # Zeros behind the end of a tensor would change no sum.
    tile = min(checked_tile(tile), max((one.w.numel() for one in tensors), default=1))
    for one in tensors:
        expected = (tiles_of(one.w.numel(), tile), len(SCORES))
        if tuple(one.scores.shape) != expected or one.scores.dtype != torch.float64 or not one.scores.is_cpu:
            raise UsageError(
                f"scores of {one.w.numel()} weights in tiles of {tile} are float64 of {expected} on the CPU, "
                f"not {one.scores.dtype} of {tuple(one.scores.shape)} on {one.scores.device}."
            )
    plan, table, last, n = plan_for(grid, torch.float32), [], None, 0
    together = not plan.scaled and native.library() is not None
    for one in tensors:
        if together and one.plain():
            table.append((*(x.data_ptr() for x in one), one.w.numel(), n))
            last, n = one.w, n + len(one.scores)
        else:
            one.scores.add_(score(one.w, one.g, one.after, grid, after=True, tile=tile).cpu())
    if last is not None:
        like = flat_of(last)
        Step(like, like, like, True, plan, last).score(table, tile, n)
