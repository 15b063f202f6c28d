"""Runs with a test error after every step, and what a reference says about learning on a grid.

For `testbed`, `phase-diagram`, `midpoint` and `ce-transfer`. With E a test error, *learned* is the share of a
reference's progress (eq:learned),

    lambda = (E_0 - E) / (E_0 - E_T)

and a rate is *in the window* of a mantissa when the median over seeds is at least one half. What has diverged
(None) counts as nothing learned under the **robust** convention; the **survivor** convention leaves it out.

A predictor has an onset tau, the update from which the majority is frozen
to the end, and forecasts that learning stops there. The paper says "error at the crossing" and not on which
side of it, so a forecast holds both: E *before* update tau and E *after* it. No onset means 1. Three
predictors look at a reference:

    directional   code equality at the projected weights (Eq. 4)
    symmetric     |d| < u(w) / 2
    scalar        pooled rho below 1 / sqrt(2), the boundary of uniform phases

A reference has *diverged* when a weight exceeds 2**300 or is not a number, and when it ends at or above the
error that it started from: the mapping needs positive progress. A run on a grid has diverged in the same
cases, but for one that never moves: its end is its start, and it has learned nothing. What has diverged
counts as nothing learned (the robust convention).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.measures.crossings import first_majority, persistent_majority
from halfulp.measures.forecasts import pooled_rho, scalar_rho_map
from halfulp.numbers.grids import grid as named
from halfulp.paper.models.mlp import Series, Trainer, run
from halfulp.paper.models.teacher import Problem, Testbed, teacher_student
from halfulp.paper.values import grouped, known
from halfulp.study.protocol import Config, Json, Running

Array = npt.NDArray[Any]

PREDICTORS = ("directional", "symmetric", "scalar")
SIDE = "after"
"""On which side of an onset every study takes the error: what `testbed` chose."""
LEARNED = 0.5
"""A run or a forecast is positive from this share on."""
SIDES = ("before", "after")
"""The sides of an onset on which the error may be taken."""

Shares = Mapping[tuple[int, float], Sequence[float | None]]
"""Learned shares of every seed, by mantissa and rate."""


@dataclass(frozen=True)
class Followed:
    """A run with a test error after every step."""

    trainer: Trainer
    series: Series
    start: float

    @property
    def end(self) -> float | None:
        """The last error; None where it is no number."""
        last = float(self.series.test[-1])
        return last if math.isfinite(last) else None

    @property
    def slow(self) -> bool:
        """True if the run did not end below its start though no weight left its range."""
        return not self.trainer.diverged and not (self.end is not None and self.end < self.start)

    @property
    def diverged(self) -> bool:
        """Return True if the run diverged or was too slow."""
        return self.trainer.diverged or self.slow

    def learned(self, steps: int) -> float | None:
        """Return the share of this run's own progress after some steps; None if it diverged."""
        end = self.end
        if self.diverged or end is None:
            return None
        error = self.start if steps == 0 else float(self.series.test[steps - 1])
        return learned(self.start, error, end)


def regression(c: Config) -> Problem:
    """Return the effective-mantissa testbed of a cell: as many tests as examples."""
    n, testbed = c["examples"], Testbed.of(c["testbed"])
    return teacher_student(c["seed"], width=c["width"], examples=n, tests=n, testbed=testbed)


def follow(p: Problem, rate: float, steps: int, running: Running | None = None, **how: Any) -> Followed:
    """Train a problem at a rate of its own loss."""
    trainer = Trainer(p.net, p.train, p.start, rate=p.factor * rate, test=p.test, **how)
    start = trainer.error(p.test)
    return Followed(trainer, run(trainer, steps, running), start)


def forecasts(reference: Followed, mantissas: Sequence[int]) -> dict[str, dict[str, dict[str, Json]]]:
    """Return by grid and predictor the first crossing, the onset, and what is learned on both sides of it."""
    series = reference.series
    weights, proposals = series.squares.T
    by_grid: dict[str, dict[str, dict[str, Json]]] = {}
    for m in mantissas:
        grid = f"m{m}"
        rho = np.nan_to_num(pooled_rho(proposals, weights, named(grid).epsilon), nan=np.inf)  # diverging
        frozen = {
            "directional": series.audited(grid) / series.size,
            "symmetric": series.symmetric(grid) / series.size,
            "scalar": scalar_rho_map(rho),
        }
        by_grid[grid] = {name: _forecast(reference, f) for name, f in frozen.items()}
    return by_grid


def _forecast(reference: Followed, frozen: Array) -> dict[str, Json]:
    onset = None if reference.diverged else persistent_majority(frozen)
    whole = len(reference.series)
    return {
        "first": first_majority(frozen),
        "onset": onset,
        "before": reference.learned(whole if onset is None else onset - 1),
        "after": reference.learned(whole if onset is None else onset),
    }


def arm_learned(reference: Mapping[str, Json], error: float | None, diverged: bool) -> float | None:
    """Return Eq. 18 for a run on a grid, from the errors of its reference; None for one that diverged."""
    if reference["diverged"] or diverged or error is None:
        return None
    return learned(reference["error"]["start"], error, reference["error"]["end"])


# ---- windows ----------------------------------------------------------------------------------------------


def learned(start: float, error: float, end: float) -> float:
    """Return the share of the progress from ``start`` to ``end`` that an error stands for.

    >>> learned(1.0, 0.6, 0.5)
    0.8
    """
    return float((start - error) / (start - end))


def gathered(cells: Iterable[tuple[int, float, float | None]]) -> dict[tuple[int, float], list[float | None]]:
    """(mantissa, rate, share) of every cell, as :data:`Shares`."""
    return grouped(((m, rate), share) for m, rate, share in cells)


def medians(shares: Shares, *, robust: bool = True) -> dict[tuple[int, float], float | None]:
    """Return the median over seeds: diverged ones count as zero (robust) or not at all (survivors).

    >>> medians({(1, 0.2): [0.4, None, 0.6]}), medians({(1, 0.2): [0.4, None, 0.6]}, robust=False)
    ({(1, 0.2): 0.4}, {(1, 0.2): 0.5})
    """
    by_cell = {}
    for key, values in shares.items():
        each = [0.0 if v is None else v for v in values] if robust else known(values)
        by_cell[key] = median(each) if each else None
    return by_cell


def windows(shares: Shares, threshold: float = LEARNED, *, robust: bool = True) -> dict[int, list[float]]:
    """Return the rates in the window of each mantissa.

    >>> windows({(1, 0.2): [0.6], (1, 0.1): [0.4], (2, 0.1): [0.9]})
    {1: [0.2], 2: [0.1]}
    """
    rates: dict[int, list[float]] = {m: [] for m, _ in sorted(shares)}
    for (m, rate), value in sorted(medians(shares, robust=robust).items()):
        rates[m] += [rate] if value is not None and value >= threshold else []
    return rates


def matched(real: Mapping[int, list[float]], said: Mapping[int, list[float]]) -> tuple[int, int]:
    """Return the number of windows that are as forecast, and the number of windows."""
    return sum(said[m] == rates for m, rates in real.items()), len(real)


def accuracy(cells: Sequence[tuple[float | None, float | None]]) -> float:
    """Return the share of cells, as (forecast, outcome), that were forecast correctly."""
    return sum(((said or 0.0) >= LEARNED) == ((came or 0.0) >= LEARNED) for said, came in cells) / len(cells)
