"""Find the choices that survive when there are several costs: dominance, with and without tolerances.

A choice has a quality, which should be large, and costs, which should be small. One *dominates* another if it
is no worse in any coordinate, up to a tolerance, and better in one by more than the tolerance. Tolerances of
qualities are differences, those of costs are shares. Survivors are those that nothing dominates.

With tolerances dominance is not transitive, so survivors are counted against all choices and not against
each other.

>>> points = {
...     "plain": Point(0.0, {"wall": 1.0}),
...     "fixed": Point(0.9, {"wall": 1.04}),
...     "half": Point(0.5, {"wall": 1.03}),
... }
>>> survivors(points), survivors(points, Tolerance(quality=0.02, cost=0.05))
(['plain', 'fixed', 'half'], ['fixed'])
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Point:
    """The quality and the costs of a choice; all choices have the same costs."""

    quality: float
    costs: Mapping[str, float]

    def with_cost(self, name: str, more: float) -> Point:
        """Return the same point at a higher cost."""
        return replace(self, costs={**self.costs, name: self.costs[name] + more})


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that count as none: of qualities in their own unit, of costs as a share."""

    quality: float = 0.0
    cost: float = 0.0


def dominates(a: Point, b: Point, within: Tolerance = Tolerance()) -> bool:  # noqa: B008  # frozen
    """Return True if ``a`` is nowhere worse than ``b``, and better somewhere, both up to tolerances."""
    if a.quality < b.quality - within.quality:
        return False
    if any(a.costs[name] > cost * (1 + within.cost) for name, cost in b.costs.items()):
        return False
    better = a.quality > b.quality + within.quality
    return better or any(a.costs[name] * (1 + within.cost) < cost for name, cost in b.costs.items())


def survivors(points: Mapping[str, Point], within: Tolerance = Tolerance()) -> list[str]:  # noqa: B008
    """Return the names of the points that no other dominates, in their order."""
    return [
        name
        for name, point in points.items()
        if not any(dominates(other, point, within) for key, other in points.items() if key != name)
    ]


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of (cost, quality) pairs that nothing as cheap or cheaper beats, by rising cost."""
    best, made = float("-inf"), []
    for name in sorted(points, key=lambda n: (points[n][0], -points[n][1], n)):
        if points[name][1] > best:
            best = points[name][1]
            made.append(name)
    return made


def paired_median(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of pairs, less one: each repetition against its own partner."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) - 1


def unpaired_median(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the ratio of two medians, less one: it mixes repetitions, and may have the other sign.

    The paper's own case: three paired changes of -0.556%, +0.352% and -0.259% have the median -0.259%, and
    comparing the medians of the arms instead gave +0.076%.

    >>> theirs = [100.0, 101.0, 99.0]
    >>> ours = [99.444, 101.356, 98.744]
    >>> f"{paired_median(ours, theirs):+.4f} {unpaired_median([99.9, 100.2, 98.0], theirs):+.4f}"
    '-0.0026 -0.0010'
    """
    return statistics.median(ours) / statistics.median(theirs) - 1
