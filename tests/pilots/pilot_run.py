"""A small training for pilots: two layers with dropout, so that the state of the generators matters."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

UPDATES, BATCH = 12, 8


class Small:
    """A run as a pilot takes it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(32, 4)
        )
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 4)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def batch(self, update: int) -> dict[str, torch.Tensor]:
        x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(update))
        return {"x": x, "y": x[:, :4].argmax(dim=1)}

    def step(self, batch: dict[str, torch.Tensor], update: int) -> None:
        self.model.train()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(batch["x"]), batch["y"]).backward()
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        return float(F.cross_entropy(self.model(x), x[:, :4].argmax(dim=1)))


def counted(part: int) -> float:
    """Count costs in sequences, so that no plan depends on the machine."""
    return part / BATCH


class Single(Small):
    """One sequence a batch, so that no twin can be made and forks are all that can be paid."""

    def batch(self, update: int) -> dict[str, torch.Tensor]:
        return {name: x[:1] for name, x in super().batch(update).items()}


def by_hand(spec: tuple[str, str] | None = None, part: int = BATCH, updates: int = UPDATES) -> Any:
    """The plain loop that a user would write."""
    import halfulp as hu

    run = Small()
    if spec is not None:
        run.optimizer = hu.WriteBack(run.optimizer, *spec, model=run.model)
    for update in range(1, updates + 1):
        batch = run.batch(update)
        run.step({name: x[:part] for name, x in batch.items()}, update)
    return run
