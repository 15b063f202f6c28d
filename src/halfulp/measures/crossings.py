"""Majority crossings of a frozen fraction, and how well they were forecast.

The frozen fraction f_t is the share of stored weights that step t leaves unchanged. Steps count
from one, so ``f[0]`` is step 1, the first update. From the trajectory (paper, appendix A):

    first majority crossing        the first step with f_t >= 1/2
    persistent majority crossing   the first step from which f_t >= 1/2 for the rest of what was
                                   observed (it says nothing about later)

and from the first one a category: ``at-initialisation`` (step 1), ``later`` or ``absent``. A majority
need not be the same weights from step to step, and freezing is not a loss plateau.

For people there is one more, with one rule: *a majority is named when it lasts*. It lasts if at least half
is frozen at every one of some consecutive recorded steps: a tenth of the record, and two at least. Of several
such stretches the one that reaches the end of the record is named, otherwise the longest
(:func:`majority`).

A forecast is judged on both crossings. Timing is a ratio, forecast / measured, defined only for *eligible*
pairs: both crossings exist and come after step 1. That is a conditional statement, so the cells it
leaves out are never dropped: their categories are compared instead, over all cells.

A trace need not hold every step. Then ``steps`` says which it holds, a crossing is the first
*recorded* step above the threshold (the true one lies after the record before it), and if the first
record comes after step 1 and is frozen already, nobody can tell at-initialisation from later: the
category is ``undecided``, and such a pair is neither eligible nor a disagreement.
"""

from __future__ import annotations

import math
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
LASTS = 0.1
"""The share of the record that a majority must hold for, without a gap, to be named."""
TOLERANCE = 0.15
"""The paper's descriptive band around a timing ratio of one."""


@dataclass(frozen=True)
class Crossing:
    """The crossings of a trajectory, as steps, or None if there is no crossing."""

    first: int | None
    persistent: int | None
    category: Category


def first_majority(
    f: npt.ArrayLike, threshold: float = MAJORITY, *, steps: npt.ArrayLike | None = None
) -> int | None:
    """Return the first step at which at least ``threshold`` of the weights are frozen.

    Args:
        f: Frozen shares, one per recorded step.
        threshold: The share from which a step counts.
        steps: The steps that the shares belong to; 1, 2, ... by default.

    Returns:
        The step; None if there is none.

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
    """Return the first step from which at least ``threshold`` are frozen to the end of the record.

    Args:
        f: Frozen shares, one per recorded step.
        threshold: The share from which a step counts.
        steps: The steps that the shares belong to; 1, 2, ... by default.

    Returns:
        The step; None if there is none.

    >>> persistent_majority([0.2, 0.6, 0.4, 0.7])
    4
    >>> persistent_majority([0.9, 0.4]) is None
    True
    """
    values, at = _trajectory(f, steps)
    below = np.flatnonzero(values < threshold)
    start = int(below[-1]) + 1 if below.size else 0
    return int(at[start]) if start < len(at) else None


def crossing(
    f: npt.ArrayLike, threshold: float = MAJORITY, *, steps: npt.ArrayLike | None = None
) -> Crossing:
    """Find both crossings of a trajectory, and its category.

    Args:
        f: Frozen shares, one per recorded step.
        threshold: The share from which a step counts.
        steps: The steps that the shares belong to; 1, 2, ... by default.

    Returns:
        The crossings and the category.

    >>> crossing([0.2, 0.6, 0.4, 0.7])
    Crossing(first=2, persistent=4, category='later')
    >>> crossing([0.7, 0.1]).category, crossing([0.7, 0.1], steps=[10, 20]).category
    ('at-initialisation', 'undecided')
    """
    first = first_majority(f, threshold, steps=steps)
    kind: Category = "absent" if first is None else "at-initialisation" if first == 1 else "later"
    if kind == "later" and first == int(_trajectory(f, steps)[1][0]):
        kind = "undecided"
    return Crossing(first, persistent_majority(f, threshold, steps=steps), kind)


@dataclass(frozen=True)
class Majority:
    """A lasting majority: at least half is frozen at every recorded step from ``first`` to ``last``."""

    first: int
    last: int
    from_start: bool
    """True if the record begins with it."""
    to_end: bool
    """True if the record ends with it."""

    @property
    def when(self) -> str:
        """The range of steps as part of a sentence, such as "from step 3 to the end"."""
        if self.from_start and self.to_end:
            start = "the first step" if self.first == 1 else f"step {self.first}, the first that was audited,"
            return f"from {start} on"
        return f"from step {self.first} to {'the end' if self.to_end else f'step {self.last}'}"


def majority(
    f: npt.ArrayLike, threshold: float = MAJORITY, *, steps: npt.ArrayLike | None = None
) -> Majority | None:
    """Find the majority to report: the stretch that lasts to the end of the record, or the longest.

    Args:
        f: Shares, one per recorded step.
        threshold: The share from which a step counts.
        steps: The steps that the shares belong to; 1, 2, ... by default.

    Returns:
        The stretch; None if no stretch lasts for a tenth of the record and for at least two steps.

    >>> majority([0.2, 0.2, 0.6, 0.2, 0.2]) is None
    True
    >>> majority([0.2, 0.6, 0.6, 0.2, 0.7, 0.8]).when, majority([0.2, 0.6, 0.6, 0.2]).when
    ('from step 5 to the end', 'from step 2 to step 3')
    """
    values, at = _trajectory(f, steps)
    edges = np.flatnonzero(np.diff(values >= threshold, prepend=False, append=False))
    begins, ends = edges[::2], edges[1::2]  # of stretches, and one past their ends
    lasting = np.flatnonzero(ends - begins >= max(2, math.ceil(len(values) * LASTS)))
    if not lasting.size:
        return None
    longest = max(lasting, key=lambda i: (ends[i] == len(values), ends[i] - begins[i]))
    begin, end = int(begins[longest]), int(ends[longest])
    return Majority(int(at[begin]), int(at[end - 1]), begin == 0, end == len(values))


# ---- forecast against outcome ---------------------------------------------------------------------


@dataclass(frozen=True)
class TimingPair:
    """A forecast and a measured crossing of one cell."""

    forecast: Crossing
    measured: Crossing
    which: Which = "first"

    @property
    def steps(self) -> tuple[int, int] | None:
        """(forecast, measured) steps of an eligible pair, in which both exist and come after step 1."""
        forecast, measured = (_timed(c, self.which) for c in (self.forecast, self.measured))
        return None if forecast is None or measured is None else (forecast, measured)

    @property
    def eligible(self) -> bool:
        """Return True if both sides crossed the level."""
        return self.steps is not None

    @property
    def ratio(self) -> float | None:
        """Forecast / measured; None for a pair that is not eligible."""
        return None if self.steps is None else self.steps[0] / self.steps[1]

    def within(self, tolerance: float = TOLERANCE) -> bool | None:
        """Return True if |ratio - 1| <= tolerance, computed without dividing.

        Args:
            tolerance: The largest relative error.

        Returns:
            The answer; None for a pair that is not eligible.
        """
        if self.steps is None:
            return None
        forecast, measured = self.steps
        return abs(forecast - measured) <= tolerance * measured

    @property
    def disagrees(self) -> bool:
        """True if the categories differ; an undecided one never differs."""
        both = (self.forecast.category, self.measured.category)
        return "undecided" not in both and both[0] != both[1]


def timing_pair(forecast: Crossing, measured: Crossing, which: Which = "first") -> TimingPair:
    """Pair the crossings of a forecast and of the run that it forecasts.

    Args:
        forecast: The forecast crossings.
        measured: The measured crossings.
        which: ``first`` or ``persistent``: the crossing to compare.

    Raises:
        UsageError: If ``which`` is neither.

    >>> pair = timing_pair(crossing([0.0] * 9 + [1.0]), crossing([0.0] * 8 + [1.0]))
    >>> pair.eligible, round(pair.ratio, 3), pair.within(0.15), pair.within(0.10)
    (True, 1.111, True, False)
    """
    if which not in ("first", "persistent"):
        raise UsageError(f"which must be 'first' or 'persistent', not {which!r}.")
    return TimingPair(forecast, measured, which)


def _timed(c: Crossing, which: Which) -> int | None:
    """Return the step of a crossing that has a post-initialisation time, otherwise None."""
    step = c.first if which == "first" else c.persistent
    unknown = c.category == "undecided" and step == c.first
    return None if step is None or step == 1 or unknown else step


def _trajectory(f: npt.ArrayLike, steps: npt.ArrayLike | None) -> tuple[Array, Array]:
    """Return a frozen-fraction trajectory and its steps, checked."""
    values = np.asarray(f, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise UsageError(f"a trajectory is one value a step: expected shape (n,), found {values.shape}.")
    wrong = ~((values >= 0) & (values <= 1))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise UsageError(f"a frozen fraction lies in [0, 1]: found {values[at]!r} at position {at}.")
    return values, recorded_steps(len(values), steps)


def recorded_steps(n: int, steps: npt.ArrayLike | None) -> Array:
    """Return the steps of n records: 1 to n, or what was given, which must increase from one or more."""
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
