"""torchtitan: ``hu.AdamW`` in its ``OptimizersContainer``, two model parts, its flattened state.

Each optimizer takes its part of the flattened state through ``halfulp.writeback.unflattened``. The container
is what a job's ``build_optimizers`` gives; its trainer needs GPUs and is not run here.

    python examples/recipes/torchtitan_optimizer.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch
from torchtitan.components.optimizer import OptimizersContainer

import halfulp as hu
from halfulp.writeback import unflattened


def make() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    parts = (torch.nn.Linear(32, 64), torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(64, 32)))
    return [part.bfloat16() for part in parts]


def train(parts: list[torch.nn.Module], optimizers: OptimizersContainer, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizers.zero_grad()
        (parts[1](parts[0](x)) - x).float().square().mean().backward()
        optimizers.step()


def main(folder: Path) -> dict[str, Any]:
    parts = make()
    plain = OptimizersContainer(parts, torch.optim.AdamW, {"lr": 1e-4})
    with hu.Audit(plain.optimizers[0], ["bf16"], model=parts[0], out=folder / "trace"):
        train(parts, plain, 0, 40)
    lost = shared.lost(folder / "trace")

    parts = make()
    optimizers = OptimizersContainer(parts, hu.AdamW, {"lr": 1e-4})
    train(parts, optimizers, 0, 20)
    states = {
        "model": [p.state_dict() for p in parts],
        "flattened": optimizers.state_dict(),
    }
    torch.save(states, folder / "state.pt")
    train(parts, optimizers, 20, 40)

    saved = torch.load(folder / "state.pt", weights_only=True)
    again = make()
    resumed = OptimizersContainer(again, hu.AdamW, {"lr": 1e-4})
    for part, optimizer, weights in zip(again, resumed, saved["model"], strict=True):
        part.load_state_dict(weights)
        optimizer.load_state_dict(unflattened(saved["flattened"], optimizer, part))
    train(again, resumed, 20, 40)
    for a, b in zip(parts, again, strict=True):
        shared.assert_equal(a, b)
    return {
        "audit": f"{lost:.0%} lost",
        "fix": "as the container's optimizer",
        "resume": "bit for bit, from its flattened state",
    }


if __name__ == "__main__":
    shared.report(main)
