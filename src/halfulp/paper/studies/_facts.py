"""Express what the paper prints about the references of its controlled studies as counts of cells.

A fact looks at a record of study `testbed`: references of a candidate, each with its rate, its seed, whether
it diverged, and by grid and predictor [first crossing, onset, learned before it, learned after it]. It counts
the cells that are as the paper has them. With x = rate * 2**m, updates shrink beside the spacing as x does;
the paper's edges lie between x = 0.283 and 1.13 in the midpoint study and between 0.4 and 0.8 in the phase
diagram.

Outcome facts (what runs on a grid did) are not here: they choose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from halfulp.paper.models.learning_forecasts import LEARNED, PREDICTORS, SIDES, gathered, medians
from halfulp.paper.studies.finite_size import means, width_of
from halfulp.paper.values import grouped
from halfulp.study.protocol import Json

PAPER_WIDTHS = {6: (2.811, 4.49), 7: (3.267, 4.734), 8: (3.426, 4.566)}
"""Q0.84 - Q0.16 at 128 and at 4096 coordinates, by mantissa (app:arithmetic)."""
Reference = Mapping[str, Json]
Count = tuple[int, int]
"""The number of cells that are as the paper has them, and the number of cells."""


@dataclass(frozen=True)
class Fact:
    """Something that the paper prints about references, and how to count it in a candidate's."""

    name: str
    printed: str
    source: str
    count: Callable[[Reference, str], Count | None]
    """(cells as printed, cells) of a record and a side of the error; None where it has no such cells."""


def _of(record: Reference, role: str, low: float = 0.0, high: float = 1e9) -> list[tuple[Json, int]]:
    """(reference, mantissa) of a role with low < rate * 2**m < high."""
    return [
        (r, int(grid[1:])) for r in record["references"] if r["role"] == role
        for grid in r["said"] if low < r["rate"] * 2 ** int(grid[1:]) < high
    ]  # fmt: skip


def _said(pair: tuple[Json, int], predictor: str, what: str) -> Json:
    r, m = pair
    return r["said"][f"m{m}"][predictor][("first", "onset", *SIDES).index(what)]


def _positive(pair: tuple[Json, int], predictor: str, side: str) -> bool:
    learned = _said(pair, predictor, side)
    return learned is not None and learned >= LEARNED


def _at_rate(record: Reference, low: float, high: float) -> list[bool]:
    return [r["diverged"] for r in record["references"] if low < r["rate"] < high]


def _share(holds: Sequence[bool]) -> Count | None:
    return (sum(holds), len(holds)) if holds else None


def stable(record: Reference, side: str) -> Count | None:
    return _share([not bad for bad in _at_rate(record, 0, 0.6)])


def half_diverge(record: Reference, side: str) -> Count | None:
    bad = _at_rate(record, 0.6, 1.0)
    return (len(bad) - abs(2 * sum(bad) - len(bad)), len(bad)) if bad else None


def ceiling(record: Reference, side: str) -> Count | None:
    return _share(_at_rate(record, 1.0, 2.0))


BELOW, EDGE, ABOVE = (0.0, 0.4), (0.4, 0.8), (0.8, 1e9)
"""In rate * 2**m: negative, the lower edge, positive; the midpoint study has 0.283, 0.566 and 1.13 there."""


def frozen_below(record: Reference, side: str) -> Count | None:
    return _share([_said(p, "directional", "first") == 1 for p in _of(record, "midpoint", *BELOW)])


def _edge(record: Reference, holds: Callable[[tuple[Json, int]], bool]) -> list[int]:
    """At the edge, by mantissa: of how many seeds it holds."""
    pairs = _of(record, "midpoint", *EDGE)
    return [sum(holds(p) for p in pairs if p[1] == m) for m in sorted({m for _, m in pairs})]


def frozen_edge(record: Reference, side: str) -> Count | None:
    return _share([n == 1 for n in _edge(record, lambda p: _said(p, "directional", "first") == 1)])


def later_above(record: Reference, side: str) -> Count | None:
    return _share([_said(p, "directional", "first") != 1 for p in _of(record, "midpoint", *ABOVE)])


def _called(record: Reference, side: str, predictor: str, seeds: Sequence[int]) -> Count | None:
    """Negative below the edge, positive above it, and so many seeds positive at it."""
    below = [not _positive(p, predictor, side) for p in _of(record, "midpoint", *BELOW)]
    above = [_positive(p, predictor, side) for p in _of(record, "midpoint", *ABOVE)]
    edge = [n in seeds for n in _edge(record, lambda p: _positive(p, predictor, side))]
    return _share([*below, *edge, *above])


def onsets(record: Reference, side: str) -> Count | None:
    """Count the predictors that have an onset where the majority is not frozen at update 1."""
    return _share(
        [
            _said(p, predictor, "onset") is not None
            for p in _of(record, "midpoint", EDGE[0]) if _said(p, "directional", "first") != 1
            for predictor in PREDICTORS
        ]
    )  # fmt: skip


def forecast_windows(record: Reference, side: str) -> Count | None:
    """Robust medians over seeds: a rate is in the window of m from rate * 2**m = 0.8 up to rate 0.4."""
    each = _of(record, "phase")
    median_shares = medians(gathered((m, r["rate"], _said((r, m), "directional", side)) for r, m in each))
    inside = {(m, rate): rate * 2**m > 0.6 and rate < 0.6 for m, rate in median_shares}
    return _share([((share or 0.0) >= LEARNED) == inside[key] for key, share in median_shares.items()])


def _later(record: Reference) -> list[Json]:
    return [t for t in record.get("timing", ()) if t["first"] is not None and t["first"] > 1]


def rho_at_crossing(record: Reference, side: str) -> Count | None:
    rhos = [t["rho"] for t in _later(record)]
    return _share([abs(median(rhos) - 0.74) <= 0.05]) if rhos else None


def crossing_range(record: Reference, side: str) -> Count | None:
    steps = [t["first"] for t in _later(record)]
    return _share([min(steps) <= 11, max(steps) >= 4575]) if steps else None


def lone_seed(record: Reference, side: str) -> Count | None:
    alike = grouped(((t["rate"], t["mantissa"]), t["first"]) for t in _later(record))
    crossings = [sorted(each) for each in alike.values() if len(each) > 1]
    return _share([any(each[0] <= 100 and each[1] >= 1000 for each in crossings)]) if crossings else None


def mean_widths(record: Reference) -> dict[int, list[float | None]]:
    """Mean width by mantissa, the smallest layer first; None if a seed has none."""
    by_width = means((row["mantissa"], row["width"], width_of(row)) for row in record.get("sizes", ()))
    return {m: [each[width] for width in sorted(each)] for m, each in by_width.items()}


def widths(record: Reference, side: str) -> Count | None:
    pairs = [
        (ours, theirs) for m, each in mean_widths(record).items()
        for ours, theirs in zip((each[0], each[-1]), PAPER_WIDTHS[m], strict=True)
    ]  # fmt: skip
    return (
        _share([ours is not None and abs(ours - theirs) <= 0.5 for ours, theirs in pairs]) if pairs else None
    )


def widening(record: Reference, side: str) -> Count | None:
    widths = mean_widths(record).values()
    ends = [(each[0], each[-1]) for each in widths]
    return _share([a is not None and b is not None and b > a for a, b in ends]) if ends else None


_E4, _PROSPECTIVE, _PREDICTOR, _ARITHMETIC = "app:e4", "tab:e4-prospective", "app:predictor", "app:arithmetic"
_EXCEPT_EDGE = "negative below 0.566, positive in two seeds of three there, positive above"
FACTS = (
    Fact("stable", "no reference diverges at 0.566 or below", _E4, stable),
    Fact("half-at-0.8", "3 of 6 references diverge at 0.8", "fig:e4", half_diverge),
    Fact("ceiling", "every reference diverges at 1.6", _E4, ceiling),
    Fact("windows", "forecast windows start at rate x 2^m = 0.8 and end at rate 0.4", "tab:e4-window",
         forecast_windows),
    Fact("frozen-below", "frozen majority at update 1 wherever rate x 2^m <= 0.283 (30 of 35)", _E4,
         frozen_below),
    Fact("frozen-edge", "and in one seed of three at 0.566 (5 of 35)", _E4, frozen_edge),
    Fact("later-above", "nowhere else (55 cells with an onset)", _PROSPECTIVE, later_above),
    Fact("onsets", "in those 55, all three predictors have an onset within 3000 updates", _PROSPECTIVE,
         onsets),
    Fact("directional", f"directional: {_EXCEPT_EDGE}", _PROSPECTIVE,
         partial(_called, predictor="directional", seeds=(2,))),
    Fact("symmetric", "symmetric: the same, but for one cell more", _PROSPECTIVE,
         partial(_called, predictor="symmetric", seeds=(2, 3))),
    Fact("scalar", "scalar rho: negative below 0.566, positive from there up, in every seed", _PROSPECTIVE,
         partial(_called, predictor="scalar", seeds=(3,))),
    Fact("rho", "pooled rho at the crossing about 0.74 (ours: 0.69 to 0.79)", _ARITHMETIC, rho_at_crossing),
    Fact("range", "forecast crossings from 11 to 4575 (ours: that range or wider)", "section 3",
         crossing_range),
    Fact("lone-seed", "one seed at 61, siblings near 1800 (ours: up to 100, from 1000)", _PREDICTOR,
         lone_seed),
    Fact("widths", "crossover widths at N = 128 and 4096 (ours: within half a bit)", _ARITHMETIC, widths),
    Fact("widening", "widths rise with N at m = 6, 7, 8", _ARITHMETIC, widening),
)  # fmt: skip


def met(record: Reference, side: str) -> dict[str, Count]:
    """Return the counts of every fact that a record can speak of."""
    counts = {fact.name: fact.count(record, side) for fact in FACTS}
    return {name: count for name, count in counts.items() if count is not None}


def score(record: Reference, side: str) -> tuple[int, float]:
    """Facts met, and the mean over facts of the share of cells that are as printed."""
    counts = met(record, side)
    return sum(a == b for a, b in counts.values()), sum(a / b for a, b in counts.values()) / len(counts)


def best_side(record: Reference) -> str:
    """Return the side of the error that fits better; before, if it makes no difference."""
    return max(SIDES, key=lambda side: score(record, side))


def ranked(records: Mapping[str, Reference]) -> list[str]:
    """Names of records, the best first; among equals the order of declaration."""
    return sorted(records, key=lambda name: score(records[name], best_side(records[name])), reverse=True)
