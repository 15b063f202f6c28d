"""Locate the piece of a tensor that a rank holds, and choose the rank that is responsible for it.

The shards of a tensor (``DTensor``: FSDP2, HSDP, tensor parallelism) are boxes that tile it. If several ranks
hold the same piece, the first of them is its owner, and the others leave it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.text import shown

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Box:
    """A piece of a tensor of ``shape``, which begins at ``start`` and has ``size``."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def flat(self, at: Array) -> Array:
        """Convert flat positions in the piece to flat positions in the whole tensor.

        >>> Box((4, 6), (2, 3), (2, 3)).flat(np.array([0, 1, 3])).tolist()
        [15, 16, 21]
        """
        if self.size[1:] == self.shape[1:]:
            return at + self.start[0] * math.prod(self.shape[1:])
        where = np.unravel_index(at, self.size)
        moved = tuple(i + a for i, a in zip(where, self.start, strict=True))
        return np.ravel_multi_index(moved, self.shape).astype(np.int64)

    def in_blocks(self, block: int) -> Box | None:
        """Return this box in units of blocks; None if it cuts a block in two."""
        ends = [a + n for a, n in zip(self.start, self.size, strict=True)]
        if any(
            a % block or (e % block and e != s) for a, e, s in zip(self.start, ends, self.shape, strict=True)
        ):
            return None
        shape, start, end = (tuple(-(-v // block) for v in x) for x in (self.shape, self.start, ends))
        return Box(shape, start, tuple(e - a for e, a in zip(end, start, strict=True)))


def is_sharded(x: torch.Tensor) -> bool:
    """Return True for a DTensor."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def box_of(name: str, x: torch.Tensor) -> Box | None:
    """Return the piece of a distributed tensor that this rank owns; None if it owns none or it is empty."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]  # a DTensor
    for dim, placement in enumerate(placements):
        if placement.is_partial() or type(placement).__name__ == "_StridedShard":
            raise UsageError(
                f"{shown(name)!r} is placed {placement}, so its shards cannot be followed one "
                "by one. Redistribute it (x.redistribute(placements=[Shard(0)])), or give its full_tensor()."
            )
        if placement.is_replicate() and mesh.get_local_rank(dim):
            return None
    size, start = compute_local_shape_and_global_offset(x.shape, mesh, placements)
    box = Box(tuple(x.shape), tuple(start), tuple(size))
    return box if box.numel else None


def speaks(x: torch.Tensor) -> bool:
    """Return True if this rank is the first of a tensor's mesh, and so handles the plain tensors."""
    return not any(x.device_mesh.get_coordinate() or ())  # type: ignore[attr-defined]  # a DTensor


def tiled(name: str, boxes: list[Box]) -> None:
    """Refuse boxes that do not cover a tensor exactly once."""
    whole = {box.shape for box in boxes}
    if len(whole) > 1:
        raise UsageError(
            f"the shards of {shown(name)!r} are of tensors of different shapes: {sorted(whole)}."
        )
    held, numel = sum(box.numel for box in boxes), math.prod(boxes[0].shape)
    twice = len({(box.start, box.size) for box in boxes}) < len(boxes)
    if held != numel or twice:
        raise UsageError(
            f"the shards of {shown(name)!r} have {held:,} values, and the tensor {numel:,}"
            f"{', one of them twice' if twice else ''}: give the change of every rank, once."
        )
