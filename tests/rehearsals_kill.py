"""A run that rehearses, killed again and again, and one that is not; ``rehearsals_kill.py FOLDER KILLS``.

Every run is a fork, which spares the imports, and goes on from the last checkpoint of the one before it. It
kills itself, by SIGKILL, before an event whose number is drawn: an operation on the disk, a step, or one
rehearsal among those of a step. So where it dies does not depend on the machine's pace. polars must not be
touched before a fork (its threads do not survive it): whoever starts this looks at the traces. Prints how
often a run was killed before which kind of event, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import halfulp as hu
from halfulp import files
from halfulp.audit import rehearsal

STEPS, EACH = 14, 4
SPECS = ["e5m2", "e4m3@128:sr", "bf16:kahan", "bf16:eco", "e5m2:master", "int8/row"]
BOUNDS = ("lower", "point", "upper")


def run(out: Path, event: Callable[[str], None]) -> None:
    """Train from the last checkpoint to the end, and save what the model would hold."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, STEPS)
    parts, checkpoint, first = (model, optimizer, schedule), out / "checkpoint.pt", 0
    if checkpoint.exists():
        first, *states = torch.load(checkpoint)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)

    def loss(seed: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(16, n, generator=made) for n in (24, 33))
        return torch.nn.functional.mse_loss(model(x), y)

    def move(*given: Any) -> Any:
        event("rehearsal")
        return moved(*given)

    moved = rehearsal.kernel.move_many
    rehearsal.kernel.move_many = move
    with hu.Audit(
        optimizer, ["bf16", "e5m2"], model=model, out=out / "trace", rehearse=SPECS, part_steps=3,
        part_seconds=1e9, resume=True, first_step=first + 1,
    ) as audit:  # fmt: skip
        for step in range(first + 1, STEPS + 1):
            event("step")
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
            event("step")
            schedule.step()
            if step % EACH == 0:
                audit.evaluate(lambda: loss(0))
                audit.commit()  # a checkpoint may not be ahead of the trace
                torch.save((step, *(part.state_dict() for part in parts)), out / "aside.pt")
                event("checkpoint")
                (out / "aside.pt").rename(checkpoint)
        for spec in SPECS:
            for bound in BOUNDS:
                name = spec.replace("/", "-").replace(":", "-")
                audit.save_as_if(spec, out / f"{name}.{bound}.safetensors", bound=bound)


def forked(out: Path, until: int) -> str:
    """Run in a fork that kills itself before its n-th event; which kind that was, or nothing at the end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        left = until

        def event(what: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.write(writing, what.encode())
                os.kill(os.getpid(), signal.SIGKILL)

        files.hook = lambda operation, where: event("disk")
        try:
            run(out, event)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        what = told.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert what
        return what
    assert os.WEXITSTATUS(status) == 0, "the run failed"
    return ""


def main(folder: Path, wanted: int) -> None:
    torch.set_num_threads(1)
    w = torch.nn.Parameter(torch.ones(8, 8))  # import and compile what every run would
    w.square().sum().backward()
    with hu.Audit(torch.optim.AdamW([w]), ["bf16", "e5m2"], rehearse=SPECS) as audit:
        audit.optimizers[0].step()  # type: ignore[index]  # it has one
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    assert forked(folder / "whole", 10**9) == ""
    drawn, kills = random.Random(0), Counter[str]()
    while kills.total() < wanted:
        what = forked(folder / "killed", drawn.randint(1, 160))
        if what:
            kills[what] += 1
        else:  # it came to its end: on to another one
            (folder / "killed").rename(folder / f"killed-{kills.total()}")
            (folder / "killed").mkdir()
    assert forked(folder / "killed", 10**9) == ""
    print(json.dumps(kills))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
