"""Define the contract of an optimizer rule: what a step in one pass needs to know of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Group = Mapping[str, Any]


class Advance(Protocol):
    """The arithmetic of an elementwise optimizer on a chunk of a tensor, in place."""

    def __call__(
        self, z: torch.Tensor, grad: torch.Tensor, moments: dict[str, Any], group: Group, *, first: bool
    ) -> None:
        """Move z and its moments; ``first`` is True if it has never been stepped before."""


def nothing(group: Group) -> None:
    """Return None, whatever the group."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRule:
    """An optimizer whose arithmetic a step in one pass implements itself.

    Args:
        kind: The optimizer's class, exactly: a subclass may change what its step does.
        moments: The names of its moments in its state, the first moment first.
        reads: The options of a group that the rule supports; every other one must be off.
        counts: True if its state counts steps, under ``step``.
        decoupled: True if weight decay is decoupled, for groups that do not say so themselves.
        fused_only: True if the rule equals only the arithmetic of ``fused=True``.
        number: A function that returns the kernel's number of the rule for a group; None if there is none.
        advance: The step of a chunk, for grids that kernels do not support; None if there is none.
        refuses: A function that returns why a group cannot be moved in one pass, or None.
    """

    kind: Any
    moments: tuple[str, ...]
    reads: frozenset[str]
    counts: bool = False
    decoupled: bool = False
    fused_only: bool = True
    number: Callable[[Group], int | None] = nothing
    advance: Advance | None = None
    refuses: Callable[[Group], str | None] = nothing

    def why_not_fused(self, group: Group, options: Mapping[str, Any]) -> str | None:
        """Return why a group cannot be moved in one pass; ``options``: all that the optimizer has."""
        if self.fused_only and not group.get("fused"):
            return "it was not made with fused=True, the arithmetic that one pass equals"
        for option in options:
            known = option == "fused" or option in self.reads
            if not known and group.get(option) is not None and group[option] is not False:
                return f"{option}={group[option]!r}, an option that one pass does not have"
        numbers = [x for name in NUMBERS if name in group for x in _each(group[name])]
        if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
            return "its rate, betas, eps or weight decay are not plain finite numbers"
        return self.refuses(group)


NUMBERS = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening")


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
