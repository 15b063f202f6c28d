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

from collections.abc import Mapping
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
    best, names = float("-inf"), []
    for name in sorted(points, key=lambda n: (points[n][0], -points[n][1], n)):
        if points[name][1] > best:
            best = points[name][1]
            names.append(name)
    return names
