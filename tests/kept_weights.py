"""Copies of the weights before and after every step, for tests that compare an audit with brute force."""

from __future__ import annotations

import torch

Steps = list[dict[str, tuple[torch.Tensor, torch.Tensor]]]


class KeptWeights:
    """Copy the trained parameters around every step; ``steps`` has (before, after) by name."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.steps: Steps = []
        self._before: dict[str, torch.Tensor] = {}
        optimizer.register_step_pre_hook(self._set_aside)
        optimizer.register_step_post_hook(self._keep)

    def _now(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def _set_aside(self, *_: object) -> None:
        self._before = self._now()

    def _keep(self, *_: object) -> None:
        after = self._now()
        self.steps.append({name: (before, after[name]) for name, before in self._before.items()})
