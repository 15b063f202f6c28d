"""Define the measures of a unit of a decoder study, each once, as functions of its records alone.

A unit is one target under one condition: its float32 anchor, its arms and its forecast. A measure takes a
`Unit` and its other arguments by name, so that the protocol can print and seal them; it returns None where it
is not defined. Recovery (Eq. 5) is relative to the anchor that the bundle names.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from halfulp.measures.crossings import crossing
from halfulp.measures.forecasts import Comparison, compare, scalar_rho_map
from halfulp.paper.arms import records
from halfulp.paper.models.training import Schedule
from halfulp.paper.values import MaybeFloat, known, less, quotient

if TYPE_CHECKING:
    from halfulp.paper.arms.bundle import Bundle, Unit

FP32 = "fp32"


# ---- losses -----------------------------------------------------------------------------------------


def loss(unit: Unit, arm: str, update: int | None = None) -> MaybeFloat:
    """Held-out loss of an arm, or of the anchor (``fp32``), after an update; the last by default."""
    return records.loss(unit.run(arm), update)


def progress(unit: Unit, arm: str = FP32) -> MaybeFloat:
    """Return how far the held-out loss fell between the first evaluation and the last."""
    first, *_, last = records.losses(unit.run(arm)).values()
    return less(first, last)


def gap(unit: Unit, arm: str = "rne", update: int | None = None) -> MaybeFloat:
    """Return the held-out loss above the anchor's."""
    return less(loss(unit, arm, update), loss(unit, FP32, update))


def recovery(unit: Unit, arm: str, update: int | None = None) -> MaybeFloat:
    """Return the share of the nearest arm's gap that an arm does not have; None without a gap."""
    return _won_back(gap(unit, "rne", update), gap(unit, arm, update))


def _won_back(whole: MaybeFloat, left: MaybeFloat) -> MaybeFloat:
    return None if whole is None or whole <= 0 else quotient(less(whole, left), whole)


def early_recovery(unit: Unit, arm: str, after: float) -> MaybeFloat:
    """Return the recovery at the first evaluation after a share of the run."""
    return recovery(unit, arm, early_update(unit, arm, after))


def early_update(unit: Unit, arm: str, after: float) -> int:
    """Return the first evaluation after a share of the run."""
    run = unit.run(arm)
    return int(min(u for u in records.losses(run) if u > after * run["updates"]))


def best_recovery(unit: Unit, arms: Sequence[str]) -> MaybeFloat:
    """Return the largest recovery among some arms; None if one is missing."""
    recoveries = known(recovery(unit, arm) for arm in arms)
    return max(recoveries) if len(recoveries) == len(arms) else None


def advantage(unit: Unit, arm: str, over: Sequence[str]) -> MaybeFloat:
    """Return the recovery of an arm less the largest among others."""
    return less(recovery(unit, arm), best_recovery(unit, over))


def above_median(unit: Unit, arm: str, over: Sequence[str]) -> MaybeFloat:
    """Return the recovery of an arm less the median among others."""
    theirs = known(recovery(unit, other) for other in over)
    return less(recovery(unit, arm), statistics.median(theirs) if len(theirs) == len(over) else None)


def wins(unit: Unit, arm: str, over: Sequence[str]) -> MaybeFloat:
    """Return 1 where an arm wins back more than every other."""
    lead = advantage(unit, arm, over)
    return None if lead is None else float(lead > 0)


def forecast_recovery(unit: Unit, arm: str) -> MaybeFloat:
    """Return the recovery that the rehearsals of the nearest arm and of another forecast."""
    return _won_back(forecast_gap(unit), forecast_gap(unit, arm))


# ---- visibility -------------------------------------------------------------------------------------


def never_moved(unit: Unit, arm: str, scope: str = "core") -> MaybeFloat:
    """Return the share of a scope's coordinates that never moved."""
    return records.never_moved(unit.run(arm), scope)


def moved_by(unit: Unit, arm: str, scope: str = "core") -> MaybeFloat:
    """Share of a scope's coordinates that never moved under nearest write-back, less that under an arm."""
    return records.never_moved(unit.run("rne"), scope) - records.never_moved(unit.run(arm), scope)


def stays(unit: Unit, scope: str = "core") -> MaybeFloat:
    """Return the share of a scope that stochastic rounding never moves, as expected; None if not followed."""
    share = unit.of_forecast("stays", scope)
    return None if share is None else float(share)


def endpoint(unit: Unit, arms: Sequence[str]) -> MaybeFloat:
    """Return the largest share of codes at the ends of the range, over all updates of some arms."""
    runs = [unit.run(arm) for arm in arms]
    return max(float(r["most_endpoint"] / sum(r["coordinates"].values())) for r in runs)


def onset(unit: Unit, scope: str, arm: str | None = None, predictor: str = "frozen") -> MaybeFloat:
    """Return the persistent majority crossing of an arm; without one, of the forecast."""
    f = unit.forecast(scope, predictor) if arm is None else measured(unit, scope, arm)
    return None if f is None else crossing(f).persistent


def at_start(unit: Unit, scope: str, predictor: str = "frozen") -> MaybeFloat:
    """Return 1 where the first update freezes a majority, in the nearest arm and as forecast."""
    both = (unit.forecast(scope, predictor), measured(unit, scope))
    return float(all(f is not None and crossing(f).category == "at-initialisation" for f in both))


def timing_error(unit: Unit, scope: str, arm: str = "rne") -> MaybeFloat:
    """|forecast - measured| / measured of the persistent crossing; None where there is nothing to time."""
    forecast, actual = onset(unit, scope), onset(unit, scope, arm)
    if forecast is None or actual is None or min(forecast, actual) == 1:
        return None
    return abs(forecast - actual) / actual


# ---- forecasts --------------------------------------------------------------------------------------

PREDICTORS = {
    "frozen": "directional", "symmetric": "symmetric", "rho": "scalar rho", "rehearsal": "rehearsal",
    "matched": "matched reference", "template": "template", "constant": "best constant", "one": "fixed one",
}  # fmt: skip
"""The predictors that are compared with the measured frozen fraction, and their names in tables.

The first four were sealed; there is a rehearsal where the references have one. ``matched`` is the
directional forecast of the unit's own reference, which is the sealed one unless a source was reused, and
``rehearsed`` is that reference's rehearsal. The last three are not known in time or cost nothing: the mean
of what the other targets measured under the same condition, the best constant in hindsight, and one.
``archive`` is what an archived run of another seed had at the same rates (:func:`archived`).
``schedule`` is the learning rate alone, through the uniform-phase map, where rho is the rate over its peak;
it exists for runs whose records have a schedule.
"""


ARCHIVE = "archive"
"""The stage of a run that leaves a map from rate to frozen share."""


def rivals(bundle: Bundle) -> dict[str, str]:
    """Return the predictors that a bundle's forecast is compared with, and their names in tables."""
    absent = {"frozen"}
    absent |= set() if bundle.forecast_from is not None else {"matched"}
    absent |= set() if "rne" in bundle.rehearse else {"rehearsal"}
    return {name: what for name, what in PREDICTORS.items() if name not in absent}


def measured(unit: Unit, scope: str, arm: str = "rne") -> records.Array:
    """Return the frozen fraction of every update of an arm."""
    run = unit.run(arm)
    return records.frozen(run, run["grid"], scope)


def forecast_by(unit: Unit, scope: str, predictor: str, first: int = 0) -> records.Array | None:
    """Return a predictor's value for every update; the constant is the best one after ``first`` updates."""
    if predictor in ("constant", "one"):
        shares = measured(unit, scope)
        return np.full_like(shares, 1.0 if predictor == "one" else shares[first:].mean())
    if predictor == "template":
        siblings = unit.siblings
        return np.mean([measured(u, scope) for u in siblings], axis=0) if siblings else None
    if predictor in ("matched", "rehearsed"):
        of = "frozen" if predictor == "matched" else predictor
        return records.frozen(unit.run(FP32), unit.run("rne")["grid"], scope, of)
    if predictor == "schedule":
        run = unit.run("rne")
        schedule = Schedule(**run["schedule"])
        rates = np.array([schedule.rate(update) for update in range(1, run["updates"] + 1)])
        return scalar_rho_map(rates / schedule.peak)
    if predictor == "archive":
        return archived(unit, scope)
    return unit.forecast(scope, predictor)


def archived(unit: Unit, scope: str) -> records.Array:
    """Return the frozen fraction that an archived run of another seed had at the rates of every update.

    After its warmup the archived rate falls, so a rate is one moment of that run; rates in between are
    interpolated, those beyond its ends take the ends' value.
    """
    (run,) = unit.outcomes[ARCHIVE].values()
    own = unit.run("rne")
    known, wanted = (
        np.array([Schedule(**r["schedule"]).rate(u) for u in range(1, r["updates"] + 1)]) for r in (run, own)
    )
    share = records.frozen(run, run["grid"], scope)
    order = np.argsort(known[run["warmup"] :], kind="stable")
    after = slice(run["warmup"], None)
    return np.asarray(np.interp(wanted, known[after][order], share[after][order]))


def comparison(unit: Unit, scope: str, warmup: bool = True, predictor: str = "frozen") -> Comparison:
    """Compare a predictor and its simpler rivals with the nearest arm's frozen fraction.

    ``warmup``: whether the updates of the warmup count too.
    """
    first = 0 if warmup else unit.run("rne")["warmup"]
    series = forecast_by(unit, scope, predictor, first)
    assert series is not None
    return compare(
        series, measured(unit, scope), warmup=first,
        symmetric=unit.forecast(scope, "symmetric"), scalar_rho=unit.forecast(scope, "rho"),
    )  # fmt: skip


def forecast_rmse(unit: Unit, scope: str, warmup: bool = True, predictor: str = "frozen") -> MaybeFloat:
    """Return the RMSE of a predictor against the measured frozen fraction; None where there is none."""
    if forecast_by(unit, scope, predictor) is None:
        return None
    return comparison(unit, scope, warmup, predictor).rmse


def added_value(unit: Unit, scope: str, warmup: bool = True) -> MaybeFloat:
    """RMSE of the directional forecast over the smaller of the symmetric and the scalar rho forecast's."""
    errors = comparison(unit, scope, warmup)
    if errors.symmetric_rmse is None or errors.rho_rmse is None:
        return None
    return quotient(errors.rmse, min(errors.symmetric_rmse, errors.rho_rmse))


def informativeness(unit: Unit, scope: str, warmup: bool = True) -> MaybeFloat:
    """Return the RMSE of the forecast over that of the best constant in hindsight."""
    errors = comparison(unit, scope, warmup)
    return quotient(errors.rmse, errors.constant_rmse)


def informative(unit: Unit, scope: str, warmup: bool = True) -> MaybeFloat:
    """1 where there is enough to forecast, and the forecast is enough better than the best constant."""
    return float(comparison(unit, scope, warmup).informative)


def measured_range(unit: Unit, scope: str, warmup: bool = True) -> MaybeFloat:
    """95th minus 5th percentile of the measured frozen fraction."""
    return comparison(unit, scope, warmup).measured_range


def skill(unit: Unit, scope: str, warmup: bool = True) -> MaybeFloat:
    """Return the share of the measured variance that the forecast explains."""
    return comparison(unit, scope, warmup).skill


def regret(unit: Unit, scope: str, warmup: bool = True) -> MaybeFloat:
    """Return the RMSE of the forecast less that of the unit's own reference."""
    own = comparison(unit, scope, warmup, "matched").rmse
    return comparison(unit, scope, warmup).rmse - own


# ---- losses that were forecast ------------------------------------------------------------------------


def forecast_gap(unit: Unit, arm: str = "rne", bound: str = "point", update: int | None = None) -> MaybeFloat:
    """The loss above the anchor's that a rehearsal of an arm forecast; ``lower`` and ``upper`` are bounds.

    Of a source that was reused: above its own.
    """
    return less(unit.rehearsed_loss(arm, bound, update), records.loss(unit.source, update))


def gap_ratio(unit: Unit, arm: str = "rne", bound: str = "point") -> MaybeFloat:
    """Return the forecast gap over the measured one."""
    return quotient(forecast_gap(unit, arm, bound), gap(unit, arm))


def inside(unit: Unit, arm: str = "rne") -> MaybeFloat:
    """Return how far the measured loss is inside its bounds, in nats; negative outside."""
    if unit.bundle.forecast_from is not None:  # bounds of another seed's loss
        return None
    lower, upper = (unit.rehearsed_loss(arm, bound) for bound in ("lower", "upper"))
    outcome = loss(unit, arm)
    margins = known((less(outcome, lower), less(upper, outcome)))
    return min(margins) if len(margins) == 2 else None


def misordered(units: Sequence[Unit], arm: str = "rne", above: float = 0.0) -> MaybeFloat:
    """Pairs of units whose forecast gaps are not in the order of the measured ones.

    Of the pairs with a measured gap above a floor; equal forecasts are no order.
    """
    wrong = 0
    for pair in itertools.combinations(units, 2):
        a, b, forecast_a, forecast_b = (
            measure(unit, arm) for measure in (gap, forecast_gap) for unit in pair
        )
        if a is None or b is None or forecast_a is None or forecast_b is None:
            return None
        if max(a, b) > above and a != b:
            wrong += (a < b) != (forecast_a < forecast_b) or forecast_a == forecast_b
    return float(wrong)


# ---- evaluation noise -------------------------------------------------------------------------------


def noise(unit: Unit, arm: str) -> tuple[MaybeFloat, MaybeFloat]:
    """Standard errors of an arm's last gap and recovery, from contexts that all runs are evaluated on.

    The contexts are drawn at random from the held-out text and are the same for all runs, so differences are
    taken context by context. This says how much other contexts would have changed the numbers, and nothing of
    other seeds, streams or texts. Recovery is a ratio of means; its error is that of its linear part.
    """
    anchor, nearest, ours = (unit.contexts(a) for a in (FP32, "rne", arm))
    if anchor is None or nearest is None or ours is None:
        return None, None
    left, whole = ours[-1] - anchor[-1], nearest[-1] - anchor[-1]
    if not whole.mean() > 0:
        return _error(left), None
    linear = (left - left.mean() / whole.mean() * whole) / whole.mean()
    return _error(left), None if arm == "rne" else _error(linear)


def _error(values: records.Array) -> MaybeFloat:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if np.isfinite(values).all() else None


# ---- integrity --------------------------------------------------------------------------------------


def matched(unit: Unit) -> MaybeFloat:
    """Return 1 where all runs drew the same weights, and those on the grid began from the codes declared.

    They begin from the same codes, but for those with a stochastic first projection, which have others. A
    projected anchor began from the nearest codes too; a raw one did not.
    """
    anchor = unit.run(FP32)
    nearest, others = set[str](), set[str]()
    arms = {arm: how for arm, how in unit.bundle.matched.items() if unit.ran(arm)}
    for arm, how in arms.items():
        (others if how.get("projection") == "stochastic" else nearest).add(unit.run(arm)["start"])
    drawn = {unit.run(arm)["initial"] for arm in (FP32, *arms)}
    common = (anchor["start"] in nearest) == (anchor["projected"] is not None)
    return float(len(drawn) == 1 == len(nearest) and not nearest & others and common)


def bytes_off(unit: Unit, arms: Sequence[str]) -> MaybeFloat:
    """Return the largest difference between the masters that arms hold and their masks' budgets, in bytes."""
    ran = [arm for arm in arms if unit.ran(arm)]
    return float(max(abs(unit.run(arm)["master_bytes"] - unit.budget(arm)) for arm in ran))


def shared_tiles(unit: Unit, mask: str) -> MaybeFloat:
    """Return the share of the source's tiles that the target's own mask chose too."""
    return float(unit.masks("target")["shared"][mask])
