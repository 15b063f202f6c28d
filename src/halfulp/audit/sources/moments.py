"""Moments: the state that an optimizer keeps for each of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from halfulp.audit.sources.copies import followed, narrow_scalar, role_name
from halfulp.audit.sources.held_dtypes import flat
from halfulp.writeback.optimizer import WriteBack


def wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that keeps the state."""
    return optimizer.optimizer if isinstance(optimizer, WriteBack) else optimizer


def groups_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the parameter group of every tensor that an optimizer steps."""
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def moments_of(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the float tensors of an optimizer's state that belong to a weight or to several stacked weights.

    They are listed by kind, then by the weight's name. A float tensor of another shape beside codes holds
    their scales and is not a moment. Single numbers are followed if they are held in 16 bits, such as a
    ``step`` that counts to 256.
    """
    inner = wrapped(optimizer)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for group in inner.param_groups:
        for p in (p for p in group["params"] if p in names):
            state = dict(flat(inner.state.get(p, {})))
            tensors = [x for x in state.values() if isinstance(x, torch.Tensor) and x.numel() > 1]
            coded = not all(x.is_floating_point() for x in tensors)
            for kind, x in state.items():
                if narrow_scalar(x) and p.numel() > 1:
                    found.setdefault(role_name(str(kind)), {})[names[p]] = x
                if not followed(x) or (coded and x.shape != p.shape):
                    continue
                more = 0 if x.numel() == p.numel() else _stacked(x.shape, p.shape)
                if more is not None and more < len(group["params"]):
                    name = f"{names[p]} and {more} more" if more else names[p]
                    found.setdefault(role_name(str(kind)), {})[name] = x
    return found


def _stacked(shape: torch.Size, weight: torch.Size) -> int | None:
    """Return the number of further weights that a state covers: 0, or the number stacked in front.

    The state is as large as the weights or has some of their dimensions, as factored moments do; otherwise
    the result is None.
    """
    if len(shape) > len(weight):
        return shape[0] - 1 if _stacked(shape[1:], weight) == 0 else None
    dimensions = iter(weight)
    return 0 if all(n == 1 or n in dimensions for n in shape) else None


def grid_of(tensors: Iterable[torch.Tensor]) -> str:
    """Choose the grid that states of this kind are measured on."""
    return "fp16" if all(x.dtype == torch.float16 for x in tensors) else "bf16"


def stopped(x: torch.Tensor) -> bool:
    """Return True if a 16-bit counter can no longer increase: x + 1 is x."""
    return narrow_scalar(x) and bool(torch.isfinite(x) & (x + 1 == x))
