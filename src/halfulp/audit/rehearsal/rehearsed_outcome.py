"""A rehearsal beside the run that it was of: shares, crossings and losses, every bound of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError
from halfulp.measures.crossings import Crossing
from halfulp.measures.forecasts import Comparison, compare
from halfulp.trace import Recorded
from halfulp.trace.schema import BOUNDS
from halfulp.trace.stored_on import is_of
from halfulp.verdicts.intervals import SMALLEST_GAP

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The losses at one step."""

    step: int
    real: float
    """The reference's."""
    measured: float
    forecast: Mapping[str, float]
    """Forecast loss by bound."""

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
        steps = next(iter(self.comparisons.values())).steps

        def listed(values: Mapping[str, str]) -> str:
            named = {"lower": "projection (lower bound)", "measured": "measured"}
            return ", ".join(f"{named.get(b, b)} {v}" for b, v in values.items())

        errors = {b: f"{c.rmse:.5f}" for b, c in self.comparisons.items()}
        out = [
            f"{self.spec} as rehearsed, scope {self.scope}, {steps} steps:",
            f"  RMSE of the share that is lost: {listed(errors)}",
        ]
        if self.never_moved:
            out.append(
                f"  never moved at the end: {listed({b: f'{v:.2%}' for b, v in self.never_moved.items()})}"
            )
        firsts = {b: "never" if c.first is None else f"step {c.first}" for b, c in self.crossings.items()}
        out.append(f"  majority: {listed(firsts)}")
        return [*out, *self._loss_lines()]

    def to_json(self) -> dict[str, Any]:
        """Return what ``json.dumps`` takes: every number that the words have."""
        losses = [{**asdict(e), "inside": e.inside, "ratio": e.ratio} for e in self.losses]
        return {**asdict(self), "losses": losses}

    def _loss_lines(self) -> list[str]:
        if not self.losses:
            return ["  loss: no evaluation at a step that both have (record one: halfulp audit --evaluate)"]
        last = self.losses[-1]
        said = ", ".join(f"{b} {last.forecast[b]:.4f}" for b in BOUNDS if b in last.forecast)
        ratio = "" if last.ratio is None else f"; the forecast gap is {last.ratio:.2f} of the measured one"
        out = [
            f"  loss at step {last.step}: reference {last.real:.4f}, measured {last.measured:.4f} "
            f"({last.measured - last.real:+.4f}); forecast {said}{ratio}"
        ]
        inside = [e.inside for e in self.losses if e.inside is not None]
        if inside:
            out.append(f"  inside the bracket at {sum(inside)} of {len(inside)} common evaluations")
        return out


def rehearsed_outcomes(
    reference: Recorded, measured: Recorded, grid: str | None = None, scope: str = "all", warmup: int = 0
) -> list[RehearsedOutcome]:
    """Return every rehearsal of a reference that is of the measured run's grid and policy."""
    return [
        rehearsed_outcome(reference, measured, spec, scope, warmup)
        for spec in reference.rehearsals
        if grid in (None, spec.partition(":")[0]) and is_of(spec, measured)
    ]


def rehearsed_outcome(
    reference: Recorded, measured: Recorded, spec: str, scope: str = "all", warmup: int = 0
) -> RehearsedOutcome:
    """Compare one rehearsal with a run."""
    forecast = reference.forecast(spec)
    mine = forecast.ids(scope)
    names = {t["name"]: t["numel"] for t in reference.tensors if t["id"] in mine}
    there = [t["id"] for t in measured.tensors if names.get(t["name"]) == t["numel"]]
    if len(there) != len(mine):
        raise UsageError(
            f"{measured.where} has {len(there)} of the {len(mine)} tensors that {reference.where} rehearsed: "
            "they are not of the same model."
        )
    both, i, j = np.intersect1d(reference.steps_of(mine), measured.steps_of(there), return_indices=True)
    if not both.size:
        raise UsageError(f"{reference.where} and {measured.where} have no step in common.")
    grid = _audited(measured, forecast.grid)
    outcome = measured.frozen(grid, there, of="weights")[j]
    projected = ["lower"] if forecast.grid in reference.grids else []
    bounds = [b for b in BOUNDS if b in (*projected, *forecast.bounds)]
    shares = {b: forecast.frozen(scope, b)[i] for b in bounds}
    followed = all(t.manifest["options"]["never_moved"] for t in (reference, measured))
    never = {b: float(forecast.never_moved(scope, b)[i][-1]) for b in bounds} if followed else {}
    crossings = {b: forecast.crossing(scope, b) for b in bounds}
    return RehearsedOutcome(
        spec=spec,
        scope=scope,
        comparisons={b: compare(f, outcome, warmup=warmup, steps=both) for b, f in shares.items()},
        never_moved={**never, "measured": float(measured.never_moved(grid, there)[j][-1])} if never else {},
        crossings={
            **crossings,
            "measured": measured.crossing(grid, there, of="weights"),
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


def _audited(measured: Recorded, grid: str) -> str:
    if grid in measured.grids:
        return grid
    raise UsageError(
        f"{measured.where} was not audited on {grid}, but on {', '.join(measured.grids)}: the outcome of a "
        "rehearsal is the event on its own grid."
    )
