"""Define the contract of an optimizer rule: what a step in one pass needs to know of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

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
        number: A function that returns the kernel's number of the rule for a group; None if there is none.
        advance: The step of a chunk, for grids that kernels do not support; None if there is none.
    """

    kind: Any
    moments: tuple[str, ...]
    reads: frozenset[str]
    counts: bool = False
    decoupled: bool = False
    number: Callable[[Group], int | None] = nothing
    advance: Advance | None = None

    def kept(self, group: Group) -> tuple[str, ...]:
        """Return the names of the moments that a group has: SGD without momentum has none."""
        return self.moments if group.get("momentum", 1) else ()

    def why_not_fused(
        self, group: Group, options: Mapping[str, Any], *, like_torch: bool = True
    ) -> str | None:
        """Return why a group cannot be moved in one pass; ``options``: all that the optimizer has.

        ``like_torch``: numbers must be plain, because torch computes with others (a NumPy float32, a tensor)
        in their own precision.
        """
        either = {"fused", "foreach"} if not group.get("fused") else {"fused"}  # of both, torch takes one
        for option in options:
            known = option in either or option in self.reads
            if not known and group.get(option) is not None and group[option] is not False:
                return f"{option}={group[option]!r}, an option that one pass does not have"
        numbers = [x for name in NUMBERS if name in group for x in _each(group[name])]
        plain = not like_torch or all(isinstance(x, int | float) for x in numbers)
        if not (plain and all(map(is_number, numbers))):
            return "its rate, betas, eps or weight decay are not plain finite numbers"
        return None


NUMBERS = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening")


def is_number(x: Any) -> bool:
    """Return True for a finite number of any library; a string is none, although ``float`` reads it."""
    try:
        return isinstance(x, SupportsFloat) and math.isfinite(float(x))
    except (OverflowError, RuntimeError, TypeError, ValueError):  # several numbers, or one too large
        return False


def _each(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
