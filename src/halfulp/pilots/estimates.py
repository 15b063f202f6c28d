"""Estimate the cost of a format from a few measured losses: every estimator, on plain numbers.

A *gap* is a loss above that of the reference, in nats. What a full run on the format would lose is estimated
by, from nothing paid to much:

    free     P - R                 the rehearsed point of the reference run
    twin     U g_b / U_b           reference and format really run on b of the B sequences of every batch: a
                                   real run keeps the share of the open loop's gap that the twin keeps
    raw      g_b                   the twin's own gap, where open loops show (almost) nothing
    fork     F - R                 the format really run to the end, from the rehearsed point's codes at t
    bracket  sqrt(lower upper)     of two more forks, from the projected and the open loop's codes, where they
                                   have closed in on each other

U is the gap of the open loop of the full run, U_b and g_b those of the small one. A twin **reads low** where
noise rules the small batch: its reference then makes less progress, and rounding hardly hurts it. Both are
measured, and :meth:`Seen.reads_low` is the guard. Nothing here runs anything, so that a rule can be tried on
numbers that are known: :func:`estimate` is all of it. A twin that ends below its reference is taken for
noise, and its estimate for zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from halfulp.verdicts.intervals import COVERAGE, SMALLEST, Family, Table, interval, quantile

Kind = Literal["free", "twin", "raw", "fork", "bracket"]

AHEAD = 1.08
"""With this many times the progress of the small-batch reference, noise may dominate the latter."""
SHALLOW = 0.25
"""Below this share of the open loop's gap, such a twin reads low."""
TRUSTED = 1.3
"""The factor within which an estimator must have been nine times in ten, where it was calibrated."""
CLOSED_IN = 4.0
"""The largest ratio of upper to lower fork whose geometric mean is taken."""


@dataclass(frozen=True, kw_only=True)
class Twin:
    """Losses at the end of the runs on a part of every batch: reference, its open loop, the real format."""

    share: float
    """Share of a full run, in sequences; for a script, in processor time."""
    reference: float
    upper: float
    real: float

    def kept(self, floor: float = SMALLEST) -> float | None:
        """Return g_b / U_b, the share of the open loop's gap that is left; None where that is none."""
        if not math.isfinite(self.upper) or self.upper - self.reference < max(SMALLEST, floor):
            return None
        return (self.real - self.reference) / (self.upper - self.reference)

    def shallow(self, floor: float = SMALLEST) -> bool:
        """Return True if so little is left that noise may dominate; the reference's final loss decides."""
        kept = self.kept(floor)
        return kept is None or kept < SHALLOW


@dataclass(frozen=True, kw_only=True)
class Forks:
    """Losses of the format, really run for the last share of the updates, by the codes it began from."""

    share: float
    losses: Mapping[str, float]
    """Losses by ``lower``, ``point`` and ``upper``; at least the point."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The measured losses of one format at the start and the end of the run."""

    start: float
    reference: float
    upper: float
    point: float
    twin: Twin | None = None
    forks: Forks | None = None
    floor: float = SMALLEST
    """Difference, in nats, between two repetitions of the same run."""
    family: Family = "nearest"
    """Family of its policy. Estimators err differently on each; rehearsals of eco are known to be too low."""

    def progress(self) -> float | None:
        """Return the progress of the reference over that of the small-batch reference."""
        if self.twin is None:
            return None
        small = self.start - self.twin.reference
        return (self.start - self.reference) / small if small > 0 else math.inf

    def kept(self) -> float | None:
        """Return g_b / U_b, the share of the open loop's gap that the twin kept; None where that is none."""
        return self.twin.kept(self.floor) if self.twin is not None and math.isfinite(self.upper) else None

    def reads_low(self) -> bool:
        """Return True if noise dominates the twin and hides what the format costs: the guard."""
        ahead, kept = self.progress(), self.kept()
        return ahead is not None and ahead > AHEAD and kept is not None and kept < SHALLOW

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of a format: a gap in nats, its interval and the kind of evidence behind it."""

    gap: float
    low: float
    high: float
    kind: Kind
    floor: float
    trusted: bool = True
    """True if the guard accepts it: paid for, not ruled by noise, and where such estimates were calibrated,
    within a factor of :data:`TRUSTED` nine times in ten. False for the free point."""
    notes: tuple[str, ...] = field(default=())

    @property
    def zero(self) -> bool:
        """True if the gap cannot be told from zero: it is below the difference of two equal runs."""
        return abs(self.gap) < self.floor


def floor_of(real: float, again: float, twin: float, nudged: float) -> float:
    """Return the noise floor, from the differences of equal runs and of evaluations of equal weights.

    Two runs that differ by a hair give one difference of two; a format's gap is one as well. Twice that
    difference is exceeded about one time in ten.

    >>> floor_of(2.0, 2.0, 2.5, 2.53)
    0.06
    """
    return round(max(2 * abs(nudged - twin), abs(again - real), SMALLEST / 2), 6)


def gaps(seen: Seen) -> dict[Kind, float]:
    """Return every estimate that these numbers allow, the guard apart.

    >>> twin = Twin(share=1 / 12, reference=2.5, upper=3.5, real=2.8)
    >>> seen = Seen(start=5.0, reference=2.4, upper=4.4, point=2.9, twin=twin)
    >>> {kind: round(gap, 3) for kind, gap in gaps(seen).items()}
    {'free': 0.5, 'twin': 0.6}
    """
    by_kind: dict[Kind, float] = {"free": seen.point - seen.reference}
    kept = seen.kept()
    if kept is not None:
        by_kind["twin"] = max(0.0, (seen.upper - seen.reference) * kept)
    elif seen.twin is not None and not seen.upper - seen.reference > 2 * max(SMALLEST, seen.floor):
        by_kind["raw"] = max(0.0, seen.twin.real - seen.twin.reference)
    if seen.forks is not None:
        each = {name: loss - seen.reference for name, loss in seen.forks.losses.items()}
        by_kind["fork"] = each["point"]
        low, high = each.get("lower", 0.0), each.get("upper", math.inf)
        if 0 < low <= high <= CLOSED_IN * low:
            by_kind["bracket"] = math.sqrt(low * high)
    return by_kind


def row(kind: Kind, seen: Seen) -> str:
    """Return the row of the calibration table for an estimate: forks by how much of the run they were."""
    if seen.family != "nearest":
        return f"{'twin' if kind in ('twin', 'raw') else 'free'} {seen.family}"
    if kind == "fork" and seen.forks is not None:
        return next((f"fork {s:.0%}" for s in (0.4, 0.2, 0.1) if seen.forks.share >= s - 1e-9), "free")
    return kind


def estimate(seen: Seen, table: Table, coverage: float = COVERAGE) -> Estimate:
    """Choose the best estimate that was paid for, with an interval.

    A bracket of forks comes before one fork, a fork before a twin that the guard distrusts, a trusted twin
    before a fork, and the free point last. Where the interval of another estimator does not overlap the
    chosen one's, the two disagree, and the interval spans both.
    """
    by_kind = gaps(seen)
    low_twin = seen.reads_low()
    order: tuple[Kind, ...] = ("twin", "raw", "bracket", "fork", "free")
    if low_twin:
        order = ("bracket", "fork", "free")
    kind = next(k for k in order if k in by_kind)
    spans = {k: interval(gap, seen.floor, row(k, seen), table, coverage) for k, gap in by_kind.items()}
    low, high = spans[kind]
    notes = []
    if low_twin:
        notes.append("the twin is limited by noise, and was not used")
    for other in (k for k in order if k in by_kind and k != kind):
        a, b = spans[other]
        if (a > high or b < low) and seen.family == "nearest":
            low, high = min(a, low), max(b, high)
            notes.append(f"the {other} estimate ({by_kind[other]:+.3f}) disagrees")
    if seen.family != "eco":
        # Observed bounds: nobody ended above the open loop, and an open loop below the floor costs nothing.
        high = max(min(high, seen.upper - seen.reference + seen.floor), by_kind[kind], low)
    return Estimate(
        gap=by_kind[kind], low=low, high=high, kind=kind, floor=seen.floor,
        trusted=kind != "free" and quantile(table.get(row(kind, seen), ()), coverage) <= math.log(TRUSTED),
        notes=tuple(notes),
    )  # fmt: skip
