"""When a run freezes: majority crossings of a frozen fraction, and how well they were forecast.

The frozen fraction f_t is the share of stored weights that step t leaves unchanged. Steps count
from one, so ``f[0]`` is step 1, the first update. From the trajectory (paper, appendix A):

    first majority crossing        the first step with f_t >= 1/2
    persistent majority crossing   the first step from which f_t >= 1/2 for the rest of what was
                                   observed (it says nothing about later)

and from the first one a category: ``at-initialisation`` (step 1), ``later`` or ``absent``. A majority
need not be the same weights from step to step, and freezing is not a loss plateau.

A forecast is judged on both. Timing is a ratio, forecast / measured, defined only for *eligible*
pairs: both crossings exist and come after step 1. That is a conditional statement, so the cells it
leaves out are never dropped: their categories are compared instead, over all cells.

A trace need not hold every step. Then ``steps`` says which it holds, a crossing is the first
*recorded* step above the threshold (the true one lies after the record before it), and if the first
record comes after step 1 and is frozen already, nobody can tell at-initialisation from later: the
category is ``undecided``, and such a pair is neither eligible nor a disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError

Array = npt.NDArray[Any]
Category = Literal["at-initialisation", "later", "absent", "undecided"]
Which = Literal["first", "persistent"]

MAJORITY = 0.5
"""A step is majority-frozen from this share on."""
TOLERANCE = 0.15
"""The paper's descriptive band around a timing ratio of one."""


@dataclass(frozen=True)
class Crossing:
    """Where a trajectory crosses: steps, or None where it does not."""

    first: int | None
    persistent: int | None
    category: Category


def first_majority(
    f: npt.ArrayLike, threshold: float = MAJORITY, *, steps: npt.ArrayLike | None = None
) -> int | None:
    """The first step at which at least ``threshold`` of the weights are frozen.

    >>> first_majority([0.2, 0.6, 0.4, 0.7])
    2
    >>> first_majority([0.2, 0.6, 0.4, 0.7], steps=[1, 11, 21, 31])
    11
    """
    values, at = _trajectory(f, steps)
    above = np.flatnonzero(values >= threshold)
    return int(at[above[0]]) if above.size else None


def persistent_majority(
    f: npt.ArrayLike, threshold: float = MAJORITY, *, steps: npt.ArrayLike | None = None
) -> int | None:
    """The first step from which at least ``threshold`` are frozen to the end of the record.

    >>> persistent_majority([0.2, 0.6, 0.4, 0.7])
    4
    >>> persistent_majority([0.9, 0.4]) is None
    True
    """
    values, at = _trajectory(f, steps)
    below = np.flatnonzero(values < threshold)
    start = int(below[-1]) + 1 if below.size else 0
    return int(at[start]) if start < len(at) else None


def category(
    f: npt.ArrayLike, threshold: float = MAJORITY, *, steps: npt.ArrayLike | None = None
) -> Category:
    """Whether the first crossing is at initialisation (step 1), later, or absent.

    >>> category([0.7, 0.1]), category([0.1, 0.7]), category([0.1, 0.2])
    ('at-initialisation', 'later', 'absent')
    >>> category([0.7, 0.1], steps=[10, 20])
    'undecided'
    """
    first = first_majority(f, threshold, steps=steps)
    if first is None:
        return "absent"
    if first == 1:
        return "at-initialisation"
    return "undecided" if first == int(_trajectory(f, steps)[1][0]) else "later"


def crossing(
    f: npt.ArrayLike, threshold: float = MAJORITY, *, steps: npt.ArrayLike | None = None
) -> Crossing:
    """Both crossings and the category of a trajectory.

    >>> crossing([0.2, 0.6, 0.4, 0.7])
    Crossing(first=2, persistent=4, category='later')
    """
    return Crossing(
        first=first_majority(f, threshold, steps=steps),
        persistent=persistent_majority(f, threshold, steps=steps),
        category=category(f, threshold, steps=steps),
    )


# ---- forecast against outcome ---------------------------------------------------------------------


@dataclass(frozen=True)
class TimingPair:
    """A forecast and a measured crossing of one cell."""

    forecast: Crossing
    measured: Crossing
    which: Which = "first"

    @property
    def steps(self) -> tuple[int, int] | None:
        """(forecast, measured) of an eligible pair: both exist and come after step 1."""
        forecast, measured = (_timed(c, self.which) for c in (self.forecast, self.measured))
        return None if forecast is None or measured is None else (forecast, measured)

    @property
    def eligible(self) -> bool:
        return self.steps is not None

    @property
    def ratio(self) -> float | None:
        """Forecast / measured; None for a pair that is not eligible."""
        return None if self.steps is None else self.steps[0] / self.steps[1]

    def within(self, tolerance: float = TOLERANCE) -> bool | None:
        """Whether |ratio - 1| <= tolerance, without dividing; None for a pair that is not eligible."""
        if self.steps is None:
            return None
        forecast, measured = self.steps
        return abs(forecast - measured) <= tolerance * measured

    @property
    def disagrees(self) -> bool:
        """Whether the categories differ; an undecided one differs from nothing."""
        both = (self.forecast.category, self.measured.category)
        return "undecided" not in both and both[0] != both[1]


def timing_pair(forecast: Crossing, measured: Crossing, which: Which = "first") -> TimingPair:
    """Pair the crossings of a forecast and of the run it is for.

    >>> pair = timing_pair(crossing([0.0] * 9 + [1.0]), crossing([0.0] * 8 + [1.0]))
    >>> pair.eligible, round(pair.ratio, 3), pair.within(0.15), pair.within(0.10)
    (True, 1.111, True, False)
    """
    if which not in ("first", "persistent"):
        raise UsageError(f"which must be 'first' or 'persistent', not {which!r}.")
    return TimingPair(forecast, measured, which)


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
        return self.within / self.eligible if self.eligible else None

    @property
    def span(self) -> float | None:
        """Latest measured crossing over the earliest, among eligible cells."""
        return None if self.measured_range is None else self.measured_range[1] / self.measured_range[0]


def summarise(pairs: Sequence[TimingPair], tolerance: float = TOLERANCE) -> TimingSummary:
    """Timing and categories over cells.

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


def _timed(c: Crossing, which: Which) -> int | None:
    """The step of a crossing that has a post-initialisation time, otherwise None."""
    step = c.first if which == "first" else c.persistent
    unknown = c.category == "undecided" and step == c.first
    return None if step is None or step == 1 or unknown else step


def _range(values: list[int]) -> tuple[int, int] | None:
    return (min(values), max(values)) if values else None


def _trajectory(f: npt.ArrayLike, steps: npt.ArrayLike | None) -> tuple[Array, Array]:
    """A frozen-fraction trajectory and its steps, checked."""
    values = np.asarray(f, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise UsageError(f"a trajectory is one value a step: expected shape (n,), found {values.shape}.")
    wrong = ~((values >= 0) & (values <= 1))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise UsageError(f"a frozen fraction lies in [0, 1]: found {values[at]!r} at position {at}.")
    return values, recorded_steps(len(values), steps)


def recorded_steps(n: int, steps: npt.ArrayLike | None) -> Array:
    """The steps of n records: 1 to n, or what was given, which must increase from one or more."""
    if steps is None:
        return np.arange(1, n + 1)
    at = np.asarray(steps)
    whole = at.dtype.kind in "iu"
    if at.shape != (n,) or not whole or (n and int(at[0]) < 1) or bool(np.any(at[1:] <= at[:-1])):
        raise UsageError(
            f"steps must be {n} increasing whole numbers from 1 up, one for each value: found "
            f"shape {at.shape}, {at.dtype}, {at[:4].tolist()}..."
        )
    return at
