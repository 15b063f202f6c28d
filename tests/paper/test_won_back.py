"""The table of what policies won back, against the committed studies."""

from __future__ import annotations

import json
from pathlib import Path

from halfulp.paper.report import won_back
from halfulp.paper.report.beside_paper import ALLOCATION, TRANSFORMERS, shown
from halfulp.report import recoveries

STUDIES = Path(__file__).parents[2] / "results" / "studies"


def test_the_table_is_what_the_records_say() -> None:
    folders = {name: shown(STUDIES, name, scale) for name, scale in {**TRANSFORMERS, **ALLOCATION}.items()}
    closed = {n: f / "result.json" for n, f in folders.items() if (f / "result.json").is_file()}
    results = {n: json.loads(file.read_text()) for n, file in closed.items()}
    assert recoveries.FILE.read_text() == won_back.table(results)
    rows = recoveries.known()
    assert {r.policy for r in rows} >= {"P", "F", "R", "eco", "sr", "master"}
    assert all(r.least <= r.mean + 1e-4 and r.mean <= r.most + 1e-4 for r in rows)
