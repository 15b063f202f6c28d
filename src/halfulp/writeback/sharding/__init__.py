"""Access the local shards of sharded parameters (FSDP2's DTensor), and their offsets."""

from __future__ import annotations

import atexit
import math
import time
from functools import cache
from typing import Any

import torch

from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid


def local(x: torch.Tensor) -> torch.Tensor:
    """Return the shard on this rank, sharing memory, or an ordinary tensor itself."""
    return x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]  # a DTensor


def is_sharded(x: Any) -> bool:
    """Return True for a DTensor."""
    return hasattr(x, "to_local") and hasattr(x, "placements")


def shard_offset(x: torch.Tensor) -> int:
    """Return the global flat index of the first element of this rank's shard."""
    if not is_sharded(x):
        return 0
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in x.placements:  # type: ignore[attr-defined]  # a DTensor
        whole = isinstance(placement, Replicate)
        if not whole and not (isinstance(placement, Shard) and placement.dim == 0):
            raise UsageError(
                f"placement {placement} is not supported: random streams need shards that are contiguous in "
                "the whole tensor, that is Shard(0) or Replicate()."
            )
    placed = (x.device_mesh, x.placements)  # type: ignore[attr-defined]  # a DTensor
    _, offset = compute_local_shape_and_global_offset(x.shape, *placed)
    return int(offset[0]) * math.prod(x.shape[1:]) if offset else 0


def unsupported_moving(x: torch.Tensor, grid: Grid) -> None:
    """Refuse a scale that a shard cannot know: that of the whole tensor."""
    if not is_sharded(x) or grid.scaling is None or not grid.scaling.moves:
        return
    if grid.scaling.per == "tensor" or grid.scaling.rule == "nv" or x.dim() < 2:
        raise UsageError(
            f"grid {grid.name} takes its scale from the whole tensor, but this one is sharded. "
            "Use a scale per row or group, such as int8/row or mxfp8_e4m3."
        )


def wrap_like(value: torch.Tensor, x: Any) -> torch.Tensor:
    """Wrap a local tensor of the shard's shape as a DTensor placed like x, for distributed checkpoints."""
    if not is_sharded(x) or value.shape != local(x).shape:
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def wrap_rows(value: torch.Tensor, x: Any) -> torch.Tensor:
    """Wrap a value with one row per row of the shard, of any length, as a DTensor placed like x."""
    from torch.distributed.tensor import DTensor

    whole = torch.Size((x.shape[0], *value.shape[1:]))
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(value, x.device_mesh, x.placements, run_check=False, shape=whole, stride=stride)


def reduce_sum(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks that hold different shards of x."""
    if not is_sharded(x):
        return values
    import torch.distributed as dist
    from torch.distributed.tensor import Shard

    mesh = x.device_mesh  # type: ignore[attr-defined]  # a DTensor
    for dim, placement in enumerate(x.placements):  # type: ignore[attr-defined]  # a DTensor
        if isinstance(placement, Shard):
            dist.all_reduce(values, group=mesh.get_group(dim))
            _leave_time_to_let_go()
    return values


@cache
def _leave_time_to_let_go() -> None:
    """Make the interpreter wait a moment before it shuts down.

    A thread of gloo releases a reduced tensor only after the reduction has returned, and needs the
    interpreter's lock for that. If the interpreter is shutting down by then, the thread is ended inside a
    destructor, and the process aborts ("terminate called without an active exception"). Plain torch 2.13:
    one script in four whose last act is an ``all_reduce`` in a group that something still holds.
    """
    atexit.register(time.sleep, 0.05)
