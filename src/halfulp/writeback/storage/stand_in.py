"""Provide float32 stand-ins, which the wrapped optimizer moves in place of narrow or packed parameters.

An optimizer that is given a bfloat16 parameter rounds to bfloat16 in its own arithmetic, before any policy
sees a proposal. So it is given another parameter of the same shape, device and sharding, which has values
only during a step. The exchange is made once, wherever the optimizer holds the parameter: in its groups, as a
key of its state, in lists of its own, in an optimizer inside it (Lookahead). Existing state of the parameter
continues in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from halfulp.writeback.sharding import is_sharded, local

NARROW = (torch.bfloat16, torch.float16)
"""Types in which an optimizer's own arithmetic loses what a policy would save."""


def stand_in(p: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a float32 parameter like p, without values but with the attributes set on p."""
    empty: Any = local(p.detach()).new_empty(0, dtype=torch.float32)
    if is_sharded(p):
        from torch.distributed.tensor import DTensor

        placed: Any = p
        empty = DTensor.from_local(
            empty, placed.device_mesh, placed.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
    shadow = torch.nn.Parameter(empty)
    for name, value in getattr(p, "__dict__", {}).items():
        if not name.startswith("_"):
            setattr(shadow, name, value)
    return shadow


def fill(shadow: torch.nn.Parameter, values: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a stand-in the values of this rank, without a copy, and a gradient in float32."""
    if is_sharded(shadow):
        shadow._local_tensor = values  # type: ignore[attr-defined]  # a DTensor has no other way
    else:
        shadow.data = values
    shadow.grad = None if grad is None else grad.float()


def drop(shadow: torch.nn.Parameter) -> None:
    """Release the values and the gradient."""
    fill(shadow, _nothing(shadow.device), None)


@cache
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)


def exchange(
    optimizer: torch.optim.Optimizer, stand_ins: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> None:
    """Replace the parameters by their stand-ins wherever an optimizer holds them."""
    _Exchange(stand_ins).of(optimizer)


class _Exchange:
    """A walk through an optimizer's attributes, its containers and the optimizers inside it."""

    def __init__(self, stand_ins: Mapping[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        self.stand_ins = {id(p): shadow for p, shadow in stand_ins.items()}
        self.copies = {(p.dtype, tuple(p.shape)) for p in stand_ins if p.dtype in NARROW}
        self.done: dict[int, tuple[Any, Any]] = {}  # keeps what it has seen, so that no number comes twice

    def of(self, x: Any, owner: torch.dtype | None = None) -> Any:
        """Return what should be in the place of x; ``owner``: type of the parameter whose state x is in."""
        if id(x) in self.done:
            return self.done[id(x)][1]
        if isinstance(x, torch.Tensor):
            self.done[id(x)] = (x, self._tensor(x, owner))
        elif isinstance(x, torch.optim.Optimizer):
            self.done[id(x)] = (x, x)
            self._dictionary(vars(x), None)
        elif isinstance(x, dict):
            self.done[id(x)] = (x, x)
            self._dictionary(x, owner)
        elif isinstance(x, list):
            self.done[id(x)] = (x, x)
            x[:] = [self.of(value, owner) for value in x]
        elif type(x) in (tuple, set, frozenset):
            self.done[id(x)] = (x, type(x)(self.of(value, owner) for value in x))
        return self.done[id(x)][1] if id(x) in self.done else x

    def _tensor(self, x: torch.Tensor, owner: torch.dtype | None) -> torch.Tensor:
        if id(x) in self.stand_ins:
            return self.stand_ins[id(x)]
        # State of a narrow parameter, or a copy of one (slow weights): it would round what float32 adds.
        narrow = x.dtype in NARROW and (owner == x.dtype or (x.dtype, tuple(x.shape)) in self.copies)
        return x.float() if narrow and not isinstance(x, torch.nn.Parameter) else x

    def _dictionary(self, x: dict[Any, Any], owner: torch.dtype | None) -> None:
        items = list(x.items())
        keys = [self.stand_ins.get(id(key), key) for key, _ in items]
        values = [self.of(value, key.dtype if id(key) in self.stand_ins else owner) for key, value in items]
        if any(new is not old for new, (old, _) in zip(keys, items, strict=True)):
            x.clear()  # the order stays
            x.update(zip(keys, values, strict=True))
            return
        for key, new, (_, old) in zip(keys, values, items, strict=True):
            if new is not old:
                x[key] = new
