"""A forecast beside its outcome: the trace of a reference, and that of the run on the grid.

Every grid that both audited is compared (:class:`GridOutcome`), and every rehearsal of the run that was
really made (:class:`RehearsedOutcome`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from halfulp.errors import UsageError
from halfulp.measures.crossings import Crossing, TimingPair, timing_pair
from halfulp.measures.forecasts import Comparison, compare
from halfulp.trace import Array, Recorded, Trace
from halfulp.trace.schema import BOUNDS
from halfulp.trace.stored_on import default_scope, is_of
from halfulp.verdicts.findings import known
from halfulp.verdicts.intervals import SMALLEST_GAP


def compare_traces(
    reference: Trace, measured: Trace, grid: str | None = None, scope: str | None = None, warmup: int = 0
) -> list[GridOutcome | RehearsedOutcome]:
    """Compare two traces on every grid that both have, and every rehearsal with the run that it was of."""
    return [
        *grid_outcomes(reference, measured, grid, scope, warmup),
        *rehearsed_outcomes(reference, measured, grid, scope or "all", warmup),
    ]


def _common_steps(
    reference: Recorded, mine: list[int], measured: Recorded, theirs: list[int]
) -> tuple[Array, Array, Array]:
    """Return the steps that both recorded, and where they are in each."""
    both, i, j = np.intersect1d(reference.steps_of(mine), measured.steps_of(theirs), return_indices=True)
    if not both.size:
        raise UsageError(f"{reference.where} and {measured.where} have no step in common.")
    return both, i, j


def _when(step: int | None) -> str:
    return "never" if step is None else f"step {step}"


# ---- grids -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GridOutcome:
    """The forecast for one grid and the measured result."""

    grid: str
    scope: str | None
    """None selects the tensors that the measured run stores on the grid."""
    comparison: Comparison
    crossings: TimingPair
    arrives: Mapping[str, tuple[float, float | None]]
    """Share of the update that arrives, and its cosine, by trace that has it: ``forecast``, ``measured``."""

    @property
    def lines(self) -> list[str]:
        """The outcome in words."""
        c, pair = self.comparison, self.crossings
        arrives = [
            f"{what} {gain:.1%}" + ("" if cosine is None else f" (cosine {cosine:.2f})")
            for what, (gain, cosine) in self.arrives.items()
        ]
        uninformative = "not informative, because the outcome hardly varies, or a constant does as well"
        return [
            f"{self.grid}, scope {self.scope or 'of what is stored on it'}, {c.steps} steps:",
            f"  RMSE {c.rmse:.5f} of the share of weights that a step leaves unchanged: "
            f"{c.signed_error:+.5f} in its level, {c.centred_rmse:.5f} in its shape",
            f"  known only afterwards: the best constant {c.constant_rmse:.5f}, the best rising curve "
            f"{c.monotone_rmse:.5f}; known before: all is lost {c.fixed_one_rmse:.5f}",
            f"  skill against the best constant {'none' if c.skill is None else f'{c.skill:.3f}'}; the "
            f"outcome ranges over {c.measured_range:.4f} (5th to 95th percentile): "
            + ("informative" if c.informative else uninformative),
            "  better than two simpler rules (symmetric spacing, and rho alone): "
            + ("yes" if c.directional_added_value else "no"),
            *([f"  how much of the update arrives: {', '.join(arrives)}"] if arrives else []),
            f"  first step that leaves a majority unchanged: forecast {_when(pair.forecast.first)}, "
            f"measured {_when(pair.measured.first)}"
            + (f", ratio {pair.ratio:.3f}" if pair.eligible else " (no ratio: not both after step 1)"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return what ``json.dumps`` takes: every number that the words have."""
        c, pair = self.comparison, self.crossings
        return {
            "grid": self.grid, "scope": self.scope, **asdict(c), "skill": c.skill,
            "informative": c.informative, "directional_added_value": c.directional_added_value,
            "majority": {
                "forecast": pair.forecast.first, "measured": pair.measured.first, "ratio": pair.ratio
            },
            "arrives": {what: {"gain": g, "cosine": cos} for what, (g, cos) in self.arrives.items()},
        }  # fmt: skip


def matched(
    reference: Trace, measured: Trace, grid: str, scope: str | None
) -> tuple[list[int], list[int], tuple[Array, Array, Array]]:
    """Return the tensors of a scope in each trace, the steps that both recorded, and where these are in each.

    By default the tensors that the measured run stores on the grid, under the same names in the reference.
    """
    theirs = measured.ids(default_scope(measured, grid) if scope is None else scope)
    if scope is None:
        names = {t["name"] for t in measured.tensors if t["id"] in theirs}
        mine = [t["id"] for t in reference.tensors if t["name"] in names]
    else:
        mine = reference.ids(scope)
    if reference.numel(mine) != measured.numel(theirs):
        raise UsageError(
            f"scope {scope or 'stored on the grid'!r} has {reference.numel(mine):,} coordinates in "
            f"{reference.path} and {measured.numel(theirs):,} in {measured.path}: they are not of the same "
            "model."
        )
    return mine, theirs, _common_steps(reference, mine, measured, theirs)


def compare_grid(
    reference: Trace, measured: Trace, grid: str, scope: str | None = None, warmup: int = 0
) -> Comparison:
    """Compare the reference's projection of one grid with what was measured on it.

    The comparison uses the paper's f_t, because a run that stores its weights on the grid cannot tell a
    proposal of zero from one that is lost.
    """
    mine, theirs, (both, i, j) = matched(reference, measured, grid, scope)
    return compare(
        reference.frozen(grid, mine, of="weights")[i],
        measured.frozen(grid, theirs, of="weights")[j],
        warmup=warmup,
        symmetric=reference.frozen(grid, mine, by="symmetric", of="weights")[i],
        scalar_rho=reference.frozen(grid, mine, by="rho")[i],
        steps=both,
    )


def grid_outcomes(
    reference: Trace, measured: Trace, grid: str | None = None, scope: str | None = None, warmup: int = 0
) -> list[GridOutcome]:
    """Compare two traces on every grid that both have, or on one of them."""
    shared = [g for g in reference.grids if g in measured.grids and grid in (None, g)]
    if not shared:
        raise UsageError(
            f"no grid to compare: {reference.path} has {', '.join(reference.grids)}, {measured.path} has "
            f"{', '.join(measured.grids)}{'' if grid is None else f', and {grid} was asked for'}."
        )
    outcomes = []
    for g in shared:
        mine, theirs, _ = matched(reference, measured, g, scope)
        pair = timing_pair(
            reference.crossing(g, mine, of="weights"), measured.crossing(g, theirs, of="weights")
        )
        arrives = {}
        for trace, ids, what in ((reference, mine, "forecast"), (measured, theirs, "measured")):
            if (gain := known(trace.gain(g, ids))) is not None:
                arrives[what] = (gain, known(trace.cosine(g, ids)))
        comparison = compare_grid(reference, measured, g, scope, warmup)
        outcomes.append(
            GridOutcome(grid=g, scope=scope, comparison=comparison, crossings=pair, arrives=arrives)
        )
    return outcomes


# ---- rehearsals --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The losses at one step: of the reference, of the measured run, and forecast by bound."""

    step: int
    real: float
    measured: float
    forecast: Mapping[str, float]

    @property
    def inside(self) -> bool | None:
        """True if the measured loss is between the bounds; None unless both were kept."""
        ends = [self.forecast[b] for b in ("lower", "upper") if b in self.forecast]
        return min(ends) <= self.measured <= max(ends) if len(ends) == 2 else None

    @property
    def ratio(self) -> float | None:
        """The forecast gap divided by the measured one; None if the latter is too small."""
        gap = self.measured - self.real
        if "point" not in self.forecast or not abs(gap) >= SMALLEST_GAP:
            return None
        return (self.forecast["point"] - self.real) / gap


@dataclass(frozen=True, kw_only=True)
class RehearsedOutcome:
    """The forecast of a rehearsal, by bound, and the measured result."""

    spec: str
    scope: str
    comparisons: Mapping[str, Comparison]
    """Comparisons of f_t by bound; the lower bound is the projection, if its grid was audited."""
    never_moved: Mapping[str, float]
    """At the end, by bound; ``measured`` is the outcome."""
    crossings: Mapping[str, Crossing]
    losses: tuple[Evaluated, ...]

    @property
    def lines(self) -> list[str]:
        """The outcome in words."""

        def listed(values: Mapping[str, str]) -> str:
            named = {"lower": "projection (lower bound)"}
            return ", ".join(f"{named.get(b, b)} {v}" for b, v in values.items())

        steps = next(iter(self.comparisons.values())).steps
        never = {b: f"{v:.2%}" for b, v in self.never_moved.items()}
        return [
            f"{self.spec} as rehearsed, scope {self.scope}, {steps} steps:",
            "  RMSE of the share that is lost: "
            + listed({b: f"{c.rmse:.5f}" for b, c in self.comparisons.items()}),
            *([f"  never moved at the end: {listed(never)}"] if never else []),
            f"  majority: {listed({b: _when(c.first) for b, c in self.crossings.items()})}",
            *self._loss_lines(),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return what ``json.dumps`` takes: every number that the words have."""
        losses = [{**asdict(e), "inside": e.inside, "ratio": e.ratio} for e in self.losses]
        return {**asdict(self), "losses": losses}

    def _loss_lines(self) -> list[str]:
        if not self.losses:
            return ["  loss: no evaluation at a step that both have (record one: halfulp audit --evaluate)"]
        last = self.losses[-1]
        forecast = ", ".join(f"{b} {last.forecast[b]:.4f}" for b in BOUNDS if b in last.forecast)
        ratio = "" if last.ratio is None else f"; the forecast gap is {last.ratio:.2f} of the measured one"
        inside = [e.inside for e in self.losses if e.inside is not None]
        return [
            f"  loss at step {last.step}: reference {last.real:.4f}, measured {last.measured:.4f} "
            f"({last.measured - last.real:+.4f}); forecast {forecast}{ratio}",
            *(
                [f"  inside the bracket at {sum(inside)} of {len(inside)} common evaluations"]
                if inside
                else []
            ),
        ]


def rehearsed_outcomes(
    reference: Recorded, measured: Recorded, grid: str | None = None, scope: str = "all", warmup: int = 0
) -> list[RehearsedOutcome]:
    """Return every rehearsal of a reference that is of the measured run's grid and policy."""
    return [
        _rehearsed_outcome(reference, measured, spec, scope, warmup)
        for spec in reference.rehearsals
        if grid in (None, spec.partition(":")[0]) and is_of(spec, measured)
    ]


def _rehearsed_outcome(
    reference: Recorded, measured: Recorded, spec: str, scope: str, warmup: int
) -> RehearsedOutcome:
    forecast = reference.forecast(spec)
    grid, mine = forecast.grid, forecast.ids(scope)
    names = {t["name"]: t["numel"] for t in reference.tensors if t["id"] in mine}
    theirs = [t["id"] for t in measured.tensors if names.get(t["name"]) == t["numel"]]
    if len(theirs) != len(mine):
        raise UsageError(
            f"{measured.where} has {len(theirs)} of the {len(mine)} tensors that {reference.where} "
            "rehearsed: they are not of the same model."
        )
    both, i, j = _common_steps(reference, mine, measured, theirs)
    if grid not in measured.grids:
        raise UsageError(
            f"{measured.where} was not audited on {grid}, but on {', '.join(measured.grids)}: the outcome of "
            "a rehearsal is the event on its own grid."
        )
    outcome = measured.frozen(grid, theirs, of="weights")[j]
    bounds = [b for b in BOUNDS if b in forecast.bounds or (b == "lower" and grid in reference.grids)]
    never = {}
    if all(t.manifest["options"]["never_moved"] for t in (reference, measured)):
        never = {b: float(forecast.never_moved(scope, b)[i][-1]) for b in bounds}
        never["measured"] = float(measured.never_moved(grid, theirs)[j][-1])
    return RehearsedOutcome(
        spec=spec,
        scope=scope,
        comparisons={
            b: compare(forecast.frozen(scope, b)[i], outcome, warmup=warmup, steps=both) for b in bounds
        },
        never_moved=never,
        crossings={
            **{b: forecast.crossing(scope, b) for b in bounds},
            "measured": measured.crossing(grid, theirs, of="weights"),
        },
        losses=tuple(evaluations(reference, measured, spec)),
    )


def evaluations(reference: Recorded, measured: Recorded, spec: str) -> list[Evaluated]:
    """Return the evaluations at steps that both runs have."""
    outcome, own = measured.real_losses(), reference.real_losses()
    forecast: dict[int, dict[str, float]] = {}
    for step, bound, loss, _ in reference.forecast(spec).compared().rows():
        forecast.setdefault(step, {})[bound] = loss
    return [
        Evaluated(step=step, real=own[step], measured=outcome[step], forecast=losses)
        for step, losses in forecast.items()
        if step in outcome
    ]
