"""Implement Adam and AdamW as torch's steps make them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from halfulp.kernels import onepass
from halfulp.writeback.rules.rule import Group, OptimizerRule


def _decoupled(group: Group, default: bool) -> bool:
    return bool(group.get("decoupled_weight_decay", default))


def _advance(default: bool) -> Any:
    def advance(
        z: torch.Tensor, grad: torch.Tensor, moments: dict[str, Any], group: Group, *, first: bool
    ) -> None:
        """Make torch's step of a chunk, whose end is that of the tensor, or whole vectors."""
        beta1, beta2 = (float(b) for b in group["betas"])
        step = adamw if _decoupled(group, default) else adam
        step(  # which counts for itself
            [z], [grad], [moments["exp_avg"]], [moments["exp_avg_sq"]], [], [moments["step"] - 1],
            lr=float(group["lr"]), beta1=beta1, beta2=beta2, eps=float(group["eps"]), amsgrad=False,
            weight_decay=float(group["weight_decay"]), maximize=False, foreach=False,
            fused=bool(group.get("fused")),
        )  # fmt: skip

    return advance


def _rule(kind: Any, *, decoupled: bool) -> OptimizerRule:
    return OptimizerRule(
        kind=kind,
        moments=("exp_avg", "exp_avg_sq"),
        reads=frozenset(("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")),
        counts=True,
        decoupled=decoupled,
        number=lambda group: onepass.ADAMW if _decoupled(group, decoupled) else onepass.ADAM,
        advance=_advance(decoupled),
    )


ADAM = _rule(torch.optim.Adam, decoupled=False)
ADAMW = _rule(torch.optim.AdamW, decoupled=True)
