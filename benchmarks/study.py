"""What the study engine costs: time a cell that does nothing, and validation as studies grow.

Each study is sealed, run by worker processes and closed, with every record made durable (fsync) before the
ledger names it; then it is validated. A cell gives back one number, so nearly all of the time is the
engine's: starting the workers is measured apart, by a study of one cell. What the disk takes for one file is
measured beside it, in the same folder, because that is the floor.

    python benchmarks/study.py [--cells 1000,3000,10000] [--folder DIR] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels import OUT, environment

from halfulp.study import engine, loading
from halfulp.study.validate import validate

STUDY = """
from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study


def cells(config):
    return [Cell(name=f"cell-{{i}}", config={{"i": i}}) for i in range({cells})]


def run(cell):
    return {{"value": cell.config["i"]}}


def mean(records):
    values = [record["value"] for record in records["only"].values()]
    return {{"study": sum(values) / len(values)}}


study = Study(
    name="many", question="q", units="u", not_claimed=(), scales={{"small": {{}}}},
    stages=(Stage(name="only", kind="outcome", cells=cells, run=run),),
    estimands=(Estimand(name="mean", what="m", compute=mean),),
    gates=(Gate(name="g", estimand="mean", scope="mean", comparison=">=", threshold=0),),
    rules=(Rule(label="yes", passed=("g",)), Rule(label="no")),
)
"""


def seconds(task: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


def disk(folder: Path) -> float:
    """Seconds to write, synchronise and rename one small file, the median of many."""
    times = []
    for i in range(200):
        part, final = folder / f"part-{i}", folder / f"final-{i}"

        def one(part: Path = part, final: Path = final) -> None:
            with open(part, "wb") as file:
                file.write(b"x" * 700)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, final)

        times.append(seconds(one))
        final.unlink()
    return statistics.median(times)


def measure(cells: int, folder: Path, workers: int | None) -> dict[str, Any]:
    path, out = folder / f"study_{cells}.py", folder / f"out-{cells}"
    path.write_text(STUDY.format(cells=cells))
    source = loading.load(str(path))
    row: dict[str, Any] = {"cells": cells}
    row["run_seconds"] = seconds(lambda: engine.run(source, "small", out, workers=workers))
    row["validate_seconds"] = seconds(lambda: validate(out))
    row["ledger_bytes"] = (out / "ledger.jsonl").stat().st_size
    shutil.rmtree(out)
    return row


def markdown(env: dict[str, Any], found: dict[str, Any]) -> str:
    lines = [
        "Cells that do nothing, run by worker processes, every record durable before the ledger names it.",
        "",
        "| cells | run, s | overhead, ms a cell | validation, s | validation, ms a cell |",
        "|--:|--:|--:|--:|--:|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['cells']:,} | {row['run_seconds']:.2f} | {row['overhead_ms_a_cell']:.2f} | "
            f"{row['validate_seconds']:.2f} | {row['validate_ms_a_cell']:.3f} |"
        )
    lines += [
        "",
        f"A study of one cell takes {found['one_cell_seconds']:.2f} s (worker processes import torch); this "
        "is taken off. One small file, written, synchronised and renamed, takes "
        f"{found['disk_ms_a_file']:.2f} ms here. Load average of the machine before: {found['load']:.1f}.",
        "",
        "; ".join(f"{key}: {value}" for key, value in env.items()) + ".",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cells", default="1000,3000,10000")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--folder", type=Path, help="where to run, so which disk; default the temporary one")
    parser.add_argument("--json", type=Path, default=OUT / "study.json", help="results; a .md goes beside it")
    options = parser.parse_args()
    env = environment()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        found: dict[str, Any] = {"load": os.getloadavg()[0], "disk_ms_a_file": disk(folder) * 1e3, "rows": []}
        one = measure(1, folder, options.workers)["run_seconds"]
        found["one_cell_seconds"] = one
        for cells in (int(c) for c in options.cells.split(",")):
            row = measure(cells, folder, options.workers)
            row["overhead_ms_a_cell"] = (row["run_seconds"] - one) / cells * 1e3
            row["validate_ms_a_cell"] = row["validate_seconds"] / cells * 1e3
            found["rows"].append(row)
            print(f"{cells:,} cells: {row['overhead_ms_a_cell']:.2f} ms a cell", flush=True)
    table = markdown(env, found)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"environment": env, **found}, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(table)
    print("\n" + table, flush=True)


if __name__ == "__main__":
    main()
