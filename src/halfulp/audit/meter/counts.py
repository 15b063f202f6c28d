"""``Meter``: pairs of tensors, before and after, become rows of counts.

It knows neither optimizers nor disks. A kernel call costs tens of microseconds before it looks at a weight,
and a small model has dozens of tensors. So small ones are laid side by side, each beginning at a tile
(:class:`Batch`): they are copied aside in one operation before the step and read where they are, in one call,
after it (:mod:`halfulp.kernels.auditing`). The numbers are those of one call per tensor, because every count
and sum is made tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfulp import kernels
from halfulp.audit.meter import device_moved
from halfulp.audit.meter.rows import PER_GRID, SHARED, Array, Summing, mark_unmeasured, row_of
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.ranks import rank, reduced
from halfulp.kernels import TILE
from halfulp.kernels.auditing import Layout, Together
from halfulp.kernels.plan import plan_for
from halfulp.kernels.scoring import Scored, add_scores
from halfulp.numbers.grids import Grid
from halfulp.trace.scores import Scores

Rows = Sequence[torch.Tensor | Array] | Array
"""A row of numbers per tensor."""


SMALL = 2**20
"""Coordinates; above, the cost of a call is nothing, and the second copy that rehearsals want is not."""


class Batch:
    """Tensors of one dtype on the CPU, or samples of them, audited for the same grids with fixed scales."""

    def __init__(self, members: Sequence[Watched], phase: bool) -> None:
        self.members = list(members)
        self._sampled = any(w.tiles is not None for w in members)
        self.at = {w: i for i, w in enumerate(members)}
        self.grids: list[Grid] = members[0].grids
        self.shapes = [w.values().shape for w in members]
        self.layout = Layout([shape.numel() for shape in self.shapes])
        self.starts = self.layout.starts
        self.before = torch.zeros(self.layout.total * TILE, dtype=members[0].tensor.dtype, device="cpu")
        self.after: torch.Tensor | None = None
        """The values after a step, side by side, for rehearsals."""
        self._before = self._places(self.before)
        self._after: list[torch.Tensor] = []
        for w, before in zip(members, self._before, strict=True):
            w.batch, w.before = self, before
        self.moved, self.stay = self._side_by_side("moved", 8), self._side_by_side("stay", 1)
        self._together = Together(
            self.before, self.layout, self.grids, phase=phase, moved=self.moved, stay=self.stay
        )
        self._rows = Summing(self._together.call.audited, self.starts)

    def _side_by_side(self, what: str, per: int) -> torch.Tensor | None:
        """Have what is followed of the members go on in one block, an element for ``per`` coordinates."""
        first = getattr(self.members[0], what)
        if first is None:
            return None
        block = torch.zeros((len(self.grids), self.before.numel() // per), dtype=first.dtype, device="cpu")
        for w, start in zip(self.members, self.starts, strict=True):
            begun = getattr(w, what)
            setattr(w, what, block[:, start * TILE // per :][:, : begun.shape[1]].copy_(begun))
        return block

    def _places(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[first * TILE :][: shape.numel()].view(shape)
            for first, shape in zip(self.starts, self.shapes, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Return what is kept between steps beside copies and what is followed."""
        return self._together.call.nbytes + (0 if self.after is None else self.after.nbytes)

    def dissolve(self) -> None:
        """Audit every member by itself from now on; its tracked state stays where it is."""
        for w in self.members:
            w.batch = None

    def set_aside(self) -> None:
        """Keep the weights as they are before a step."""
        self._together.set_aside(self._whole(self.members))

    def _whole(self, of: Sequence[Watched]) -> list[torch.Tensor]:
        return [w.whole() for w in of] if self._sampled else [w.tensor for w in of]

    def keep_after(self) -> None:
        """Keep the values after each step side by side from now on."""
        self.after = torch.zeros_like(self.before)
        self._after = self._places(self.after)

    def look(self, present: Sequence[Watched]) -> None:
        """Read the weights of the members that took part in a step, if they are needed."""
        if self.after is not None:
            torch._foreach_copy_(self._after, self._now(present))

    def _now(self, present: Sequence[Watched]) -> list[torch.Tensor]:
        """Return what every member is after a step; one that is not part of it stays."""
        if present == self.members:
            return self._whole(present)
        now = list(self._before)
        for w, x in zip(present, self._whole(present), strict=True):
            now[self.at[w]] = x
        return now

    def audit(self, present: Sequence[Watched]) -> Array:
        """Return the numbers of the members that are part of this step, a row each."""
        self._together.audit(self._now(present))
        rows = self._rows()
        return rows if present == self.members else rows[[self.at[w] for w in present]]


def batches(new: Sequence[Watched], phase: bool) -> list[Batch]:
    """Batches of those that can be in one; one tensor is none. ``phase``: whether phases are summed."""
    alike: dict[torch.dtype, list[Watched]] = {}
    for w in new:
        plain = w.tensor.device.type == "cpu" and not w.sharded and w.codes is None
        dtype = w.tensor.dtype
        fixed = not any(plan_for(g, dtype).scaled for g in w.grids)
        if plain and dtype != torch.float16 and 0 < w.recorded <= SMALL and fixed:
            alike.setdefault(dtype, []).append(w)
    return [Batch(members, phase) for members in alike.values() if len(members) > 1]


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
        added = batches(new, self.phase) if rank() == 0 and self.batching else []
        self.batches += added
        return added

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
        rows: dict[Watched, torch.Tensor | Array] = {}
        for batch in together:
            present = [w for w in seen if w.batch is batch]
            rows.update(zip(present, batch.audit(present), strict=True))
        for w in seen:
            if w.batch is None:
                assert w.before is not None
                counted = device_moved.audit(
                    w.before, w.values(), w.grids, moved=w.moved, stay=w.stay, phase=self.phase
                )
                rows[w] = row_of(counted)
        return [rows[w] for w in seen]

    def total(self, seen: Sequence[Watched], rows: Rows) -> Array:
        """Sum the rows of shards over ranks; what was not measured is not a number."""
        totals = reduced(seen, rows)
        if rank() == 0 and not self.phase:
            mark_unmeasured(totals, "phase")
        if rank() == 0 and not self.expected:
            mark_unmeasured(totals, "expected")
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
