"""Define the measures of native runs: evidence of their products, replays, streams, and how a source fares.

The frozen fraction of a native run is compared with a source's forecast and with predictors that need no
source: the best constant in hindsight; the *schedule* alone, through the uniform-phase map, rho being the
rate over its peak; and the *archive*, a map from rate to frozen share that an earlier run of another seed
left, read at the rates of the new schedule. *Centred* errors leave out the mean over time of both, so that a
level counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from halfulp.paper.arms import measures
from halfulp.paper.arms.bundle import Bundle, Unit
from halfulp.paper.values import MaybeFloat, quotient
from halfulp.study.protocol import Records, Values

SOURCE_FREE = ("constant", "schedule", "archive")


def dispatched(unit: Unit, arms: Sequence[str]) -> MaybeFloat:
    """Return 1 where every profiled update of these arms made the native products that it should have, and no
    others.
    """
    profiles = [unit.run(arm).get("dispatch", []) for arm in arms]
    return float(all(seen and all(e["calls"] == e["expected"] for e in seen) for seen in profiles))


def replayed(unit: Unit, arms: Sequence[str]) -> MaybeFloat:
    """1 where start and end of these runs, made anew from saved states, have the same loss and weights."""
    runs = [(unit.run(arm), unit.run(arm).get("replayed", [])) for arm in arms]
    return float(
        all(
            [e["update"] for e in ends] == [0, run["updates"]]
            and all(e["loss"] is not None and e["loss"] == e["again"] and e["same_weights"] for e in ends)
            for run, ends in runs
        )
    )


def coupled(unit: Unit, arms: Sequence[str]) -> MaybeFloat:
    """1 where these arms draw from one stream: same seed, and streams are by tensor, update and element."""
    return float(len({unit.run(arm)["stream"] for arm in arms}) == 1)


def paired(unit: Unit) -> MaybeFloat:
    """1 where the run began from the same weights and codes as those of its target under other conditions."""
    bundle, seed = unit.bundle, unit.bundle.units[unit.name][1]
    same_seed = [name for name, (_, other) in bundle.units.items() if other == seed]
    runs = [Unit(bundle, unit.outcomes, name).run("rne") for name in same_seed]
    return float(len({(run["initial"], run["start"]) for run in runs}) == 1)


def improvement_ratio(unit: Unit, arm: str, over: str) -> MaybeFloat:
    """Return the recovery of an arm, divided by that of another."""
    return quotient(measures.recovery(unit, arm), measures.recovery(unit, over))


# ---- a source against none --------------------------------------------------------------------------


against = partial(measures.comparison, warmup=False)
"""A predictor against the measured frozen fraction, after the warmup."""


def strongest(unit: Unit, scope: str) -> str:
    """Return the source-free predictor with the smallest centred error."""
    return min(SOURCE_FREE, key=lambda predictor: against(unit, scope, predictor=predictor).centred_rmse)


def centred_ratio(unit: Unit, scope: str) -> MaybeFloat:
    """Centred RMSE of the source over that of the strongest source-free predictor."""
    best = against(unit, scope, predictor=strongest(unit, scope)).centred_rmse
    return quotient(against(unit, scope, predictor="frozen").centred_rmse, best)


def raw_ratio(unit: Unit, scope: str) -> MaybeFloat:
    """Return the RMSE of the source over the smallest of the source-free predictors'."""
    best = min(against(unit, scope, predictor=p).rmse for p in SOURCE_FREE)
    return quotient(against(unit, scope, predictor="frozen").rmse, best)


def residual_correlation(unit: Unit, scope: str) -> MaybeFloat:
    """Correlation over updates of source and measurement, both less the strongest source-free predictor."""
    first = unit.run("rne")["warmup"]
    best, source = (measures.forecast_by(unit, scope, p, first) for p in (strongest(unit, scope), "frozen"))
    assert best is not None
    assert source is not None
    said, seen = ((x - best)[first:] for x in (source, measures.measured(unit, scope)))
    return float(np.corrcoef(said, seen)[0, 1]) if said.std() and seen.std() else None


def macro_ratio(bundle: Bundle, records: Records, scope: str) -> Values:
    """By condition: the mean centred RMSE of the source over that of the strongest source-free predictors."""
    ratios: dict[str, float | None] = {}
    for condition in bundle.conditions:
        units = bundle.over(records, condition)
        ours = np.mean([against(u, scope, predictor="frozen").centred_rmse for u in units])
        best = np.mean([against(u, scope, predictor=strongest(u, scope)).centred_rmse for u in units])
        ratios[condition] = float(ours / best) if best else None
    return ratios
