"""Audited runs to be killed: reads ``FOLDER SECONDS`` lines, forks a run, kills it then; answers each line.

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

import halfulp as hu
from halfulp import kernels

STEPS = 100
PART = 5
GRIDS = ["bf16", "e4m3@128", "int4/g32", "mxfp4"]


def run(folder: Path, progress: mmap.mmap | None = None) -> None:
    """Train from step 1; note every step that is over."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"scores": ("e4m3@128", 10, 40), "keep": True, "decay": True, "resume": True}
    with hu.Audit(
        optimizer, GRIDS, model=model, out=folder, part_steps=PART, expected_never_moved=True, **options
    ) as audit:
        for step in range(1, STEPS + 1):
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


def main() -> None:
    warm_up()
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
