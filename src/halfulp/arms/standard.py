"""What transfer studies compute, tabulate and draw of their bundles, all in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from halfulp.arms import estimands, figures
from halfulp.arms.bundle import Bundle
from halfulp.arms.tables import tables


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
        losses = {"policy-effect": partial(figures.policy_effect, bundle, target=target)}
    else:
        losses = {"loss-gap": partial(figures.gaps, bundle)}
    return {
        "estimands": (
            *estimands.of_outcomes(bundle, moved),
            *estimands.of_forecasts(bundle, warmup=warmup, scopes=scopes),
            *estimands.of_rehearsals(bundle),
        ),
        "tables": tables(bundle, warmup=warmup, scopes=moved),
        "figures": {**losses, "forecast": partial(figures.tracked, bundle, scope=drawn)},
    }
