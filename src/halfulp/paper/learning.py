"""Compute the share of a reference's progress that runs make, the rates that learn, and forecasts of both.

With E a test error, *learned* is the share of a reference's progress (eq:learned),

    lambda = (E_0 - E) / (E_0 - E_T)

A rate is *in the window* of a mantissa when the median over seeds is at least one half. What has diverged
(None) counts as nothing learned under the **robust** convention; the **survivor** convention leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from halfulp.paper.values import grouped, known

LEARNED = 0.5
"""A run or a forecast is positive from this share on."""
SIDES = ("before", "after")
"""The sides of an onset on which the error may be taken."""

Shares = Mapping[tuple[int, float], Sequence[float | None]]
"""Learned shares of every seed, by mantissa and rate."""


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
    found = {}
    for key, values in shares.items():
        each = [0.0 if v is None else v for v in values] if robust else known(values)
        found[key] = median(each) if each else None
    return found


def windows(shares: Shares, threshold: float = LEARNED, *, robust: bool = True) -> dict[int, list[float]]:
    """Return the rates in the window of each mantissa.

    >>> windows({(1, 0.2): [0.6], (1, 0.1): [0.4], (2, 0.1): [0.9]})
    {1: [0.2], 2: [0.1]}
    """
    found: dict[int, list[float]] = {m: [] for m, _ in sorted(shares)}
    for (m, rate), value in sorted(medians(shares, robust=robust).items()):
        found[m] += [rate] if value is not None and value >= threshold else []
    return found


def matched(real: Mapping[int, list[float]], said: Mapping[int, list[float]]) -> tuple[int, int]:
    """Return the number of windows that are as forecast, and the number of windows."""
    return sum(said[m] == rates for m, rates in real.items()), len(real)


def accuracy(cells: Sequence[tuple[float | None, float | None]]) -> float:
    """Return the share of cells, as (forecast, outcome), that were forecast correctly."""
    return sum(((said or 0.0) >= LEARNED) == ((came or 0.0) >= LEARNED) for said, came in cells) / len(cells)
