"""A run that rehearses, killed again and again, and one that is not; ``rehearsals_kill.py FOLDER KILLS``.

Every run is a fork, which spares the imports, and goes on from the last checkpoint of the one before it. It
kills itself, by SIGKILL, before an event whose number is drawn: of operations on the disk, of steps (before
and after), and of single rehearsals, in turn. So where it dies does not depend on the machine's pace. polars
must not be touched before a fork (its threads do not survive it): whoever starts this looks at the traces.
Prints how often a run was killed before which kind of event, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forks import killed

import halfulp as hu
from halfulp.audit.rehearsal import rehearsals as rehearsal

STEPS, EACH = 14, 4
SPECS = ["e5m2", "e4m3@128:sr", "bf16:kahan", "bf16:eco", "e5m2:master", "int8/row"]
BOUNDS = ("lower", "point", "upper")
MOST = {"disk": 60, "step": 16, "rehearsal": 50}
"""Kinds of events, and of how many the number is drawn: a whole run has more of each."""


def run(out: Path, event: Callable[[str], None]) -> None:
    """Train from the last checkpoint to the end, and save what the model would hold."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, STEPS)
    parts: list[Any] = [model, optimizer, schedule]
    checkpoint, first = out / "checkpoint.pt", 0
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
                event("disk")
                (out / "aside.pt").rename(checkpoint)
        for spec in SPECS:
            for bound in BOUNDS:
                name = spec.replace("/", "-").replace(":", "-")
                audit.save_as_if(spec, out / f"{name}.{bound}.safetensors", bound=bound)


def main(folder: Path, wanted: int) -> None:
    torch.set_num_threads(1)
    w = torch.nn.Parameter(torch.ones(8, 8))  # import and compile what every run would
    w.square().sum().backward()
    with hu.Audit(torch.optim.AdamW([w]), ["bf16", "e5m2"], rehearse=SPECS) as audit:
        audit.optimizers[0].step()  # type: ignore[index]  # it has one
    for name in ("whole", "killed"):
        (folder / name).mkdir()
    assert not killed(partial(run, folder / "whole"), 0)
    drawn, kills = random.Random(0), Counter[str]()
    while kills.total() < wanted:
        kind = list(MOST)[kills.total() % len(MOST)]
        if killed(partial(run, folder / "killed"), drawn.randint(1, MOST[kind]), kind):
            kills[kind] += 1
        else:  # it came to its end: on to another one
            (folder / "killed").rename(folder / f"killed-{len(list(folder.iterdir()))}")
            (folder / "killed").mkdir()
    assert not killed(partial(run, folder / "killed"), 0)
    print(json.dumps(kills))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
