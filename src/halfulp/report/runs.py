"""Relations of the traces on a page: references, arms on a grid, and which are compared.

A *reference* stores its weights in high precision, so all that it says of grids is a forecast. An *arm*
stores most of them on a grid that was audited, under some policy. An arm that rounds to nearest is the
outcome that a reference's forecast is about; arms with losses beside a reference and a nearest arm have a
recovery (Eq. 5), the share of the loss gap that a policy wins back.

Not every unchanged weight is a lost update: ``eco``, ``kahan`` and masters carry what they do not write.
For them, and for stochastic rounding, the page speaks of weights that *kept their code*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from halfulp.audit.rehearsal.forecast_outcome import compare_grid, matched
from halfulp.errors import UsageError
from halfulp.measures.crossings import Majority, majority
from halfulp.measures.forecasts import Comparison, recovery
from halfulp.numbers.grids import grid as named
from halfulp.report.gather import Array, Gathered, gather
from halfulp.trace import Trace, stored_on
from halfulp.writeback.policies import KINDS

NEAREST = "rne"
POLICY_WORDS = {name: kind.words or name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Run:
    """One trace on a page."""

    name: str
    gathered: Gathered

    @property
    def trace(self) -> Trace:
        """Return the run's trace."""
        return self.gathered.trace

    @cached_property
    def grid(self) -> str | None:
        """The audited grid that most of the weights are stored on; None for a reference."""
        stored = {g: self.gathered.stored(g) for g in self.trace.grids}
        home = max(stored, key=lambda g: stored[g])
        return home if stored[home] > 0.5 else None

    @cached_property
    def policy(self) -> str | None:
        """Name the policy; nearest where the optimizer writes to a narrow dtype itself."""
        if self.grid is None:
            return None
        return " and ".join(stored_on.policies(self.trace)) or NEAREST

    @property
    def policy_words(self) -> str:
        """Name the policy for the page."""
        return "fp32" if self.policy is None else POLICY_WORDS.get(self.policy, self.policy)

    @property
    def loses(self) -> bool:
        """True if an unchanged weight is a lost update here, or would be on another grid."""
        return self.policy in (None, NEAREST)

    @cached_property
    def bytes_per_weight(self) -> float:
        """Bytes per stored weight: codes, and what the policy keeps beside them."""
        if self.grid is None:
            sizes = {"float64": 8.0, "bfloat16": 2.0, "float16": 2.0}
            return max(sizes.get(t["dtype"], 4.0) for t in self.trace.tensors)
        optimizers = self.trace.manifest.get("optimizers", ())
        kept = max((float(o.get("policy_bytes_per_weight", 0.0)) for o in optimizers), default=0.0)
        return named(self.grid).bytes_per_weight + kept

    @cached_property
    def final_loss(self) -> float | None:
        """The mean loss over the last tenth of the recorded steps."""
        late = self.gathered.loss[-max(1, len(self.gathered.loss) // 10) :]
        return float(late.mean()) if np.isfinite(late).all() else None

    def same_model(self, other: Run) -> bool:
        """Return True if two runs have the same tensors."""
        mine, theirs = ({t["name"]: t["recorded"] for t in r.trace.tensors} for r in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class Outcome:
    """A forecast and the run that it was for."""

    reference: Run
    measured: Run
    grid: str
    steps: Array
    forecast: Array
    """The share of weights that a step leaves unchanged, of the tensors that the measured run stores on the
    grid: it does not tell a proposal of zero from a lost one."""
    outcome: Array
    comparison: Comparison
    rehearsed: Array | None = None
    """The share that a rehearsal of the run forecast, where there was one of all these tensors."""

    @property
    def majorities(self) -> tuple[Majority | None, Majority | None]:
        """Tell when a majority of the weights stays: as forecast, and as measured."""
        return majority(self.forecast, steps=self.steps), majority(self.outcome, steps=self.steps)


@dataclass(frozen=True)
class Arms:
    """Policies on one grid beside their reference."""

    grid: str
    reference: Run | None
    runs: Sequence[Run]

    @property
    def members(self) -> list[Run]:
        """The reference, if there is one, and the arms."""
        return [*([self.reference] if self.reference else []), *self.runs]

    def recovery(self, run: Run) -> float | None:
        """R_A; None where it has no meaning: no loss, no nearest arm, no gap, or other steps."""
        nearest = next((r for r in self.runs if r.policy == NEAREST), None)
        if nearest is None or self.reference is None or run is self.reference:
            return None
        rne, arm, fp32 = (r.final_loss for r in (nearest, run, self.reference))
        same = all(np.array_equal(r.gathered.steps, run.gathered.steps) for r in (nearest, self.reference))
        if not same or rne is None or arm is None or fp32 is None:
            return None
        try:
            return recovery(rne=rne, arm=arm, fp32=fp32)
        except UsageError:
            return None


def open_runs(traces: Sequence[Trace]) -> list[Run]:
    """Read traces, and give each a name of its own."""
    taken: dict[str, int] = {}
    runs = []
    for trace in traces:
        given = trace.manifest.get("run", {}).get("name")
        base = given if isinstance(given, str) and given else trace.path.resolve().name
        taken[base] = taken.get(base, 0) + 1
        runs.append(Run(base if taken[base] == 1 else f"{base} ({taken[base]})", gather(trace)))
    return runs


def shown_first(runs: Sequence[Run]) -> list[Run]:
    """Return the runs whose grids are a forecast; all of them where there is no reference."""
    return [r for r in runs if r.grid is None] or list(runs)


def forecasts(runs: Sequence[Run]) -> list[Outcome]:
    """Return every nearest arm beside the first reference of the same model that audited its grid."""
    outcomes = []
    for measured in runs:
        if measured.grid is None or measured.policy != NEAREST:
            continue
        reference = _reference_of(measured, runs)
        if reference is not None and np.intersect1d(reference.gathered.steps, measured.gathered.steps).size:
            outcomes.append(_outcome(reference, measured, measured.grid))
    return outcomes


def arms(runs: Sequence[Run]) -> list[Arms]:
    """Return the arms of each grid, in the order given."""
    grids = dict.fromkeys(r.grid for r in runs if r.grid is not None)
    groups = []
    for grid in grids:
        here = [r for r in runs if r.grid == grid]
        groups.append(Arms(grid, _reference_of(here[0], runs), here))
    return groups


def _reference_of(arm: Run, runs: Sequence[Run]) -> Run | None:
    fitting = [r for r in runs if r.grid is None and arm.grid in r.trace.grids and r.same_model(arm)]
    return fitting[0] if fitting else None


def _outcome(reference: Run, measured: Run, grid: str) -> Outcome:
    mine, theirs, (steps, i, j) = matched(reference.trace, measured.trace, grid, None)
    rehearsed = _rehearsed(reference.trace, grid, mine)
    return Outcome(
        reference,
        measured,
        grid,
        steps,
        reference.trace.frozen(grid, mine, of="weights")[i],
        measured.trace.frozen(grid, theirs, of="weights")[j],
        compare_grid(reference.trace, measured.trace, grid),
        None if rehearsed is None else rehearsed[i],
    )


def _rehearsed(reference: Trace, grid: str, ids: Sequence[int]) -> Array | None:
    if grid not in reference.rehearsals:
        return None
    forecast = reference.forecast(grid)
    whole = all(t.get("rehearsed") for t in reference.tensors if t["id"] in ids)
    return forecast.frozen(ids) if whole and "point" in forecast.bounds else None
