"""Load and scale: what a coordinate costs from a million to a billion, long traces, studies of many cells,
models of many tensors and their pages, checkpoints of which little has to be read.

Memory is this process's; times are of its processors, so that a busy machine does not count, and of the
best of three steps. ``lost`` counts what came out wrong or broke its bound: an audit whose counts do not add
up, a cost a coordinate that grows, memory beyond what is stated.
"""

from __future__ import annotations

import json
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from study.samples import quick_identity, run, study_file

import halfulp as hu
from halfulp.study.validate import validate
from torture import Clock, Effort, Trial

GRIDS = ["bf16", "e4m3@128"]
FLAT = 2.0  # how much dearer the dearest coordinate may be than the cheapest


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def coordinates(effort: Effort) -> Iterator[Trial]:
    """A model of one bfloat16 matrix, audited over three steps of SGD."""
    costs: dict[int, float] = {}
    for power in range(6, 10 if effort.long else 9):
        clock, n = Clock(), 10**power
        before = peak_bytes()
        p = torch.nn.Parameter(torch.full((n // 1000, 1000), 0.5, dtype=torch.bfloat16))
        p.grad = torch.full_like(p, 0.1)
        optimizer = torch.optim.SGD([p], lr=0.01)
        seconds = []
        folder = effort.folder / f"audit{power}"
        with hu.Audit(optimizer, GRIDS, out=folder):
            for _ in range(3):
                began = time.process_time()
                optimizer.step()
                seconds.append(time.process_time() - began)
        trace = hu.Trace.open(folder)
        rows = trace.table().to_polars()
        lost = int(rows["numel"].max() != n) if "numel" in rows.columns else 0
        costs[power] = min(seconds) / n * 1e9
        grown = max(peak_bytes() - before, 0)
        lost += (
            max(costs[p] for p in costs if p >= 7) > FLAT * min(costs[p] for p in costs if p >= 7)
            if power > 7
            else 0
        )
        note = f"{costs[power]:.2f} ns of a processor a coordinate and step; "
        note += f"memory +{grown / n:.1f} bytes a coordinate"
        yield Trial("Scale", f"an audit of 10^{power} coordinates, two grids", n, lost, clock(), note)
        del p, optimizer


def long_trace(effort: Effort) -> Iterator[Trial]:
    """Recorded, opened and drawn."""
    steps = effort.of(5_000, 100_000)
    clock, folder = Clock(), effort.folder / "long"
    p = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.SGD([p], lr=1e-3)
    p.grad = torch.full_like(p, 0.01)
    with hu.Audit(optimizer, GRIDS, out=folder, part_steps=1000):
        for _ in range(steps):
            optimizer.step()
    recorded = clock()
    trace = hu.Trace.open(folder)
    opened = clock()
    from halfulp.report.document import write
    from halfulp.report.page import page

    html = effort.folder / "long.html"
    write(page([folder]), html)
    drawn = clock()
    lost = int(trace.last_step != steps) + int(not html.is_file())
    note = f"opened in {opened:.1f} s, drawn in {drawn:.1f} s, page {html.stat().st_size >> 10} KiB"
    yield Trial("Scale", f"a trace of {steps:,} steps", steps, lost, recorded + opened + drawn, note)


def many_tensors(effort: Effort) -> Iterator[Trial]:
    """A model of thousands of tensors: audited, and its page, which must stay small and quick to make."""
    count = effort.of(2_000, 10_000)
    clock, folder = Clock(), effort.folder / "many tensors"
    model = torch.nn.ModuleList(torch.nn.Linear(16, 16, bias=False) for _ in range(count))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    with hu.Audit(optimizer, GRIDS, model=model, out=folder):
        for _ in range(3):
            optimizer.step()
    recorded = clock()
    watched = hu.Trace.open(folder).table().to_polars()["tensor"].n_unique()
    note = f"{recorded / 3 / count * 1e6:.0f} us a tensor and step"
    yield Trial(
        "Scale", f"an audit of {count:,} tensors", count, int(watched != count), recorded + clock(), note
    )
    from halfulp.report.document import write
    from halfulp.report.page import page

    if count >= REPORTED:  # a page of as many as a large model has
        model = torch.nn.ModuleList(list(model)[:REPORTED])
        folder = effort.folder / "reported"
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        with hu.Audit(optimizer, GRIDS, model=model, out=folder):
            optimizer.step()
        count = REPORTED
        clock()
    html = effort.folder / "many.html"
    write(page([folder]), html)
    size = html.stat().st_size
    what = f"a report of {count:,} tensors, below 3 MB"
    yield Trial("Scale", what, count, int(size > 3_000_000), clock(), f"{size / 1e6:.2f} MB")


REPORTED = 5_000


def _shard(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """A safetensors file whose values were never written: the file system has nothing of them."""
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def shards(effort: Effort) -> Iterator[Trial]:
    """Check and diff of two checkpoints that are nearly all something else than weights: that is not read.

    What was read is what of the files is in memory afterwards; the system reads ahead, so twice the weights
    and some megabytes a shard are allowed for."""
    count, weights, other = 20, 8 << 20, 5 << 30
    clock, memory = Clock(), peak_bytes()
    folders = [effort.folder / "base", effort.folder / "trained"]
    for folder in folders:
        folder.mkdir()
        index = {}
        for i in range(count):
            held = {f"layers.{i}.weight": ("BF16", [4096, 1024], weights)}
            held |= {f"layers.{i}.positions": ("I64", [other // 8], other)}
            _shard(folder / f"model-{i}.safetensors", held)
            index |= dict.fromkeys(held, f"model-{i}.safetensors")
        whole = {"metadata": {}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    checked = hu.check(folders[0], lr=1e-6).weights
    compared = hu.diff(*folders).total.weights
    files = [str(p) for folder in folders for p in folder.glob("*.safetensors")]
    said = subprocess.run(["fincore", "-b", "-n", "-o", "RES", *files], capture_output=True, text=True)
    resident = sum(map(int, said.stdout.split()))
    lost = int(checked != compared or checked != count * weights // 2)
    lost += int(resident > 2 * len(files) * (2 * weights)) + int(peak_bytes() - memory > 2 << 30)
    note = f"{resident / 1e6:,.0f} MB read, of which {len(files) * weights / 1e6:,.0f} MB are weights"
    what = "`check` and `diff` of two checkpoints of 107 GB each, in 20 sparse shards"
    yield Trial("Scale", what, len(files), lost, clock(), note)


MANY = """
from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study


def cells(config):
    return [Cell(name=f"cell-{i}", config={"i": i}) for i in range(config["cells"])]


def run(cell):
    return {"value": cell.config["i"] / 7}


def value(records):
    return {"mean": sum(r["value"] for r in records["only"].values()) / len(records["only"])}


study = Study(
    name="many", question="q", units="u", not_claimed=(), scales={"small": {"cells": CELLS}},
    stages=(Stage(name="only", kind="outcome", cells=cells, run=run),),
    estimands=(Estimand(name="value", what="v", compute=value),),
    gates=(Gate(name="g", estimand="value", scope="all", comparison=">=", threshold=0),),
    rules=(Rule(label="yes", passed=("g",)), Rule(label="no")),
)
"""


def many_cells(effort: Effort) -> Iterator[Trial]:
    cells = effort.of(1_000, 100_000)
    clock = Clock()
    quick_identity()
    path = study_file(effort.folder / "many", MANY.replace("CELLS", str(cells)))
    out = effort.folder / "many" / "out"
    run(path, out)
    ran = clock()
    lost = int(validate(out).exit_code != 0) + int(len(list(Path(out, "records").rglob("*.json"))) != cells)
    checked = clock()
    note = f"run in {ran:.0f} s, validated in {checked:.0f} s"
    yield Trial("Scale", f"a study of {cells:,} cells", cells, lost, ran + checked, note)


def trials(effort: Effort) -> Iterator[Trial]:
    torch.set_num_threads(2)
    parts = {"coordinates": coordinates, "trace": long_trace, "cells": many_cells, "tensors": many_tensors}
    parts |= {"shards": shards} if shutil.which("fincore") else {}
    for name, part in parts.items():
        if effort.wants(name):
            yield from part(effort)
