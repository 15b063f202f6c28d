"""``Meter``: pairs of tensors, before and after, become rows of counts.

It knows neither optimizers nor disks. Small tensors are counted together (:mod:`~halfulp.audit.meter.batch`);
the numbers are those of one call per tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfulp import kernels
from halfulp.audit.meter import device_moved
from halfulp.audit.meter.batch import Batch, batches
from halfulp.audit.meter.rows import PER_GRID, SHARED, Array, leave_out, row_of
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.ranks import rank, reduced
from halfulp.kernels.scoring import Scored, add_scores
from halfulp.trace.scores import Scores

Rows = Sequence[torch.Tensor | Array] | Array
"""A row of numbers per tensor."""


class Meter:
    """Set tensors aside, and count later what each grid does to their change.

    Args:
        phase: Whether to sum phases, an estimate of what is lost by weights.
        expected: Whether probabilities of never moving are followed.
        batching: Whether small tensors are copied side by side.
    """

    def __init__(self, *, phase: bool = True, expected: bool = False, batching: bool = True) -> None:
        self.phase, self.expected, self.batching = phase, expected, batching
        self.batches: list[Batch] = []

    def join(self, new: Sequence[Watched]) -> list[Batch]:
        """Lay new tensors side by side where that is faster; return the new batches."""
        made = batches(new, self.phase) if rank() == 0 and self.batching else []
        self.batches += made
        return made

    def leave(self, w: Watched) -> None:
        """Count a tensor no longer; those beside it are counted one by one."""
        if w.batch is not None:
            self.batches.remove(w.batch)
            w.batch.dissolve()

    def set_aside(self, watched: Sequence[Watched]) -> None:
        """Keep the values as they are before a change."""
        for batch in self._batches_of(watched):
            batch.set_aside()
        for w in watched:
            if w.batch is None:
                w.set_aside()

    def look(self, seen: Sequence[Watched]) -> None:
        """Read the values after a change side by side, for rehearsals."""
        for batch in self._batches_of(seen):
            batch.look([w for w in seen if w.batch is batch])

    def count(self, seen: list[Watched]) -> Rows:
        """Count the effect of the change on this rank."""
        together = self._batches_of(seen)
        if len(together) == 1 and together[0].members == seen:  # most models
            return together[0].audit(seen)
        found: dict[Watched, torch.Tensor | Array] = {}
        for batch in together:
            present = [w for w in seen if w.batch is batch]
            found.update(zip(present, batch.audit(present), strict=True))
        for w in seen:
            if w.batch is None:
                assert w.before is not None
                counted = device_moved.audit(
                    w.before, w.values(), w.grids, moved=w.moved, stay=w.stay, phase=self.phase
                )
                found[w] = row_of(counted)
        return [found[w] for w in seen]

    def total(self, seen: Sequence[Watched], rows: Rows) -> Array:
        """Sum the rows of shards over ranks; what was not measured is not a number."""
        totals = reduced(seen, rows)
        if rank() == 0 and not self.phase:
            leave_out(totals, "phase")
        if rank() == 0 and not self.expected:
            leave_out(totals, "expected")
        return totals

    def _batches_of(self, watched: Sequence[Watched]) -> list[Batch]:
        if len(self.batches) == 1 and self.batches[0].members == watched:  # most models
            return self.batches
        return [b for b in self.batches if any(w.batch is b for w in watched)]


def count_apart(w: Watched, row: torch.Tensor, shrink: torch.Tensor) -> None:
    """Put into a row how many updates weight decay alone would lose, and the rest of the change alone."""
    assert w.before is not None
    parts = (("frozen_decay", shrink), ("frozen_gradient", (w.values() - w.before) - shrink))
    for column, d in parts:
        alone = kernels.audit(w.before, d, w.grids, phase=False).counts[:, :, 0]
        row[PER_GRID.index(column) : -len(SHARED) : len(PER_GRID)] = alone.sum(dim=0, dtype=torch.float64)


def score(window: Scores, step: int, seen: Sequence[Watched]) -> None:
    """Add to the scores what a step says, where there was a gradient."""
    seen = [w for w in seen if w.scores is not None]
    if window.first <= step <= window.last:
        scored = []
        for w in seen:
            gradient = w.gradient()
            if gradient is not None and w.before is not None and w.scores is not None:
                scored.append(Scored(w.before, gradient, w.values(), w.scores))
        add_scores(scored, window.grid, window.tile)
    for w in seen:
        w.given = None
