"""What decoder studies compute, tabulate and draw of their bundles, always under the same names.

Tables decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from halfulp.paper.arms import measures, plots
from halfulp.paper.arms.bundle import Bundle
from halfulp.paper.arms.measures import FP32, PREDICTORS, rivals
from halfulp.study.protocol import Estimand, Records, Table

Tables = dict[str, Callable[[Records], Table]]


def standard(
    bundle: Bundle,
    *,
    warmup: bool = True,
    moved: Sequence[str] = ("core",),
    scopes: Sequence[str] = (),
    drawn: str = "core",
    target: float | None = None,
) -> dict[str, Any]:
    """Return the estimands, tables and figures that decoder studies share.

    ``warmup``: whether its updates count for forecasts. Never-moved shares are of the scopes ``moved``,
    forecasts of ``scopes`` or all that the bundle has, and drawn of one; ``target`` is a recovery aimed at.
    """
    if len(bundle.arms) > 1:
        losses = {"policy-effect": partial(plots.policy_effect, bundle, target=target)}
    else:
        losses = {"loss-gap": partial(plots.gaps, bundle)}
    return {
        "estimands": (
            *of_outcomes(bundle, moved),
            *of_forecasts(bundle, warmup=warmup, scopes=scopes),
            *of_rehearsals(bundle),
        ),
        "tables": tables(bundle, warmup=warmup, scopes=moved),
        "figures": {**losses, "forecast": partial(plots.tracked, bundle, scope=drawn)},
    }


def of_outcomes(bundle: Bundle, scopes: Sequence[str] = ("core",)) -> tuple[Estimand, ...]:
    """Losses, gaps, recoveries, never-moved shares by scope, codes at the ends, and whether arms match."""
    anchor, arms = f"{bundle.anchor} fp32", list(bundle.arms)
    others, within = [arm for arm in arms if arm != "rne"], {"scopes": list(scopes)}
    by_arm: tuple[tuple[str, str, Any, Sequence[str], dict[str, Any]], ...] = (
        ("loss", "final held-out loss, nats", measures.loss, (FP32, *arms), {}),
        ("gap", f"final loss above {anchor}, nats", measures.gap, arms, {}),
        ("recovery", f"share of gap-rne won back; anchor: {anchor}", measures.recovery, others, {}),
        ("never-moved", "share of coordinates", measures.never_moved, arms, within),
    )
    return (
        *(
            bundle.estimand(f"{name}-{arm}", what, measure, arm=arm, **more)
            for name, what, measure, each, more in by_arm
            for arm in each
        ),
        bundle.estimand(
            "endpoint", "largest share of codes at the range's ends", measures.endpoint, arms=arms
        ),
        bundle.estimand("matched", "1 where the arms began as declared", measures.matched),
    )


def of_rehearsals(bundle: Bundle) -> tuple[Estimand, ...]:
    """Return estimands of the rehearsals' loss gaps, at the upper bound too, and over the measured gaps."""
    upper: dict[str, Any] = {"bound": "upper"}
    return tuple(
        bundle.estimand(f"{name}-{arm}", f"{what}, {arm}", measure, arm=arm, **args)
        for arm in bundle.rehearse
        for name, what, measure, args in (
            ("foretold-gap", "loss gap of the rehearsal, nats", measures.forecast_gap, {}),
            ("foretold-most", "loss gap of its upper bound, nats", measures.forecast_gap, upper),
            ("foretold-ratio", "gap of the rehearsal over the measured one", measures.gap_ratio, {}),
        )
    )


def of_forecasts(bundle: Bundle, *, warmup: bool, scopes: Sequence[str] = ()) -> tuple[Estimand, ...]:
    """Return estimands of the forecast and its rivals, by unit and scope, with or without the ``warmup``."""
    over: dict[str, Any] = {"scopes": list(scopes or bundle.scopes), "warmup": warmup}
    when = "all updates" if warmup else "updates after the warmup"
    better = "RMSE over the smaller of the symmetric and the scalar rho forecast's"
    return (
        *(
            bundle.estimand(name, what, measure, **over)
            for name, what, measure in (
                ("rmse", f"of the forecast frozen fraction, {when}", measures.forecast_rmse),
                ("range", "95th less 5th percentile of the measured fraction", measures.measured_range),
                ("of-constant", "RMSE over that of the best constant", measures.informativeness),
                ("added-value", better, measures.added_value),
            )
        ),
        *(
            bundle.estimand(f"rmse-{p}", f"RMSE of {what}", measures.forecast_rmse, predictor=p, **over)
            for p, what in rivals(bundle).items()
        ),
    )


# ---- tables -----------------------------------------------------------------------------------------------


def tables(
    bundle: Bundle, *, warmup: bool = True, scopes: Sequence[str] = ()
) -> dict[str, Callable[[Records], Table]]:
    """Return the tables that a bundle's records fill; ``scopes`` of never-moved shares, core by default."""
    tables: Tables = {"losses": partial(losses, bundle)}
    if len(bundle.matched) > 1:
        tables["recovery"] = partial(recovery, bundle)
    if bundle.scopes:
        tables["forecasts"] = partial(forecasts, bundle, warmup=warmup)
    tables["evaluation noise"] = partial(noise, bundle)
    if bundle.rehearse:
        tables["loss forecasts"] = partial(loss_forecasts, bundle)
    tables["visibility"] = partial(visibility, bundle, scopes=tuple(scopes) or ("core",))
    return tables


def _anchor(bundle: Bundle) -> str:
    kind = "raw (not projected)" if bundle.anchor == "raw" else "projected"
    return f"the float32 run of the same seed from its {kind} initial weights"


def losses(bundle: Bundle, records: Records) -> Table:
    """Tabulate the held-out loss after the last update."""
    columns = (FP32, *bundle.ran(records))
    rows = [(u.name, *(measures.loss(u, arm) for arm in columns)) for u in bundle.over(records)]
    return Table(
        columns=("unit", *columns), rows=rows,
        caption=f"Held-out loss in nats after the last update; fp32 is {_anchor(bundle)}.",
    )  # fmt: skip


def recovery(bundle: Bundle, records: Records) -> Table:
    """Tabulate the share of the nearest arm's gap that every other arm wins back."""
    others = [arm for arm in bundle.ran(records) if arm != "rne"]
    rows = [
        (u.name, measures.gap(u), *(measures.recovery(u, arm) for arm in others))
        for u in bundle.over(records)
    ]
    return Table(
        columns=("unit", "gap of rne, nats", *others), rows=rows,
        caption=f"Share of the gap won back, against {_anchor(bundle)}.",
    )  # fmt: skip


def masks(bundle: Bundle, records: Records, beside: str) -> Table:
    """Tabulate the parts of the model that masks of a source lie in, and their overlap with one of them."""
    units = {unit.name: unit for unit in bundle.over(records)}
    if bundle.masked is not None and bundle.masked.source is not None:
        units = {"source": next(iter(units.values()))}
    by_unit = {name: unit.masks("source") for name, unit in units.items()}
    parts = list(
        dict.fromkeys(part for m in by_unit.values() for tiles in m["tiles"].values() for part in tiles)
    )
    rows: list[tuple[str | float | None, ...]] = []
    for unit, masks in by_unit.items():
        packed = units[unit].packed("source")
        for name, tiles in masks["tiles"].items():
            total = sum(tiles.values())
            shares = [tiles.get(part, 0) / total for part in parts]
            rows.append(
                (unit, name, total, masks["budget"][name], *shares, packed[beside].overlap(packed[name]))
            )
    return Table(
        columns=("of", "mask", "tiles", "bytes", *parts, f"has of {beside}"), rows=rows,
        caption=f"Where tiles lie, as shares of a mask's, and the share of {beside}'s tiles that a mask has.",
    )  # fmt: skip


def forecast_recoveries(bundle: Bundle, records: Records) -> Table:
    """Tabulate recoveries as rehearsals forecast them, beside the measured ones."""
    rows = [
        (unit.name, arm, measures.forecast_recovery(unit, arm), measures.recovery(unit, arm))
        for unit in bundle.over(records)
        for arm in bundle.rehearse
        if arm != "rne" and unit.ran(arm)
    ]
    return Table(
        columns=("unit", "arm", "forecast recovery", "recovery"), rows=rows,
        caption="Before its run every mask was rehearsed by the float32 run of the same seed: what that said "
        "masters there would win back of the gap that it forecast, and what they won back.",
    )  # fmt: skip


def forecasts(bundle: Bundle, records: Records, warmup: bool = True) -> Table:
    """Tabulate the reference's forecast of the nearest arm, beside predictors that are free or come late."""
    named = {"frozen": PREDICTORS["frozen"], **rivals(bundle)}
    rows: list[tuple[str | float | None, ...]] = []
    for unit in bundle.over(records):
        for scope in bundle.scopes:
            c = measures.comparison(unit, scope, warmup)
            errors = [measures.forecast_rmse(unit, scope, warmup, predictor) for predictor in named]
            rows.append((unit.name, scope, c.measured_range, *errors, c.centred_rmse, c.signed_error))
    when = "all updates" if warmup else "updates after the warmup"
    return Table(
        columns=("unit", "scope", "range", *named.values(), "centred", "signed error"), rows=rows,
        caption=f"RMSE of the frozen fraction over {when}. Range: 95th less 5th percentile of the measured "
        "one. Template: mean of what the other targets measured. Centred, signed: of the directional one.",
    )  # fmt: skip


def noise(bundle: Bundle, records: Records) -> Table:
    """Tabulate what other held-out contexts would have changed."""
    rows: list[tuple[str | float | None, ...]] = []
    for unit in bundle.over(records):
        for arm in bundle.arms:
            gap, recovered = measures.noise(unit, arm)
            won = None if arm == "rne" else measures.recovery(unit, arm)
            rows.append((unit.name, arm, measures.gap(unit, arm), gap, won, recovered))
    return Table(
        columns=("unit", "arm", "gap, nats", "standard error", "recovery", "standard error of it"), rows=rows,
        caption="Evaluation noise: standard errors over the held-out contexts, paired between runs. They say "
        "what other contexts would have changed, and nothing of other seeds, streams or texts.",
    )  # fmt: skip


def loss_forecasts(bundle: Bundle, records: Records) -> Table:
    """Tabulate the loss gaps that rehearsals forecast for every rehearsed arm, beside the measured ones."""
    bounds = ("lower", "point", "upper")
    rows = []
    for unit in bundle.over(records):
        for arm in bundle.rehearse:
            gaps = [measures.forecast_gap(unit, arm, bound) for bound in bounds]
            rows.append((unit.name, arm, measures.gap(unit, arm), *gaps, measures.gap_ratio(unit, arm)))
    reused = " Forecasts are of the source, above its own loss." if bundle.forecast_from is not None else ""
    return Table(
        columns=("unit", "arm", "gap, nats", *bounds, "point over gap"), rows=rows,
        caption=f"Gaps to {_anchor(bundle)}, measured and as rehearsals forecast them.{reused}",
    )  # fmt: skip


def visibility(bundle: Bundle, records: Records, scopes: Sequence[str] = ("core",)) -> Table:
    """Tabulate never-moved shares, and where the codes of the nearest arm lie at the end."""
    kinds = ("endpoint", "subnormal", "zero_code")
    rows = []
    for unit in bundle.over(records):
        nearest = unit.run("rne")
        total = sum(nearest["coordinates"].values())
        last = nearest["evaluations"][-1]["occupancy"]
        never = [measures.never_moved(unit, arm, scope) for arm in bundle.arms for scope in scopes]
        most = measures.endpoint(unit, list(bundle.arms))
        rows.append((unit.name, *never, most, *(last[kind] / total for kind in kinds[1:])))
    columns = [f"never moved, {arm}, {scope}" for arm in bundle.arms for scope in scopes]
    return Table(
        columns=("unit", *columns, "endpoint, most", "subnormal, rne", "zero, rne"), rows=rows,
        caption="Shares of coordinates.",
    )  # fmt: skip
