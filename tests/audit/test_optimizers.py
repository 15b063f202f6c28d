"""The table of optimizers in the documentation is what the installed libraries give."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_is_what_happens(threads: None) -> None:
    found = runpy.run_path(str(DOCS / "matrix.py"), run_name="matrix")["rows"]()
    page = (DOCS / "optimizers.md").read_text()
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", page, re.MULTILINE))
    listed = {}
    for line in re.findall(r"^\| (\w.+?) \|$", page, re.MULTILINE):
        label, *cells = line.split(" | ")
        listed[label] = tuple(reasons[c[4:-1]] if c.startswith("no (") else c for c in cells)
    assert any(label.startswith("torch ") for label in found)
    for label, cells in found.items():
        assert cells == listed[label]
