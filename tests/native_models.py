"""A small model whose weights live as float8 codes, and steps of it."""

from __future__ import annotations

from typing import Any

import torch
from oracle import assert_same

import halfulp as hu
from halfulp.writeback.storage.native_weight import (
    plain,
)

GRID, SCALE = "e4m3@128", 2.0**-7


class Net(torch.nn.Module):
    """An embedding that is tied to the output, two matrices with a bias, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(24, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.rows(x)
        h = h + self.down(torch.nn.functional.gelu(self.up(self.norm(h))))
        return torch.nn.functional.linear(h, self.rows.weight)


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.randint(24, (4, 9), generator=torch.Generator().manual_seed(step))
    return found[:, :-1], found[:, 1:]


def native_net() -> Net:
    model = Net()
    assert hu.native(model) == ["rows.weight", "up.weight", "down.weight"]
    return model


def loss_of(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    x, y = batch(step)
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def wrapped(model: torch.nn.Module, policy: str = "sr", **options: Any) -> hu.WriteBack:
    fused = options.pop("fused", True)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=fused)
    return hu.WriteBack(adamw, GRID, policy, model=model, seed=3, **options)


def steps(model: torch.nn.Module, opt: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        opt.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert_same(plain(p.detach()), plain(q.detach()), name)
