"""A small model of words: a batch gives gradients to some rows of its embedding only."""

from __future__ import annotations

import torch


class Words(torch.nn.Module):
    """An embedding of which a micro-batch uses some rows, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(60, 24)
        self.head = torch.nn.Linear(24, 24)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids)).square().mean()
