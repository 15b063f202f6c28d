"""Collect the tensors of a model by name, and locate the shards of distributed ones.

The shards of a tensor (``DTensor``: FSDP2, HSDP, tensor parallelism) are boxes that tile it. If several ranks
hold the same piece, the first of them is its owner, and the others leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import tensors
from halfulp.errors import UsageError
from halfulp.text import shown, unwrapped_name

Array = npt.NDArray[Any]
Model = torch.nn.Module | Mapping[str, torch.Tensor]
"""A model, or its tensors by name."""


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


def _box_of(name: str, x: torch.Tensor) -> Box | None:
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


def whole_tensors(model: Model) -> dict[str, torch.Tensor]:
    """Return the tensors that have values, by name; tied tensors under their first name."""
    by_name = _all(model)
    for name, x in by_name.items():
        _check_plain(name, x)
    return by_name


def owned(model: Model) -> tuple[dict[str, torch.Tensor], dict[str, Box]]:
    """Return the tensors that this rank owns, by name, and the boxes of those that are shards.

    If none is distributed, these are all tensors; otherwise the first rank owns those that are not.
    """
    everything = _all(model)
    meshes = [x.device_mesh for x in everything.values() if is_sharded(x)]  # type: ignore[attr-defined]  # DTensors
    first_rank = not any(any(mesh.get_coordinate() or ()) for mesh in meshes)
    mine, boxes = {}, {}
    for name, x in everything.items():
        if not is_sharded(x):
            _check_plain(name, x)
            if first_rank:
                mine[name] = x
        elif (box := _box_of(name, x)) is not None:
            mine[name] = x.to_local()  # type: ignore[attr-defined]  # a DTensor
            _check_plain(name, mine[name])
            boxes[name] = box
    return mine, boxes


def tied_names(model: Model) -> dict[str, list[str]]:
    """Return the further names of tied tensors, by their first name."""
    if not isinstance(model, torch.nn.Module):
        return {}
    names: dict[torch.Tensor, list[str]] = {}
    for pairs in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, x in pairs:
            names.setdefault(x, []).append(unwrapped_name(name))
    return {first: others for first, *others in names.values() if others}


def _all(model: Model) -> dict[str, torch.Tensor]:
    given: Any = model  # whatever a caller gave
    if isinstance(given, torch.nn.Module):
        pairs: list[Any] = [
            (unwrapped_name(n), x) for n, x in (*given.named_parameters(), *given.named_buffers())
        ]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        raise UsageError(f"give a torch module, or its tensors by name, not {type(given).__name__}.")
    for name, x in pairs:
        if not (isinstance(name, str) and isinstance(x, torch.Tensor)):
            at = f"{shown(repr(name))} is of type {type(x).__name__}"
            raise UsageError(f"give a torch module, or its tensors by name: {at}.")
    return {name: x.detach() for name, x in pairs if x.numel()}


def _check_plain(name: str, x: torch.Tensor) -> None:
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout != torch.strided:
        raise UsageError(
            f"{shown(name)!r} is a {type(x).__name__}: give plain tensors. (Sync follows the shards of a "
            "distributed model; a copy to which changes are applied is whole.)"
        )
    if x.is_meta:
        raise UsageError(f"{shown(name)!r} is on the meta device: it has no values. Load the model first.")
    if x.dtype not in tensors.NAMES:
        raise UsageError(f"{shown(name)!r} is {x.dtype}, which safetensors cannot hold.")


def tiled(name: str, boxes: list[Box]) -> None:
    """Refuse boxes that do not cover a tensor exactly once."""
    whole = {box.shape for box in boxes}
    if len(whole) > 1:
        raise UsageError(
            f"the shards of {shown(name)!r} are of tensors of different shapes: {sorted(whole)}."
        )
    covered, numel = sum(box.numel for box in boxes), math.prod(boxes[0].shape)
    twice = _overlap(boxes)
    if covered != numel or twice:  # boxes of so many values that do not overlap leave none out
        raise UsageError(
            f"the shards of {shown(name)!r} have {covered:,} values, and the tensor {numel:,}"
            f"{', some of them twice' if twice else ''}: give the change of every rank, once."
        )


def _overlap(boxes: list[Box]) -> bool:
    """Return True if any value is in two of these boxes."""
    start = np.array([box.start for box in boxes], dtype=np.int64)
    end = start + np.array([box.size for box in boxes], dtype=np.int64)
    for dim in range(start.shape[1]):  # shards along one dimension, of which there may be thousands
        order = np.argsort(start[:, dim])
        if (end[order[:-1], dim] <= start[order[1:], dim]).all():
            return False
    return any(
        bool(((start[i + 1 :] < end[i]) & (start[i] < end[i + 1 :])).all(axis=1).any())
        for i in range(len(boxes) - 1)
    )
