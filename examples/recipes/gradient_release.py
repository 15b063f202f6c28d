"""Gradient release: each parameter is stepped inside the backward, and its gradient freed.

python examples/recipes/gradient_release.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch

import halfulp as hu


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).bfloat16()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.zero_grad()
        (model(x) - x).float().square().mean().backward()
        optimizer.step()


def main(folder: Path) -> dict[str, Any]:
    model = make()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with hu.Audit(plain, ["bf16"], model=model, out=folder / "trace"):
        train(model, plain, 0, 40)
    lost = shared.lost(folder / "trace")

    model, other, again = make(), make(), make()
    optimizer = hu.AdamW(model.parameters(), lr=1e-4)
    optimizer.in_backward()
    train(model, optimizer, 0, 20)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "state.pt")
    train(model, optimizer, 20, 40)
    train(other, hu.AdamW(other.parameters(), lr=1e-4), 0, 40)
    shared.assert_equal(model, other)

    resumed = hu.AdamW(again.parameters(), lr=1e-4)
    saved = torch.load(folder / "state.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    resumed.in_backward()
    train(again, resumed, 20, 40)
    shared.assert_equal(model, again)
    return {"audit": f"{lost:.0%} lost", "fix": "the bits of a step at step()", "resume": "bit for bit"}


if __name__ == "__main__":
    shared.report(main)
