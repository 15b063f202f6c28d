"""The audit of many tensors in one call, where they are: what an audit of a run calls.

A kernel call costs tens of microseconds before it looks at a weight, and a small model has dozens of tensors.
Their weights before a step are copies, which lie side by side, each from the beginning of a tile on
(:class:`Layout`). What they are after it is read in place, by address. The numbers are those of one call a
tensor, because every count and sum is made tile by tile; :func:`halfulp.kernels.audit` is that call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.grids import Grid, container
from halfulp.kernels import ARRIVED, AUDIT_COUNTS, TILE, Audited, check_followed, tiles_of
from halfulp.kernels import params as _params
from halfulp.kernels.plan import Plan, flat_of, narrowing, plan_for
from halfulp.kernels.pool import run

Array = npt.NDArray[Any]
NO_PLACES = np.empty((0, 2), dtype=np.int64)
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Layout:
    """Tensors side by side, each from the beginning of a tile on."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.tiles = np.array([tiles_of(n) for n in sizes], dtype=np.int64)
        self.starts: list[int] = (np.cumsum(self.tiles) - self.tiles).tolist()
        self.total = int(self.tiles.sum())
        self.begins = (np.arange(self.total) - np.repeat(self.starts, self.tiles)) * TILE
        """Where in its tensor a tile begins."""
        self.used = np.minimum(np.repeat(self.sizes, self.tiles) - self.begins, TILE)

    def addresses(self, bases: Sequence[int], itemsize: int) -> Array:
        """Of every tile, its place in memory, given those of the tensors."""
        return np.asarray(np.repeat(np.array(bases, dtype=np.int64), self.tiles) + self.begins * itemsize)


class Together:
    """As :func:`halfulp.kernels.audit` of many tensors, in one call; made ready once, for every step.

    ``before``: the weights before a step as the layout has them, zeros between; ``moved`` and ``stay`` are
    laid out in the same way. What is found is overwritten by the next call.
    """

    def __init__(
        self,
        before: torch.Tensor,
        layout: Layout,
        grids: Sequence[Grid],
        *,
        phase: bool = True,
        moved: torch.Tensor | None = None,
        stay: torch.Tensor | None = None,
    ) -> None:
        plans = [plan_for(g, before.dtype) for g in grids]
        if any(p.scaled for p in plans) or before.dtype == torch.float16:
            raise UsageError(
                "tensors are audited together in float32, float64 or bfloat16, with fixed scales."
            )
        if before.numel() != layout.total * TILE:
            raise UsageError("what is audited together is laid out tile by tile.")
        check_followed(before, len(plans), moved, stay)
        self.layout, self._dtype, self._flat = layout, before.dtype, flat_of(before)
        self._bases: list[int] = []
        self._places = np.zeros((layout.total, 2), dtype=np.int64)
        self._places[:, 1] = layout.used
        self._none = self._flat[:0]
        self.call = Call(
            self._flat, self._none, True, plans, before.dtype, phase, moved, stay, self._places
        )  # fmt: skip

    def set_aside(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors as they are before a step."""
        from halfulp.kernels.auditing.copying import copy_tiles

        held = self._find(tensors)
        run(copy_tiles, self.layout.total, self._places, self._none, self._flat)
        del held

    def audit(self, tensors: Sequence[torch.Tensor]) -> Audited:
        """What became of them: tiles in the order of the layout. They are read where they are, or from a copy
        where that cannot be."""
        held = self._find(tensors)
        found = self.call()
        del held
        return found

    def _find(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Say where every tile is; what is returned must be held until it was read."""
        sizes = self.layout.sizes
        if len(tensors) != len(sizes):
            raise UsageError(f"expected {len(sizes)} tensors to audit together, found {len(tensors)}.")
        held = [_read(x, size, self._dtype) for x, size in zip(tensors, sizes, strict=True)]
        bases = [x.data_ptr() for x in held]
        if bases != self._bases:
            self._places[:, 0] = self.layout.addresses(bases, self._flat.itemsize)
            self._bases = bases
        return held


def _read(x: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory, from its address on, holds the values: itself, or a copy."""
    if x.numel() != size:
        raise UsageError(f"expected {size} values, as at the first step, found {x.numel()}.")
    plain = type(x) in PLAIN and x.dtype == dtype and x.is_cpu
    if plain and x.layout == torch.strided and x.is_contiguous() and not x.is_neg():
        return x
    return torch.empty(x.shape, dtype=dtype, device="cpu").copy_(x.detach())


class Call:
    """One kernel call with its arguments and room for what it finds; nothing is found of grids whose scale
    moves with the data, but for the phase sums."""

    def __init__(
        self,
        w: Array,
        d: Array,
        after: bool,
        plans: Sequence[Plan],
        dtype: torch.dtype,
        phase: bool,
        moved: torch.Tensor | None,
        stay: torch.Tensor | None,
        places: Array = NO_PLACES,
    ) -> None:
        work = _params.working(container(dtype).name)
        n, g = tiles_of(w.size), len(plans)
        counts = np.zeros((n, g, len(AUDIT_COUNTS)), dtype=np.int32)
        shared, sums = np.zeros((n, 2), dtype=np.int32), np.zeros((n, 2))
        phases, expected = np.zeros((n, g), dtype=np.int64), np.zeros((n, g))
        arrived = np.zeros((n, g, len(ARRIVED)))
        bits = np.empty((0, 0), dtype=np.uint8) if moved is None else moved.numpy()
        odds = np.empty((0, 0), dtype=work) if stay is None else stay.numpy()
        # The phase sum depends on the mantissa alone: the row of a moving grid is there for nothing else.
        rows = [i for i, p in enumerate(plans) if phase or not p.scaled]
        floats, ints = _params.table(tuple(plans[i].grid for i in rows), work)
        self._tiles = n
        self._arguments = (
            w, d, after, places, floats, ints, np.array(rows, dtype=np.int64), _params.masks(work),
            narrowing(dtype), phase, bits, odds, np.int32(1), counts, shared, sums, arrived, phases, expected,
        )  # fmt: skip
        parts = [torch.from_numpy(a) for a in (counts, shared, sums, phases, expected, arrived)]
        self._found = Audited(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], w.size)
        self.nbytes = sum(part.nbytes for part in parts) + places.nbytes
        """What it keeps between calls, beside what it was given to work on."""

    def __call__(self) -> Audited:
        """What the kernel finds: the same tensors at every call."""
        from halfulp.kernels.auditing import cpu

        run(cpu.audit_tiles, self._tiles, *self._arguments)
        return self._found
