"""Scripts for ``halfulp audit``, and where they run; the fixture ``halfulp`` is in ``conftest.py``."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import halfulp as hu

TRAIN = """
    import sys
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(1, 9):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
"""

Halfulp = Callable[..., tuple[int, str, str]]
"""Calls the command line: exit code, output, errors."""


def script(text: str, name: str = "train.py") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(hu.__file__).parent.parent), "COLUMNS": "200", **more}
