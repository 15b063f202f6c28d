"""Define Lion (Chen et al. 2023, arXiv 2302.06675) as a torch optimizer, because torch has none.

Its arithmetic is that of :mod:`halfulp.kernels.onepass_reference`: operations of torch, each rounded, so that
a step in two passes, or of tensors that are not on a grid, is the same bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from halfulp.errors import UsageError
from halfulp.kernels import onepass
from halfulp.writeback.rules.rule import OptimizerRule


class Lion(torch.optim.Optimizer):
    """Plain Lion, with which :class:`halfulp.Lion` steps the tensors that are not on a grid."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas) or lr < 0 or weight_decay < 0:
            raise UsageError(
                "Lion takes betas in [0, 1), and a rate and a weight decay that are not negative; found "
                f"betas={betas}, lr={lr}, weight_decay={weight_decay}."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one optimizer step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                m, g = state["exp_avg"], p.grad
                c = m.mul(b1).add_(g.mul(1 - b1))
                sign = torch.where((c > 0) | (c < 0), c.sign(), c)  # NaN stays
                p.mul_(1 - lr * decay).add_(sign.mul_(-lr))
                m.mul_(b2).add_(g.mul(1 - b2))
        return loss


LION = OptimizerRule(
    kind=Lion,
    moments=("exp_avg",),
    reads=frozenset(("lr", "betas", "weight_decay")),
    decoupled=True,
    number=lambda group: onepass.LION,
)
