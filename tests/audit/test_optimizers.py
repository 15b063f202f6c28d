"""The table of optimizers in the documentation is what the installed libraries give."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.contract import ContractError

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


def test_a_group_whose_rate_is_none_has_no_rate(tmp_path: Path) -> None:
    """As in transformers' Adafactor, which finds its rate by itself."""

    class Relative(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            rates = [group["lr"] for group in self.param_groups]
            try:
                for group in self.param_groups:
                    group["lr"] = 0.1
                return super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

    model = torch.nn.Linear(4, 4)
    optimizer = Relative(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    rehearse = hu.Rehearse(["e5m2"], pull=0)
    with hu.Audit(optimizer, "bf16", model=model, out=tmp_path / "t", decay=True, rehearse=rehearse):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert np.isnan(hu.Trace.open(tmp_path / "t").scan("tensors", "lr")["lr"]).all()
    with (
        hu.require(optimizer, model=model.bfloat16(), weights="float32"),
        pytest.raises(ContractError, match=r"lr=\.\.\."),
    ):
        optimizer.step()
