"""Define optimizer rules, one per file, for the optimizers that a step in one pass need not call.

:mod:`halfulp.kernels.onepass_reference` equals the arithmetic of torch's Adam, AdamW and SGD bit for bit, so
a write-back around one of them need not call it. The optimizer's own state (``step``, ``exp_avg``,
``momentum_buffer``...) stays in its place and is the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from halfulp.writeback.rules.adam import ADAM, ADAMW
from halfulp.writeback.rules.lion import LION
from halfulp.writeback.rules.rule import Group, OptimizerRule
from halfulp.writeback.rules.sgd import SGD

__all__ = ["RULES", "Group", "OptimizerRule", "decay_of", "decouples", "rate_of", "rule_of"]

RULES: dict[Any, OptimizerRule] = {rule.kind: rule for rule in (ADAM, ADAMW, SGD, LION)}
"""The rules by the classes of their optimizers. A new one has its file and its line here."""

_OTHERS = tuple(getattr(torch.optim, n) for n in ("Adafactor", "Muon") if hasattr(torch.optim, n))
_DECOUPLED = (*_OTHERS, *(rule.kind for rule in RULES.values() if rule.decoupled))
"""Optimizers whose weight decay is decoupled where their groups do not say it."""


def rule_of(optimizer: torch.optim.Optimizer) -> OptimizerRule | None:
    """Return the rule of an optimizer; None for one that must be called."""
    return RULES.get(type(optimizer))


def decouples(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Return True if a group's weight decay is a part of the proposal of its own.

    Its option says so, and in optimizers without that option the class.
    """
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, _DECOUPLED)))


def rate_of(group: Mapping[str, Any]) -> float:
    """Return a group's learning rate; NaN if it has none, as where an optimizer finds its rate itself.

    >>> rate_of({"lr": 0.1}), rate_of({"lr": None}), rate_of({})
    (0.1, nan, nan)
    """
    rate = group.get("lr")
    return math.nan if rate is None else float(rate)


def decay_of(optimizer: torch.optim.Optimizer, group: Group) -> tuple[float, float]:
    """Return rate and decay where weight decay is a part of the proposal of its own, lr * decay * w."""
    decay = float(group.get("weight_decay") or 0.0)
    rate = rate_of(group)
    applies = decouples(optimizer, group) and math.isfinite(decay) and not math.isnan(rate)
    return (rate, decay) if applies else (0.0, 0.0)
