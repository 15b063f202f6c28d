"""What a page of a large trace costs: to make, to keep, and to open.

The trace is synthetic: 10,000 steps of 506 tensors on 8 grids, 40 million rows, in parts of 500 steps as a
recorder writes them. Beside it stand a trace of a tenth of the steps, and asking the trace for its curves
one by one, as a page without the single pass would have to (one grid, one scope, timed once and multiplied).
The browser is a headless Chromium, if there is one: from the start of loading until every chart is drawn.

    python benchmarks/report.py [--steps 1000,10000] [--layers 42] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kernels import OUT, environment

from halfulp.report.document import write
from halfulp.report.gather import COLUMNS, gather
from halfulp.report.page import page

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from report_traces import GRIDS, synthetic  # the generator is the tests'

LIMITS = {"make_seconds": 10.0, "megabytes": 6.0, "open_seconds": 2.0}


def measure(steps: int, layers: int, folder: Path) -> dict[str, Any]:
    trace = synthetic(folder / "trace", steps=steps, layers=layers)
    start = time.perf_counter()
    text = page([folder / "trace"])
    made = time.perf_counter() - start
    start = time.perf_counter()
    gathered = gather(trace)
    once = time.perf_counter() - start
    start = time.perf_counter()
    trace.series("frozen", GRIDS[-1], "core")
    single = time.perf_counter() - start
    curves = len(GRIDS) * len(gathered.scopes) * len(COLUMNS)
    file = write(text, folder / "page.html")
    return {
        "steps": steps,
        "tensors": len(trace.tensors),
        "grids": len(GRIDS),
        "rows": steps * len(trace.tensors) * len(GRIDS),
        "trace_megabytes": sum(p.stat().st_size for p in (folder / "trace").rglob("*") if p.is_file()) / 1e6,
        "make_seconds": made,
        "gather_seconds": once,
        "one_curve_seconds": single,
        "curves_one_by_one_seconds": curves * single,
        "megabytes": file.stat().st_size / 1e6,
        "open_seconds": opened(file),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def opened(file: Path) -> float | None:
    """Seconds until a browser has drawn everything; the best of three. None without a browser."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    times = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        for _ in range(3):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            start = time.perf_counter()
            tab.goto(file.as_uri())
            tab.wait_for_selector("html[data-drawn]")
            times.append(time.perf_counter() - start)
            tab.close()
        browser.close()
    return min(times)


def markdown(env: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [
        "| steps x tensors x grids | rows | trace | make the page | of it, the single pass "
        "| curves one by one | page | open it | peak memory |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        shown = "-" if r["open_seconds"] is None else f"{r['open_seconds']:.2f} s"
        size = f"{r['steps']:,} x {r['tensors']} x {r['grids']} | {r['rows']:,}"
        lines.append(
            f"| {size} | {r['trace_megabytes']:.0f} MB | {r['make_seconds']:.1f} s "
            f"| {r['gather_seconds']:.1f} s | {r['curves_one_by_one_seconds']:.0f} s "
            f"| {r['megabytes']:.1f} MB | {shown} | {r['peak_megabytes']:.0f} MB |"
        )
    limits = "asked: made in 10 s, at most 6 MB, open in 2 s"
    return (
        "\n".join([*lines, "", f"{limits}; " + "; ".join(f"{k}: {v}" for k, v in env.items()) + "."]) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--steps", default="1000,10000", help="steps of the traces; 10,000 need 160 MB of disk"
    )
    parser.add_argument("--layers", type=int, default=42, help="layers of 12 tensors")
    parser.add_argument(
        "--json", type=Path, default=OUT / "report.json", help="results; a .md goes beside it"
    )
    options = parser.parse_args()
    rows = []
    for steps in (int(s) for s in options.steps.split(",")):
        print(f"{steps:,} steps", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(steps, options.layers, Path(folder)))
    env = environment()
    table = markdown(env, rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": env, "limits": LIMITS, "pages": rows}
    options.json.write_text(json.dumps(content, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(table)
    print("\n" + table + f"wrote {options.json} and {options.json.with_suffix('.md')}", flush=True)


if __name__ == "__main__":
    main()
