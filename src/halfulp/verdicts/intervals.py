"""Intervals by split conformal prediction on log ratios.

On runs that were made for it, every estimator's gap f stood beside the measured one g. Their score is the
smallest q for which

    f exp(-q) - floor  <=  g  <=  f exp(q) + floor

where the floor is what two equal runs differ by. An interval of 90% then takes the ceil(.9 (n + 1))-th of n
sorted scores. If the next run is like those, it covers at least 90% of the time, whatever the distribution.
Where n is too small for that, the largest score is taken, and half of it again.

The table of scores lies beside this module as ``intervals.json``; ``benchmarks/pilots.py`` makes it; rows are
estimators of :mod:`halfulp.pilots.estimates`, by families of policies where they err differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from halfulp import documents, files
from halfulp.errors import CorruptionError

COVERAGE = 0.9
WIDEST = 4.0
"""The largest score: a factor of 55. What the floor alone cannot explain, no factor does."""
SMALLEST = 0.02
"""The noise floor in nats where the difference of two equal runs was not measured."""
SMALLEST_GAP = 0.01
"""A measured gap, in nats, below which a forecast's error cannot be judged."""
Family = Literal["nearest", "kept", "eco"]
"""Families of policies: those that lose small updates, those that keep them (sr, kahan, masters), and eco."""
KIND = "halfulp.pilot-intervals"
Table = Mapping[str, Sequence[float]]
"""Scores of the calibrating runs, by estimator."""


def score(gap: float, measured: float, floor: float) -> float:
    """Return the smallest q whose interval around a gap holds the measured one.

    >>> round(score(0.5, 1.0, 0.0), 3), score(0.001, 0.01, 0.02)
    (0.693, 0.0)
    """
    if abs(gap - measured) <= floor:
        return 0.0
    above, below = (measured - floor, gap) if measured > gap else (gap, measured + floor)
    return min(WIDEST, math.log(above / below)) if below > 0 else WIDEST


def quantile(scores: Sequence[float], coverage: float = COVERAGE) -> float:
    """Return the score that a share of further runs stays within.

    >>> quantile([0.1 * i for i in range(1, 20)]), quantile([0.2, 0.1])
    (1.8, 0.30000000000000004)
    """
    ordered = sorted(scores)
    rank = math.ceil(coverage * (len(ordered) + 1))
    if not ordered:
        return WIDEST
    return ordered[rank - 1] if rank <= len(ordered) else min(WIDEST, 1.5 * ordered[-1])


def interval(
    gap: float, floor: float, name: str, table: Table, coverage: float = COVERAGE
) -> tuple[float, float]:
    """Return the ends of the interval around an estimated gap."""
    factor = math.exp(quantile(table.get(name, ()), coverage))
    ends = (gap / factor, gap * factor)
    return min(ends) - floor, max(ends) + floor


def family_of(spec: str) -> Family:
    """Return the family of a format's policy.

    >>> family_of("e5m2"), family_of("e5m2:sr"), family_of("e4m3@128:eco(decay_exact=True)")
    ('nearest', 'kept', 'eco')
    """
    policy = spec.partition(":")[2]
    return "nearest" if policy in ("", "rne") else "eco" if policy.startswith("eco") else "kept"


def of_point(spec: str, gap: float) -> tuple[float, float]:
    """Return the interval of a rehearsed point, for which nothing was paid."""
    family = family_of(spec)
    return interval(gap, SMALLEST, "free" if family == "nearest" else f"free {family}", shipped())


@cache
def shipped() -> Table:
    """Return the table that halfulp comes with."""
    return load(Path(__file__).with_name("intervals.json"))


def load(path: Path) -> Table:
    """Read a table of scores; anything else is refused."""
    content = files.read(path, documents.MOST_BYTES, follow=True)
    document = documents.parsed(content, path, "a table of scores")
    documents.check_digest(document, path)
    table = documents.Fields(document, str(path)).within("scores").values
    if document.get("kind") != KIND or not all(
        isinstance(v, list) and all(isinstance(x, float | int) and 0 <= x <= WIDEST for x in v)
        for v in table.values()
    ):
        raise CorruptionError(f"{path} is not a table of scores: run benchmarks/pilots.py to make one.")
    return {str(name): tuple(map(float, scores)) for name, scores in table.items()}
