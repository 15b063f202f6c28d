"""What one rank of test_writeback_distributed.py does, and what a single process does for comparison.

Both ranks see the same batch: the mean of two equal gradients is exact, so every run must be the single one.
As a program: ``writeback_distributed.py RANK WORLD FOLDER``.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import halfulp as hu
from halfulp.writeback import Master

STEPS, STOP = 6, 3
GRIDS = ("bf16", "e4m3@128")
POLICIES: dict[str, Any] = {
    "rne": "rne",
    "sr": "sr",
    "deadzone-sr": "deadzone-sr",
    "eco": "eco",
    "kahan": "kahan",
    "master": "master",
    "master from raw": Master("raw"),
}
ROWS = {"int8/row": "sr", "mxfp4": "rne"}  # steps that a shard of rows knows
NARROW = ("rne", "sr", "deadzone-sr", "eco", "kahan", "master")  # of bfloat16 parameters
CASES = [(grid, policy) for grid in GRIDS for policy in POLICIES] + list(ROWS.items())


class Uneven(torch.nn.Module):
    """Numbers of rows that two ranks cannot share evenly: 33, 5 and 1; more than a tile on each rank."""

    def __init__(self, widths: tuple[int, int, int] = (70, 33, 5)) -> None:
        super().__init__()
        torch.manual_seed(0)
        a, b, c = widths
        self.first = torch.nn.Linear(a, b)
        self.second = torch.nn.Linear(b, c)
        self.last = torch.nn.Linear(c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 70, generator=generator), torch.randn(16, 1, generator=generator)


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)


def narrow(model: torch.nn.Module, policy: str) -> hu.WriteBack:
    """Around an optimizer that steps all tensors of a list at once."""
    return hu.WriteBack(adamw(model, foreach=True), "bf16", rule(policy), model=model, seed=2)


def rule(policy: str) -> Any:
    return POLICIES.get(policy, policy)


def steps(model: torch.nn.Module, opt: hu.WriteBack, first: int, last: int) -> list[list[str]]:
    """Train; the events of every step as text, decay shares to twelve digits."""
    seen = []
    for step in range(first, last):
        dtype = next(model.parameters()).dtype
        x, y = (t.to(dtype) for t in batch(step))
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
        seen.append([line(row) for row in opt.events.rows])
    return seen


def line(r: Any) -> str:
    counts = (r.numel, r.frozen, r.zero_proposal, r.endpoint, r.nonfinite, r.never_moved)
    share = "none" if r.decay_share is None else f"{r.decay_share:.12g}"
    return f"{r.name} {' '.join(map(str, counts))} {share}"


def outcome(model: torch.nn.Module, opt: hu.WriteBack, events: list[Any]) -> dict[str, Any]:
    """Everything of a run; of what is sharded, this rank's rows: see :func:`joined`."""
    state = opt.state_dict()["state"]
    parts = {
        "weights": {n.removeprefix("module."): v.detach() for n, v in model.state_dict().items()},
        "kept": {f"{k}/{n}": v for k, e in state.items() for n, v in e.items() if not n.endswith("moved")},
    }
    shards = [[part, name] for part in parts for name, v in parts[part].items() if isinstance(v, DTensor)]
    found = {
        part: {n: (v.to_local() if isinstance(v, DTensor) else v).clone() for n, v in named.items()}
        for part, named in parts.items()
    }
    return {**found, "shards": shards, "events": events, "steps": opt.steps}


def joined(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the ranks of a run found, each with whole tensors. Rows are put together here and not by the
    ranks: hundreds of collectives of gloo's would be hundreds of chances for its threads to abort."""
    whole = [{part: dict(run[part]) for part in ("weights", "kept")} for run in runs]
    for part, name in runs[0]["shards"]:
        rows = torch.cat([run[part][name] for run in runs])
        for tensors in whole:
            tensors[part][name] = rows
    return [run | tensors for run, tensors in zip(runs, whole, strict=True)]


def single(grid: str, policy: str) -> dict[str, Any]:
    model = Uneven()
    opt = hu.WriteBack(adamw(model), grid, rule(policy), model=model, seed=2)
    return outcome(model, opt, steps(model, opt, 0, STEPS))


def single_narrow(policy: str) -> dict[str, Any]:
    model = Uneven().bfloat16()
    opt = narrow(model, policy)
    return outcome(model, opt, steps(model, opt, 0, STEPS))


def ddp(grid: str, policy: str, **options: Any) -> dict[str, Any]:
    model = DistributedDataParallel(Uneven())
    opt = hu.WriteBack(adamw(model), grid, rule(policy), model=model, seed=2, **options)
    return outcome(model, opt, steps(model, opt, 0, STEPS))


def sharded(dtype: torch.dtype = torch.float32, model: torch.nn.Module | None = None) -> torch.nn.Module:
    model = (model or Uneven()).to(dtype)
    for part in (model.first, model.second, model):
        fully_shard(part)
    return model


def fsdp(grid: str, policy: str) -> dict[str, Any]:
    model = sharded()
    opt = hu.WriteBack(adamw(model), grid, rule(policy), model=model, seed=2)
    return outcome(model, opt, steps(model, opt, 0, STEPS))


def resumed(grid: str, policy: str, folder: Path) -> dict[str, Any]:
    def make() -> tuple[torch.nn.Module, hu.WriteBack]:
        model = sharded()
        return model, hu.WriteBack(adamw(model), grid, rule(policy), model=model, seed=2)

    return stopped(make, folder / f"checkpoint {grid} {policy}")


def fsdp_narrow(policy: str, folder: Path | None = None) -> dict[str, Any]:
    """Shards that are bfloat16: the wrapped optimizer has float32 shards in their place."""

    def make() -> tuple[torch.nn.Module, hu.WriteBack]:
        model = sharded(torch.bfloat16)
        return model, narrow(model, policy)

    if folder is not None:
        return stopped(make, folder / f"checkpoint narrow {policy}")
    model, opt = make()
    events = steps(model, opt, 0, STEPS)
    for slot in opt.slots:
        assert isinstance(slot.shadow, DTensor)
        assert (slot.p.dtype, slot.shadow.dtype) == (torch.bfloat16, torch.float32)
        moment = opt.optimizer.state[slot.shadow]["exp_avg"]
        assert moment.placements == slot.p.placements == slot.shadow.placements
        assert moment.dtype == torch.float32
    return outcome(model, opt, events)


def stopped(make: Callable[[], tuple[torch.nn.Module, hu.WriteBack]], place: Path) -> dict[str, Any]:
    """Stop half way, save from both ranks, and go on in new objects."""
    model, opt = make()
    events = steps(model, opt, 0, STOP)
    a, b = get_state_dict(model, opt)
    dcp.save({"model": a, "opt": b}, checkpoint_id=place)
    model, opt = make()
    a, b = get_state_dict(model, opt)
    dcp.load({"model": a, "opt": b}, checkpoint_id=place)
    set_state_dict(model, opt, model_state_dict=a, optim_state_dict=b)
    return outcome(model, opt, events + steps(model, opt, STOP, STEPS))


def taken_over(policy: str, dtype: torch.dtype, kind: str, distributed: bool) -> dict[str, Any]:
    """Half of a run under torch's AdamW, the rest under a write-back that is given its state: by torch's own
    functions for distributed states, or as it is."""
    model = sharded(dtype) if distributed else Uneven().to(dtype)
    plain = adamw(model)
    for step in range(STOP):
        give_gradients(model, step)
        plain.step()
    model.zero_grad()
    fresh = sharded(dtype) if distributed else Uneven().to(dtype)
    fresh.load_state_dict(model.state_dict())
    grid = "e4m3@128" if dtype == torch.float32 else "bf16"
    opt: hu.WriteBack
    if kind == "hu.AdamW":
        opt = hu.AdamW(fresh.parameters(), lr=1.0, grid=grid, policy=rule(policy), seed=2)
    else:
        opt = hu.WriteBack(adamw(fresh), grid, rule(policy), model=fresh, seed=2)
    if distributed and kind == "set_state_dict":
        set_optimizer_state_dict(fresh, opt, get_optimizer_state_dict(model, plain))
    else:
        opt.load_state_dict(plain.state_dict())
    events = []
    for step in range(STOP, STEPS):
        give_gradients(fresh, step)
        opt.step()
        events.append([line(row) for row in opt.events.rows])
    return outcome(fresh, opt, events)


def give_gradients(model: torch.nn.Module, step: int) -> None:
    """Gradients from nowhere, the same for any number of ranks."""
    for n, p in enumerate(model.parameters()):
        whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + n)).to(p.dtype)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole


TAKEN_OVER = {
    **{f"{p}, {kind}": (p, torch.float32, kind) for p in POLICIES for kind in ("set_state_dict", "as it is")},
    **{
        f"narrow {p}, {kind}": (p, torch.bfloat16, kind)
        for p in NARROW
        for kind in ("set_state_dict", "hu.AdamW")
    },
    "narrow remainder16, hu.AdamW": ("remainder16", torch.bfloat16, "hu.AdamW"),
}


def whole_state() -> dict[str, Any]:
    """What one process without shards has saved."""
    model = Uneven()
    plain = adamw(model)
    give_gradients(model, 0)
    plain.step()
    return plain.state_dict()


def refusals(folder: Path) -> dict[str, str]:
    """What sharded tensors do not do, and what it says."""
    model = sharded()

    def columns() -> Any:
        mesh = init_device_mesh("cpu", (2,))
        odd = torch.nn.Module()
        odd.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
        return hu.WriteBack(adamw(odd), "bf16", "rne", model=odd)

    tries: dict[str, Callable[[], Any]] = {
        "step": lambda: hu.WriteBack(adamw(model), "int8", "sr", model=model),
        "columns": columns,
        "file": lambda: hu.writeback.save(
            hu.WriteBack(adamw(model), "e4m3", "sr", model=model), folder / "state.safetensors"
        ),
        "whole": lambda: hu.WriteBack(adamw(model), "e4m3", "sr", model=model).load_state_dict(whole_state()),
    }
    said = {}
    for name, call in tries.items():
        try:
            call()
        except hu.HalfulpError as error:
            said[name] = str(error)
    return said


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    found: dict[str, Any] = {}
    for grid, policy in CASES:
        found[f"fsdp {grid} {policy}"] = fsdp(grid, policy)
        if grid == "e4m3@128":
            found[f"ddp {grid} {policy}"] = ddp(grid, policy)
            found[f"resumed {grid} {policy}"] = resumed(grid, policy, folder)
    found["packed e4m3@128 sr"] = ddp("e4m3@128", "sr", storage="packed")
    for policy in NARROW:
        found[f"fsdp narrow {policy}"] = fsdp_narrow(policy)
        found[f"resumed narrow {policy}"] = fsdp_narrow(policy, folder)
    for key, (policy, dtype, kind) in TAKEN_OVER.items():
        found[f"taken over: {key}"] = taken_over(policy, dtype, kind, True)
    if world == 2:
        found["refusals"] = refusals(folder)
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
