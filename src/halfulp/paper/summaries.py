"""Summaries of many runs: timing over cells, and the share of a curve that time explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError
from halfulp.measures.crossings import TOLERANCE, TimingPair


@dataclass(frozen=True)
class TimingSummary:
    """Timing over many cells. Ratios are conditional on eligibility; categories cover every cell."""

    cells: int
    eligible: int
    within: int
    """Eligible cells whose ratio lies within the tolerance."""
    disagreements: int
    """Cells, of all of them, whose categories differ."""
    undecided: int
    median_ratio: float | None
    mean_ratio: float | None
    forecast_range: tuple[int, int] | None
    measured_range: tuple[int, int] | None

    @property
    def share_within(self) -> float | None:
        """Return the share of eligible pairs within the bound."""
        return self.within / self.eligible if self.eligible else None

    @property
    def span(self) -> float | None:
        """Latest measured crossing over the earliest, among eligible cells."""
        return None if self.measured_range is None else self.measured_range[1] / self.measured_range[0]


def summarise(pairs: Sequence[TimingPair], tolerance: float = TOLERANCE) -> TimingSummary:
    """Timing and categories over cells.

    >>> from halfulp.measures.crossings import crossing, timing_pair
    >>> late, later, never = (crossing([0.0] * n + [1.0] * (9 - n)) for n in (4, 6, 9))
    >>> s = summarise([timing_pair(late, late), timing_pair(late, later), timing_pair(late, never)])
    >>> s.cells, s.eligible, s.within, s.disagreements, s.span
    (3, 2, 1, 1, 1.4)
    """
    timed = [p.steps for p in pairs if p.steps is not None]
    ratios = [forecast / measured for forecast, measured in timed]
    undecided = sum("undecided" in (p.forecast.category, p.measured.category) for p in pairs)
    return TimingSummary(
        cells=len(pairs),
        eligible=len(timed),
        within=sum(p.within(tolerance) is True for p in pairs),
        disagreements=sum(p.disagrees for p in pairs),
        undecided=undecided,
        median_ratio=float(np.median(ratios)) if ratios else None,
        mean_ratio=float(np.mean(ratios)) if ratios else None,
        forecast_range=_range([forecast for forecast, _ in timed]),
        measured_range=_range([measured for _, measured in timed]),
    )


def _range(values: list[int]) -> tuple[int, int] | None:
    return (min(values), max(values)) if values else None


@dataclass(frozen=True)
class TimeEffect:
    """Shares of the sum of squares about the grand mean; they add up to one."""

    common: float
    """One curve over time, shared by all targets."""
    offset: float
    """One level for each target."""
    residual: float
    """Target by time: what is a target's own."""


def time_effect(trajectories: npt.ArrayLike) -> TimeEffect:
    """Split trajectories of several targets, shape (targets, steps), into what they share and what not.

    y[j, t] = mean + offset[j] + common[t] + residual[j, t], by means, so the parts are orthogonal.
    A description: a large common share does not say that the schedule causes it (appendix C).

    >>> curve = np.array([0.1, 0.2, 0.6])
    >>> time_effect([curve, curve + 0.5]).residual < 1e-30
    True
    """
    y = np.asarray(trajectories, dtype=np.float64)
    if y.ndim != 2 or min(y.shape) < 2 or not np.isfinite(y).all():
        raise UsageError(
            f"expected finite values of shape (targets, steps), two of each at least: found {y.shape}."
        )
    mean, by_target, by_time = y.mean(), y.mean(axis=1, keepdims=True), y.mean(axis=0, keepdims=True)
    total = float(np.square(y - mean).sum())
    if total == 0:
        raise UsageError("the trajectories do not vary: there is nothing to split.")
    return TimeEffect(
        common=y.shape[0] * float(np.square(by_time - mean).sum()) / total,
        offset=y.shape[1] * float(np.square(by_target - mean).sum()) / total,
        residual=float(np.square(y - by_target - by_time + mean).sum()) / total,
    )
