"""Tensors by grid as CSV, safe to open in a spreadsheet.

A spreadsheet takes a cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return for a
formula. A name that begins so gets an apostrophe before it, which spreadsheets show as text; numbers are
written by us and are never changed.

>>> [neutral(x) for x in ("h.0.weight", "=cmd()", "-1+1", "@SUM(1)", " =1")]
['h.0.weight', "'=cmd()", "'-1+1", "'@SUM(1)", "' =1"]
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from halfulp.report.runs import Run
from halfulp.text import shown

COLUMNS = (
    "run", "tensor", "group", "shape", "weights", "stored_on", "grid", "updates_lost_share",
    "never_moved_share", "steps",
)  # fmt: skip


def neutral(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula, with nothing invisible in it."""
    safe = shown(name, 10**9)
    return f"'{safe}" if safe.lstrip().startswith(("=", "+", "-", "@", "\\t", "\\r")) else safe


def tensors_csv(runs: Sequence[Run]) -> str:
    """Return one row per run, tensor and grid."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(COLUMNS)
    for run in runs:
        g, followed = run.gathered, run.trace.manifest["options"]["never_moved"]
        for i, grid in enumerate(g.grids):
            for t, share, never, steps in zip(
                run.trace.tensors, g.tensor_share(grid), g.last_never[:, i], g.present, strict=True
            ):
                rows.writerow(
                    [
                        neutral(run.name), neutral(t["name"]), neutral(t["group"]),
                        "x".join(str(n) for n in t["shape"]), t["numel"], neutral(t["stored"]), grid,
                        "" if share != share else f"{share:.6f}",
                        f"{never / t['recorded']:.6f}" if followed and steps else "", int(steps),
                    ]
                )  # fmt: skip
    return out.getvalue()
