"""Steps on grids whose scale may follow the data, and scores on any: calls of the C++ kernels.

Where scales move, those under which the weights are stored come from the weights, and those of the write-back
from what is written; see :func:`halfulp.kernels.reference.audit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from halfulp.kernels import native, reference
from halfulp.kernels.plan import Array, Plan, as_floats, fixed_scales, gathered, narrowing
from halfulp.kernels.reference import ARRIVED, AUDIT_COUNTS, TILE, tiles_of


class Step:
    """Weights, gradients and proposals of one tensor, flat; ``like``: the tensor of the weights.

    An audit has no gradients and passes the weights again.
    """

    def __init__(self, w: Array, g: Array, d: Array, after: bool, plan: Plan, like: torch.Tensor) -> None:
        if not w.dtype == g.dtype == d.dtype:  # float32 beside weights of 16 bits
            w, g, d = as_floats(w), as_floats(g), as_floats(d)
        self._d, self._plan = d, plan
        self._shape, self._dtype = tuple(like.shape), like.dtype
        self.addresses = [native.at(x) or 0 for x in (w, g, d)]
        self._given: dict[str, Any] = {
            "stored": native.OF_ARRAY[w.dtype], "after": after, "to": narrowing(like.dtype), "w": w, "g": g,
            "d": d, "size": w.size, **plan.numbers, **plan.segments(self._shape),
        }  # fmt: skip

    @cached_property
    def scales(self) -> tuple[Array, Array]:
        """The scales under which w is stored, and those of the write-back of Q(w) + d."""
        fixed = fixed_scales(self._plan, self._shape, self._dtype)
        if fixed is not None:
            return fixed, fixed
        assert self._plan.grid.scaling is not None
        now = self._scales_of(False, now=np.ones(1))
        if not self._plan.grid.scaling.from_old:
            return now, self._scales_of(True, now=now)
        # The scales of Q(w) itself.
        still = np.where(np.isfinite(as_floats(self._d)), 0, np.nan).astype(self._plan.work)
        if self._d.dtype == np.uint16:
            still = (still.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return now, self._scales_of(True, now=now, d=still, after=False)

    def _scales_of(self, proposed: bool, **other: Any) -> Array:
        stats = gathered(self._plan, self._shape, {**self._given, **other}, proposed)
        return reference.scales_from(stats, self._plan.grid, self._dtype)

    def audit(self, moved: Array | None, stay: Array | None) -> tuple[Array, Array, Array]:
        """Count what the grid would do to the step: counts, what arrives, expected; per tile."""
        now, then = self.scales
        n = tiles_of(self._d.size)
        counts, arrived = np.zeros((n, len(AUDIT_COUNTS)), dtype=np.int32), np.zeros((n, len(ARRIVED)))
        expected = np.zeros(n)
        call = native.call_of(
            "audit_scaled", **self._given, now=now, next=then, moved=moved, stay=stay, counts=counts,
            arrived=arrived, expected=expected,
        )  # fmt: skip
        native.run("audit_scaled", n, call)
        return counts, arrived, expected

    def score(self, rows: Sequence[tuple[int, ...]], tile: int, tiles: int) -> None:
        """Add the scores of a step to those of tensors.

        Args:
            rows: Of each, the addresses of weights, gradients, proposals and scores, how many weights, and
                its first tile.
            tile: Coordinates that are one tile.
            tiles: How many there are of all tensors.
        """
        now, then = self.scales if self._plan.scaled else (None, None)
        call = native.call_of(
            "score", **self._given, now=now, next=then, scaled=self._plan.scaled, tile=tile,
            half=max(reference.tree_size(tile) // 2, 3), tensors=len(rows),
            rows=np.array(rows, dtype=np.int64),
        )  # fmt: skip
        native.run("score", tiles, call, max(native.GRAIN * TILE // tile, 1))
