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

    def addresses(self, tensors: Sequence[torch.Tensor], itemsize: int) -> Array:
        """Of every tile, its place in its tensor's memory."""
        bases = np.array([x.data_ptr() for x in tensors], dtype=np.int64)
        return np.asarray(np.repeat(bases, self.tiles) + self.begins * itemsize)


def audit_many(
    before: torch.Tensor,
    after: Sequence[torch.Tensor],
    layout: Layout,
    grids: Sequence[Grid],
    *,
    phase: bool = True,
    moved: torch.Tensor | None = None,
    stay: torch.Tensor | None = None,
) -> Audited:
    """As :func:`halfulp.kernels.audit` of every tensor, in one call: tiles in the order of the layout.

    ``before``: the weights before a step as the layout has them, zeros between; ``after``: the tensors
    themselves, read where they are, or from a copy where that cannot be. ``moved`` and ``stay`` are laid out
    in the same way.
    """
    plans = [plan_for(g, before.dtype) for g in grids]
    if any(p.scaled for p in plans) or before.dtype == torch.float16:
        raise UsageError("tensors are audited together in float32, float64 or bfloat16, with fixed scales.")
    if before.numel() != layout.total * TILE or len(after) != len(layout.sizes):
        raise UsageError("what is audited together is laid out tile by tile, and there is an after of each.")
    now = [_read(x, size, before.dtype) for x, size in zip(after, layout.sizes, strict=True)]
    check_followed(before, len(plans), moved, stay)
    places = np.empty((layout.total, 2), dtype=np.int64)
    places[:, 0] = layout.addresses(now, before.element_size())
    places[:, 1] = layout.used
    flat = flat_of(before)
    return counted(flat, flat[:0], True, plans, before.dtype, phase, moved, stay, places)


def _read(x: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory, from its address on, holds the values: itself, or a copy."""
    if x.numel() != size:
        raise UsageError(f"expected {size} values, as before the step, found {x.numel()}.")
    plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.dtype == dtype and x.is_cpu
    if plain and x.layout == torch.strided and x.is_contiguous() and not x.is_neg():
        return x
    return torch.empty(x.shape, dtype=dtype).copy_(x.detach())


def counted(
    w: Array,
    d: Array,
    after: bool,
    plans: Sequence[Plan],
    dtype: torch.dtype,
    phase: bool,
    moved: torch.Tensor | None,
    stay: torch.Tensor | None,
    places: Array = NO_PLACES,
) -> Audited:
    """What the kernel finds; nothing of grids whose scale moves with the data, but for the phase sums."""
    from halfulp.kernels.auditing import cpu

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
    run(
        cpu.audit_tiles, n, w, d, after, places, floats, ints, np.array(rows, dtype=np.int64),
        _params.masks(work), narrowing(dtype), phase, bits, odds, np.int32(1), counts, shared, sums,
        arrived, phases, expected,
    )  # fmt: skip
    parts = [torch.from_numpy(a) for a in (counts, shared, sums, phases, expected, arrived)]
    return Audited(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], w.size)
