"""What is measured of a unit of a decoder study, each once: functions of its records alone.

A unit is one target under one condition: its float32 anchor, its arms and its forecast. A measure takes a
:class:`~halfulp.arms.bundle.Unit` and what else it needs by name, so that the protocol can print and seal
the arguments; None where it is not defined. Recovery (Eq. 5) is against the anchor that the bundle names.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfulp.arms import records
from halfulp.measures.crossings import crossing
from halfulp.measures.forecasts import Comparison, compare, rmse

if TYPE_CHECKING:
    from halfulp.arms.bundle import Unit

Found = float | None

FP32 = "fp32"


# ---- losses -----------------------------------------------------------------------------------------


def loss(unit: Unit, arm: str, update: int | None = None) -> Found:
    """Held-out loss of an arm, or of the anchor (``fp32``), after an update; the last by default."""
    return records.loss(unit.run(arm), update)


def gap(unit: Unit, arm: str = "rne", update: int | None = None) -> Found:
    """Held-out loss above the anchor's."""
    ours, anchor = loss(unit, arm, update), loss(unit, FP32, update)
    return None if ours is None or anchor is None else ours - anchor


def recovery(unit: Unit, arm: str, update: int | None = None) -> Found:
    """The share of the nearest arm's gap that an arm does not have; None without a gap."""
    whole, left = gap(unit, "rne", update), gap(unit, arm, update)
    return None if whole is None or left is None or whole <= 0 else (whole - left) / whole


def early_recovery(unit: Unit, arm: str, after: float) -> Found:
    """Recovery at the first evaluation after a share of the run."""
    return recovery(unit, arm, early_update(unit, arm, after))


def early_update(unit: Unit, arm: str, after: float) -> int:
    """The first evaluation after a share of the run."""
    run = unit.run(arm)
    return int(min(u for u in records.losses(run) if u > after * run["updates"]))


def best_recovery(unit: Unit, arms: Sequence[str]) -> Found:
    """The largest recovery among some arms; None if one is missing."""
    found = [recovery(unit, arm) for arm in arms]
    return None if None in found else max(r for r in found if r is not None)


def advantage(unit: Unit, arm: str, over: Sequence[str]) -> Found:
    """Recovery of an arm less the largest among others."""
    ours, theirs = recovery(unit, arm), best_recovery(unit, over)
    return None if ours is None or theirs is None else ours - theirs


# ---- visibility -------------------------------------------------------------------------------------


def never_moved(unit: Unit, arm: str, scope: str = "core") -> Found:
    """Share of a scope's coordinates that never moved."""
    return records.never_moved(unit.run(arm), scope)


def endpoint(unit: Unit, arms: Sequence[str]) -> Found:
    """The largest share of codes at the ends of the range, over all updates of some arms."""
    runs = [unit.run(arm) for arm in arms]
    return max(float(r["most_endpoint"] / sum(r["coordinates"].values())) for r in runs)


def onset(unit: Unit, scope: str, arm: str | None = None) -> Found:
    """The persistent majority crossing of an arm; without one, of the forecast."""
    told = unit.forecast(scope) if arm is None else _measured(unit, scope, arm)
    return None if told is None else crossing(told).persistent


def timing_error(unit: Unit, scope: str, arm: str = "rne") -> Found:
    """|forecast - measured| / measured of the persistent crossing; None where there is nothing to time."""
    told, found = onset(unit, scope), onset(unit, scope, arm)
    return None if told is None or found is None or min(told, found) == 1 else abs(told - found) / found


# ---- forecasts --------------------------------------------------------------------------------------


def comparison(unit: Unit, scope: str, warmup: bool = True) -> Comparison:
    """The forecast frozen fraction, and its simpler rivals, against the nearest arm's.

    ``warmup``: whether the updates of the warmup count too.
    """
    told = unit.forecast(scope)
    assert told is not None
    return compare(
        told, _measured(unit, scope, "rne"), warmup=0 if warmup else unit.run("rne")["warmup"],
        symmetric=unit.forecast(scope, "symmetric"), scalar_rho=unit.forecast(scope, "rho"),
    )  # fmt: skip


def forecast_rmse(unit: Unit, scope: str, warmup: bool = True) -> Found:
    """RMSE of the forecast against the measured frozen fraction."""
    return comparison(unit, scope, warmup).rmse


def added_value(unit: Unit, scope: str, warmup: bool = True) -> Found:
    """RMSE of the directional forecast over the smaller of the symmetric and the scalar rho forecast's."""
    found = comparison(unit, scope, warmup)
    if found.symmetric_rmse is None or found.rho_rmse is None:
        return None
    return _ratio(found.rmse, min(found.symmetric_rmse, found.rho_rmse))


def informativeness(unit: Unit, scope: str, warmup: bool = True) -> Found:
    """RMSE of the forecast over that of the best constant in hindsight."""
    found = comparison(unit, scope, warmup)
    return _ratio(found.rmse, found.constant_rmse)


def measured_range(unit: Unit, scope: str, warmup: bool = True) -> Found:
    """95th minus 5th percentile of the measured frozen fraction."""
    return comparison(unit, scope, warmup).measured_range


def rehearsal_rmse(unit: Unit, scope: str, warmup: bool = True) -> Found:
    """RMSE of the rehearsed nearest run against the measured frozen fraction."""
    return _rmse(unit, records.rehearsed(unit.run(FP32), unit.run("rne")["grid"], scope), scope, warmup)


def projection_rmse(unit: Unit, scope: str, warmup: bool = True) -> Found:
    """The same of the reference's own projection: the directional forecast."""
    return _rmse(unit, records.frozen(unit.run(FP32), unit.run("rne")["grid"], scope), scope, warmup)


def rehearsal_over_projection(unit: Unit, scope: str, warmup: bool = True) -> Found:
    """The first over the second."""
    ours, theirs = rehearsal_rmse(unit, scope, warmup), projection_rmse(unit, scope, warmup)
    return None if ours is None or theirs is None else _ratio(ours, theirs)


def _rmse(unit: Unit, told: records.Array, scope: str, warmup: bool) -> float:
    first = 0 if warmup else unit.run("rne")["warmup"]
    return rmse(told[first:], _measured(unit, scope, "rne")[first:])


# ---- losses that were forecast ------------------------------------------------------------------------


def forecast_gap(unit: Unit, arm: str = "rne", bound: str = "point", update: int | None = None) -> Found:
    """The loss above the anchor's that a rehearsal of an arm forecast; ``lower`` and ``upper`` are bounds."""
    told, anchor = unit.forecast_loss(arm, bound, update), loss(unit, FP32, update)
    return None if told is None or anchor is None else told - anchor


def gap_ratio(unit: Unit, arm: str = "rne", bound: str = "point") -> Found:
    """The forecast gap over the measured one."""
    told, found = forecast_gap(unit, arm, bound), gap(unit, arm)
    return None if told is None or not found else told / found


def gap_error(unit: Unit, arm: str = "rne") -> Found:
    """How far the forecast gap was from the measured one, as a share of it."""
    found = gap_ratio(unit, arm)
    return None if found is None else abs(found - 1)


def inside(unit: Unit, arm: str = "rne") -> Found:
    """How far the measured loss is inside its bounds, in nats; negative outside."""
    lower, upper = (unit.forecast_loss(arm, bound) for bound in ("lower", "upper"))
    found = loss(unit, arm)
    return None if lower is None or upper is None or found is None else min(found - lower, upper - found)


def misordered(units: Sequence[Unit], arm: str = "rne", above: float = 0.0) -> Found:
    """Pairs of units whose forecast gaps are not in the order of the measured ones.

    Of the pairs with a measured gap above a floor; equal forecasts are no order.
    """
    found = [(gap(unit, arm), forecast_gap(unit, arm)) for unit in units]
    wrong = 0
    for (ours, told), (theirs, their_told) in itertools.combinations(found, 2):
        if None in (ours, told, theirs, their_told):
            return None
        assert ours is not None and theirs is not None and told is not None and their_told is not None
        if max(ours, theirs) > above and ours != theirs:
            wrong += (ours < theirs) != (told < their_told) or told == their_told
    return float(wrong)


def _ratio(a: float, b: float) -> Found:
    return None if b == 0 else a / b


def _measured(unit: Unit, scope: str, arm: str) -> records.Array:
    run = unit.run(arm)
    return records.frozen(run, run["grid"], scope)


# ---- integrity --------------------------------------------------------------------------------------


def matched(unit: Unit) -> Found:
    """1 where all runs drew the same weights, and those on the grid began from the same codes.

    A projected anchor began from these codes too; a raw one did not.
    """
    runs, anchor = [unit.run(arm) for arm in unit.arms], unit.run(FP32)
    drawn = {r["initial"] for r in (*runs, anchor)}
    starts = {r["start"] for r in runs}
    common = (anchor["start"] in starts) == (anchor["projected"] is not None)
    return float(len(drawn) == 1 == len(starts) and common)


def bytes_off(unit: Unit, arms: Sequence[str]) -> Found:
    """The largest difference between the masters that arms hold and their masks' budgets, in bytes."""
    return float(max(abs(unit.run(arm)["master_bytes"] - unit.budget(arm)) for arm in arms))


def shared_tiles(unit: Unit, mask: str) -> Found:
    """The share of the source's tiles that the target's own mask chose too."""
    return float(unit.masks["shared"][mask])
