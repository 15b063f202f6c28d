"""A trace of seven steps in four parts, as fixtures."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from audit_reference import made, train

import halfulp as hu

GRIDS = ["bf16", "e4m3@128"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of seven steps in four parts."""
    folder = tmp_path_factory.mktemp("recorded") / "trace"
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"part_steps": 2, "scores": ("e4m3", 1, 5), "describe": {"note": "seven steps"}}
    with hu.Audit(optimizer, GRIDS, model=model, out=folder, expected_never_moved=True, **options) as audit:
        train(model, optimizer, 7, audit=audit)
    return folder


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(recorded, tmp_path / "trace"))


# ---- what a trace holds ----------------------------------------------------------------------------------
