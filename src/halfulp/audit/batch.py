"""Small tensors that are audited together.

A kernel call costs tens of microseconds before it looks at a weight, and a small model has dozens of
tensors. So the small ones are laid side by side, each beginning at a tile, copied aside in one operation
before the step and in another after it, and audited in one call. The numbers are those of one call a
tensor, because every count and sum is made tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from halfulp import kernels
from halfulp.audit.rows import numbers
from halfulp.audit.watched import Watched
from halfulp.grids import Grid
from halfulp.kernels import TILE, tiles_of

SMALL = 2**20
"""Coordinates; above, the cost of a call is nothing, and the second copy that a batch keeps is not."""


class Batch:
    """Tensors of one dtype on the CPU, or samples of them, audited for the same grids with fixed scales."""

    def __init__(self, members: Sequence[Watched]) -> None:
        self.members = list(members)
        self.grids: list[Grid] = members[0].grids
        self.shapes = [w.values().shape for w in members]
        sizes = [shape.numel() for shape in self.shapes]
        tiles = [tiles_of(n) for n in sizes]
        self.starts: list[int] = np.cumsum([0, *tiles[:-1]]).tolist()
        self.extents = np.full(sum(tiles), TILE, dtype=np.int32)
        self.extents[np.cumsum(tiles) - 1] -= np.array(tiles, dtype=np.int32) * TILE - sizes
        self.before = torch.zeros(sum(tiles) * TILE, dtype=members[0].tensor.dtype)
        self.after = torch.zeros_like(self.before)
        self.moved: torch.Tensor | None = None
        self.stay: torch.Tensor | None = None
        self._before = [self._place(self.before, i) for i in range(len(members))]
        self._after = [self._place(self.after, i) for i in range(len(members))]
        for w, before in zip(members, self._before, strict=True):
            w.batch, w.before = self, before
        if members[0].moved is not None:
            self.moved = torch.zeros((len(self.grids), sum(tiles) * TILE // 8), dtype=torch.uint8)
        if members[0].stay is not None:
            self.stay = torch.zeros((len(self.grids), sum(tiles) * TILE), dtype=members[0].stay.dtype)
        for i, w in enumerate(members):  # what they follow goes on in the batch's memory
            for what, flat, per in (("moved", self.moved, 8), ("stay", self.stay, 1)):
                begun = getattr(w, what)
                if flat is not None and begun is not None:
                    place = flat[:, self.starts[i] * TILE // per :][:, : begun.shape[1]]
                    setattr(w, what, place.copy_(begun))

    def _place(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        return flat[self.starts[i] * TILE :][: self.shapes[i].numel()].view(self.shapes[i])

    def set_aside(self) -> None:
        """Keep the weights as they are before a step."""
        torch._foreach_copy_(self._before, [w.values() for w in self.members])

    def look(self, present: Sequence[Watched]) -> None:
        """Read the weights after a step of the members that are part of it."""
        here = set(present)
        now = [
            w.values() if w in here else before for w, before in zip(self.members, self._before, strict=True)
        ]
        torch._foreach_copy_(self._after, now)

    def audit(self, present: Sequence[Watched]) -> list[torch.Tensor]:
        """The numbers of the members that are part of this step, which were looked at."""
        found = kernels.audit(
            self.before, self.after, self.grids, after=True, moved=self.moved, stay=self.stay,
            extents=self.extents,
        )  # fmt: skip
        rows = numbers(found, self.starts)
        at = {w: i for i, w in enumerate(self.members)}
        return [torch.from_numpy(rows[at[w]]) for w in present]


def batches(new: Sequence[Watched]) -> list[Batch]:
    """Batches of those that can be in one; a batch of one would be a copy for nothing."""
    alike: dict[torch.dtype, list[Watched]] = {}
    for w in new:
        plain = w.tensor.device.type == "cpu" and not w.sharded and w.codes is None
        if plain and 0 < w.recorded <= SMALL and all(g.scaling is None for g in w.grids):
            alike.setdefault(w.tensor.dtype, []).append(w)
    return [Batch(members) for members in alike.values() if len(members) > 1]
