"""A forecast beside its outcome: two traces, the reference and the run on the grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.audit.rehearsal.rehearsed_outcome import RehearsedOutcome, rehearsed_outcomes
from halfulp.errors import UsageError
from halfulp.measures.crossings import TimingPair, timing_pair
from halfulp.measures.forecasts import Comparison, compare
from halfulp.trace import Trace
from halfulp.trace.stored_on import default_scope
from halfulp.verdicts.findings import known

Array = npt.NDArray[Any]


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
    both, i, j = np.intersect1d(reference.steps_of(mine), measured.steps_of(theirs), return_indices=True)
    if not both.size:
        raise UsageError(f"{reference.path} and {measured.path} have no step in common.")
    return mine, theirs, (both, i, j)


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
        return [
            f"{self.grid}, scope {self.scope or 'of what is stored on it'}, {c.steps} steps:",
            f"  RMSE {c.rmse:.5f} of the share of weights that a step leaves unchanged: "
            f"{c.signed_error:+.5f} in its level, {c.centred_rmse:.5f} in its shape",
            f"  known only afterwards: the best constant {c.constant_rmse:.5f}, the best rising curve "
            f"{c.monotone_rmse:.5f}; known before: all is lost {c.fixed_one_rmse:.5f}",
            f"  skill against the best constant {'none' if c.skill is None else f'{c.skill:.3f}'}; the "
            f"outcome ranges over {c.measured_range:.4f} (5th to 95th percentile): "
            + ("informative" if c.informative else f"not informative, because {_UNINFORMATIVE}"),
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
    out = []
    for g in shared:
        mine, theirs, _ = matched(reference, measured, g, scope)
        pair = timing_pair(
            reference.crossing(g, mine, of="weights"), measured.crossing(g, theirs, of="weights")
        )
        arrives = {}
        for trace, ids, what in ((reference, mine, "forecast"), (measured, theirs, "measured")):
            if (gain := known(trace.gain(g, ids))) is not None:
                arrives[what] = (gain, known(trace.cosine(g, ids)))
        made = compare_grid(reference, measured, g, scope, warmup)
        out.append(GridOutcome(grid=g, scope=scope, comparison=made, crossings=pair, arrives=arrives))
    return out


def compare_traces(
    reference: Trace, measured: Trace, grid: str | None = None, scope: str | None = None, warmup: int = 0
) -> list[GridOutcome | RehearsedOutcome]:
    """Compare two traces on every grid that both have, and every rehearsal with the run that it was of."""
    return [
        *grid_outcomes(reference, measured, grid, scope, warmup),
        *rehearsed_outcomes(reference, measured, grid, scope or "all", warmup),
    ]


_UNINFORMATIVE = "the outcome hardly varies, or a constant does as well"


def _when(step: int | None) -> str:
    return "never" if step is None else f"step {step}"
