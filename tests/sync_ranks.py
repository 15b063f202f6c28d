"""Changes of shards: what a rank of test_sharded_sync.py does. Every rank saves its own."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import halfulp as hu
from halfulp.checkpoints import BlockFp8

WORLD, STEPS = 4, 3


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(10, 7), torch.nn.Linear(7, 3, bias=False)).bfloat16()
    made.register_buffer("counter", torch.zeros(2))
    return made


def placed(mesh: Any, *placements: Any) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(9, 10, generator=generator).bfloat16()
        return {"w": distribute_tensor(whole, mesh, placements), "plain": torch.zeros(5)}

    return make


def full(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def tensors(held: Any) -> dict[str, torch.Tensor]:
    if isinstance(held, torch.nn.Module):
        return {**dict(held.named_parameters()), **dict(held.named_buffers())}
    return dict(held)


@torch.no_grad()
def move(held: Any, step: int) -> None:
    """A few values, the same whatever rank holds them."""
    for x in tensors(held).values():
        generator = torch.Generator().manual_seed(step)
        delta = torch.randn(x.shape, generator=generator) * (torch.rand(x.shape, generator=generator) < 0.2)
        delta = delta.to(x.dtype)
        x += distribute_tensor(delta, x.device_mesh, x.placements) if isinstance(x, DTensor) else delta


def follow(name: str, held: Any, folder: Path, **options: Any) -> None:
    rank = dist.get_rank()
    sync = hu.Sync(held, **options)
    found: dict[str, Any] = {"began": sync.position, "full": sync.full().to_bytes(), "changes": []}
    whole = [{n: full(x) for n, x in tensors(held).items()}]
    for step in range(STEPS):
        move(held, step)
        found["changes"].append(sync.take().to_bytes())
        whole.append({n: full(x) for n, x in tensors(held).items()})
    torch.save(found | ({"whole": whole} if rank == 0 else {}), folder / f"{name}.{rank}.pt")


def refusals(mesh: Any) -> dict[str, str]:
    whole = torch.randn(9, 10)
    tries: dict[str, Callable[[], Any]] = {
        "scales": lambda: hu.Sync({"w": distribute_tensor(whole, mesh, [Shard(0)])}, "mxfp4"),
        "cut": lambda: hu.Sync({"w": distribute_tensor(whole, mesh, [Shard(0)])}, BlockFp8(block=4)),
        "partial": lambda: hu.Sync({"w": DTensor.from_local(whole, mesh, [Partial()])}),
    }
    said = {}
    for name, call in tries.items():
        try:
            call()
        except hu.UsageError as error:
            said[name] = str(error)
    return said


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=limit
    )
    one = init_device_mesh("cpu", (WORLD,))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name, mesh in {"fsdp": one, "hsdp": two}.items():
        sharded = model()
        fully_shard(sharded, mesh=mesh)
        follow(name, sharded, folder)
    follow("rows", placed(one, Shard(0))(), folder)
    follow("columns", placed(one, Shard(1))(), folder)
    follow("both", placed(two, Shard(0), Shard(1))(), folder)
    follow("replicated", placed(one, Replicate())(), folder)
    follow("codes", placed(one, Shard(0))(), folder, grid="e5m2")
    follow("blocks", placed(two, Replicate(), Shard(0))(), folder, grid=BlockFp8(block=5))
    torch.save(refusals(one), folder / f"refusals.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
