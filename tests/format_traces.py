"""Traces of earlier releases, traces like them by the code of today, and their digests made right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fixtures.make_format_1 import GRIDS, model, train

import halfulp as hu
from halfulp import documents, files

FIRST, SECOND = (Path(__file__).parent / "fixtures" / f"format_{n}" for n in (1, 2))
OPTIONS: dict[str, Any] = {"scores": ("e4m3", 1, 4), "expected_never_moved": True}


def record(
    folder: Path, steps: int = 5, *, grids: list[str] = GRIDS, lr: float = 1e-3, **options: Any
) -> Path:
    """A trace like that of the fixtures, by the code of today."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    settings = {"part_steps": 2, "describe": {"note": "five steps"}, **OPTIONS, **options}
    with hu.Audit(optimizer, grids, model=net, out=folder, **settings) as audit:
        train(net, optimizer, steps, audit)
    return folder


def resealed(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A document with something changed and its digest made right, as somebody might on purpose."""
    document = json.loads(file.read_text())
    del document["sha256"]
    change(document)
    file.write_bytes(documents.sealed(document))


def bound_anew(folder: Path) -> None:
    """Every digest of a trace's tables made right."""
    before = None
    for part in sorted((folder / "parts").iterdir()):

        def change(told: dict[str, Any], before: str | None = before, part: Path = part) -> None:
            told["before"] = before
            for name, entry in told["files"].items():
                entry.update(bytes=(part / name).stat().st_size, sha256=files.sha256(part / name))

        resealed(part / "part.json", change)
        before = json.loads((part / "part.json").read_text())["sha256"]
