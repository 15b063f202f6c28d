"""Exchange data between the processes of a run: who writes, what a step moved, and sums over shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.audit.meter.tensor import Watched, gradient_of
from halfulp.writeback.sharding import reduce_sum

Array = npt.NDArray[Any]


def rank() -> int:
    """Return the rank of this process, from the process group or, before it exists, from the launcher."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _launched_as()


@cache
def _launched_as() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of ranks, 1 without a process group."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def many() -> bool:
    """Return True if several processes train together, according to the process group or the launcher."""
    return world() > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1


def broadcast(what: Any, mesh: Any) -> Any:
    """Return what the first rank of a mesh knows, for all of its ranks."""
    dist = torch.distributed
    box = [what]
    for group in mesh.get_all_groups():
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def taking_part(watched: Sequence[Watched]) -> list[Watched]:
    """Return the tensors that are part of a step that is just over.

    Those that had a gradient when ``step()`` was called (an optimizer may drop it inside), or have one now
    (a closure makes it inside), or are not what they were, by whatever hand. All ranks must agree, or the
    sums of shards would not match: whether a shard changed is asked of all of them.
    """
    unsure = [w for w in watched if not w.takes_part and gradient_of(w.tensor) is None]
    if not unsure:
        return list(watched)
    flags = [torch.tensor([float(w.changed())], device=w.values().device) for w in unsure]
    still = {w for w, moved in zip(unsure, reduced(unsure, flags), strict=True) if moved[0] == 0}
    return [w for w in watched if w not in still]


def as_tensor(row: torch.Tensor | Array) -> torch.Tensor:
    """Numbers as a tensor where they are, whatever device is torch's default."""
    return row if isinstance(row, torch.Tensor) else torch.from_numpy(row)


def reduced(seen: Sequence[Watched], counted: Sequence[torch.Tensor | Array] | Array) -> Array:
    """Return the rows of all tensors, with shards summed over ranks in one reduction per kind of sharding."""
    if isinstance(counted, np.ndarray):  # a batch, in which there are no shards
        return counted
    rows = list(counted)
    alike: dict[Any, list[int]] = {}
    for i, w in enumerate(seen):
        if w.sharded:
            alike.setdefault((w.tensor.device_mesh, w.tensor.placements), []).append(i)  # type: ignore[attr-defined]  # a DTensor
    for places in alike.values():
        total = reduce_sum(torch.stack([as_tensor(rows[i]) for i in places]), seen[places[0]].tensor)
        for i, row in zip(places, total, strict=True):
            rows[i] = row
    return np.stack([row.cpu().numpy() if isinstance(row, torch.Tensor) else row for row in rows])
