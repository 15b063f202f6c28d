"""Runs on ranks that rehearse, killed and resumed, and ones that are not; ``rehearsals_ranks.py FOLDER``.

Every rank is a fork, which spares the imports; all ranks of a run are killed at once, by SIGKILL, before an
event whose number is given: on one rank, of operations on the disk or of steps, or when another rank has
done its part and this one has not. Every run trains from its first step on: the audit skips what is recorded.
polars must not be touched before a fork (its threads do not survive it): whoever starts this looks at the
traces. Prints, as JSON, what became of each attempt.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import halfulp as hu
from halfulp import files

STEPS, EACH, PART = 11, 4, 3
SPECS = ["e5m2", "e4m3@128:sr", "bf16:kahan", "bf16:eco", "e5m2:master", "int8/row"]
BOUNDS = ("lower", "point", "upper")
Kill = tuple[str, int, int]
"""Of which kind of event, on which rank, the how manieth."""
RUNS: dict[str, list[tuple[str, int, Kill | None]]] = {
    "single": [("single", 1, None)],
    "whole": [("fsdp", 2, None)],
    "killed": [
        ("fsdp", 2, ("disk", 0, 9)), ("fsdp", 2, ("behind", 1, 2)), ("fsdp", 2, ("disk", 1, 7)),
        ("fsdp", 2, ("step", 1, 8)), ("fsdp", 2, ("behind", 1, 1)), ("fsdp", 2, ("ahead", 0, 2)),
        ("fsdp", 2, ("disk", 0, 31)), ("fsdp", 2, None),
    ],
    "replicas": [("ddp", 2, ("step", 0, 9)), ("ddp", 2, ("disk", 0, 25)), ("ddp", 2, None)],
}  # fmt: skip


class Model(torch.nn.Module):
    """With rows that two and three ranks have different numbers of, and a tensor that one rank has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 35), torch.nn.Linear(35, 11)
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.gain


def run(out: Path, mode: str, rank: int, world: int) -> None:
    """One rank: train to the end, and save what the model would hold."""
    torch.manual_seed(0)
    model = Model()
    if world > 1:
        place = f"file://{out}/meeting-{os.getpgrp()}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    if mode == "fsdp":
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    params = list(model.parameters())  # now: FSDP2 shows others after a forward pass
    optimizer = torch.optim.AdamW(params, lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, STEPS)

    def loss() -> float:
        with torch.no_grad():
            return float(model(torch.linspace(-1, 1, 240).reshape(10, 24)).square().mean())

    with hu.Audit(
        optimizer, ["bf16", "e5m2"], model=model, out=out / "trace", rehearse=SPECS, part_steps=PART,
        expected_never_moved=True, resume=True,
    ) as audit:  # fmt: skip
        for step in range(1, STEPS + 1):
            made = torch.Generator().manual_seed(step)
            for p in params:
                whole = torch.randn(p.shape, generator=made)  # not by backward: sums over ranks are rounded
                if isinstance(p, DTensor):
                    p.grad = distribute_tensor(whole, p.device_mesh, p.placements)
                else:
                    p.grad = whole
                if mode == "ddp":
                    dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)  # as ranks meet in a backward pass
            files.hook("step", out)
            optimizer.step()
            files.hook("step", out)
            schedule.step()
            if step % EACH == 0:
                audit.evaluate(loss)
                if mode == "fsdp":
                    model.reshard()  # as a backward pass would: the root keeps what it gathered
        for spec, bound in itertools.product(SPECS, BOUNDS):
            name = spec.replace("/", "-").replace(":", "-")
            audit.save_as_if(spec, out / f"{name}.{bound}.safetensors", bound=bound)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def killer(out: Path, rank: int, kill: Kill | None) -> Callable[[str, Path], None]:
    """What to do before an event: nothing, or to kill all ranks of this run."""
    kind, of, left = kill or ("", -1, 0)

    def event(what: str, path: Path) -> None:
        nonlocal left
        saves = what == "rename" and path.parent.name == "shards"
        commits = what == "rename" and path.parent.name == "parts"
        here = {"step": what == "step", "disk": what != "step", "behind": saves, "ahead": commits}
        left -= rank == of and here[kind]
        if rank == of and here[kind] and left == 0:
            if kind == "behind":  # the first rank has committed what this one has not
                step = int(path.name.partition(".")[0])
                waited(lambda: any(last >= step for last in committed(out / "trace")))
            if kind == "ahead":  # all others have saved what this one has not committed
                newest = max((out / "trace" / "shards").glob("*.0.safetensors"))
                waited(newest.with_name(newest.name.replace(".0.", ".1.")).exists)
            os.killpg(os.getpgrp(), signal.SIGKILL)

    return event


def committed(trace: Path) -> list[int]:
    """The last steps of the parts that are there."""
    return [json.loads(p.read_text())["last_step"] for p in sorted(trace.glob("parts/[0-9]*/part.json"))]


def waited(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.002)


def attempt(out: Path, mode: str, world: int, kill: Kill | None) -> str:
    """Run all ranks, each in a fork: whether they were killed."""
    children: list[int] = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.setpgid(0, children[0] if children else 0)
            files.hook = killer(out, rank, kill)
            try:
                run(out, mode, rank, world)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
        os.setpgid(child, children[0])
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if codes == [-signal.SIGKILL] * world:
        return "killed"
    assert codes == [0] * world, f"{out.name}: the run failed: {codes}"
    return "done"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    w = torch.nn.Parameter(torch.ones(8, 8))  # import and compile what every run would
    w.grad = torch.ones(8, 8)
    with hu.Audit(
        torch.optim.AdamW([w]), ["bf16", "e5m2"], rehearse=SPECS, expected_never_moved=True
    ) as audit:
        audit.optimizers[0].step()  # type: ignore[index]  # it has one
    told = {}
    for name, attempts in RUNS.items():
        (folder / name).mkdir()
        told[name] = [attempt(folder / name, *each) for each in attempts]
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
