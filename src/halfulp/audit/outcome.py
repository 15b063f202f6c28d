"""A forecast beside its outcome: two traces, the reference and the run on the grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.audit.findings import known
from halfulp.audit.rehearsed_outcome import rehearsed_outcomes
from halfulp.errors import UsageError
from halfulp.measures.crossings import timing_pair
from halfulp.measures.forecasts import Comparison, compare
from halfulp.trace import Trace

Array = npt.NDArray[Any]


def matched(reference: Trace, measured: Trace, scope: str) -> tuple[Array, Array, Array]:
    """The steps that both traces recorded, and where they are in each."""
    a, b = reference.steps_of(scope), measured.steps_of(scope)
    both, i, j = np.intersect1d(a, b, return_indices=True)
    if not both.size:
        raise UsageError(f"{reference.path} and {measured.path} have no step in common.")
    if reference.numel(scope) != measured.numel(scope):
        raise UsageError(
            f"scope {scope!r} has {reference.numel(scope):,} coordinates in {reference.path} and "
            f"{measured.numel(scope):,} in {measured.path}: they are not of the same model."
        )
    return both, i, j


def compare_grid(
    reference: Trace, measured: Trace, grid: str, scope: str = "all", warmup: int = 0
) -> Comparison:
    """How well the reference's projection of one grid met what was measured on it."""
    both, i, j = matched(reference, measured, scope)
    return compare(
        reference.frozen(grid, scope)[i],
        measured.frozen(grid, scope)[j],
        warmup=warmup,
        symmetric=reference.frozen(grid, scope, by="symmetric")[i],
        scalar_rho=reference.frozen(grid, scope, by="rho")[i],
        steps=both,
    )


def compare_traces(
    reference: Trace, measured: Trace, grid: str | None = None, scope: str = "all", warmup: int = 0
) -> list[str]:
    """The comparison in words, for every grid that both traces have, and every rehearsal of the run."""
    shared = [g for g in reference.grids if g in measured.grids and grid in (None, g)]
    if not shared:
        raise UsageError(
            f"no grid to compare: {reference.path} has {', '.join(reference.grids)}, {measured.path} has "
            f"{', '.join(measured.grids)}{'' if grid is None else f', and {grid} was asked for'}."
        )
    out = []
    for g in shared:
        c = compare_grid(reference, measured, g, scope, warmup)
        pair = timing_pair(reference.crossing(g, scope), measured.crossing(g, scope))
        out += [
            f"{g}, scope {scope}, {c.steps} steps:",
            f"  RMSE {c.rmse:.5f} of the share that is lost: {c.signed_error:+.5f} in its level, "
            f"{c.centred_rmse:.5f} in its shape",
            f"  known only afterwards: the best constant {c.constant_rmse:.5f}, the best rising curve "
            f"{c.monotone_rmse:.5f}; known before: all is lost {c.fixed_one_rmse:.5f}",
            f"  skill against the best constant {'none' if c.skill is None else f'{c.skill:.3f}'}; the "
            f"outcome ranges over {c.measured_range:.4f} (5th to 95th percentile): "
            + ("informative" if c.informative else f"not informative, because {_UNINFORMATIVE}"),
            "  better than symmetric spacing and than rho alone: "
            + ("yes" if c.directional_added_value else "no"),
            *_arrival(reference, measured, g, scope),
            f"  majority: forecast {_when(pair.forecast.first)}, measured {_when(pair.measured.first)}"
            + (f", ratio {pair.ratio:.3f}" if pair.eligible else " (no timing ratio: not both after step 1)"),
        ]
    for found in rehearsed_outcomes(reference, measured, grid, scope, warmup):
        out += found.lines
    return out


def _arrival(reference: Trace, measured: Trace, grid: str, scope: str) -> list[str]:
    """How much of the update arrives, as the traces that know proposals have it."""
    told = []
    for trace, what in ((reference, "forecast"), (measured, "measured")):
        gain, cosine = known(trace.gain(grid, scope)), known(trace.cosine(grid, scope))
        if gain is not None:
            told.append(f"{what} {gain:.1%}" + ("" if cosine is None else f" (cosine {cosine:.2f})"))
    return [f"  how much of the update arrives: {', '.join(told)}"] if told else []


_UNINFORMATIVE = "the outcome hardly varies, or a constant does as well"


def _when(step: int | None) -> str:
    return "never" if step is None else f"step {step}"
