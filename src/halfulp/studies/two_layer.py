"""Does a high-precision reference say when a network's updates freeze? The paper's principal grid.

A tanh student learns from a tanh teacher (:mod:`halfulp.models.teacher`), all weights and biases trained by
whole-batch steps. Every (rate, seed) has one fp64 reference, which predicts the first majority crossing on
every grid before any run on a grid exists; then each grid is run. Four systems: descent with squared loss
(72 cells: six precisions, three rates, four seeds), Adam, cross-entropy, and three layers with cross-entropy.

A reference need not be fp64: stage ``recomputed`` repeats those of the principal system in float32 arithmetic
and with weights rounded to 16 mantissa bits, and asks for the same predicted steps. A reference of 16 bits
itself freezes near the grids that it is nearest to, and a frozen fraction that lingers at one half crosses it
many times; so the comparison is *clean* where the grid has at least four bits less and the fp64 reference
crosses one half once, after step 1.

Start and teacher are what study `testbed` chose. Left open by the paper and chosen here, on references:
rates, mantissas, seeds and steps. Of rates 0.05, 0.1 and 0.2 and mantissas 1 to 13, the six odd ones up to 11
come nearest to what the paper prints of its grid (predicted crossings from 11 to 4575, 55 of 72 cells after
step 1, pooled rho 0.74 there): references predict 7 to 3665, 56 of 72, and 0.75.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from halfulp.models.mlp import Trainer, run
from halfulp.models.teacher import CHOSEN, Problem, Testbed, classification, teacher_student
from halfulp.studies import _timing as timing
from halfulp.studies.claims import Claim
from halfulp.study.protocol import (
    Cell,
    Config,
    Estimand,
    Gate,
    Json,
    Records,
    Rule,
    Running,
    Stage,
    Study,
    Values,
)

PRINCIPAL = "gd-squared"
COARSE_REFERENCE = 16
PRECISIONS = ["fp32", f"m{COARSE_REFERENCE}"]
CLEAN_BITS = 4


def _references(config: Config) -> Iterator[tuple[str, Config]]:
    for system, c in config["systems"].items():
        for rate in c["rates"]:
            for seed in c["seeds"]:
                keys = ("testbed", "loss", "optimizer", "hidden", "examples", "steps")
                shared = {key: c[key] for key in keys}
                yield f"{system}.rate={rate}.seed={seed}", {
                    "system": system, **shared, "rate": rate, "seed": seed, "mantissas": c["mantissas"],
                }  # fmt: skip


def reference_cells(config: Config) -> Iterator[Cell]:
    for name, c in _references(config):
        yield Cell(name=name, config={**c, "precision": "fp64"})


def recomputed_cells(config: Config) -> Iterator[Cell]:
    for name, c in _references(config):
        if c["system"] == PRINCIPAL:
            for precision in config["precisions"]:
                yield Cell(name=f"{name}.{precision}", config={**c, "precision": precision})


def measured_cells(config: Config) -> Iterator[Cell]:
    for name, c in _references(config):
        for m in c["mantissas"]:
            yield Cell(name=f"{name}.m{m}", config={**c, "reference": name, "grid": f"m{m}"})


def problem(c: Config) -> Problem:
    """The testbed of a cell."""
    testbed, n = Testbed.of(c["testbed"]), c["examples"]
    if c["loss"] == "squared":
        (width,) = c["hidden"]
        return teacher_student(c["seed"], width=width, examples=n, tests=n, testbed=testbed)
    return classification(c["seed"], hidden=tuple(c["hidden"]), examples=n, tests=n, testbed=testbed)


def reference(cell: Running) -> Mapping[str, Json]:
    """The predicted crossings of every grid."""
    c = cell.config
    p, grids = problem(c), [f"m{m}" for m in c["mantissas"]]
    trainer = Trainer(
        p.net, p.train, p.start.astype(np.float32 if c["precision"] == "fp32" else np.float64),
        rate=p.factor * c["rate"], optimizer=c["optimizer"], audit=grids,
        store=f"m{COARSE_REFERENCE}" if c["precision"].startswith("m") else None,
    )  # fmt: skip
    series = run(trainer, c["steps"], cell)
    return {
        "system": c["system"], "rate": c["rate"], "seed": c["seed"], "diverged": trainer.diverged,
        "loss": [float(series.loss[0]), float(series.loss[-1])],
        "predicted": timing.forecast(grids, series.counts, series.size),
    }  # fmt: skip


def measure(cell: Running) -> Mapping[str, Json]:
    """The crossing of one run on a grid."""
    c = cell.config
    p = problem(c)
    trainer = Trainer(
        p.net, p.train, p.start, rate=p.factor * c["rate"], optimizer=c["optimizer"], store=c["grid"]
    )
    series = run(trainer, c["steps"], cell)
    return {
        "system": c["system"], "rate": c["rate"], "seed": c["seed"], "reference": c["reference"],
        "diverged": trainer.diverged, "loss": [float(series.loss[0]), float(series.loss[-1])],
        **timing.measured(c["grid"], series.frozen, series.squares, series.size),
    }  # fmt: skip


# ---- the precision of the reference ---------------------------------------------------------------------


def clean_comparisons(records: Records, precisions: Sequence[str] = PRECISIONS) -> dict[str, bool]:
    """Whether fp64 and these reference precisions predict the same step, by clean cell."""
    found = {}
    for name, r in records["reference"].items():
        if r["system"] != PRINCIPAL:
            continue
        others = [o for o in (records["recomputed"].get(f"{name}.{p}") for p in precisions) if o]
        for grid, predicted in r["predicted"].items():
            said = predicted["symmetric"]
            once = said["category"] == "later" and said["first"] == said["persistent"]
            if once and int(grid[1:]) <= COARSE_REFERENCE - CLEAN_BITS:
                steps = {each["predicted"][grid]["symmetric"]["first"] for each in (r, *others)}
                found[f"{name}.{grid}"] = len(steps) == 1
    return found


def same_prediction(records: Records) -> Values:
    found = clean_comparisons(records)
    return {"study": sum(found.values()) / len(found) if found else None}


def measured_span(records: Records) -> Values:
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

STUDY = Study(
    name="two-layer",
    question="Does a high-precision reference predict when the majority of a network's updates freeze?",
    units="one precision, rate and seed; cells that share a reference are paired coverage tests",
    not_claimed=(
        "that cells which share a reference are independent",
        "that a predicted crossing says anything about the loss",
        "that the reference's path stays near the path on the grid",
    ),
    scales={
        "smoke": {"systems": SMOKE_SYSTEMS, "precisions": [f"m{COARSE_REFERENCE}"]},
        "small": {"systems": {name: {**c, "seeds": c["seeds"][:1]} for name, c in PAPER_SYSTEMS.items()},
                  "precisions": PRECISIONS},
        "paper": {"systems": PAPER_SYSTEMS, "precisions": PRECISIONS},
    },
    stages=(
        Stage(name="reference", kind="prediction", cells=reference_cells, run=reference),
        Stage(name="recomputed", kind="prediction", cells=recomputed_cells, run=reference),
        Stage(name="measured", kind="outcome", cells=measured_cells, run=measure),
    ),
    estimands=(
        *timing.ESTIMANDS,
        Estimand(name="measured-span", what="latest over earliest measured crossing, principal system",
                 compute=measured_span),
        Estimand(name="same-prediction", what="share of clean cells that every reference precision predicts "
                 "at the same step", compute=same_prediction),
    ),
    gates=(
        *timing.gates(),
        Gate(name="wide-range", estimand="measured-span", scope="all", comparison=">=", threshold=100,
             why="a ratio near one means little unless times differ widely: two decades at least"),
        Gate(name="any-reference", estimand="same-prediction", scope="all", comparison="==", threshold=1,
             why="the paper has identical steps in all 25 clean cells"),
    ),
    rules=(
        Rule(label="onset is predicted, over a wide range of times, from any reference precision",
             passed=(*(gate.name for gate in timing.gates()), "wide-range", "any-reference")),
        Rule(label="onset is predicted over a wide range of times",
             passed=("median-near-one.symmetric", "most-within.symmetric", "categories-agree.symmetric",
                     "wide-range")),
        Rule(label="median onset is predicted", passed=("median-near-one.symmetric",)),
        Rule(label="onset is not predicted"),
    ),
    tables={"timing": timing.table},
    figures={"timing": timing.figure},
)  # fmt: skip


# ---- beside the paper -----------------------------------------------------------------------------------


def lone_seed(records: Records) -> str | None:
    """Of seeds that differ in nothing else, the one that crosses earliest by the largest factor."""
    alike: dict[tuple[str, float], list[tuple[int, int, str]]] = {}
    for cell in records["measured"].values():
        if cell["system"] == PRINCIPAL and cell["crossing"]["category"] == "later":
            found = (cell["crossing"]["first"], cell["seed"], cell["reference"])
            alike.setdefault((cell["grid"], cell["rate"]), []).append(found)
    several = {key: sorted(cells) for key, cells in alike.items() if len(cells) > 1}
    if not several:
        return None
    key = max(several, key=lambda k: several[k][1][0] / several[k][0][0])
    (first, seed, name), *others = several[key]
    predicted = records["reference"][name]["predicted"][key[0]]["symmetric"]["first"]
    return (
        f"seed {seed} at {first} (predicted {predicted}), the others at "
        f"{', '.join(str(step) for step, *_ in others)} ({key[0]}, rate {key[1]})"
    )


def _same_steps(records: Records) -> str:
    found, single = (clean_comparisons(records, which) for which in (PRECISIONS, ["fp32"]))
    fp32 = f"fp64 and fp32 alone: {sum(single.values())} of {len(single)}"
    return f"{sum(found.values())} of {len(found)} ({fp32})"


def _principal(quantity: str) -> Callable[[Records], float | str | None]:
    return timing.value(PRINCIPAL, "symmetric", quantity)


PAPER = (
    *timing.transfer_rows(PRINCIPAL, "two-layer, GD, squared loss", 55, 1.000, "94.5%"),
    Claim(claim="two-layer cells", source="section 3", paper=72, ours=_principal("cells")),
    Claim(claim="categories that differ, of all two-layer cells", source="section 3", paper=4,
          ours=_principal("disagreements"), note=timing.OPEN),
    Claim(claim="earliest and latest measured crossing", source="section 3", paper="11 to 4222",
          ours=_principal("measured_range"), note=timing.OPEN),
    Claim(claim="earliest and latest predicted crossing", source="section 3", paper="11 to 4575",
          ours=_principal("predicted_range"), note=timing.OPEN),
    Claim(claim="latest over earliest measured crossing", source="section 3", paper=384,
          ours=_principal("span"), note=timing.OPEN),
    Claim(claim="mean ratio", source="app:predictor", paper=1.019, ours=_principal("mean_ratio")),
    Claim(claim="cells with a measured crossing after step 1", source="fig:controlled", paper=58,
          ours=lambda records: len(timing.locations(records)[PRINCIPAL]), note=timing.OPEN),
    Claim(claim="pooled rho at the crossing, two-layer, median", source="app:arithmetic", paper=0.74,
          ours=lambda records: timing.median_location(records)[PRINCIPAL],
          note=timing.POOLED),
    Claim(claim="a seed that freezes long before its siblings", source="app:predictor",
          paper="at 61 (predicted 61), siblings near 1800", ours=lone_seed, note=timing.OPEN),
    Claim(claim="clean cells in which fp64, fp32 and 16-bit references predict the same step",
          source="app:predictor", paper="25 of 25",
          ours=_same_steps,
          note="'Clean' is not defined in the paper; here: the grid has at least four bits less than 16, "
               "and the fp64 reference crosses one half once, after step 1."),
    *timing.transfer_rows("adam-squared", "two-layer, Adam, squared loss", 60, 1.000, "90.0%"),
    *timing.transfer_rows("gd-cross-entropy", "two-layer, GD, cross-entropy", 64, 1.016, "92.2%"),
    *timing.transfer_rows("three-layer", "three-layer, GD, cross-entropy", 25, 0.999, "96.0%"),
)  # fmt: skip
