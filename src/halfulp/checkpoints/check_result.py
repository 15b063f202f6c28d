"""Present the results of ``check`` and ``sweep``: counts per tensor, in total and by learning rate."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.checkpoints.check_bounds import Reach
from halfulp.numbers.containers import SHORT
from halfulp.text import count, shown

Array = npt.NDArray[Any]
EMBEDDING = re.compile(r"emb(ed|\b|_)|\bw[tp]e\b")
"""The names that models give to tables of which a batch uses a few rows."""
NOTABLE = 0.01
"""The share of stuck weights from which a fix is offered."""


@dataclass(frozen=True)
class Checked:
    """The check of one tensor."""

    name: str
    kind: str
    """The dtype that it is stored in."""
    grid: str
    group: str
    weights: int
    stuck: int
    """Weights that a step within the bound cannot move."""
    nonfinite: int
    half_from: float
    """The learning rate from which half of the weights can move; NaN if none is finite."""
    stuck_worst: int | None = None
    """Weights that no Adam step can move, whatever the gradients; None if its step has no bound."""
    rare: bool = False
    """True if the worst case is the bound of this tensor, because its rows rarely see gradients."""

    @property
    def share(self) -> float:
        """Return the share of the finite weights that the step cannot move."""
        return self.stuck / max(self.weights - self.nonfinite, 1)


class Spread:
    """The learning rates from which weights can move, and the number of weights for each."""

    def __init__(self) -> None:
        self.rates, self.counts = np.empty(0), np.empty(0, dtype=np.int64)

    def add(self, rates: Array, counts: Array) -> None:
        """Add some weights."""
        self.rates, where = np.unique(np.concatenate([self.rates, rates]), return_inverse=True)
        merged = np.zeros(self.rates.size, dtype=np.int64)
        np.add.at(merged, where, np.concatenate([self.counts, counts]))
        self.counts = merged

    def stuck(self, lr: float) -> float:
        """Return the share of the weights that cannot move at a rate; NaN if there are none."""
        total = int(self.counts.sum())
        return int(self.counts[self.rates > lr].sum()) / total if total else math.nan


@dataclass(frozen=True)
class Check:
    """The weights that one step cannot move, tensor by tensor; returned by :func:`~halfulp.check`."""

    reach: Reach
    tensors: list[Checked]
    skipped: dict[str, str]
    """Tensors that were not checked, and why."""
    spread: Spread = field(repr=False)
    """The spread of all weights, by the bound that applies to each."""
    groups: dict[str, Spread] = field(repr=False)
    """The same for each kind of layer."""
    spread_worst: Spread | None = field(repr=False, default=None)
    """The spread of all weights by Adam's worst case; None if that is not known."""
    worst: Reach | None = None
    """Adam's worst case beside the typical step; None if there is none, or if it is the bound itself."""

    @cached_property
    def weights(self) -> int:
        """Return the number of weights that were checked."""
        return sum(t.weights for t in self.tensors)

    @cached_property
    def stuck(self) -> int:
        """Return the number of weights that the step cannot move."""
        return sum(t.stuck for t in self.tensors)

    @cached_property
    def stuck_worst(self) -> int | None:
        """The number of weights that no Adam step can move, whatever the gradients; None if not known."""
        known = [t.stuck_worst for t in self.tensors if t.stuck_worst is not None]
        return sum(known) if len(known) == len(self.tensors) else None

    @property
    def share(self) -> float:
        """The share of all finite weights that a step within the bound cannot move; NaN if none is finite."""
        return self._share(self.stuck)

    @property
    def worst_share(self) -> float | None:
        """The share that no Adam step can move, whatever the gradients; None if not known."""
        return None if self.stuck_worst is None else self._share(self.stuck_worst)

    def _share(self, stuck: int) -> float:
        finite = self.weights - sum(t.nonfinite for t in self.tensors)
        return stuck / finite if finite else math.nan

    @property
    def kinds(self) -> str:
        """The types that the weights are stored in, and the grids on which they are checked."""
        kinds = {t.kind if t.grid == t.kind else f"{t.kind} as {t.grid}" for t in self.tensors}
        return ", ".join(sorted(kinds))

    def rate_for(self, share: float) -> float:
        """Return the learning rate from which this share of the weights can move.

        Args:
            share: A share between 0 and 1.

        Returns:
            The learning rate; NaN if no weight is finite.
        """
        return quantile(self.spread.rates, self.spread.counts, share)

    def lines(self, most: int | None = 12) -> list[str]:
        """Describe the result in words, the most stuck tensors first.

        Args:
            most: The number of tensors to list; None for all.
        """
        out = [
            f"{count(len(self.tensors), 'tensor')}, {self.weights:,} weights ({self.kinds}).",
            "none of the weights is finite."
            if math.isnan(self.share)
            else f"{self.share:.2%} of the weights cannot be moved by {self.reach.said}.",
        ]
        if self.worst is not None and self.worst_share is not None and not math.isnan(self.share):
            out.append(f"{self.worst_share:.2%} cannot be moved by {self.worst.said}.")
        if rare := [shown(t.name) for t in self.tensors if t.rare]:
            out.append(f"  rows that see gradients rarely, counted by that bound in both: {', '.join(rare)}")
        if self.spread.counts.size:
            rates = ", ".join(f"{s:.0%} from {self.rate_for(s):.2g}" for s in (0.1, 0.5, 0.9, 0.99))
            out.append(f"  could move at a learning rate: {rates}")
        bad = sum(t.nonfinite for t in self.tensors)
        if bad:
            out.append(f"  NOT FINITE: {bad:,} weights, in none of these shares")
        listed = sorted((t for t in self.tensors if t.stuck), key=lambda t: (-t.share, -t.weights, t.name))
        for t in listed[:most]:
            place = "" if t.grid == t.kind else f" as {t.grid}"
            out.append(
                f"  {t.share:7.2%} of {shown(t.name)} ({t.weights:,} {t.kind}{place}); "
                f"half could from lr {t.half_from:.2g}"
            )
        if most is not None and len(listed) > most:
            out.append(f"  and {len(listed) - most} more tensors")
        likely = [t.name for t in self.tensors if t.stuck != t.stuck_worst and EMBEDDING.search(t.name)]
        if self.worst is not None and likely:
            out.append(
                "  rows of an embedding may see gradients rarely and then take larger steps; to count that, "
                f"name it (rare=, --rare): {shown(likely[0])}"
            )
        return [*out, *self.skipped_lines(), *labelled("Fix", self.fix())]

    def skipped_lines(self) -> list[str]:
        """Say which tensors were not checked, and why."""
        whys: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            whys.setdefault(why, []).append(name)
        return [
            f"  not checked: {len(names)} tensor(s), such as {shown(names[0])}: {why}"
            for why, names in whys.items()
        ]

    def fix(self, lr: str | None = None) -> list[str]:
        """Suggest a fix if a notable share of the weights or a whole tensor is stuck.

        Args:
            lr: The learning rate to print; by default that of this check.
        """
        narrow = [t for t in self.tensors if t.stuck and t.grid not in ("float32", "float64")]
        if not narrow or not (self.share >= NOTABLE or any(t.share == 1 for t in narrow)):
            return []
        grid = max(narrow, key=lambda t: t.stuck).grid
        grid = SHORT.get(grid, grid)
        wrapped = f'optimizer = hu.WriteBack(optimizer, "{grid}", "sr", model=model)'
        lines = [wrapped, "or load the weights in float32 (dtype=torch.float32) and train under autocast"]
        if grid == "bf16":
            lines[0] += "  # any other optimizer"
            rate = f"{self.reach.lr:g}" if lr is None else lr
            lines.insert(0, f"optimizer = hu.AdamW(model.named_parameters(), lr={rate})")
        return lines

    def table(self) -> list[dict[str, Any]]:
        """Return one row per tensor, for a file or a data frame."""
        return [
            {
                "tensor": t.name, "group": t.group, "dtype": t.kind, "grid": t.grid, "weights": t.weights,
                "stuck": t.stuck, "stuck_worst": t.stuck_worst, "rare": t.rare, "nonfinite": t.nonfinite,
                "half_from": None if math.isnan(t.half_from) else t.half_from,
            }
            for t in self.tensors
        ]  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


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
        worst = check.spread_worst is not None
        groups = list(check.groups) if len(check.groups) > 1 else []
        head = ["lr", "all", *(["worst case"] if worst else []), *groups]
        rows = []
        for row in self.table():
            shares = [
                row["share"],
                *([row["worst_share"]] if worst else []),
                *(row["groups"][g] for g in groups),
            ]
            rows.append([f"{row['lr']:g}", *("-" if x != x else f"{x:.1%}" for x in shares)])
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

    __repr__ = __str__


def labelled(label: str, lines: list[str]) -> list[str]:
    """Put a label before the first of some lines, and the others below it."""
    return [f"{label if i == 0 else '':<5}{line}" for i, line in enumerate(lines)]


def quantile(rates: Array, counts: Array, share: float) -> float:
    """Return the smallest rate at or below which a share of what was counted lies."""
    if not counts.size:
        return math.nan
    order = np.argsort(rates, kind="stable")
    reached = np.cumsum(counts[order])
    return float(rates[order][np.searchsorted(reached, share * reached[-1])])
