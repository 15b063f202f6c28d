"""Forecast onset against measured onset: what `emulator`, `two-layer` and `cnn` have in common.

A *system* is a testbed with a loss and an optimizer. Stage ``reference`` holds, for each grid, the majority
crossings that a high-precision run forecasts, by two predictors:

    exact       code equality at the projected weights (Eq. 4)
    symmetric   |d| < u(w) / 2, the spacing proxy of the paper's archived sweeps (appendix A)

Stage ``measured`` holds the crossing of a run on the grid, and the pooled rho of Eq. 3 where it crossed.
Pairs are made and judged by :mod:`halfulp.measures.crossings`; nothing is recomputed here. Stage ``bf16``, of
two of the studies, holds m = 7 beside a direct bfloat16 update (:mod:`halfulp.paper.models.descent`).

The thresholds were fixed before the first measured run and not changed since; the testbed's start was
changed once after it (docs/controlled.md). A median within 5% of one and 80% of the eligible
pairs within 15% are asked of every system by both predictors (80% is the paper's own floor, appendix D);
at most one category in ten may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from halfulp.drawing import new_figure
from halfulp.measures.crossings import TOLERANCE, Array, Crossing, TimingPair, crossing, timing_pair
from halfulp.measures.forecasts import pooled_rho
from halfulp.numbers.grids import grid as named
from halfulp.paper import panels
from halfulp.paper.studies.claims import Beside, Claim, Ours
from halfulp.paper.studies.declared import gate
from halfulp.paper.values import grouped
from halfulp.study.protocol import Cell, Config, Estimand, Json, Records, Running, Stage, Table, Values

PREDICTORS = ("symmetric", "exact")


# ---- cells and what they give back ----------------------------------------------------------------------


def each_rate_and_seed(config: Config, keys: Sequence[str], prefix: str = "") -> Iterator[Cell]:
    """Yield one cell per rate and seed, with these keys of the config."""
    for rate in config["rates"]:
        for seed in config["seeds"]:
            c = {**{key: config[key] for key in keys}, "rate": rate, "seed": seed}
            yield Cell(name=f"{prefix}rate={rate}.seed={seed}", config=c)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """References of a system, and then a run on every grid that they speak of."""

    system: str
    cells: Callable[[Config], Iterator[Cell]]
    train: Callable[..., tuple[Any, dict[str, Json]]]
    """A cell's run, audited on grids (``audit``) or stored on one (``store``): series, and what is kept."""

    def reference(self, cell: Running) -> Mapping[str, Json]:
        """Return the forecast crossings of every grid."""
        series, kept = self.train(cell, audit=grids(cell.config))
        return {**kept, "predicted": forecast(cell.config, series.counts, series.size)}

    def measure(self, cell: Running) -> Mapping[str, Json]:
        """Return the crossing of one run on a grid."""
        grid, reference = cell.config["grid"], cell.config["reference"]
        series, kept = self.train(cell, store=grid)
        crossed = measured(grid, series.frozen, series.squares, series.size)
        return {"system": self.system, **kept, "reference": reference, **crossed}

    def measured_cells(self, config: Config) -> Iterator[Cell]:
        """Yield a cell on each grid that a reference speaks of."""
        for cell in self.cells(config):
            for grid in grids(cell.config):
                c = {**cell.config, "reference": cell.name, "grid": grid}
                yield Cell(name=f"{cell.name}.{grid}", config=c)

    @property
    def stages(self) -> tuple[Stage, Stage]:
        """References first."""
        return (
            Stage(name="reference", kind="prediction", cells=self.cells, run=self.reference),
            Stage(name="measured", kind="outcome", cells=self.measured_cells, run=self.measure),
        )


def grids(config: Config) -> list[str]:
    """Return the grids that a reference is audited on."""
    return [f"m{m}" for m in config["mantissas"]]


def crossing_json(frozen: Array, size: int) -> dict[str, Json]:
    """Return the crossings of counts over ``size`` coordinates, one count per step."""
    return asdict(crossing(np.asarray(frozen) / size))


def forecast(config: Config, counts: Array, size: int) -> dict[str, Json]:
    """Both predictors' crossings of each grid, from counts (steps, grids, exact and symmetric)."""
    return {
        grid: {name: crossing_json(counts[:, j, k], size) for k, name in enumerate(("exact", "symmetric"))}
        for j, grid in enumerate(grids(config))
    }


def measured(grid: str, frozen: Array, squares: Array, size: int) -> dict[str, Json]:
    """Return the crossing of a run on a grid, and the pooled rho at its first one."""
    crossing, rho = crossing_json(frozen, size), None
    if crossing["first"] is not None:
        weights, proposals = squares[crossing["first"] - 1]
        rho = float(pooled_rho([proposals], [weights], named(grid).epsilon)[0])
    return {"grid": grid, "crossing": crossing, "rho": rho}


# ---- pairs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimingSummary:
    """Timing over many cells. Ratios are conditional on eligibility; categories cover every cell."""

    cells: int
    eligible: int
    within: int
    """Eligible cells whose ratio lies within the tolerance."""
    disagreements: int
    """Cells, of all of them, whose categories differ."""
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


def summarise(pairs: Sequence[TimingPair]) -> TimingSummary:
    """Timing and categories over cells.

    >>> from halfulp.measures.crossings import crossing, timing_pair
    >>> late, later, never = (crossing([0.0] * n + [1.0] * (9 - n)) for n in (4, 6, 9))
    >>> s = summarise([timing_pair(late, late), timing_pair(late, later), timing_pair(late, never)])
    >>> s.cells, s.eligible, s.within, s.disagreements, s.span
    (3, 2, 1, 1, 1.4)
    """
    timed = [p.steps for p in pairs if p.steps is not None]
    ratios = [forecast / measured for forecast, measured in timed]
    return TimingSummary(
        cells=len(pairs),
        eligible=len(timed),
        within=sum(p.within() is True for p in pairs),
        disagreements=sum(p.disagrees for p in pairs),
        median_ratio=float(np.median(ratios)) if ratios else None,
        mean_ratio=float(np.mean(ratios)) if ratios else None,
        forecast_range=_range([forecast for forecast, _ in timed]),
        measured_range=_range([measured for _, measured in timed]),
    )


def _range(values: list[int]) -> tuple[int, int] | None:
    return (min(values), max(values)) if values else None


def pairs(records: Records, predictor: str) -> dict[str, list[TimingPair]]:
    """Forecast and measured crossings of every measured cell, by system."""
    by_system: dict[str, list[TimingPair]] = {}
    for cell in records["measured"].values():
        said = records["reference"][cell["reference"]]["predicted"][cell["grid"]][predictor]
        pair = timing_pair(Crossing(**said), Crossing(**cell["crossing"]))
        by_system.setdefault(cell["system"], []).append(pair)
    return by_system


def summaries(records: Records, predictor: str) -> dict[str, TimingSummary]:
    """Timing and categories of every system."""
    return {system: summarise(each) for system, each in pairs(records, predictor).items()}


def points(records: Records, system: str, predictor: str = "symmetric") -> list[tuple[int, int]]:
    """(forecast, measured) of the eligible cells of a system."""
    return [p.steps for p in pairs(records, predictor)[system] if p.steps is not None]


def locations(records: Records, stage: str = "measured") -> dict[str, list[float]]:
    """Pooled rho where runs first cross, if after step 1, by system; of ``bf16``, direct ones by network."""
    by_system: dict[str, list[float]] = {}
    for cell in records[stage].values():
        ran, system = (cell["direct"], cell["network"]) if stage == "bf16" else (cell, cell["system"])
        if ran["crossing"]["category"] == "later" and ran["rho"] is not None:
            by_system.setdefault(system, []).append(ran["rho"])
    return by_system


# ---- estimands and gates --------------------------------------------------------------------------------


def timing(records: Records, predictor: str, quantity: str) -> Values:
    """One number of every system's timing summary."""
    return {system: _quantity(s, quantity) for system, s in summaries(records, predictor).items()}


def _quantity(s: TimingSummary, quantity: str) -> float | None:
    if quantity == "median-error":
        return None if s.median_ratio is None else abs(s.median_ratio - 1)
    if quantity == "disagreement":
        return s.disagreements / s.cells
    value: float | None = getattr(s, quantity)
    return value


def rho_at_crossing(records: Records) -> Values:
    """Median pooled rho at the first crossing after step 1."""
    return {system: float(np.median(values)) for system, values in locations(records).items()}


def bf16_rmse(records: Records) -> Values:
    """Root mean square difference of frozen fractions, m = 7 against bfloat16, over steps and seeds."""
    each = grouped((r["network"], r) for r in records["bf16"].values())
    squares = {n: sum(r["squared_difference"] / r["size"] ** 2 for r in runs) for n, runs in each.items()}
    return {n: (squares[n] / sum(r["steps"] for r in runs)) ** 0.5 for n, runs in each.items()}


def bf16_rho(records: Records) -> Values:
    """Median pooled rho where bfloat16 runs cross."""
    return {network: float(np.median(values)) for network, values in locations(records, "bf16").items()}


_QUANTITIES = {
    "eligible": "cells with both crossings after step 1",
    "median_ratio": "median of forecast / measured over eligible cells",
    "median-error": "distance of that median from one",
    "share_within": "share of eligible cells within 15%",
    "disagreement": "share of all cells whose category differs",
    "span": "latest measured crossing over the earliest, among eligible cells",
}
ESTIMANDS = (
    *(
        Estimand(
            name=f"{quantity.replace('_', '-')}.{predictor}", what=f"{what}, {predictor} predictor",
            compute=timing, args={"predictor": predictor, "quantity": quantity},
        )
        for predictor in PREDICTORS
        for quantity, what in _QUANTITIES.items()
    ),
    Estimand.of(rho_at_crossing),
)  # fmt: skip


# ---- reports --------------------------------------------------------------------------------------------


def table(records: Records) -> Table:
    """One row a system and predictor."""
    rows: list[Sequence[str | float | None]] = [
        (system, predictor, s.cells, s.eligible, s.median_ratio, s.share_within, s.disagreements,
         *(s.forecast_range or (None, None)), *(s.measured_range or (None, None)))
        for predictor in PREDICTORS
        for system, s in summaries(records, predictor).items()
    ]  # fmt: skip
    return Table(
        columns=("system", "predictor", "cells", "eligible", "median ratio", "within 15%",
                 "categories differ", "earliest forecast", "latest forecast",
                 "earliest measured", "latest measured"),
        rows=rows,
        caption="First-majority crossings; ratios of eligible cells, categories of all. Cells that share a "
                "reference are paired coverage tests, not replicates.",
    )  # fmt: skip


def figure(records: Records) -> Any:
    """Forecast against measured, and where in rho the crossings lie."""
    fig, (left, right) = new_figure(1, 2, width=9.0, height=3.8)
    systems = sorted(pairs(records, "symmetric"))
    panels.timing_pairs(left, {s: points(records, s) for s in systems}, "symmetric", TOLERANCE)
    panels.locations(right, locations(records))
    return fig


GATES = tuple(
    gate(f"{name}.{predictor}", f"{estimand}.{predictor} {floor}", why)
    for predictor in PREDICTORS
    for name, estimand, floor, why in (
        ("median-near-one", "median-error", "<= 0.05", "the paper's medians lie between 0.999 and 1.03"),
        ("most-within", "share-within", ">= 0.8", "the floor of the paper's promotion rule (appendix D)"),
        ("categories-agree", "disagreement", "<= 0.1", "the paper has 4 of 72"),
    )
)
PASSED = tuple(g.name for g in GATES)

OPEN = "The paper prints neither mantissas nor rates nor seeds of this grid; ours are other cells like them."
POOLED = (
    "Median over cells. A root mean square is lifted by a few large proposals, so it passes 1/sqrt(2) where "
    "update-to-weight ratios do not concentrate; how far depends on the start, which is not printed."
)


def shown(system: str, predictor: str, quantity: str) -> Ours:
    """Return what shows a number of a system's summary on the comparison page."""

    def ours(records: Records) -> float | str | None:
        s = summaries(records, predictor).get(system)
        if s is None:
            return None
        if quantity == "share_within" and s.share_within is not None:
            return f"{100 * s.share_within:.1f}% ({s.within} of {s.eligible})"
        value: Any = getattr(s, quantity)
        return "{} to {}".format(*value) if isinstance(value, tuple) else value

    return ours


def transferred(
    row: Beside, system: str, title: str, eligible: int, median: float, within: str, note: str | None = None
) -> Iterator[Claim]:
    """Make the rows of a system in the paper's table, which prints the same of both predictors."""
    for predictor in PREDICTORS:
        for what, quantity, paper in (
            ("eligible cells", "eligible", eligible),
            ("median ratio", "median_ratio", median),
            ("within 15%", "share_within", within),
        ):
            ours = shown(system, predictor, quantity)
            yield row(f"{title}: {what}, {predictor} predictor", paper, ours, note=note)
