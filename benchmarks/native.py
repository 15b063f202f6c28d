"""Bytes of weights that are float8, bfloat16 or float32: what is stored, and the peak of a step.

Each form in a process of its own: four matrices of 2048 x 2048, AdamW with float32 moments, one training step
after a first that makes the moments. The peak is the process's resident memory (Linux) above what it had
before the model: weights, gradients, moments and all that a step sets aside. glibc keeps what is freed in
blocks of up to 32 MB, so that the peak would tell what was ever freed; here it gives back at once what is
larger than a megabyte (MALLOC_MMAP_THRESHOLD_), for all forms.

    python benchmarks/native.py [--out results/bench/native.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import halfulp as hu
from halfulp.writeback import WriteBackOptions
from halfulp.writeback.storage.native_weight import NativeWeight

SIZE, LAYERS, ROWS = 2048, 4, 64
FORMS = ("float32", "float32 on the grid", "bfloat16", "native")


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit("this benchmark reads /proc")


def trained(form: str, size: int) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A model of this form, and what makes a step of it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False) for _ in range(LAYERS)))
    if form == "bfloat16":
        model.bfloat16()
    if form == "native":
        hu.native(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if form != "float32":
        grid = "bf16" if form == "bfloat16" else "e4m3@128"
        optimizer = hu.WriteBack(
            optimizer, grid, "sr", model=model, options=WriteBackOptions(telemetry=False)
        )
    x = torch.randn(ROWS, size, dtype=next(model.parameters()).dtype)

    def step() -> None:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def measure(form: str) -> dict[str, float]:
    trained(form, 64)[1]()  # loads kernels
    empty, count = status("VmRSS"), LAYERS * SIZE * SIZE
    model, step = trained(form, SIZE)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    peak = status("VmHWM") - empty
    held = [p.codes if isinstance(p, NativeWeight) else p for p in model.parameters()]
    stored = sum(p.untyped_storage().nbytes() for p in held)
    return {"stored": stored / count, "peak": peak / count, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=FORMS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.form:
        print(json.dumps(measure(given.form)))
        return
    found = {}
    for form in FORMS:
        command = [sys.executable, __file__, "--form", form]
        place = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=place).stdout
        found[form] = json.loads(said.splitlines()[-1])
    print("| weights | stored, bytes per weight | peak of a step, the same | step, s |\n|---|--:|--:|--:|")
    for form, row in found.items():
        print(f"| {form} | {row['stored']:.2f} | {row['peak']:.1f} | {row['seconds']:.2f} |")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
