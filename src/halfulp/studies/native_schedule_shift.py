"""``native-schedule-shift``: does a source forecast native runs under schedules that it was not trained with?

The paper's Study 1 (section 4.3). All 50 matrices of a NeoX-style decoder live as E4M3 codes and are
multiplied natively (:mod:`halfulp.writeback.gemm`); moments and everything else are float32. One float32
source, of another seed and under the cosine of the other studies, is audited and sealed. Then three targets
train natively, to the nearest, under two other schedules: ``constant-mid`` warms up to half the peak and
stays there, ``cosine-restart`` runs two cosines from the peak to a tenth of it.

The joint rule asks, of both schedules and all six cells: native products in the profiler's trace, replays of
start and end, valid training, the source's RMSE, raw and centred, at most 0.9 of the strongest source-free
predictor's, and a positive correlation of residuals (:mod:`halfulp.arms.native`).

A record made by hand (``halfulp study recover``) is never promoted: the registered label is then
``inconclusive_invalid_native_source_audit``, whatever the gates say. What the six cells show all the same is
an analysis after the outcomes, :data:`RETROSPECTIVE`, with a label of its own: ``halfulp study retrospect``
with a file that imports it.

Not printed by the paper and chosen here: the seeds, used by no other study; which source-free predictors
there are; the raw gate's 0.9; the definition of residuals; a fall of one nat as valid training; the float8
recipe of activations and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from halfulp.arms import Bundle, figures, measures
from halfulp.arms import native as of_native
from halfulp.arms.family import PAPER_NEOX, SMALL_NATIVE, SMOKE_NEOX, native_three_thousand
from halfulp.studies.declared import declared
from halfulp.study.protocol import Estimand, Records, Table, Values
from halfulp.study.retrospective import Retrospective

SCOPE = "core"

RUNS = Bundle(
    scales=native_three_thousand(SMOKE_NEOX, SMALL_NATIVE, PAPER_NEOX),
    targets=(161803, 662607, 299792),
    conditions={
        "constant-mid": {"grid": "e4m3@128", "schedule": {"peak": 0.5, "floor": 0.5}},
        "cosine-restart": {"grid": "e4m3@128", "schedule": {"peak": 1.0, "floor": 0.1, "cycles": 2}},
    },
    arms={"rne": {"policy": "rne", "storage": "native", "tables": False}},
    anchored=False,
    scopes=(SCOPE,),
    forecast_from=141421,
)


def macro_ratio(found: Records, scope: str) -> Values:
    """Of every schedule, over its targets."""
    return of_native.macro_ratio(RUNS, found, scope)


def ratios(found: Records) -> Table:
    """The source beside every predictor that needs none, and what the other targets measured."""
    rows: list[tuple[str | float | None, ...]] = []
    for unit in RUNS.over(found):
        each = [
            of_native.against(unit, SCOPE, predictor=p)
            for p in ("frozen", *of_native.SOURCE_FREE, "template")
        ]
        rows.append((unit.name, *(c.centred_rmse for c in each), *(c.rmse for c in each[:1])))
    return Table(
        columns=("unit", "source", "best constant", "schedule", "other targets", "source, not centred"),
        rows=rows,
        caption="Centred RMSE of the frozen fraction after the warmup. What the other targets measured under "
        "the same schedule needs no source either, but is known too late: it decides nothing.",
    )


_ONE_CELL: tuple[tuple[str, str, Callable[..., float | None], dict[str, Any]], ...] = (
    ("dispatched", "1 where profiled updates ran natively", of_native.dispatched, {"arms": ["rne"]}),
    ("replayed", "1 where start and end replay from files", of_native.replayed, {"arms": ["rne"]}),
    ("paired", "1 where both schedules began alike", of_native.paired, {}),
    ("progress", "fall of the held-out loss, nats", measures.progress, {"arm": "rne"}),
    ("loss", "final held-out loss, nats", measures.loss, {"arm": "rne"}),
    ("endpoint", "largest share of codes at the range's ends", measures.endpoint, {"arms": ["rne"]}),
    ("raw", "RMSE of the source over the best source-free", of_native.raw_ratio, {"scope": SCOPE}),
    ("centred", "the same, centred", of_native.centred_ratio, {"scope": SCOPE}),
    ("correlation", "of residuals, source and measured", of_native.residual_correlation, {"scope": SCOPE}),
)

ESTIMANDS = (
    *(RUNS.estimand(name, what, measure, **args) for name, what, measure, args in _ONE_CELL),
    Estimand(
        name="macro", what="mean centred RMSE, source over strongest source-free, by schedule",
        compute=macro_ratio, args={"scope": SCOPE},
    ),
)  # fmt: skip

STUDY = declared(
    __name__,
    RUNS,
    estimands=ESTIMANDS,
    tables={"centred errors": ratios},
    figures={"forecast": partial(figures.tracked, RUNS, scope=SCOPE)},
)

RETROSPECTIVE = Retrospective(
    name="native-schedule-shift-after",
    study=STUDY.name,
    why="A cell that was recovered by hand leaves the registered label inconclusive. It is disjoint from the "
    "constant-mid cells and can neither pass nor fail their gates, so what those show can be told.",
    estimands=ESTIMANDS,
    gates=STUDY.gates,
    rules=tuple(
        replace(rule, label=f"post_outcome_retrospective_{rule.label}")
        for rule in STUDY.rules
        if not rule.recovered
    ),
)
