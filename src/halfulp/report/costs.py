"""The part of a page that says what a format would cost, in loss: rehearsals, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from halfulp.audit.rehearsal.forecast_outcome import Evaluated, evaluations
from halfulp.report import words
from halfulp.report.markup import Content, Html, number, numeric, picture, table, tag
from halfulp.report.runs import Run
from halfulp.text import percent
from halfulp.trace.stored_on import is_of
from halfulp.verdicts import loss_costs as costs
from halfulp.verdicts.intervals import COVERAGE, SMALLEST_GAP
from halfulp.verdicts.loss_costs import Cost, between, bytes_per_weight, nats, spread

TITLE = "What it would cost, in loss"
WHAT = (
    "Beside this run, the codes of runs that did not happen were kept, and moved by its own updates: a "
    "rehearsal. The model was then evaluated as if it held them. An interval is of how far such forecasts "
    "were off elsewhere; a pilot (halfulp pilot) narrows it for a little compute. The bracket reaches from "
    "the projection, where all that is lost is compensated at once, to the open loop, where nothing is; its "
    "ends are bounds as observed, not proved."
)
KEY = "Dot: forecast; bar: {}; dotted line: this run itself"
MET = "; diamond: measured"


@dataclass(frozen=True)
class Costs:
    """The rehearsals of a reference, the cheapest first, and the runs on the page that they were of."""

    run: Run
    costs: Sequence[Cost]
    measured: dict[str, tuple[Run, list[Evaluated]]]
    """The measured runs and their evaluations, by spec."""

    def run_of(self, cost: Cost) -> Run | None:
        """Return the run on the page that a rehearsal was of."""
        return self.measured[cost.spec][0] if cost.spec in self.measured else None

    def met(self, cost: Cost) -> float | None:
        """Return the measured loss at the step of a forecast."""
        _, each = self.measured.get(cost.spec, (None, []))
        return next((e.measured for e in each if e.step == cost.step), None)


def gathered(runs: Sequence[Run]) -> list[Costs]:
    """Return every reference that rehearsed something."""
    by_run = []
    for run in (r for r in runs if r.trace.rehearsals):
        measured = {}
        for spec in run.trace.rehearsals:
            of = [r for r in runs if r is not run and r.same_model(run) and is_of(spec, r.trace)]
            if of and (each := evaluations(run.trace, of[0].trace, spec)):
                measured[spec] = (of[0], each)
        by_run.append(Costs(run, costs.costs(run.trace), measured))
    return by_run


# ---- words ------------------------------------------------------------------------------------------------


def sentence(rehearsed: Costs) -> str:
    """Return the forecasts in one sentence."""
    first = rehearsed.costs[0]
    each = [f"{c.spec} {words.gap(c.gap)}{f' ({spread(c)})' if c.interval else ''}" for c in rehearsed.costs]
    known = f", with {COVERAGE:.0%} intervals" if any(c.interval for c in rehearsed.costs) else ""
    return (
        f"At step {first.step:,} this run has a loss of {nats(first.real)}. Forecast from it, for no other "
        f"run{known}: {words.listed(each)}."
    )


def met_sentence(rehearsed: Costs) -> str | None:
    """Say how the forecasts met their outcomes; None where nothing was measured."""
    measured = [(c, m) for c in rehearsed.costs if (m := rehearsed.met(c)) is not None]
    if not measured:
        return None
    inside = [
        min(c.lower, c.upper) <= m <= max(c.lower, c.upper)
        for c, m in measured
        if c.lower is not None and c.upper is not None and abs(m - c.real) >= SMALLEST_GAP
    ]
    each = [f"{c.spec} {words.gap(m - c.real)} ({words.gap(c.gap)} forecast)" for c, m in measured]
    bracket = (
        f" Gaps above {SMALLEST_GAP:g} that came out inside their brackets: {sum(inside)} of {len(inside)}."
        if inside
        else ""
    )
    right = all(a <= b for (_, a), (_, b) in pairwise(measured))  # the forecasts are in order already
    order = f" The order of the formats is {'as forecast' if right else 'another one'}."
    return f"Measured: {words.listed(each)}.{bracket}{order if len(measured) > 1 else ''}"


# ---- the section -----------------------------------------------------------------------------------------


def cost_section(rehearsed: Costs, *, alone: bool) -> Html:
    """Say what each format would cost, and list them in a table."""
    kicker = None if alone else tag("p", rehearsed.run.name, class_="kicker")
    if not rehearsed.costs:
        said = f"Rehearsed: {', '.join(rehearsed.run.trace.rehearsals)}; but {costs.MISSING}."
        return tag("section", kicker, tag("h2", TITLE), tag("p", said), _table(rehearsed), aria_label=TITLE)
    met = met_sentence(rehearsed)
    notes = costs.cautions(rehearsed.costs)
    return tag(
        "section",
        kicker,
        tag("h2", TITLE),
        tag("p", sentence(rehearsed), class_="lead"),
        tag("p", met) if met else None,
        _table(rehearsed),
        tag("p", WHAT, class_="note"),
        *(tag("p", note, class_="note") for note in notes),
        aria_label=TITLE,
    )


def _table(rehearsed: Costs) -> Html:
    """Return a row for each rehearsal; columns that no row has a value for are left out."""
    by_spec = {c.spec: c for c in rehearsed.costs}
    specs = [*by_spec, *(s for s in rehearsed.run.trace.rehearsals if s not in by_spec)]
    scale, known = _scale(rehearsed), any(c.interval for c in rehearsed.costs)
    columns: list[tuple[Content, bool]] = [
        ("format", True),
        ("forecast", scale is not None),
        (numeric("over this run"), True),
        (numeric(f"{COVERAGE:.0%} interval"), known),
        (numeric("measured"), bool(rehearsed.measured)),
        (numeric("bracket"), True),
        (numeric("never moved"), True),
        (numeric("bytes per weight"), True),
    ]
    rows = [_row(rehearsed, spec, by_spec.get(spec), scale) for spec in specs]
    bar = f"{COVERAGE:.0%} interval, as far as the picture reaches" if known else "lower to upper bound"
    return table(
        [head for head, shown in columns if shown],
        [[cell for cell, (_, shown) in zip(row, columns, strict=True) if shown] for row in rows],
        caption=f"{KEY.format(bar)}{MET if rehearsed.measured else ''}." if scale else None,
    )


def _row(rehearsed: Costs, spec: str, cost: Cost | None, scale: tuple[float, float] | None) -> list[Content]:
    each = bytes_per_weight(spec)
    unknown = number("-")
    head, met = tag("th", spec, scope="row"), None if cost is None else rehearsed.met(cost)
    tail = [number(_never_moved(rehearsed.run, spec)), number("-" if each is None else f"{each:.3g}")]
    if cost is None:
        return [head, tag("td", class_="spark"), *[unknown] * 4, *tail]
    return [
        head,
        tag("td", bracket(cost, met, scale) if scale else None, class_="spark"),
        number(words.gap(cost.gap)),
        number(spread(cost)),
        unknown if met is None else number(words.gap(met - cost.real)),
        number(between(cost)),
        *tail,
    ]


def _never_moved(run: Run, spec: str) -> str:
    forecast = run.trace.forecast(spec)
    if not run.trace.manifest["options"]["never_moved"] or "point" not in forecast.bounds:
        return "-"
    return percent(float(forecast.never_moved()[-1]))


def _scale(rehearsed: Costs) -> tuple[float, float] | None:
    """Return the losses that the brackets of a table are drawn between."""
    seen = [x for c in rehearsed.costs for x in (c.real, c.lower, c.point, c.upper, c.loss, rehearsed.met(c))]
    there = [x for x in seen if x is not None and np.isfinite(x)]
    return (min(there), max(there)) if there and max(there) > min(there) else None


def bracket(cost: Cost, met: float | None, scale: tuple[float, float], width: int = 180) -> Html:
    """Return a forecast with its interval, or its bounds where none is known, as a picture of one line."""
    height, low, high = 22, *scale

    def at(loss: float) -> float:
        return 6 + (width - 12) * (loss - low) / (high - low)

    def finite(*losses: float | None) -> list[float]:
        return [at(x) for x in losses if x is not None and np.isfinite(x)]

    middle = height / 2
    known = None if cost.interval is None else [cost.real + end for end in cost.interval]
    ends = finite(cost.lower, cost.upper) if known is None else finite(*np.clip(known, low, high))
    parts = [tag("line", x1=f"{at(cost.real):.1f}", x2=f"{at(cost.real):.1f}", y1=0, y2=height, class_="own")]
    if len(ends) == 2:
        parts.append(
            tag("line", x1=f"{min(ends):.1f}", x2=f"{max(ends):.1f}", y1=middle, y2=middle, class_="span")
        )
    for x in finite(cost.loss):
        dot = f"M{x - 4.5:.1f} {middle}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0"
        parts.append(tag("path", d=dot, class_="dot"))
    for x in finite(met):
        parts.append(tag("path", d=f"M{x:.1f} {middle - 6}l6 6l-6 6l-6 -6Z", class_="met"))
    said = f"forecast {nats(cost.loss)}, over this run {spread(cost)}, bracket {between(cost)}" + (
        "" if met is None else f", measured {nats(met)}"
    )
    return picture(said, width, height, parts, class_="bracket")
