"""What one rank does of runs that are saved by some ranks, in one layout, and gone on with by others.

As a program: ``resharded_ranks.py RANK WORLD FOLDER``; ``FOLDER/job.json`` says what: ``layout`` "fsdp", or
"hsdp", two replicas of half the ranks each, on a mesh of two dimensions; ``load`` is where to go on from,
``save`` where to. A first part trains to ``STOP`` and saves, a second one goes on to the end.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from writeback_distributed import STEPS, STOP, Uneven, adamw, outcome, rule, steps

import halfulp as hu

CASES = [
    ("e4m3@128", "sr"),
    ("bf16", "deadzone-sr"),
    ("e4m3@128", "kahan"),
    ("bf16", "master"),
    ("bf16", "eco"),
]


def made(layout: str, world: int, grid: str, policy: str) -> tuple[torch.nn.Module, hu.WriteBack]:
    model = Uneven()
    shape, names = ((2, world // 2), ("replicas", "shards")) if layout == "hsdp" else ((world,), ("shards",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    return model, hu.WriteBack(adamw(model), grid, rule(policy), model=model, seed=2)


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=200)
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit
    )
    found = {}
    for grid, policy in CASES:
        model, opt = made(job["layout"], world, grid, policy)
        first = 0
        if job["load"]:
            a, b = get_state_dict(model, opt)
            dcp.load({"model": a, "opt": b}, checkpoint_id=f"{job['load']}/{grid} {policy}")
            set_state_dict(model, opt, model_state_dict=a, optim_state_dict=b)
            first = STOP
        events = steps(model, opt, first, STEPS if job["load"] else STOP)
        if job["save"]:
            a, b = get_state_dict(model, opt)
            dcp.save({"model": a, "opt": b}, checkpoint_id=f"{job['save']}/{grid} {policy}")
        found[f"{grid} {policy}"] = outcome(model, opt, events)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
