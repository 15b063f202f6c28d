"""The tables that every decoder study has: losses, recoveries, forecasts, visibility. They decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from halfulp.arms import measures, records
from halfulp.arms.bundle import Bundle
from halfulp.arms.measures import FP32
from halfulp.study.protocol import Records, Table

Tables = Mapping[str, Callable[[Records], Table]]


def tables(bundle: Bundle, *, warmup: bool = True, scopes: Sequence[str] = ()) -> Tables:
    """Those that a bundle's records can fill; ``scopes`` of never-moved shares, core by default."""
    made = {"losses": partial(losses, bundle)}
    if len(bundle.arms) > 1:
        made["recovery"] = partial(recovery, bundle)
        made["recovery over time"] = partial(over_time, bundle)
    if bundle.scopes:
        made["forecasts"] = partial(forecasts, bundle, warmup=warmup)
    made["visibility"] = partial(visibility, bundle, scopes=tuple(scopes) or ("core",))
    return made


def _anchor(bundle: Bundle) -> str:
    kind = "raw (not projected)" if bundle.anchor == "raw" else "projected"
    return f"the float32 run of the same seed from its {kind} initial weights"


def losses(bundle: Bundle, found: Records) -> Table:
    """Held-out loss after the last update."""
    columns = (FP32, *bundle.arms)
    rows = [(u.name, *(measures.loss(u, arm) for arm in columns)) for u in bundle.over(found)]
    return Table(
        columns=("unit", *columns), rows=rows,
        caption=f"Held-out loss in nats after the last update; fp32 is {_anchor(bundle)}.",
    )  # fmt: skip


def recovery(bundle: Bundle, found: Records) -> Table:
    """Share of the nearest arm's gap that every other arm wins back."""
    others = [arm for arm in bundle.arms if arm != "rne"]
    rows = [
        (u.name, measures.gap(u), *(measures.recovery(u, arm) for arm in others)) for u in bundle.over(found)
    ]
    return Table(
        columns=("unit", "gap of rne, nats", *others), rows=rows,
        caption=f"Share of the gap won back, against {_anchor(bundle)}.",
    )  # fmt: skip


def over_time(bundle: Bundle, found: Records) -> Table:
    """Recovery at every evaluation, of the first arm beside nearest."""
    arm = next(arm for arm in bundle.arms if arm != "rne")
    units = bundle.over(found)
    updates = list(records.losses(units[0].run("rne")))
    rows = [(u, *(measures.recovery(unit, arm, u) for unit in units)) for u in updates]
    return Table(
        columns=("update", *(u.name for u in units)), rows=rows,
        caption=f"Share of the gap won back by {arm}, against {_anchor(bundle)}.",
    )  # fmt: skip


def forecasts(bundle: Bundle, found: Records, warmup: bool = True) -> Table:
    """How well the reference forecast the nearest arm, beside predictors that cost nothing."""
    rows = []
    for unit in bundle.over(found):
        for scope in bundle.scopes:
            c = measures.comparison(unit, scope, warmup)
            rows.append(
                (
                    unit.name, scope, c.measured_range, c.rmse, c.symmetric_rmse, c.rho_rmse, c.constant_rmse,
                    c.fixed_one_rmse, c.centred_rmse, c.signed_error,
                )
            )  # fmt: skip
    return Table(
        columns=(
            "unit", "scope", "range", "directional", "symmetric", "scalar rho", "best constant", "fixed one",
            "centred", "signed error",
        ),
        rows=rows,
        caption="RMSE of the forecast frozen fraction; range: 95th less 5th percentile of the measured one.",
    )  # fmt: skip


def visibility(bundle: Bundle, found: Records, scopes: Sequence[str] = ("core",)) -> Table:
    """Never-moved shares, and where the codes of the nearest arm lie at the end."""
    kinds = ("endpoint", "subnormal", "zero_code")
    rows = []
    for unit in bundle.over(found):
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
