"""The tables that every decoder study has: losses, recoveries, forecasts, visibility. They decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from halfulp.paper.arms import measures
from halfulp.paper.arms.bundle import Bundle
from halfulp.paper.arms.measures import FP32, PREDICTORS
from halfulp.study.protocol import Records, Table

Tables = Mapping[str, Callable[[Records], Table]]


def tables(bundle: Bundle, *, warmup: bool = True, scopes: Sequence[str] = ()) -> Tables:
    """Return the tables that a bundle's records fill; ``scopes`` of never-moved shares, core by default."""
    made = {"losses": partial(losses, bundle)}
    if len(bundle.matched) > 1:
        made["recovery"] = partial(recovery, bundle)
    if bundle.scopes:
        made["forecasts"] = partial(forecasts, bundle, warmup=warmup)
    made["evaluation noise"] = partial(noise, bundle)
    if bundle.rehearse:
        made["loss forecasts"] = partial(loss_forecasts, bundle)
    made["visibility"] = partial(visibility, bundle, scopes=tuple(scopes) or ("core",))
    return made


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
    made = {name: unit.masks("source") for name, unit in units.items()}
    parts = list(
        dict.fromkeys(part for m in made.values() for tiles in m["tiles"].values() for part in tiles)
    )
    rows: list[tuple[str | float | None, ...]] = []
    for unit, masks in made.items():
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
    """Recoveries as rehearsals forecast them, beside what came."""
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
    named = {"frozen": PREDICTORS["frozen"], **measures.rivals(bundle)}
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
    """Never-moved shares, and where the codes of the nearest arm lie at the end."""
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
