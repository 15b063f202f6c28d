"""Implement ``halfulp check`` without a learning rate: the weights that one step cannot move, by rate.

A check counts the weights by the rate from which each can move, so one pass over the file answers for every
rate. Decoupled weight decay is left out: it moves a weight w by ``lr * decay * |w|``, so the order of two
weights would depend on the rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from halfulp.checkpoints.check_model import check
from halfulp.checkpoints.check_result import Check, labelled
from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.pictures import percent, pre
from halfulp.text import count, shown

RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)


@dataclass(frozen=True)
class Sweep:
    """The weights that one step cannot move at several learning rates; returned by :func:`sweep`."""

    rates: tuple[float, ...]
    found: Check
    """The check at one of the rates, with the tensors and the rates from which they can move."""

    def table(self) -> list[dict[str, Any]]:
        """Return one row per rate: the shares of all weights, by the worst case, and by kind of layer."""
        check = self.found
        return [
            {
                "lr": lr,
                "share": check.spread.stuck(lr),
                "worst_share": None if check.spread_worst is None else check.spread_worst.stuck(lr),
                "groups": {name: spread.stuck(lr) for name, spread in check.groups.items()},
            }
            for lr in self.rates
        ]

    def lines(self, most: int | None = 0) -> list[str]:
        """Describe the result in words.

        Args:
            most: The number of tensors to list, those that need the largest rate first; None for all.
        """
        check = self.found
        worst, groups = check.spread_worst is not None, list(check.groups)
        head = ["lr", "all", *(["worst case"] if worst else []), *(groups if len(groups) > 1 else [])]
        rows = [
            [f"{row['lr']:g}", *(percent(x) for x in (row["share"], row["worst_share"]) if x is not None)]
            + [percent(x) for x in row["groups"].values() if len(groups) > 1]
            for row in self.table()
        ]
        out = [
            f"{count(len(check.tensors), 'tensor')}, {check.weights:,} weights ({check.kinds}).",
            "Share of the weights that one step cannot move, by learning rate:",
            *(" ".join(f"{cell:>10}" for cell in row) for row in [head, *rows]),
        ]
        if worst:
            out.append("  all: a step of size lr, the typical one; worst case: no Adam step can move them")
        listed = sorted(check.tensors, key=lambda t: (-t.half_from, -t.weights, t.name))[:most]
        out += [
            f"  half of {shown(t.name)} ({t.weights:,} {t.kind}) from lr {t.half_from:.2g}" for t in listed
        ]
        bad = sum(t.nonfinite for t in check.tensors)
        if bad:
            out.append(f"  NOT FINITE: {bad:,} weights, in none of these shares")
        return [*out, *check.skipped_lines(), *labelled("Fix", check.fix("..."))]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return pre(str(self))


def sweep(
    what: str | Path | torch.nn.Module | Mapping[str, torch.Tensor],
    rates: Sequence[float] = RATES,
    *,
    optimizer: str = "adamw",
    betas: tuple[float, float] = (0.9, 0.999),
    bound: Literal["step", "worst"] | float = "step",
    rare: Sequence[str] = (),
    grid: str | Grid | torch.dtype | None = None,
) -> Sweep:
    """Compute the share of stored weights that a step cannot move, at each of several learning rates.

    Args:
        what: As for :func:`~halfulp.checkpoints.check`.
        rates: The learning rates, in rising order.
        optimizer: As for ``check``.
        betas: As for ``check``.
        bound: As for ``check``.
        rare: As for ``check``.
        grid: As for ``check``.

    Returns:
        The shares by rate, in total and by kind of layer.

    Raises:
        UsageError: As for ``check``, or if the rates are not in rising order.

    >>> norm = {"norm.weight": torch.ones(768, dtype=torch.bfloat16)}
    >>> [row["share"] for row in sweep(norm, (1e-3, 2e-3)).table()]
    [1.0, 0.0]
    """
    if not rates or list(rates) != sorted(set(rates)):
        raise UsageError(f"rates must be some learning rates in rising order, not {list(rates)}.")
    middle = rates[len(rates) // 2]
    found = check(what, middle, optimizer=optimizer, betas=betas, bound=bound, rare=rare, grid=grid)
    return Sweep(tuple(rates), found)
