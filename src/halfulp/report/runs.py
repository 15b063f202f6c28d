"""What the traces on a page are to each other: references, arms on a grid, and who is compared with whom.

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

from halfulp.audit import stored_on
from halfulp.audit.outcome import compare_grid, matched
from halfulp.errors import UsageError
from halfulp.grids import grid as named
from halfulp.measures.crossings import TimingPair, timing_pair
from halfulp.measures.forecasts import Comparison, recovery
from halfulp.report.gather import Array, Gathered, gather
from halfulp.trace import Trace

NEAREST = "rne"
POLICY_WORDS = {
    "rne": "nearest",
    "sr": "stochastic",
    "deadzone-sr": "stochastic in the dead zone",
    "eco": "ECO",
    "kahan": "Kahan",
    "master": "full fp32 masters",
    "tile-master": "fp32 masters for chosen tiles",
    "dqt": "DQT",
}


@dataclass(frozen=True)
class Run:
    """One trace on a page."""

    name: str
    gathered: Gathered

    @property
    def trace(self) -> Trace:
        return self.gathered.trace

    @cached_property
    def grid(self) -> str | None:
        """The audited grid that most of the weights are stored on; None for a reference."""
        stored = {g: self.gathered.stored(g) for g in self.trace.grids}
        home = max(stored, key=lambda g: stored[g])
        return home if stored[home] > 0.5 else None

    @cached_property
    def policy(self) -> str | None:
        """How proposals become stored values; nearest where the optimizer writes to a narrow dtype itself."""
        if self.grid is None:
            return None
        return " and ".join(stored_on.policies(self.trace)) or NEAREST

    @property
    def policy_words(self) -> str:
        return "fp32" if self.policy is None else POLICY_WORDS.get(self.policy, self.policy)

    @property
    def loses(self) -> bool:
        """Whether an unchanged weight is a lost update here, or would be on another grid."""
        return self.policy in (None, NEAREST)

    @cached_property
    def bytes_per_weight(self) -> float:
        """Of the weights in store: codes, and what the policy keeps beside them."""
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

    @cached_property
    def scope(self) -> str:
        """The scope that a verdict speaks of: attention and mlp if there are any, otherwise the matrices."""
        return next(s for s in ("core", "all-2d", "all") if s in self.gathered.scopes)

    def same_model(self, other: Run) -> bool:
        """Whether two runs have the same tensors."""
        mine, theirs = ({t["name"]: t["recorded"] for t in r.trace.tensors} for r in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class Outcome:
    """A forecast and the run that it was for."""

    reference: Run
    measured: Run
    grid: str
    scope: str
    steps: Array
    forecast: Array
    outcome: Array
    comparison: Comparison
    timing: TimingPair
    rehearsed: Array | None = None
    """The share that a rehearsal of the run forecast, where there was one of all these tensors."""


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
        told = trace.manifest.get("run", {}).get("name")
        base = told if isinstance(told, str) and told else trace.path.resolve().name
        taken[base] = taken.get(base, 0) + 1
        runs.append(Run(base if taken[base] == 1 else f"{base} ({taken[base]})", gather(trace)))
    return runs


def shown_first(runs: Sequence[Run]) -> list[Run]:
    """The runs whose grids are a forecast; all of them where there is no reference."""
    return [r for r in runs if r.grid is None] or list(runs)


def forecasts(runs: Sequence[Run]) -> list[Outcome]:
    """Every nearest arm beside the first reference of the same model that audited its grid."""
    found = []
    for measured in runs:
        if measured.grid is None or measured.policy != NEAREST:
            continue
        reference = _reference_of(measured, runs)
        if reference is not None and np.intersect1d(reference.gathered.steps, measured.gathered.steps).size:
            found.append(_outcome(reference, measured, measured.grid))
    return found


def arms(runs: Sequence[Run]) -> list[Arms]:
    """The arms of each grid, in the order given."""
    grids = dict.fromkeys(r.grid for r in runs if r.grid is not None)
    made = []
    for grid in grids:
        here = [r for r in runs if r.grid == grid]
        made.append(Arms(grid, _reference_of(here[0], runs), here))
    return made


def _reference_of(arm: Run, runs: Sequence[Run]) -> Run | None:
    fitting = [r for r in runs if r.grid is None and arm.grid in r.trace.grids and r.same_model(arm)]
    return fitting[0] if fitting else None


def _outcome(reference: Run, measured: Run, grid: str) -> Outcome:
    scope = reference.scope
    steps, i, j = matched(reference.trace, measured.trace, scope)
    rehearsed = _rehearsed(reference.trace, grid, scope)
    return Outcome(
        reference,
        measured,
        grid,
        scope,
        steps,
        reference.trace.frozen(grid, scope)[i],
        measured.trace.frozen(grid, scope)[j],
        compare_grid(reference.trace, measured.trace, grid, scope),
        timing_pair(reference.trace.crossing(grid, scope), measured.trace.crossing(grid, scope)),
        None if rehearsed is None else rehearsed[i],
    )


def _rehearsed(reference: Trace, grid: str, scope: str) -> Array | None:
    if grid not in reference.rehearsals:
        return None
    forecast = reference.forecast(grid)
    whole = "point" in forecast.bounds and all(
        t.get("rehearsed") for t in reference.tensors if t["id"] in reference.ids(scope)
    )
    return forecast.frozen(scope) if whole else None
