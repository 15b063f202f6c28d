"""Find the learning rates that still learn with one to five mantissa bits, and compare them with forecasts.

The effective-mantissa testbed (appendix D): input 8, teacher 8, student 64, 512 training and 512 test
examples, noise 0.1, 3,000 whole-batch steps of fp64 descent. Three base seeds at eight rates and three more
at the four rates of the boundary give 36 references; each of five mantissas makes that 180 cells, each with a
nearest and a stochastic arm (its start projected stochastically too, as in the paper). With E the test
error, an arm has learned

    lambda = (E_0 - E_T) / (E_0 - E_T,fp64)

and the reference-only forecast of a nearest arm puts the reference's own error at update tau, its forecast
persistent majority crossing, in place of E_T, or lambda = 1 where there is none. A rate is *in the window*
of a mantissa when the median over seeds is at least 1/2. The **robust** convention counts a diverged
reference or arm as zero; the **survivor** convention leaves it out. Neither makes a forecast of the final
loss of it: a majority crossing is no stopping time.

What the paper leaves open is chosen by study `testbed` (start, teacher, loss, and the side of update tau on
which the error is taken; both are recorded and shown) and here: base seeds 2021 to 2023, additional ones 2024
to 2026. What has diverged is defined in `models.learning_forecasts`. Test errors are mean squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halfulp.measures.crossings import persistent_majority
from halfulp.paper import panels
from halfulp.paper.models import learning_forecasts as learning
from halfulp.paper.models.learning_forecasts import (
    LEARNED,
    SIDE,
    SIDES,
    arm_learned,
    follow,
    forecasts,
    regression,
)  # fmt: skip
from halfulp.paper.models.mlp import Trainer, run
from halfulp.paper.models.teacher import CHOSEN
from halfulp.paper.studies.claims import Beside, over
from halfulp.paper.studies.declared import declared, gate, rule, scaled
from halfulp.paper.values import finite, grouped
from halfulp.study.protocol import Cell, Config, Estimand, Json, Records, Running, Stage, Table, Values

ARMS = ("nearest", "stochastic")


def reference_cells(config: Config) -> Iterator[Cell]:
    """Base seeds at every rate, the others at the rates of the boundary."""
    c = {key: config[key] for key in ("testbed", "width", "examples", "steps", "mantissas")}
    for rate in config["rates"]:
        for seed in [*config["seeds"], *(config["more_seeds"] if rate in config["boundary_rates"] else [])]:
            yield Cell(name=f"rate={rate}.seed={seed}", config={**c, "rate": rate, "seed": seed})


def arm_cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each reference and mantissa."""
    for cell in reference_cells(config):
        for m in config["mantissas"]:
            c = {key: value for key, value in cell.config.items() if key != "mantissas"}
            yield Cell(name=f"{cell.name}.m{m}", config={**c, "mantissa": m})


def reference(cell: Running) -> Mapping[str, Json]:
    """An fp64 run: its errors, and for each mantissa the forecast crossing and what is learned by then."""
    c = cell.config
    ran = follow(regression(c), c["rate"], c["steps"], cell, audit=[f"m{m}" for m in c["mantissas"]])
    said = {grid: each["directional"] for grid, each in forecasts(ran, c["mantissas"]).items()}
    return {
        "rate": c["rate"], "seed": c["seed"], "diverged": ran.diverged, "slow": ran.slow,
        "steps": len(ran.series), "error": {"start": ran.start, "end": ran.end}, "forecast": said,
    }  # fmt: skip


def arms(cell: Running) -> Mapping[str, Json]:
    """Return the two stored-weight runs of a mantissa, rate and seed."""
    c, p = cell.config, regression(cell.config)
    by_arm: dict[str, Json] = {}
    for arm in c.get("only", ARMS):
        seed = c["seed"] if arm == "stochastic" else None
        how: dict[str, Any] = {"store": f"m{c['mantissa']}", "stochastic": seed}
        trainer = Trainer(p.net, p.train, p.start, rate=p.factor * c["rate"], **how)
        start = trainer.error(p.test)
        series = run(trainer, c["steps"])
        cell.progress(len(by_arm) + 1, len(ARMS))
        error = finite(trainer.error(p.test))
        by_arm[arm] = {
            "diverged": trainer.diverged or error is None or error > start, "error": error,
            "crossing": persistent_majority(series.frozen / series.size),
            "never_moved": int(series.never[-1]) / series.size,
        }  # fmt: skip
    return {"rate": c["rate"], "seed": c["seed"], "mantissa": c["mantissa"], **by_arm}


# ---- learned fractions ----------------------------------------------------------------------------------


def shares(records: Records, arm: str, side: str = SIDE) -> learning.Shares:
    """Learned fractions of every seed by (mantissa, rate), of an arm or of the forecast."""

    def share(r: Mapping[str, Json]) -> float | None:
        reference = records["reference"][f"rate={r['rate']}.seed={r['seed']}"]
        if arm == "forecast":
            said: float | None = reference["forecast"][f"m{r['mantissa']}"][side]
            return said
        return arm_learned(reference, r[arm]["error"], r[arm]["diverged"])

    return learning.gathered((r["mantissa"], r["rate"], share(r)) for r in records["arms"].values())


def medians(records: Records, arm: str, *, robust: bool = True) -> dict[tuple[int, float], float | None]:
    """Return the median over seeds, by mantissa and rate."""
    return learning.medians(shares(records, arm), robust=robust)


def windows(
    records: Records, arm: str, threshold: float = LEARNED, *, robust: bool = True, side: str = SIDE
) -> dict[int, list[float]]:
    """Return the rates in the window of each mantissa."""
    return learning.windows(shares(records, arm, side), threshold, robust=robust)


def diverged(records: Records) -> dict[float, tuple[int, int]]:
    """Diverged references and all of them, by rate."""
    by_rate = grouped((r["rate"], r["diverged"]) for r in records["reference"].values())
    return {rate: (sum(each), len(each)) for rate, each in sorted(by_rate.items())}


# ---- estimands ------------------------------------------------------------------------------------------


def median_learned(records: Records, arm: str) -> Values:
    """Median learned fraction, robust."""
    return {f"m{m}.rate={rate}": value for (m, rate), value in medians(records, arm).items()}


def lowest_rate_ratio(records: Records) -> Values:
    """Lowest rate of a mantissa's window over that of the next larger mantissa; None if one is empty."""
    window = windows(records, "nearest")
    return {
        f"m{m} over m{n}": window[m][0] / window[n][0] if window[m] and window[n] else None
        for m, n in zip(sorted(window), sorted(window)[1:], strict=False)
    }


def compression(records: Records) -> Values:
    """Lowest rate of the smallest mantissa's window over that of the largest."""
    window = windows(records, "nearest")
    low, high = window[min(window)], window[max(window)]
    return {"study": low[0] / high[0] if low and high else None}


def windows_matched(records: Records, threshold: float = LEARNED, side: str = SIDE) -> tuple[int, int]:
    """Mantissas whose forecast window is the measured one, of all."""
    each = (windows(records, arm, threshold, side=side) for arm in ("nearest", "forecast"))
    return learning.matched(*each)


def matches_by_side(records: Records) -> Values:
    """The same, with the reference's error before and after the crossing."""
    counts = {side: windows_matched(records, side=side) for side in SIDES}
    return {side: n / of for side, (n, of) in counts.items()}


def matches(records: Records) -> Values:
    """Share of mantissas whose forecast window is the measured one."""
    return {"study": matches_by_side(records)[SIDE]}


def slow_divergence(records: Records) -> Values:
    """References that ended at or above their start though no weight left its range."""
    return {"study": float(sum(r["slow"] for r in records["reference"].values()))}


def stochastic_at_stable_rates(records: Records) -> Values:
    """Learned fraction under stochastic rounding, wherever no reference diverged."""
    stable = [rate for rate, (bad, _) in diverged(records).items() if bad == 0]
    return {
        f"m{m}.rate={rate}": value
        for (m, rate), value in medians(records, "stochastic").items()
        if rate in stable
    }


# ---- reports --------------------------------------------------------------------------------------------


def _set(rates: Sequence[float]) -> str:
    return "{" + ", ".join(f"{rate:g}" for rate in rates) + "}"


def table(records: Records) -> Table:
    """Measured and forecast windows."""
    names = (("nearest", True), ("forecast", True), ("nearest", False), ("stochastic", True))
    each = [windows(records, arm, robust=robust) for arm, robust in names]
    return Table(
        columns=("mantissa bits", "measured", "forecast", "measured, survivors only", "stochastic"),
        rows=[(str(m), *(_set(by_mantissa[m]) for by_mantissa in each)) for m in sorted(each[0])],
        caption="Rates whose median learned fraction is at least 0.5; a diverged run counts as zero unless "
                "only survivors are said to count.",
    )  # fmt: skip


def figure(records: Records) -> Any:
    """Agreement of the forecast, and the learned fraction of both arms, with diverged references hatched."""
    real, said, stochastic = (medians(records, arm) for arm in ("nearest", "forecast", "stochastic"))
    return panels.phase_diagram(real, said, stochastic, diverged(records), LEARNED)


ESTIMANDS = (
    Estimand.of(median_learned, "learned.nearest", arm="nearest"),
    Estimand.of(median_learned, "learned.stochastic", arm="stochastic"),
    Estimand.of(median_learned, "learned.forecast", arm="forecast"),
    *map(Estimand.of, (lowest_rate_ratio, compression, slow_divergence)),
    Estimand.of(matches, "windows-matched"),
    Estimand.of(matches_by_side, "windows-matched-by-side"),
    Estimand.of(stochastic_at_stable_rates, "stochastic-stable"),
)  # fmt: skip

STUDY = declared(
    __name__, own=ESTIMANDS,
    stages=(
        Stage(name="reference", kind="prediction", cells=reference_cells, run=reference),
        Stage(name="arms", kind="outcome", cells=arm_cells, run=arms),
    ),
    tables={"windows": table},
    figures={"e4": figure},
    question=(
        "At which rates does training still learn when weights have one to five mantissa bits, and does an "
        "fp64 reference know?"
    ),
    units="one seed; mantissas that share its reference are paired coverage tests",
    not_claimed=(
        "a calibrated forecast of the final loss",
        "that a majority crossing stops learning",
        "anything about vendor four-bit formats",
    ),
    gates=(
        gate("never-downward", "lowest-rate-ratio >= 1", "fewer mantissa bits never admit a lower rate"),
        gate("shrinks-upward", "compression > 1",
            "the window of the smallest mantissa starts at a higher rate"),
        gate("stochastic-learns", "stochastic-stable >= 0.5",
            "stochastic rounding meets the criterion at every stable rate"),
        gate("windows-predicted", "windows-matched >= 0.8", "the paper forecasts four of five windows"),
    ),
    rules=(
        rule("windows shrink upward as bits fall, stochastic rounding restores them, references know",
            "never-downward", "shrinks-upward", "stochastic-learns", "windows-predicted"),
        rule("windows shrink upward as bits fall, stochastic rounding restores them", "never-downward",
            "shrinks-upward", "stochastic-learns"),
        rule("windows shrink upward as bits fall", "never-downward", "shrinks-upward"),
        rule("windows do not shrink upward"),
    ),
    scales=scaled(
        {"testbed": CHOSEN.json(), "rates": [0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6],
            "boundary_rates": [0.1, 0.2, 0.4, 0.8], "seeds": [2021, 2022, 2023],
            "more_seeds": [2024, 2025, 2026], "mantissas": [1, 2, 3, 4, 5], "width": 64, "examples": 512,
            "steps": 3000},
        smoke={"rates": [0.05, 0.4, 1.6], "boundary_rates": [0.4], "seeds": [2021], "more_seeds": [2024],
            "mantissas": [1, 3, 5], "width": 8, "examples": 64, "steps": 200},
        small={"seeds": [2021], "more_seeds": [2024]},
    ),
)  # fmt: skip


def also(records: Records) -> dict[str, float | str]:
    """Return what the paper prints beside the estimands."""
    measured, said = (windows(records, arm) for arm in ("nearest", "forecast"))
    alive, broken = windows(records, "nearest", robust=False), diverged(records)
    matched = {str(t): windows_matched(records, t) for t in (0.3, 0.5, 0.7)}
    matched |= {side: windows_matched(records, side=side) for side in SIDES}
    added = {m: sorted(set(alive[m]) - set(measured[m])) for m in measured}
    return {
        **{f"nearest m{m}": _set(rates) for m, rates in measured.items()},
        **{f"forecast m{m}": _set(rates) for m, rates in said.items()},
        **{f"matched {how}": "{} of {}".format(*each) for how, each in matched.items()},
        "promised only": sum(len(set(said[m]) - set(measured[m])) for m in said),
        "learned only": sum(len(set(measured[m]) - set(said[m])) for m in said),
        "cells": f"{len(records['reference'])} and {len(records['arms'])}",
        "stable": _set([rate for rate, (bad, _) in broken.items() if bad == 0]),
        "survivors": "; ".join(f"m{m}: {_set(rates)}" for m, rates in added.items()),
        "diverged": ", and ".join("{} of {}".format(*broken[r]) for r in (0.8, 1.6) if r in broken),
    }


_NOTE_START = "The student's start and the teacher's scale are not printed; edges of windows move with them."
_NOTE_INFERRED = (
    "Start and teacher, which are not printed, were chosen by study testbed, on these very references: "
    "where forecast windows agree, they do by construction. Measured windows had no part in it."
)
_NOTE_SIDES = (
    "The paper takes the reference's error 'at' the crossing and does not say on which side of the update."
)
_NOTE_MAJORITY = "A majority of frozen updates is not the end of learning: what still moves goes on."
row = Beside(STUDY, "tab:e4-window")
CLAIMS = (
    row("measured window, m = 1", "{0.2, 0.4}", also, "nearest m1", note=_NOTE_START),
    row("forecast window, m = 1", "{0.4}", also, "forecast m1", note=_NOTE_INFERRED),
    row("measured window, m = 2", "{0.2, 0.4}", also, "nearest m2", note=_NOTE_START),
    row("forecast window, m = 2", "{0.2, 0.4}", also, "forecast m2", note=_NOTE_INFERRED),
    row("measured window, m = 3", "{0.1, 0.2, 0.4}", also, "nearest m3", note=_NOTE_START),
    row("forecast window, m = 3", "{0.1, 0.2, 0.4}", also, "forecast m3", note=_NOTE_INFERRED),
    row("measured window, m = 4", "{0.05, 0.1, 0.2, 0.4}", also, "nearest m4", note=_NOTE_START),
    row("forecast window, m = 4", "{0.05, 0.1, 0.2, 0.4}", also, "forecast m4", note=_NOTE_INFERRED),
    row("measured window, m = 5", "{0.025, 0.05, 0.1, 0.2, 0.4}", also, "nearest m5", note=_NOTE_START),
    row("forecast window, m = 5", "{0.025, 0.05, 0.1, 0.2, 0.4}", also, "forecast m5", note=_NOTE_INFERRED),
    row("windows that the reference forecasts, at 0.5", "4 of 5", also, "matched 0.5", note=_NOTE_START),
    row("the same, with the error before the crossing", "4 of 5", also, "matched before", note=_NOTE_SIDES),
    row("the same, with the error after the crossing", "4 of 5", also, "matched after", note=_NOTE_SIDES),
    *row.each("windows that the reference forecasts, at {}", {"0.7": "5 of 5", "0.3": "not universally"},
        also, "matched {}", source="app:e4", note=_NOTE_START),
    row("rates and mantissas that the reference promises and runs do not keep", 0, also, "promised only"),
    row("rates and mantissas that learn though the reference does not promise it", 1, also, "learned only",
        note=_NOTE_MAJORITY),
    row("references and cells", "36 and 180", also, "cells", source="app:e4"),
    row("rates at which no reference diverges", "{0.0125, 0.025, 0.05, 0.1, 0.2, 0.4}", also, "stable",
        source="app:e4"),
    row("stochastic rounding: least median learned fraction at those rates", "at least 0.5",
        over(min, "stochastic-stable"), source="app:e4"),
    row("rates that the survivor convention adds", "m1: {0.8}; m2: {0.8}; m3: {0.8}; m4: {0.8}; m5: {0.8}",
        also, "survivors", source="app:e4", note=_NOTE_START),
    row("references that end at or above their start with finite weights", "not printed", "slow-divergence",
        source="app:predictor"),
    row("references that diverge at 0.8, and at 1.6", "3 of 6, and 3 of 3", also, "diverged",
        source="fig:e4"),
    row("median learned fraction, nearest, m = 1, rate 0.2", 0.5195, "learned.nearest", "m1.rate=0.2",
        source="app:e4", note=_NOTE_START),
    row("median learned fraction, nearest, m = 2, rate 0.8", 0.34, "learned.nearest", "m2.rate=0.8",
        source="fig:e4", note=_NOTE_START),
)  # fmt: skip
