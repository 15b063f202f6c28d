"""Implement SGD, with momentum or without, as torch's steps make it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.sgd import sgd

from halfulp.kernels import onepass
from halfulp.writeback.rules.rule import Group, OptimizerRule


def _advance(
    z: torch.Tensor, grad: torch.Tensor, moments: dict[str, Any], group: Group, *, first: bool
) -> None:
    """Make torch's step of a chunk, whose end is that of the tensor, or whole vectors."""
    kept: list[torch.Tensor | None] = [None if first or not group["momentum"] else moments["momentum_buffer"]]
    sgd(
        [z], [grad], kept, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]), dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]), maximize=False, foreach=False, fused=bool(group.get("fused")),
    )  # fmt: skip
    if first and kept[0] is not None:
        moments["momentum_buffer"].copy_(kept[0])


def _number(group: Group) -> int:
    if not group["momentum"]:
        return onepass.PLAIN
    return onepass.NESTEROV if group["nesterov"] else onepass.SGD


SGD = OptimizerRule(
    kind=torch.optim.SGD,
    moments=("momentum_buffer",),
    reads=frozenset(("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    number=_number,
    advance=_advance,
)
