"""What one rank of test_native_distributed.py does, and what a single process does for comparison.

Each rank has half of the batch. A single process goes through the same halves one after the other, so that
every float8 scale is that of the same rows. As a program: ``native_distributed.py RANK WORLD FOLDER``.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import halfulp as hu
from halfulp.writeback.storage.native_weight import NativeWeight, is_native, plain

STEPS, STOP = 4, 2
POLICIES = ("rne", "sr", "deadzone-sr", "master")


class Small(torch.nn.Module):
    """An embedding, a matrix that two ranks share evenly and one that they do not, a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(12, 32)
        self.first = torch.nn.Linear(32, 48)
        self.norm = torch.nn.LayerNorm(48)
        self.last = torch.nn.Linear(48, 33, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.norm(self.first(self.rows(x)))))
        return out


def half(step: int, which: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2 * step + which)
    return torch.randint(12, (16,), generator=generator), torch.randn(16, 33, generator=generator)


def made(kind: str, policy: str) -> tuple[torch.nn.Module, hu.WriteBack]:
    model: torch.nn.Module = Small()
    hu.native(model)
    if kind == "fsdp":
        for part in (model.first, model.last, model):
            fully_shard(part)  # type: ignore[arg-type]  # a module
    if kind == "ddp":
        model = DistributedDataParallel(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1, fused=True)
    return model, hu.WriteBack(adamw, "e4m3@128", policy, model=model, seed=2)


def steps(model: torch.nn.Module, opt: hu.WriteBack, first: int, last: int, ranks: list[int]) -> list[Any]:
    """Train on these halves, the mean of their gradients; the events of every step."""
    seen = []
    for step in range(first, last):
        opt.zero_grad()
        for which in ranks:
            x, y = half(step, which)
            ((model(x) - y).square().mean() / len(ranks)).backward()
        opt.step()
        seen.append([(r.name, r.numel, r.frozen, r.never_moved) for r in opt.events.rows])
    return seen


def whole(p: torch.Tensor) -> torch.Tensor:
    """All of a parameter, decoded: ranks gather bytes."""
    if not isinstance(p, DTensor):
        return plain(p.detach()).clone()
    here = p.to_local()
    codes = here.codes.view(torch.uint8) if isinstance(here, NativeWeight) else here
    gathered = DTensor.from_local(
        codes, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    ).full_tensor()
    if isinstance(here, NativeWeight):
        return NativeWeight(gathered.view(torch.float8_e4m3fn), here.scale).decoded()
    return gathered.detach()


def outcome(model: torch.nn.Module, events: list[Any]) -> dict[str, Any]:
    named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    return {
        "weights": {n: whole(p) for n, p in named.items()},
        "native": sorted(n for n, p in named.items() if is_native(p)),
        "events": events,
    }


def single(policy: str) -> dict[str, Any]:
    model, opt = made("one", policy)
    return outcome(model, steps(model, opt, 0, STEPS, [0, 1]))


def spread(kind: str, policy: str, rank: int) -> dict[str, Any]:
    model, opt = made(kind, policy)
    return outcome(model, steps(model, opt, 0, STEPS, [rank]))


def resumed(policy: str, rank: int, folder: Path) -> dict[str, Any]:
    """FSDP2 through torch.distributed.checkpoint."""
    model, opt = made("fsdp", policy)
    events = steps(model, opt, 0, STOP, [rank])
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp")
    model, opt = made("fsdp", policy)
    weights, state = get_state_dict(model, opt)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "dcp")
    set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    return outcome(model, events + steps(model, opt, STOP, STEPS, [rank]))


def main(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=300),
    )  # fmt: skip
    found: dict[str, Any] = {}
    for policy in POLICIES:
        found[f"fsdp {policy}"] = spread("fsdp", policy, rank)
    found["ddp sr"] = spread("ddp", "sr", rank)
    found["resumed master"] = resumed("master", rank, folder)
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
