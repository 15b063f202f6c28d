"""Audited runs to be killed: reads ``FOLDER SECONDS`` lines, forks a run, kills it then; answers each line.
Given a folder, kills short runs there, one before each operation on the disk, and goes on with them.

Every run is the same from its first step to its last; its audit goes on with the trace in the folder. Forking
spares the imports of fifty processes. polars must not be touched before a fork (its threads do not survive
it), so whoever writes the lines looks at the traces.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path

import torch
from forks import killed

import halfulp as hu
from halfulp import kernels

STEPS, SHORT = 100, 12
PART = 5
GRIDS = ["bf16", "e4m3@128", "int4/g32", "mxfp4"]


def run(folder: Path, progress: mmap.mmap | None = None, steps: int = STEPS) -> None:
    """Train from step 1; note every step that is over."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {
        "scores": ("e4m3@128", steps // 10, steps * 4 // 10),
        "decay": True,
        "resume": True,
    }
    with hu.Audit(
        optimizer, GRIDS, model=model, out=folder, part_steps=PART, expected_never_moved=True, **options
    ) as audit:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 12)).square().mean()
            loss.backward()
            audit.log(loss)
            optimizer.step()
            if progress is not None:
                progress[:8] = struct.pack("<q", step)


def warm_up() -> None:
    """Import and compile what every run would."""
    torch.set_num_threads(1)
    w = torch.nn.Parameter(torch.ones(100))
    w.square().sum().backward()
    with hu.Audit(torch.optim.AdamW([w]), GRIDS) as audit:
        audit.optimizers[0].step()
    kernels.score(w, w, w, "e4m3@128")
    import safetensors.torch  # noqa: F401


def every_operation(place: Path) -> None:
    """Says of each operation that its run was killed before it, and of the last that there was none."""
    came, number = True, 0
    while came:
        number += 1
        folder = place / str(number)
        came = killed(lambda event, folder=folder: run(folder, steps=SHORT), number)
        if came:
            killed(lambda event, folder=folder: run(folder, steps=SHORT), 0)  # to the end
        print(number, int(came), flush=True)


def main() -> None:
    warm_up()
    if len(sys.argv) > 1:
        every_operation(Path(sys.argv[1]))
        return
    for line in sys.stdin:
        folder, seconds = line.split()
        progress = mmap.mmap(-1, 8)
        child = os.fork()
        if child == 0:
            run(Path(folder), progress)
            os._exit(0)
        deadline = time.monotonic() + float(seconds)
        while (
            time.monotonic() < deadline
            and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        done = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        killed = os.WIFSIGNALED(status)
        outcome = "done" if done else "killed" if killed else "failed"
        print(outcome, struct.unpack("<q", progress[:8])[0], flush=True)


if __name__ == "__main__":
    main()
