"""``pilot-forecast``: does a little real running say, in nats, what a number format would cost?

The study before it, `loss-forecast`, asked it of one float32 run alone, and had the order and the bounds
right, not the size. Here a forecast may pay: twins on a part of every batch, forks for a part of the run, and
an interval that says how far it can be off. *Everything that could be paid for* is run first, and what each
budget buys of it is decided by the rule of :class:`halfulp.pilots.pilot.Pilot` and sealed. Then every format
is run in earnest.

A *cell* is a unit (one training) and a format; formats carry policies. Budgets are extra compute per format,
as a share of the run; those runs that all formats need (the small-batch reference) are shared. Intervals are
those that the library ships, calibrated on runs of other seeds (``benchmarks/pilots.py``). Rules are about
cells that really cost more than 0.1 nats. The rule of `loss-forecast`, k = 30 x peak rate, is reported
beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from halfulp.drawing import COLOURS, GREY, new_figure
from halfulp.paper.arms.arm import BYTES, PLAYS, Arm
from halfulp.paper.arms.family import SMOKE_GPT2, at
from halfulp.paper.studies._pilot_runs import (
    ESTIMATORS,
    classifier,
    decoder,
    forecast,
    ladder,
    loss,
    outcome,
    pilot,
)  # fmt: skip
from halfulp.paper.studies.declared import declared, gate, rule
from halfulp.paper.tokens import files_of
from halfulp.study.protocol import Cell, Config, Estimand, Records, Stage, Table, Values

Json = Any
FORMATS = ("e4m3@128", "e5m2", "bf16", "int8/row", "mxfp4", "e5m2:sr", "e4m3@128:eco")
BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.4)
JUDGED = "0.1"
"""The budget that the gates are about."""
MATERIAL, NEAR, COVERED = 0.1, 0.3, 0.9

SMALL = {
    "gpt2-low": decoder("gpt2", peak=4e-4, updates=300, batch=12, seed=73001),
    "gpt2-high": decoder("gpt2", peak=3.6e-3, updates=300, batch=12, seed=73002),
    "gpt2-lion": decoder("gpt2", peak=4e-4, updates=300, batch=16, seed=73003, optimizer="lion"),
    "modern-low": decoder("modern", peak=8e-4, updates=300, batch=32, seed=73004),
    "modern-corner": decoder("modern", peak=3e-3, updates=400, batch=16, seed=73005),
    "neox-middle": decoder("neox", peak=1.8e-3, updates=600, batch=12, seed=73006),
    "neox-sgd": decoder("neox", peak=3e-1, updates=300, batch=16, seed=73007, optimizer="sgd"),
    "classifier-middle": classifier(peak=1e-3, updates=300, batch=64, seed=73008),
    "classifier-high": classifier(peak=3.6e-3, updates=600, batch=32, seed=73009),
}
"""Sized for about 25 minutes of one quiet core."""
PAPER = SMALL | {
    "gpt2-long": decoder("gpt2", peak=1.8e-3, updates=3000, batch=24, seed=73010),
    "modern-long": decoder("modern", peak=9e-4, updates=3000, batch=48, seed=73011),
    "modern-wide": decoder("modern", peak=3.6e-3, updates=1000, batch=64, seed=73012),
    "neox-long": decoder("neox", peak=3e-3, updates=3000, batch=12, seed=73013),
    "neox-low": decoder("neox", peak=4e-4, updates=1000, batch=24, seed=73014),
    "gpt2-lion-long": decoder("gpt2", peak=6e-4, updates=1000, batch=24, seed=73015, optimizer="lion"),
    "modern-sgd-long": decoder("modern", peak=1e-1, updates=1000, batch=24, seed=73016, optimizer="sgd"),
    "classifier-long": classifier(peak=5e-4, updates=3000, batch=48, seed=73017),
}


def _smoke(seed: int) -> dict[str, Json]:
    arm = replace(at(SMOKE_GPT2, updates=4, warmup=1, eval_every=4), seed=seed)
    return {"arm": Arm.to_json(arm), "optimizer": "adamw"}


SMOKE = {"lm": _smoke(73101), "nn": classifier(peak=1e-3, updates=6, batch=12, seed=73102)}
FORKS = {"0.4": ["lower", "point", "upper"], "0.2": ["point"], "0.1": ["point"]}


def _config(units: dict[str, dict[str, Json]]) -> Config:
    """Return the units with the formats, forks and twins of each.

    Lion's step has no moment that eco could write into. Twins take as many sequences as a pilot would that
    may spend up to the judged budget.
    """
    configs = {}
    for name, unit in units.items():
        formats = [f for f in FORMATS if unit.get("optimizer") != "lion" or "eco" not in f]
        unit = {**unit, "forks": FORKS, "formats": formats}
        plans = [ladder(unit, b).part for b in BUDGETS if b <= float(JUDGED)]
        configs[name] = {**unit, "parts": sorted({1, *(p for p in plans if p is not None)})}
    return configs


CONFIGS = {"smoke": _config(SMOKE), "small": _config(SMALL), "paper": _config(PAPER)}


# ---- stages -----------------------------------------------------------------------------------------------


def pilots(config: Config) -> Iterator[Cell]:
    """Yield the cells of everything that could be paid for, one per unit."""
    for name, unit in config.items():
        yield Cell(name=name, config=unit)


def forecasts(config: Config) -> Iterator[Cell]:
    """Yield the cells that forecast what every budget buys, one per unit."""
    for name, unit in config.items():
        yield Cell(name=name, config={**unit, "unit": name, "budgets": list(BUDGETS)})


def outcomes(config: Config) -> Iterator[Cell]:
    """Yield the cells that really run every format."""
    for name, unit in config.items():
        for place, spec in enumerate(unit["formats"]):
            yield Cell(name=f"{name}-{place}", config={**unit, "formats": [spec], "unit": name})


# ---- estimands --------------------------------------------------------------------------------------------


def cells(records: Records) -> dict[str, tuple[str, str, float]]:
    """Unit, format and measured gap of every cell."""
    by_cell = {}
    for name, entry in records["forecast"].items():
        for place, spec in enumerate(spec for spec in FORMATS if spec in entry["old"]):  # as in outcomes()
            measured = loss(records["outcome"][f"{name}-{place}"]["loss"]) - entry["reference"]
            by_cell[f"{name} {spec}"] = (name, spec, measured)
    return by_cell


def material(records: Records) -> dict[str, tuple[str, str, float]]:
    """Return the cells whose format costs more than 0.1 nats."""
    return {cell: how for cell, how in cells(records).items() if how[2] > MATERIAL}


def _forecast(records: Records, unit: str, spec: str, budget: str) -> float | None:
    entry = records["forecast"][unit]
    gap: float | None = entry["old"][spec] if budget == "old" else entry["budgets"][budget][spec]["gap"]
    return gap


def gap(records: Records) -> Values:
    """Measured gap to float32, nats, by cell."""
    return {cell: measured for cell, (_, _, measured) in cells(records).items()}


def error(records: Records, budget: str) -> Values:
    """Distance of forecast over measured gap from one, where the format costs something."""
    errors: dict[str, float | None] = {}
    for cell, (unit, spec, measured) in material(records).items():
        entry = _forecast(records, unit, spec, budget)
        errors[cell] = None if entry is None else abs(entry / measured - 1.0)
    return errors


def median(records: Records, budget: str) -> Values:
    """The median of these errors."""
    return {"median": _over(error(records, budget), statistics.median)}


def near(records: Records, budget: str) -> Values:
    """The share of these cells that are within 30%."""
    return {"share": _over(error(records, budget), lambda each: sum(x <= NEAR for x in each) / len(each))}


def _over(values: Values, of: Any) -> float | None:
    there = [x for x in values.values() if x is not None]
    return float(of(there)) if there and len(there) == len(values) else None


def misordered(records: Records, budget: str) -> Values:
    """Pairs of formats in the wrong order, by unit: pairs that are more than 0.1 nats apart."""
    shares = {}
    for name, entry in records["forecast"].items():
        here = [(s, m) for n, s, m in cells(records).values() if n == name]
        wrong = 0
        for (a, x), (b, y) in combinations(here, 2):
            p, q = (_forecast(records, name, s, budget) for s in (a, b))
            if abs(x - y) > MATERIAL and (p is None or q is None or (p - q) * (x - y) <= 0):
                wrong += 1
        shares[name] = float(wrong) if entry else None
    return shares


def covered(records: Records, budget: str) -> Values:
    """The share of all cells whose interval holds what was measured."""
    inside = []
    for unit, spec, measured in cells(records).values():
        entry = records["forecast"][unit]["budgets"][budget][spec]
        low, high = entry["low"], entry["high"]
        inside.append(low is not None and low <= measured and (high is None or measured <= high))
    return {"share": sum(inside) / len(inside) if inside else None}


def trusted(records: Records, budget: str) -> Values:
    """The error of cells that were paid for and that the guard trusts."""
    each = error(records, budget)
    by_cell = {}
    for cell, (unit, spec, _) in material(records).items():
        if records["forecast"][unit]["budgets"][budget][spec]["trusted"]:
            by_cell[cell] = each[cell]
    return by_cell


# ---- pictures -----------------------------------------------------------------------------------------


def cells_table(records: Records) -> Table:
    """Tabulate every cell: measured, forecast for every budget, and forecast by the former rule."""
    rows = []
    for unit, spec, measured in cells(records).values():
        each = [records["forecast"][unit]["budgets"][f"{b:g}"][spec] for b in BUDGETS]
        one = records["forecast"][unit]["budgets"][JUDGED][spec]
        old = _forecast(records, unit, spec, "old")
        rows.append(
            (unit, spec, measured, old, *(e["gap"] for e in each), one["low"], one["high"], one["kind"])
        )
    return Table(
        columns=("unit", "format", "measured", "30 x peak", *(f"{b:.0%}" for b in BUDGETS), "low", "high",
                 "by"),
        rows=rows,
        caption="Gaps to fp32 in nats: measured, forecast by the rule before, and by what each budget per "
        f"format buys; the 90% interval and the estimator at {float(JUDGED):.0%}.",
    )  # fmt: skip


def budgets_table(records: Records) -> Table:
    """Tabulate for every budget how near its forecasts are, and how well their bounds cover."""
    rows = []
    for budget in ("old", *(f"{b:g}" for b in BUDGETS)):
        share = None if budget == "old" else covered(records, budget)["share"]
        wrong = sum(x or 0.0 for x in misordered(records, budget).values())
        rows.append((budget, median(records, budget)["median"], near(records, budget)["share"], share, wrong))
    return Table(
        columns=("budget", "median error", "within 30%", "covered", "misordered"), rows=rows,
        caption="Cells above 0.1 nats; coverage and order over all cells. old: k = 30 x peak rate, unpaid.",
    )  # fmt: skip


def estimators_table(records: Records) -> Table:
    """Tabulate for every estimator how near it is on all cells that it can speak of, the guard apart."""
    rows = []
    for kind in ESTIMATORS:
        ratios = []
        for unit, spec, measured in material(records).values():
            entry = records["forecast"][unit]["estimators"][spec].get(kind)
            ratios += [] if entry is None else [entry / measured]
        errors = [abs(x - 1.0) for x in ratios]
        near_ones = sum(x <= NEAR for x in errors) / len(errors) if errors else None
        rows.append(
            (kind, len(errors), statistics.median(errors) if errors else None, near_ones,
             min(ratios, default=None), max(ratios, default=None))
        )  # fmt: skip
    return Table(
        columns=("estimator", "cells", "median error", "within 30%", "least", "most"), rows=rows,
        caption="Every estimator by itself, cells above 0.1 nats; least and most: forecast over measured. "
        "Twins are on one sequence of every batch.",
    )  # fmt: skip


def against_measured(records: Records) -> Any:
    """Forecast with its interval against measured gap, a cell a point; on the line they agree."""
    figure, (panel,) = new_figure(1, 1, height=4.2)
    for unit, spec, measured in material(records).values():
        entry = records["forecast"][unit]["budgets"][JUDGED][spec]
        if entry["gap"] is None or entry["high"] is None:
            continue
        colour = COLOURS[0] if entry["trusted"] else COLOURS[1]
        panel.plot(
            [measured] * 2, [max(entry["low"], 1e-3), entry["high"]], color=colour, linewidth=1, alpha=0.6
        )
        panel.plot([measured], [max(entry["gap"], 1e-3)], "o", color=colour)
    panel.plot([0.05, 5.0], [0.05, 5.0], color=GREY, linewidth=0.8)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("measured gap to fp32, nats")
    panel.set_ylabel(f"forecast at {float(JUDGED):.0%} per format, with 90% intervals")
    return figure


# ---- the study ----------------------------------------------------------------------------------------

STUDY = declared(
    __name__,
    scales=CONFIGS,
    stages=(
        Stage(name="pilot", kind="reference", cells=pilots, run=pilot),
        Stage(name="forecast", kind="prediction", cells=forecasts, run=forecast, reads=("pilot",)),
        Stage(name="outcome", kind="outcome", cells=outcomes, run=outcome),
    ),
    estimands=(
        Estimand(name="gap", what="measured gap to fp32, nats", compute=gap),
        *(
            Estimand(name=f"{name}-{b}", what=f"{what}, {b}", compute=partial(compute, budget=b))
            for b in ("old", *(f"{b:g}" for b in BUDGETS))
            for name, what, compute in (
                ("error", "distance of forecast over measured gap from one", error),
                ("median", "median of these errors", median),
                ("near", "share of cells within 30%", near),
                ("misordered", "pairs of formats in the wrong order, by unit", misordered),
            )
        ),
        *(
            Estimand(
                name=f"covered-{b:g}", what=f"share of cells inside 90% intervals, {b:g}",
                compute=partial(covered, budget=f"{b:g}"),
            )
            for b in BUDGETS
        ),
        Estimand(
            name="trusted", what="error of the cells that the guard trusts",
            compute=partial(trusted, budget=JUDGED),
        ),
    ),
    scale_data={"smoke": files_of(PLAYS), "small": files_of(BYTES), "paper": files_of(BYTES)},
    tables={"budgets": budgets_table, "estimators": estimators_table, "cells": cells_table},
    figures={"against-measured": against_measured},
    question="Does a little real running say, in nats and with an honest interval, what a format would cost?",
    units="a cell: one training (model, rate, length, batch, optimizer, seed) in one format under one policy",
    not_claimed=(
        "anything about models larger than these, or about fp8 arithmetic: weights alone are in the format",
        "that intervals cover where runs are unlike those that calibrated them",
        "that budgets in sequences are budgets in seconds",
        "that runs longer than 600 updates behave like these: the scale `paper` has them",
    ),
    gates=(
        gate("order", f"misordered-{JUDGED} == 0"),
        gate("median", f"median-{JUDGED} <= 0.1"),
        gate("near", f"near-{JUDGED} >= 0.9", "over all cells, the hard corner included"),
        gate("covers", f"covered-{JUDGED} >= 0.85"),
        gate("not-idle", f"covered-{JUDGED} <= 0.97", "an interval that always covers says nothing"),
        gate("guard", "trusted <= 0.3"),
    ),
    rules=(
        rule("pilots know the loss: order, size, intervals, guard", "order", "median", "near", "covers",
            "not-idle", "guard"),
        rule("pilots know order and size; intervals or guard fail", "order", "median", "near"),
        rule("pilots know order, with intervals that cover", "order", "covers"),
        rule("pilots know the order only", "order"),
        rule("pilots do not know the loss"),
    ),
)  # fmt: skip
