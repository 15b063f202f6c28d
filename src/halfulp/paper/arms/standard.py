"""Define what decoder studies compute, tabulate and draw of their bundles, always under the same names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from halfulp.paper.arms import measures, plots
from halfulp.paper.arms.bundle import Bundle
from halfulp.paper.arms.measures import FP32, rivals
from halfulp.paper.arms.tables import tables
from halfulp.study.protocol import Estimand


def standard(
    bundle: Bundle,
    *,
    warmup: bool = True,
    moved: Sequence[str] = ("core",),
    scopes: Sequence[str] = (),
    drawn: str = "core",
    target: float | None = None,
) -> dict[str, Any]:
    """Estimands, tables and figures of a study.

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
