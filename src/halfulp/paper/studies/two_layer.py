"""Does a high-precision reference say when a network's updates freeze? The paper's principal grid.

A tanh student learns from a tanh teacher (:mod:`halfulp.paper.models.teacher`), all weights and biases
trained by whole-batch steps. Every (rate, seed) has one fp64 reference, which forecasts the first majority
crossing on every grid before any run on a grid exists; then each grid is run. Four systems: descent with
squared loss (72 cells: six precisions, three rates, four seeds), Adam, cross-entropy, and three layers with
cross-entropy.

A reference need not be fp64: stage ``recomputed`` repeats those of the principal system in float32 arithmetic
and with weights rounded to 16 mantissa bits, and asks for the same forecast steps. A reference of 16 bits
itself freezes near the grids that it is nearest to, and a frozen fraction that lingers at one half crosses it
many times; so the comparison is *clean* where the grid has at least four bits less and the fp64 reference
crosses one half once, after step 1.

Start and teacher are what study `testbed` chose. Left open by the paper and chosen here, on references:
rates, mantissas, seeds and steps. Of rates 0.05, 0.1 and 0.2 and mantissas 1 to 13, the six odd ones up to 11
come nearest to what the paper prints of its grid (forecast crossings from 11 to 4575, 55 of 72 cells after
step 1, pooled rho 0.74 there): references forecast 7 to 3665, 56 of 72, and 0.75.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from halfulp.paper.models.mlp import Series, Trainer, run
from halfulp.paper.models.teacher import CHOSEN, Problem, Testbed, classification, teacher_student
from halfulp.paper.studies import _timing as timing
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import OURS, declared, gate, rule
from halfulp.paper.values import grouped, quotient
from halfulp.study.protocol import Cell, Config, Estimand, Json, Records, Running, Stage, Values

PRINCIPAL = "gd-squared"
COARSE_REFERENCE = 16
PRECISIONS = ["fp32", f"m{COARSE_REFERENCE}"]
CLEAN_BITS = 4


KEYS = ("testbed", "loss", "optimizer", "hidden", "examples", "steps", "mantissas")


def _references(config: Config) -> Iterator[Cell]:
    for system, c in config["systems"].items():
        yield from timing.each_rate_and_seed({**c, "system": system}, ("system", *KEYS), f"{system}.")


def reference_cells(config: Config) -> Iterator[Cell]:
    """Yield the references in double precision."""
    return (replace(cell, config={**cell.config, "precision": "fp64"}) for cell in _references(config))


def recomputed_cells(config: Config) -> Iterator[Cell]:
    """Yield the principal references in each other precision."""
    for cell in _references(config):
        if cell.config["system"] == PRINCIPAL:
            for precision in config["precisions"]:
                c = {**cell.config, "precision": precision}
                yield Cell(name=f"{cell.name}.{precision}", config=c)


def problem(c: Config) -> Problem:
    """Return the testbed of a cell."""
    testbed, n = Testbed.of(c["testbed"]), c["examples"]
    if c["loss"] == "squared":
        (width,) = c["hidden"]
        return teacher_student(c["seed"], width=width, examples=n, tests=n, testbed=testbed)
    return classification(c["seed"], hidden=tuple(c["hidden"]), examples=n, tests=n, testbed=testbed)


def _train(cell: Running, **how: Any) -> tuple[Series, dict[str, Json]]:
    """Run the testbed of a cell, and return the run with what every record says of it."""
    c, p = cell.config, problem(cell.config)
    precision = c.get("precision", "fp64")
    if precision.startswith("m"):
        how["store"] = precision
    start = p.start.astype(np.float32 if precision == "fp32" else np.float64)
    trainer = Trainer(p.net, p.train, start, rate=p.factor * c["rate"], optimizer=c["optimizer"], **how)
    series = run(trainer, c["steps"], cell)
    kept = {key: c[key] for key in ("system", "rate", "seed")}
    return series, {
        **kept, "diverged": trainer.diverged, "loss": [float(series.loss[0]), float(series.loss[-1])],
    }  # fmt: skip


# ---- the precision of the reference ---------------------------------------------------------------------


def clean_comparisons(records: Records, precisions: Sequence[str] = PRECISIONS) -> dict[str, bool]:
    """Return, by clean cell, True if fp64 and these reference precisions forecast the same step."""
    by_cell = {}
    for name, r in records["reference"].items():
        if r["system"] != PRINCIPAL:
            continue
        others = [o for o in (records["recomputed"].get(f"{name}.{p}") for p in precisions) if o]
        for grid, forecast in r["predicted"].items():
            said = forecast["symmetric"]
            once = said["category"] == "later" and said["first"] == said["persistent"]
            if once and int(grid[1:]) <= COARSE_REFERENCE - CLEAN_BITS:
                steps = {each["predicted"][grid]["symmetric"]["first"] for each in (r, *others)}
                by_cell[f"{name}.{grid}"] = len(steps) == 1
    return by_cell


def same_prediction(records: Records) -> Values:
    """Share of clean cells that every reference precision forecasts at the same step."""
    same = clean_comparisons(records)
    return {"study": quotient(sum(same.values()), len(same))}


def measured_span(records: Records) -> Values:
    """Latest over earliest measured crossing, principal system."""
    return {"study": timing.summaries(records, "symmetric")[PRINCIPAL].span}


# ---- the study ------------------------------------------------------------------------------------------

_ALL = {"testbed": CHOSEN.json(), "examples": 512, "seeds": [0, 1, 2, 3]}
PAPER_SYSTEMS: dict[str, Json] = {
    "gd-squared": {**_ALL, "loss": "squared", "optimizer": "gd", "hidden": [64], "steps": 6000,
                   "rates": [0.05, 0.1, 0.2], "mantissas": [1, 3, 5, 7, 9, 11]},
    "adam-squared": {**_ALL, "loss": "squared", "optimizer": "adam", "hidden": [64], "steps": 6000,
                     "rates": [0.0003, 0.001, 0.003], "mantissas": [6, 7, 8, 9, 10, 11]},
    "gd-cross-entropy": {**_ALL, "loss": "cross-entropy", "optimizer": "gd", "hidden": [64], "steps": 3000,
                         "rates": [0.1, 0.2, 0.4], "mantissas": [6, 7, 8, 9, 10, 11]},
    "three-layer": {**_ALL, "loss": "cross-entropy", "optimizer": "gd", "hidden": [32, 32], "steps": 3000,
                    "seeds": [0, 1], "rates": [0.1, 0.2, 0.4], "mantissas": [6, 7, 8, 9, 10, 11]},
}  # fmt: skip
_SMOKE = {"examples": 64, "seeds": [0], "steps": 120}
SMOKE_SYSTEMS: dict[str, Json] = {
    "gd-squared": {**PAPER_SYSTEMS["gd-squared"], **_SMOKE, "hidden": [8], "rates": [0.1],
                   "mantissas": [6, 8, 10]},
    "three-layer": {**PAPER_SYSTEMS["three-layer"], **_SMOKE, "hidden": [8, 8], "rates": [0.4],
                    "mantissas": [6, 8]},
}  # fmt: skip

TIMED = timing.Timed(system=PRINCIPAL, cells=_references, train=_train)
ESTIMANDS = tuple(map(Estimand.of, (measured_span, same_prediction)))

STUDY = declared(
    __name__, own=ESTIMANDS,
    scales={
        "smoke": {"systems": SMOKE_SYSTEMS, "precisions": [f"m{COARSE_REFERENCE}"]},
        "small": {"systems": {name: {**c, "seeds": c["seeds"][:1]} for name, c in PAPER_SYSTEMS.items()},
                  "precisions": PRECISIONS},
        "paper": {"systems": PAPER_SYSTEMS, "precisions": PRECISIONS},
    },
    stages=(
        Stage(name="reference", kind="prediction", cells=reference_cells, run=TIMED.reference),
        Stage(name="recomputed", kind="prediction", cells=recomputed_cells, run=TIMED.reference),
        Stage(name="measured", kind="outcome", cells=TIMED.measured_cells, run=TIMED.measure),
    ),
    estimands=timing.ESTIMANDS,
    tables={"timing": timing.table},
    figures={"timing": timing.figure},
    question="Does a high-precision reference forecast when the majority of a network's updates freeze?",
    units="one precision, rate and seed; cells that share a reference are paired coverage tests",
    not_claimed=(
        "that cells which share a reference are independent",
        "that a forecast crossing says anything about the loss",
        "that the reference's path stays near the path on the grid",
    ),
    gates=(
        *timing.GATES,
        gate("wide-range", "measured-span >= 100",
            f"a ratio near one means little unless times differ widely: two decades; {OURS}"),
        gate("any-reference", "same-prediction == 1", "the paper has identical steps in all 25 clean cells"),
    ),
    rules=(
        rule("onset is predicted, over a wide range of times, from any reference precision", *timing.PASSED,
            "wide-range", "any-reference"),
        rule("onset is predicted over a wide range of times", "median-near-one.symmetric",
            "most-within.symmetric", "categories-agree.symmetric", "wide-range"),
        rule("median onset is predicted", "median-near-one.symmetric"),
        rule("onset is not predicted"),
    ),
)  # fmt: skip


# ---- beside the paper -----------------------------------------------------------------------------------


def lone_seed(records: Records) -> str | None:
    """Of seeds that differ in nothing else, the one that crosses earliest by the largest factor."""
    alike = grouped(
        ((cell["grid"], cell["rate"]), (cell["crossing"]["first"], cell["seed"], cell["reference"]))
        for cell in records["measured"].values()
        if cell["system"] == PRINCIPAL and cell["crossing"]["category"] == "later"
    )
    several = {key: sorted(cells) for key, cells in alike.items() if len(cells) > 1}
    if not several:
        return None
    key = max(several, key=lambda k: several[k][1][0] / several[k][0][0])
    (first, seed, name), *others = several[key]
    forecast = records["reference"][name]["predicted"][key[0]]["symmetric"]["first"]
    return (
        f"seed {seed} at {first} (forecast {forecast}), the others at "
        f"{', '.join(str(step) for step, *_ in others)} ({key[0]}, rate {key[1]})"
    )


def also(records: Records) -> dict[str, float | str | None]:
    """Return what the paper prints beside the estimands."""
    same, single = (clean_comparisons(records, which) for which in (PRECISIONS, ["fp32"]))
    fp32 = f"fp64 and fp32 alone: {sum(single.values())} of {len(single)}"
    return {
        "crossed": len(timing.locations(records)[PRINCIPAL]),
        "lone seed": lone_seed(records),
        "same steps": f"{sum(same.values())} of {len(same)} ({fp32})",
    }


_NOTE_CLEAN = (
    "'Clean' is not defined in the paper; here: the grid has at least four bits less than 16, and the fp64 "
    "reference crosses one half once, after step 1."
)
row = Beside(STUDY, "tab:transfer-app")
CLAIMS = (
    *timing.transferred(row, "gd-squared", "two-layer, GD, squared loss", 55, 1.0, "94.5%", note=timing.OPEN),
    row("two-layer cells", 72, timing.shown("gd-squared", "symmetric", "cells"), source="section 3"),
    row("categories that differ, of all two-layer cells", 4,
        timing.shown("gd-squared", "symmetric", "disagreements"), source="section 3", note=timing.OPEN),
    row("earliest and latest measured crossing", "11 to 4222",
        timing.shown("gd-squared", "symmetric", "measured_range"), source="section 3", note=timing.OPEN),
    row("earliest and latest forecast crossing", "11 to 4575",
        timing.shown("gd-squared", "symmetric", "forecast_range"), source="section 3", note=timing.OPEN),
    row("latest over earliest measured crossing", 384, timing.shown("gd-squared", "symmetric", "span"),
        source="section 3", note=timing.OPEN),
    row("mean ratio", 1.019, timing.shown("gd-squared", "symmetric", "mean_ratio"), source="app:predictor"),
    row("cells with a measured crossing after step 1", 58, also, "crossed", source="fig:controlled",
        note=timing.OPEN),
    row("pooled rho at the crossing, two-layer, median", 0.74, "rho-at-crossing", "gd-squared",
        source="app:arithmetic", note=timing.POOLED),
    row("a seed that freezes long before its siblings", "at 61 (forecast 61), siblings near 1800", also,
        "lone seed", source="app:predictor", note=timing.OPEN),
    row("clean cells in which fp64, fp32 and 16-bit references forecast the same step", "25 of 25", also,
        "same steps", source="app:predictor", note=_NOTE_CLEAN),
    *timing.transferred(row, "adam-squared", "two-layer, Adam, squared loss", 60, 1.0, "90.0%",
        note=timing.OPEN),
    *timing.transferred(row, "gd-cross-entropy", "two-layer, GD, cross-entropy", 64, 1.016, "92.2%",
        note=timing.OPEN),
    *timing.transferred(row, "three-layer", "three-layer, GD, cross-entropy", 25, 0.999, "96.0%",
        note=timing.OPEN),
)  # fmt: skip
