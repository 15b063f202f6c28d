"""The notebook runs from top to bottom, cell by cell, and shows what its text says."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "halfulp.ipynb"


def test_a_newcomer_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    scope: dict[str, Any] = {"__name__": "__main__"}
    said = io.StringIO()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    with contextlib.redirect_stdout(said):
        for i, cell in enumerate(cells):
            code = compile("".join(cell["source"]), f"<cell {i}>", "exec")
            exec(code, scope)  # noqa: S102  # our own notebook
    hu, trace = scope["hu"], scope["trace"]
    assert "optimizer = hu.AdamW(model.named_parameters(), lr=1e-4)" in str(hu.verdict(trace))
    assert "lost:              True" in said.getvalue()
    assert scope["fixed"][-1] < scope["went_on"][-1] / 2
    for link in ("recipes.md", "bf16.md", "contract.md"):
        assert (NOTEBOOK.parent.parent / "docs" / "how" / link).exists()
