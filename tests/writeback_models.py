"""A small language model with everything that makes parameters awkward, and batches for it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch

import halfulp as hu

VOCABULARY, WIDTH = 29, 24


class Tied(torch.nn.Module):
    """Embedding and output matrix are one tensor; a norm and biases are not two-dimensional."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 40)
        self.norm = torch.nn.LayerNorm(40)
        self.down = torch.nn.Linear(40, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.embedding.weight.mul_(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.norm(self.up(x))))
        return self.head(x)


TWO_DIMENSIONAL = ("embedding.weight", "up.weight", "down.weight")


def tokens(step: int, batch: int = 4) -> torch.Tensor:
    """The batch of a step, whatever came before."""
    return torch.randint(0, VOCABULARY, (batch, 9), generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = tokens(step)
    return torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())


def train(
    model: torch.nn.Module,
    opt: torch.optim.Optimizer,
    steps: int,
    *,
    start: int = 0,
    each: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Plain training; the losses."""
    losses = []
    for step in range(start, start + steps):
        opt.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        each()
    return losses


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), **({"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1} | options)
    )


def written_back(
    model: torch.nn.Module, grid: str = "e4m3@16", policy: Any = "sr", **options: Any
) -> hu.WriteBack:
    return hu.WriteBack(adamw(model), grid, policy, model=model, **options)


def masks(model: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """A mask that chooses some tiles of every matrix."""
    made = {}
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            chosen = torch.rand(-(-p.numel() // 768), generator=torch.Generator().manual_seed(seed)) < 0.5
            chosen[0] = True
            made[name] = chosen
    return made


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def unsealed(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state without its digest, as shards have it: then what is wrong must be seen in values."""
    made = copy.deepcopy(state)
    line = json.loads(made["param_groups"][0]["halfulp"])
    made["param_groups"][0]["halfulp"] = json.dumps({**line, "sha256": None})
    return made
