"""Data of a page's charts: curves, binned and packed.

A page holds what it shows. A curve has about 600 points however long the run was: the mean of each bin of
steps, and its least and largest value where a bin holds several. Shares are packed as 16-bit fractions, so a
point costs 2.7 characters; the largest code stands for "nothing moved".
Crossings are computed from every recorded step before anything is binned. Names are only ever values of the
JSON, never keys.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from halfulp.measures.forecasts import ACCURATE_RMSE
from halfulp.report.gather import BINS, COLUMNS, Array, bins
from halfulp.report.markup import elided
from halfulp.report.runs import Arms, Outcome, Run
from halfulp.text import shown

LABEL = 64


def packed(shares: Array) -> str:
    """Encode shares in [0, 1] as base64 of 16-bit integers, with NaN as the largest.

    >>> packed(np.array([0.0, 1.0, np.nan]))
    'AAD+////'
    """
    whole = np.where(np.isnan(shares), 65535, np.rint(np.nan_to_num(shares) * 65534))
    return base64.b64encode(whole.astype("<u2").tobytes()).decode("ascii")


def binned(values: Array, starts: Array) -> tuple[Array, Array, Array]:
    """Return the mean, least and largest value of each bin, NaN left out."""
    if len(starts) == len(values):
        return values, values, values
    missing = np.isnan(values)
    n = np.add.reduceat(~missing, starts, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(np.where(missing, 0.0, values), starts) / n
    low = np.minimum.reduceat(np.where(missing, np.inf, values), starts)
    high = np.maximum.reduceat(np.where(missing, -np.inf, values), starts)
    return mean, np.where(n == 0, np.nan, low), np.where(n == 0, np.nan, high)


def run_data(run: Run) -> dict[str, Any]:
    """Return the curves of one run."""
    g = run.gathered
    starts = bins(len(g.steps), BINS)
    curves: dict[str, Any] = {}
    for column in (c for c in COLUMNS if c in g.counts):
        curves[column] = [
            [_curve(g.curve(column, grid, scope), starts) for grid in g.grids] for scope in g.scopes
        ]
    return {
        "name": elided(shown(run.name, 300), LABEL),
        "grids": g.grids,
        "scopes": [elided(shown(s, 300), 40) for s in g.scopes],
        "scope": 0,  # the default one
        "forecast": run.grid is None,
        "loses": run.loses,
        "steps": _edges(g.steps, starts),
        "curves": curves,
        "marks": [[_mark(run, grid, scope) for grid in g.grids] for scope in g.scopes],
    }


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """Return forecasts and outcome on the same steps, and the band that the accuracy gate allows."""
    starts = bins(len(outcome.steps), BINS)
    return {
        "steps": _edges(outcome.steps, starts),
        "forecast": packed(binned(outcome.forecast, starts)[0]),
        "measured": packed(binned(outcome.outcome, starts)[0]),
        "rehearsed": None if outcome.rehearsed is None else packed(binned(outcome.rehearsed, starts)[0]),
        "band": ACCURATE_RMSE,
    }


def arms_data(group: Arms) -> dict[str, Any]:
    """Return the loss curves of a group of runs."""
    return {"runs": [_loss(run) for run in group.members if np.isfinite(run.gathered.loss).any()]}


def _loss(run: Run) -> dict[str, Any]:
    loss, steps = run.gathered.loss, run.gathered.steps
    starts = bins(len(steps), 200)
    mean = binned(np.where(np.isfinite(loss), loss, np.nan), starts)[0]
    return {
        "name": run.policy_words if run.policy else "fp32 reference",
        "policy": run.policy or "fp32",
        "steps": _edges(steps, starts),
        "loss": [None if np.isnan(x) else round(float(x), 4) for x in mean],
    }


def _curve(values: Array, starts: Array) -> list[str]:
    mean, low, high = binned(values, starts)
    exact = len(starts) == len(values)
    return [packed(x) for x in ((mean,) if exact else (mean, low, high))]


def _edges(steps: Array, starts: Array) -> list[list[int]]:
    """Return the first step of each bin, and its last."""
    ends = np.append(starts[1:], len(steps)) - 1
    return [[int(s) for s in steps[starts]], [int(s) for s in steps[ends]]]


def _mark(run: Run, grid: str, scope: str) -> list[Any] | None:
    """Return [step, value there] where a majority begins that lasts."""
    lasting = run.gathered.majority(grid, scope)
    if lasting is None:
        return None
    f, steps = run.gathered.lost_share(grid, scope), run.gathered.steps
    return [lasting.first, round(float(f[np.searchsorted(steps, lasting.first)]), 4)]


def page_data(shown_runs: Sequence[Run], outcomes: Sequence[Outcome], arms: Sequence[Arms]) -> dict[str, Any]:
    """Everything that the charts of a page are drawn from."""
    return {
        "runs": [run_data(run) for run in shown_runs],
        "outcomes": [outcome_data(outcome) for outcome in outcomes],
        "arms": [arms_data(group) for group in arms],
    }
