"""The locked margin test again, with rehearsals as predictors beside the projection.

In `margin` every event of a run on a grid is forecast from a reference by *projection*: the reference's
weights are rounded, its proposal is added, and the event is whether the code would stay. Most of its mistakes
are made where the run is at other codes by then. A *rehearsal* keeps codes of its own and moves them by the
reference's proposals d, with a pull k towards the reference's weights w:

    s <- Q(s + d + k (w - s))

The cells are those of `margin` to the letter (64 units, 762,880,000 events), and the projection is judged
again beside the rehearsals, on the same events; the protocol of `margin` is not touched. Predictors:

    projection   as in `margin`
    open         k = 0: the reference's proposals alone
    point        the product's rule, k = min(1, 30 x rate). It was found for Adam, whose proposals are about
                 as large as its rate; descent has rates near one here, so k is 1 and z the next reference
    pull-0.001, pull-0.01, pull-0.1   fixed, to see what lies between; they decide nothing

Stage ``forecast`` runs references only and seals what every predictor says; stage ``outcome`` runs both and
refuses to judge another forecast. The two rehearsals that the product has by default (open, point) are asked
to err less often than the projection, to be at the run's codes more often, and, as the paper asks of the
projection, to halve the risk above margin 1/8. The gates were declared before the first run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from halfulp.audit.rehearsal.specs import PULL
from halfulp.measures.crossings import Crossing, timing_pair
from halfulp.paper.models import lockstep_kernels as compiled
from halfulp.paper.models.digests import refuse_other
from halfulp.paper.models.lockstep import Finished, answered, run_units
from halfulp.paper.studies import margin
from halfulp.paper.studies._timing import crossing_json
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import computed, declared, gate, rule
from halfulp.paper.summaries import TimingSummary, summarise
from halfulp.paper.trust import PRIMARY
from halfulp.paper.values import quotient
from halfulp.study.protocol import Cell, Config, Json, Records, Running, Stage, Table, Values

FIXED = (0.001, 0.01, 0.1)
PREDICTORS = ("projection", "open", "point", *(f"pull-{k}" for k in FIXED))
ASKED = ("open", "point")


def cells(config: Config) -> Iterator[Cell]:
    """Yield the cells of `margin`, with the pull of every rehearsal."""
    for cell in margin.cells(config):
        pulls = [0.0, min(1.0, PULL * cell.config["rate"]), *FIXED]
        yield replace(cell, config={**cell.config, "pulls": pulls})


def forecast(cell: Running) -> Mapping[str, Json]:
    """From references alone: what every predictor says, bound by digests, and how often it would answer."""
    units, total, _ = run_units(cell, measure=False)
    return {"units": [{"seed": u.seed, **margin.bound(u)} for u in units], "answered": _answered(total)}


def outcome(cell: Running) -> Mapping[str, Json]:
    """Both runs, every event judged against what each predictor said of it."""
    sealed = cell.read("forecast", cell.name)
    units, total, wrong = run_units(cell, measure=True)
    for u, row in zip(units, sealed["units"], strict=True):
        refuse_other(cell.name, row, margin.bound(u))
    refuse_other(cell.name, sealed["answered"], _answered(total))
    return {"units": [_judged(u) for u in units], "wrong": _answered(wrong)}


def _answered(histograms: Any) -> dict[str, Json]:
    """Events on the exact ladder above the primary margin, by predictor."""
    found = (answered(each[0], [PRIMARY])[0] for each in histograms)
    return dict(zip(PREDICTORS, found, strict=True))


def _judged(u: Finished) -> dict[str, Json]:
    said: dict[str, Json] = {}
    measured = u.steps[:, 0, compiled.MEASURED].astype(np.int64)
    for j, name in enumerate(PREDICTORS):
        forecast, apart = (u.steps[:, j, c].astype(np.int64) for c in (compiled.FORECAST, compiled.DIVERGED))
        said[name] = {
            "crossing": crossing_json(forecast, u.n), "diverged": int(apart.sum()),
            "squared_difference": int(((forecast - measured) ** 2).sum()),
            "wrong_diverged": int(u.mistakes[j, compiled.APART]),
            "wrong_same": int(u.mistakes[j, compiled.TOGETHER]),
        }  # fmt: skip
    return {
        "seed": u.seed, "steps": len(measured), "weights": u.n, "crossing": crossing_json(measured, u.n),
        "said": said,
    }  # fmt: skip


# ---- estimands ----------------------------------------------------------------------------------------


def _total(records: Records, predictor: str, *keys: str) -> int:
    return sum(unit["said"][predictor][key] for _, unit in margin.units_of(records) for key in keys)


def _above(records: Records, stage: str, key: str, predictor: str) -> int:
    return sum(record[key][predictor] for record in records[stage].values())


def event_error(records: Records) -> Values:
    """Share of all events that a predictor got wrong."""
    n = margin.events_of(records)
    return {p: _total(records, p, "wrong_diverged", "wrong_same") / n for p in PREDICTORS}


def same_code(records: Records) -> Values:
    """Share of events at which a predictor is at the run's own code."""
    n = margin.events_of(records)
    return {p: 1 - _total(records, p, "diverged") / n for p in PREDICTORS}


def coverage(records: Records) -> Values:
    """Share of events with a margin above 1/8."""
    n = margin.events_of(records)
    return {p: _above(records, "forecast", "answered", p) / n for p in PREDICTORS}


def risk(records: Records) -> Values:
    """Mistakes among events with a margin above 1/8."""
    which = (("outcome", "wrong"), ("forecast", "answered"))
    return {p: quotient(*(_above(records, stage, key, p) for stage, key in which)) for p in PREDICTORS}


def frozen_rmse(records: Records) -> Values:
    """Root mean square difference of the forecast and the measured frozen fraction, over steps and units."""
    found = dict.fromkeys(PREDICTORS, 0.0)
    steps = 0
    for _, unit in margin.units_of(records):
        steps += unit["steps"]
        for p in PREDICTORS:
            found[p] += unit["said"][p]["squared_difference"] / unit["weights"] ** 2
    return {p: (total / steps) ** 0.5 for p, total in found.items()}


def onsets(records: Records, predictor: str) -> TimingSummary:
    """Forecast and measured persistent majorities of every unit."""
    units = [unit for _, unit in margin.units_of(records)]
    pairs = [(Crossing(**u["said"][predictor]["crossing"]), Crossing(**u["crossing"])) for u in units]
    return summarise([timing_pair(said, came, "persistent") for said, came in pairs])


def onset_within(records: Records) -> Values:
    """Share of eligible units whose persistent majority comes within 15% of the forecast."""
    return {p: onsets(records, p).share_within for p in PREDICTORS}


def error_gain(records: Records) -> Values:
    """Event error of the projection less that of a rehearsal."""
    found = {p: value or 0.0 for p, value in event_error(records).items()}
    return {p: found["projection"] - found[p] for p in ASKED}


def code_gain(records: Records) -> Values:
    """Same-code share of a rehearsal less that of the projection."""
    found = {p: value or 0.0 for p, value in same_code(records).items()}
    return {p: found[p] - found["projection"] for p in ASKED}


def risk_ratio(records: Records) -> Values:
    """Risk above 1/8 over the risk of answering everything, of the rehearsals."""
    part, whole = risk(records), event_error(records)
    return {p: (part[p] or 0.0) / (whole[p] or 1.0) for p in ASKED}


def table(records: Records) -> Table:
    """Tabulate every predictor on the same events."""
    each = (event_error, same_code, coverage, risk, frozen_rmse, onset_within)
    values = [compute(records) for compute in each]
    return Table(
        columns=("predictor", "event error", "at the run's code", "coverage above 1/8", "risk above 1/8",
                 "RMSE of f", "onsets within 15%"),
        rows=[(p, *(value[p] for value in values)) for p in PREDICTORS],
        caption="The events of `margin`, forecast by the projection and by rehearsals.",
    )  # fmt: skip


ESTIMANDS = (
    *map(computed, (
        event_error, same_code, coverage, risk, frozen_rmse, onset_within, error_gain, code_gain,
        risk_ratio,
    )),
)  # fmt: skip

STUDY = declared(
    __name__, own=ESTIMANDS,
    scales={
        name: {key: value for key, value in config.items() if key != "pulls"}
        for name, config in margin.STUDY.scales.items()
    },
    stages=(
        Stage(name="forecast", kind="prediction", cells=cells, run=forecast),
        Stage(name="outcome", kind="outcome", cells=cells, run=outcome, reads=("forecast",)),
    ),
    tables={"predictors": table},
    question="Does a rehearsal forecast the events of the locked margin test better than the projection?",
    units="one seed, rate and mantissa; predictors share their units",
    not_claimed=(
        "that coordinates or steps are independent replicates",
        "anything about Adam, minibatches or decoders: this is the paper's small network under descent",
        "that a pull other than the product's would not do better",
    ),
    gates=(
        gate("errs-less", "error-gain > 0", "a rehearsal is to be better than what it replaces"),
        gate("nearer", "code-gain > 0", "it holds codes of its own in order to be at the run's"),
        gate("halves-risk", "risk-ratio <= 0.5", "the paper's rule for the projection's margin"),
    ),
    rules=(
        rule("rehearsals err less than the projection, and their margin halves the risk", "errs-less",
            "nearer", "halves-risk"),
        rule("rehearsals err less than the projection", "errs-less"),
        rule("a rehearsal of the product errs as often as the projection, or more"),
    ),
)  # fmt: skip

_NOTE = "The paper's predictor is the projection; it has no rehearsal."
row = Beside(STUDY, "app:margin-transfer", _NOTE,
    units=("projection", "open", "point", "pull-0.001", "pull-0.01", "pull-0.1"))  # fmt: skip
CLAIMS = (
    *row.each("mistakes among all events, {}", (0.118, "-", "-", "-", "-", "-"), "event-error"),
    *row.each("events at the same code, {}", (0.00797, "-", "-", "-", "-", "-"), "same-code"),
    *row.each("risk at 1/8, {}", (0.105, "-", "-", "-", "-", "-"), "risk"),
    *row.each("coverage at 1/8, {}", (0.932, "-", "-", "-", "-", "-"), "coverage"),
)  # fmt: skip
