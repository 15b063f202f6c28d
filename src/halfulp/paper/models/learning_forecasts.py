"""Runs with a test error after every step, and what a reference says about learning on a grid.

For `testbed`, `phase-diagram`, `midpoint` and `ce-transfer`. *Learned* is a share of the reference's progress
(:mod:`halfulp.paper.learning`). A predictor has an onset tau, the update from which the majority is frozen
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.measures.crossings import first_majority, persistent_majority
from halfulp.measures.forecasts import pooled_rho, scalar_rho_map
from halfulp.numbers.grids import grid as named
from halfulp.paper.learning import learned
from halfulp.paper.models.mlp import Series, Trainer, run
from halfulp.paper.models.teacher import Problem, Testbed, teacher_student
from halfulp.study.protocol import Config, Json, Running

Array = npt.NDArray[Any]

PREDICTORS = ("directional", "symmetric", "scalar")
SIDE = "after"
"""On which side of an onset every study takes the error: what `testbed` chose."""


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
        """The share of this run's own progress that is there after so many steps; None if it diverged."""
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
    """By grid and predictor: the first crossing, the onset, and what is learned on both sides of it."""
    series = reference.series
    weights, proposals = series.squares.T
    found: dict[str, dict[str, dict[str, Json]]] = {}
    for m in mantissas:
        grid = f"m{m}"
        rho = np.nan_to_num(pooled_rho(proposals, weights, named(grid).epsilon), nan=np.inf)  # diverging
        frozen = {
            "directional": series.audited(grid) / series.size,
            "symmetric": series.symmetric(grid) / series.size,
            "scalar": scalar_rho_map(rho),
        }
        found[grid] = {name: _forecast(reference, f) for name, f in frozen.items()}
    return found


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
    """Eq. 18 for a run on a grid, from the errors of its reference; None for what has diverged."""
    if reference["diverged"] or diverged or error is None:
        return None
    return learned(reference["error"]["start"], error, reference["error"]["end"])
