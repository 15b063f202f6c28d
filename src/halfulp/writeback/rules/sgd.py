"""Implement SGD with momentum as in torch's fused step."""

from __future__ import annotations

from typing import Any

import torch

from halfulp.kernels import onepass
from halfulp.writeback.rules.base import Group, OptimizerRule


def _advance(
    z: torch.Tensor, grad: torch.Tensor, moments: dict[str, Any], group: Group, *, first: bool
) -> None:
    """Make torch's fused step of a chunk, whose end is that of the tensor, or whole vectors."""
    torch._fused_sgd_(
        [z], [grad], [moments["momentum_buffer"]], lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]), momentum=float(group["momentum"]),
        dampening=float(group["dampening"]), nesterov=bool(group["nesterov"]), is_first_step=first,
        maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip


def _refuses(group: Group) -> str | None:
    return "SGD without momentum has nothing that one pass would save" if group["momentum"] == 0 else None


SGD = OptimizerRule(
    kind=torch.optim.SGD,
    moments=("momentum_buffer",),
    reads=frozenset(("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    number=lambda group: onepass.NESTEROV if group["nesterov"] else onepass.SGD,
    advance=_advance,
    refuses=_refuses,
)
