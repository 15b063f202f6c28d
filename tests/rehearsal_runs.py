"""A small model under rehearsals, for the tests of rehearsals."""

from __future__ import annotations

import math
from typing import Any

import torch

import halfulp as hu


def pull(rate: float) -> float:
    """The default: .8 times the root of the largest rate, which is the only one here."""
    return min(1.0, 0.8 * math.sqrt(rate))


class Net(torch.nn.Module):
    """Two layers, a weight that is used twice, and a buffer that a forward pass changes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(24, 40)
        self.norm = torch.nn.BatchNorm1d(40)
        self.outer = torch.nn.Linear(40, 33)
        self.again = torch.nn.Linear(24, 40)
        self.again.weight = self.inner.weight
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).relu() + self.again(x).tanh())


def begun(
    dtype: torch.dtype = torch.float32, kind: Any = torch.optim.AdamW, **options: Any
) -> tuple[Net, Any]:
    torch.manual_seed(3)
    net = Net(dtype)
    return net, kind(net.parameters(), **{"lr": 2e-3, **options})


def loss_of(net: torch.nn.Module, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(step)
    dtype = next(net.parameters()).dtype
    x, y = (torch.randn(16, n, generator=made).to(dtype) for n in (24, 33))
    return torch.nn.functional.mse_loss(net(x), y)


def train(net: torch.nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        loss_of(net, step).backward()
        opt.step()


def held(audit: hu.Audit) -> dict[str, torch.Tensor]:
    assert audit.rehearsing is not None
    found = audit.rehearsing.state()
    for w in audit.rehearsing.tensors:
        found |= audit.rehearsing.state_of(w)
    return {name: value.clone() for name, value in found.items()}


def steps_of(audit: hu.Audit) -> int:
    assert audit.rehearsing is not None
    return audit.rehearsing.step
