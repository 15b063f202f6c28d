"""Tensors that are audited together.

A kernel call costs tens of microseconds before it looks at a weight, and a small model has dozens of
tensors. So small ones are laid side by side, each beginning at a tile, and copied aside in one operation
before the step. After it they are read where they are, in one call (:mod:`halfulp.kernels.auditing`); only
rehearsals want them side by side as well. The numbers are those of one call a tensor, because every count and
sum is made tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halfulp.audit.meter.rows import Array, Summing
from halfulp.audit.meter.tensor import Watched
from halfulp.kernels import TILE
from halfulp.kernels.auditing import Layout, Together
from halfulp.kernels.plan import plan_for
from halfulp.numbers.grids import Grid

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
        self.moved: torch.Tensor | None = None
        self.stay: torch.Tensor | None = None
        self._before = self._places(self.before)
        self._after: list[torch.Tensor] = []
        for w, before in zip(members, self._before, strict=True):
            w.batch, w.before = self, before
        if members[0].moved is not None:
            self.moved = torch.zeros(
                (len(self.grids), self.before.numel() // 8), dtype=torch.uint8, device="cpu"
            )
        if members[0].stay is not None:
            self.stay = torch.zeros(
                (len(self.grids), self.before.numel()), dtype=members[0].stay.dtype, device="cpu"
            )
        for i, w in enumerate(members):  # what they follow goes on in the batch's memory
            for what, flat, per in (("moved", self.moved, 8), ("stay", self.stay, 1)):
                begun = getattr(w, what)
                if flat is not None and begun is not None:
                    place = flat[:, self.starts[i] * TILE // per :][:, : begun.shape[1]]
                    setattr(w, what, place.copy_(begun))
        self._together = Together(
            self.before, self.layout, self.grids, phase=phase, moved=self.moved, stay=self.stay
        )
        self._rows = Summing(self._together.call.found, self.starts)

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
