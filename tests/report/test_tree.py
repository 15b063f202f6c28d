"""The model as one picture: shares are those of brute force, and the page stays small."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import made, train
from report_traces import inventory, synthetic

import halfulp as hu
from halfulp.report.gather import gather
from halfulp.report.page import page
from halfulp.report.tree import NODES, tree_data


def unpacked(text: str) -> Any:
    codes = np.frombuffer(base64.b64decode(text), dtype="<u2")
    return np.where(codes == 65535, np.nan, codes / 65534)


def members(tree: dict[str, Any], name: str) -> int:
    """The place of a module or tensor, by its whole name."""
    names: list[str] = []
    for label, parent in zip(tree["labels"], tree["parents"], strict=True):
        above = "" if parent < 0 else names[parent]
        names.append(".".join(filter(None, (above, "" if label == "the model" else label))))
    return names.index(name)


def test_shares_of_modules_are_those_of_their_tensors(tmp_path: Path) -> None:
    """Lost, arriving and never moved of a module, from the tables of the trace."""
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with hu.Audit(optimizer, ["bf16", "e5m2"], model=model, out=tmp_path / "run") as audit:
        train(model, optimizer, 5, audit=audit, scheduled=False)
    trace = hu.Trace.open(tmp_path / "run")
    tree = tree_data(gather(trace))
    assert tree["weights"][0] == trace.numel()
    module = max((t["name"] for t in trace.tensors), key=lambda n: n.count(".")).rpartition(".")[0]
    ids = [t["id"] for t in trace.tensors if t["name"].startswith(f"{module}.")]
    at = members(tree, module if len(ids) > 1 else trace.tensors[ids[0]]["name"])
    for i, grid in enumerate(trace.grids):
        grids = trace.scan("grids").to_polars().filter(grid=i)
        mine = grids.filter(grids["tensor"].is_in(ids))
        tensors = trace.scan("tensors").to_polars()
        beside = tensors.filter(tensors["tensor"].is_in(ids))
        asked = trace.numel(ids) * len(trace.steps) - beside["zero_proposal"].sum()
        lost = (mine["frozen"].sum() - beside["zero_proposal"].sum()) / asked
        assert unpacked(tree["lost"][i])[at] == pytest.approx(lost, abs=1e-4)  # packed as 16 bits
        arrives = min(1.0, mine["arrived"].sum() / beside["proposal_sq"].sum())
        assert unpacked(tree["arrives"][i])[at] == pytest.approx(arrives, abs=1e-4)
        assert unpacked(tree["stuck"][i])[at] == pytest.approx(trace.never_moved(grid, ids)[-1], abs=1e-4)


def test_a_chain_of_modules_is_one_node(tmp_path: Path) -> None:
    listed = inventory([("a.b.c.weight", "mlp", (8, 8)), ("a.b.d.weight", "mlp", (4, 4))])
    tree = tree_data(gather(synthetic(tmp_path / "run", listed=listed, grids=["bf16"], steps=3)))
    assert tree["labels"] == ["a.b", "c.weight", "d.weight"]
    assert tree["parents"] == [-1, 0, 0]
    assert tree["weights"] == [80, 64, 16]
    assert tree["shapes"] == ["", "8 x 8, float32", "4 x 4, float32"]


def test_thousands_of_tensors_give_a_small_page(tmp_path: Path) -> None:
    """Every weight is in the picture, the small ones together."""
    names = [(f"layers.{i}.experts.{j}.{k}", "mlp", (4, 4 + j)) for i in range(24) for j in range(64)
             for k in ("up.weight", "down.weight", "gate.bias")]  # fmt: skip
    trace = synthetic(tmp_path / "run", listed=inventory(names), grids=["bf16"], steps=2)
    tree = tree_data(gather(trace))
    assert len(trace.tensors) == 4608
    assert len(tree["labels"]) <= NODES
    assert tree["weights"][0] == trace.numel()
    below = [0] * len(tree["labels"])
    for weights, parent in zip(tree["weights"], tree["parents"], strict=True):
        if parent >= 0:
            below[parent] += weights
    assert all(b in (0, w) for b, w in zip(below, tree["weights"], strict=True))
    assert len(json.dumps(tree)) < 60_000
    assert len(page([trace.path])) < 400_000
