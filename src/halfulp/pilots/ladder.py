"""Plan a pilot: the rungs that a budget pays for, on plain numbers.

A *rung* is what is run beside the reference: twins on b of the B sequences of every batch, the same reference
from a hair beside its start (which measures the floor), forks for the last part of the run. Costs are shares
of one plain run. Twins come first: one in float32 and one per format, on the largest part that leaves half of
the budget, or on one sequence where only that can be paid. What is left goes to forks of the formats whose
twins may be ruled by noise, or of all formats where no twin could be paid.

What a twin costs is a function of b. In sequences it is b / B; in time it is more, because no step is
quicker than its Python. Whoever promises a budget in time measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MOST = 1 / 12
"""The share of a batch that a twin takes where the budget allows more: smaller ones were as good."""
LONGEST, SHORTEST = 0.4, 0.02
"""Shares of a run that are forked: more is not needed, and less says no more than the rehearsal."""
BRACKET = 0.2
"""Three forks are made where each can have this share of the run."""
SLACK = 1e-9
Cost = Callable[[int], float]
"""Share of a run that a run on the first sequences of every batch takes, by their number."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rungs that a budget pays for, all formats together.

    >>> [Ladder(budget=0.15, formats=3, batch=size).part for size in (12, 64, 1024)]
    [None, 1, 15]
    >>> Ladder(budget=0.15, formats=3, batch=64, cost=lambda part: 0.3).part is None
    True
    """

    budget: float
    formats: int
    batch: int
    cost: Cost | None = None

    def share(self, part: int) -> float:
        """Return what one twin on these sequences costs."""
        return part / self.batch if self.cost is None else self.cost(part)

    @property
    def part(self) -> int | None:
        """Return the number of sequences that twins take of a batch; None for no twin."""
        if self.batch < 2 or (self.formats + 1) * self.share(1) > self.budget + SLACK:
            return None
        for part in range(math.ceil(self.batch * MOST), 1, -1):
            if (self.formats + 2) * self.share(part) <= self.budget / 2 + SLACK:
                return part
        return 1

    @property
    def left(self) -> float:
        """Return the rest of the budget after the twins."""
        part = self.part
        return self.budget - (0.0 if part is None else (self.formats + 1) * self.share(part))

    @property
    def floor(self) -> bool:
        """Return True if the floor can be measured as well."""
        return self.part is not None and self.share(self.part) <= self.left + SLACK


def fork_plan(left: float, suspects: int) -> tuple[float, tuple[str, ...]]:
    """Return the share of the run that each fork can have, and the codes to fork from; zero for no forks.

    >>> fork_plan(0.3, 2), fork_plan(2.0, 2), fork_plan(0.01, 1)
    ((0.15, ('point',)), (0.3333333333333333, ('lower', 'point', 'upper')), (0.0, ()))
    """
    each = left / suspects if suspects else 0.0
    if each < SHORTEST:
        return 0.0, ()
    if each >= 3 * BRACKET:
        return min(LONGEST, each / 3), ("lower", "point", "upper")
    return min(LONGEST, each), ("point",)
