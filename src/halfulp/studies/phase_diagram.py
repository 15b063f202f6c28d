"""Which learning rates still learn on a grid of one to five mantissa bits, and does a reference know?

The effective-mantissa testbed (appendix D): input 8, teacher 8, student 64, 512 training and 512 test
examples, noise 0.1, 3,000 whole-batch steps of fp64 descent. Three base seeds at eight rates and three more
at the four rates of the boundary give 36 references; each of five mantissas makes that 180 cells, each with a
nearest and a stochastic arm (its start projected stochastically too, as in the paper). With E the test
error, an arm has learned

    lambda = (E_0 - E_T) / (E_0 - E_T,fp64)

and the reference-only forecast of a nearest arm puts the reference's own error at update tau, its predicted
persistent majority crossing, in place of E_T, or lambda = 1 where it predicts none. A rate is *in the window*
of a mantissa when the median over seeds is at least 1/2. The **robust** convention counts a diverged
reference or arm as zero; the **survivor** convention leaves it out. Neither makes a forecast of the final
loss of it: a majority crossing is no stopping time.

What the paper leaves open is chosen by study `testbed` (start, teacher, loss, and the side of update tau on
which the error is taken; both are recorded and shown) and here: base seeds 2021 to 2023, additional ones 2024
to 2026. What has diverged is defined in :mod:`halfulp.studies._forecast`. Test errors are mean squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from halfulp.measures.crossings import persistent_majority
from halfulp.models.mlp import Rounding, Trainer, run
from halfulp.models.teacher import CHOSEN, Problem, Testbed, teacher_student
from halfulp.studies._forecast import LEARNED, SIDE, SIDES, arm_learned, follow, forecasts
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
    Table,
    Values,
)

ARMS: tuple[Rounding, ...] = ("nearest", "stochastic")


def _pairs(config: Config) -> Iterator[tuple[float, int]]:
    """(rate, seed): base seeds at every rate, the others at the rates of the boundary."""
    for rate in config["rates"]:
        boundary = config["more_seeds"] if rate in config["boundary_rates"] else []
        for seed in [*config["seeds"], *boundary]:
            yield rate, seed


def reference_cells(config: Config) -> Iterator[Cell]:
    for rate, seed in _pairs(config):
        c = {key: config[key] for key in ("testbed", "width", "examples", "steps", "mantissas")}
        yield Cell(name=f"rate={rate}.seed={seed}", config={**c, "rate": rate, "seed": seed})


def arm_cells(config: Config) -> Iterator[Cell]:
    for rate, seed in _pairs(config):
        for m in config["mantissas"]:
            c = {key: config[key] for key in ("testbed", "width", "examples", "steps")}
            yield Cell(
                name=f"rate={rate}.seed={seed}.m{m}", config={**c, "rate": rate, "seed": seed, "mantissa": m}
            )


def _problem(c: Config) -> Problem:
    testbed = Testbed.of(c["testbed"])
    return teacher_student(
        c["seed"], width=c["width"], examples=c["examples"], tests=c["examples"], testbed=testbed
    )


def _finite(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


def reference(cell: Running) -> Mapping[str, Json]:
    """An fp64 run: its errors, and for each mantissa the predicted crossing and what is learned by then."""
    c = cell.config
    grids = [f"m{m}" for m in c["mantissas"]]
    found = follow(_problem(c), c["rate"], c["steps"], cell, audit=grids)
    said = {grid: each["directional"] for grid, each in forecasts(found, c["mantissas"]).items()}
    return {
        "rate": c["rate"], "seed": c["seed"], "diverged": found.diverged, "slow": found.slow,
        "steps": len(found.series), "error": {"start": found.start, "end": found.end}, "forecast": said,
    }  # fmt: skip


def arms(cell: Running) -> Mapping[str, Json]:
    """The two stored-weight runs of a mantissa, rate and seed."""
    c = cell.config
    p = _problem(c)
    found: dict[str, Json] = {}
    for arm in ARMS:
        trainer = Trainer(
            p.net, p.train, p.start, rate=p.factor * c["rate"], store=f"m{c['mantissa']}", rounding=arm,
            seed=c["seed"],
        )  # fmt: skip
        start = trainer.error(p.test)
        series = run(trainer, c["steps"])
        cell.progress(1 + ARMS.index(arm), len(ARMS))
        error = _finite(trainer.error(p.test))
        found[arm] = {
            "diverged": trainer.diverged or error is None or error > start, "error": error,
            "crossing": persistent_majority(series.frozen / series.size),
            "never_moved": int(series.never[-1]) / series.size,
        }  # fmt: skip
    return {"rate": c["rate"], "seed": c["seed"], "mantissa": c["mantissa"], **found}


# ---- learned fractions ----------------------------------------------------------------------------------


def fractions(records: Records, side: str = SIDE) -> dict[str, dict[tuple[int, float], list[float | None]]]:
    """Learned fractions of every seed by (mantissa, rate), of both arms and of the forecast."""
    found: dict[str, dict[tuple[int, float], list[float | None]]] = {k: {} for k in (*ARMS, "forecast")}
    for r in records["arms"].values():
        reference = records["reference"][f"rate={r['rate']}.seed={r['seed']}"]
        key = (r["mantissa"], r["rate"])
        for arm in ARMS:
            value = arm_learned(reference, r[arm]["error"], r[arm]["diverged"])
            found[arm].setdefault(key, []).append(value)
        found["forecast"].setdefault(key, []).append(reference["forecast"][f"m{r['mantissa']}"][side])
    return found


def medians(
    records: Records, arm: str, *, robust: bool = True, side: str = SIDE
) -> dict[tuple[int, float], float | None]:
    """The median over seeds: diverged ones count as zero (robust) or not at all (survivors)."""
    found = {}
    for key, values in fractions(records, side)[arm].items():
        each = [0.0 if v is None else v for v in values] if robust else [v for v in values if v is not None]
        found[key] = median(each) if each else None
    return found


def windows(
    records: Records, arm: str, threshold: float = LEARNED, *, robust: bool = True, side: str = SIDE
) -> dict[int, list[float]]:
    """The rates in the window of each mantissa."""
    found: dict[int, list[float]] = {}
    for (m, rate), value in medians(records, arm, robust=robust, side=side).items():
        found.setdefault(m, []).extend([rate] if value is not None and value >= threshold else [])
    return {m: sorted(rates) for m, rates in sorted(found.items())}


def diverged(records: Records) -> dict[float, tuple[int, int]]:
    """Diverged references and all of them, by rate."""
    found: dict[float, list[bool]] = {}
    for r in records["reference"].values():
        found.setdefault(r["rate"], []).append(r["diverged"])
    return {rate: (sum(each), len(each)) for rate, each in sorted(found.items())}


# ---- estimands ------------------------------------------------------------------------------------------


def median_learned(arm: str) -> Any:
    def compute(records: Records) -> Values:
        return {f"m{m}.rate={rate}": value for (m, rate), value in medians(records, arm).items()}

    compute.__qualname__ = f"median_learned[{arm}]"
    return compute


def lowest_rate_ratio(records: Records) -> Values:
    """Lowest rate of a mantissa's window over that of the next larger mantissa; None if one is empty."""
    found = windows(records, "nearest")
    return {
        f"m{m} over m{n}": found[m][0] / found[n][0] if found[m] and found[n] else None
        for m, n in zip(sorted(found), sorted(found)[1:], strict=False)
    }


def compression(records: Records) -> Values:
    """Lowest rate of the smallest mantissa's window over that of the largest."""
    found = windows(records, "nearest")
    low, high = found[min(found)], found[max(found)]
    return {"study": low[0] / high[0] if low and high else None}


def matches(records: Records) -> Values:
    """Mantissas whose predicted window is the measured one, as a share."""
    return {"study": matches_by_side(records)[SIDE]}


def matches_by_side(records: Records) -> Values:
    """The same, with the error before and after the crossing."""
    real = windows(records, "nearest")
    told = {side: windows(records, "forecast", side=side) for side in SIDES}
    return {side: sum(real[m] == each[m] for m in real) / len(real) for side, each in told.items()}


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
    """Measured and predicted windows."""
    names = (("nearest", True), ("forecast", True), ("nearest", False), ("stochastic", True))
    each = [windows(records, arm, robust=robust) for arm, robust in names]
    return Table(
        columns=("mantissa bits", "measured", "predicted", "measured, survivors only", "stochastic"),
        rows=[(str(m), *(_set(found[m]) for found in each)) for m in sorted(each[0])],
        caption="Rates whose median learned fraction is at least 0.5; a diverged run counts as zero unless "
                "only survivors are said to count.",
    )  # fmt: skip


def figure(records: Records) -> Any:
    """Agreement of the forecast, and the learned fraction of both arms, with diverged references hatched."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(11.0, 3.6), layout="constrained")
    left, middle, right = fig.subplots(1, 3, sharey=True)
    real, told = medians(records, "nearest"), medians(records, "forecast")
    mantissas, rates = (sorted({key[i] for key in real}) for i in (0, 1))
    bad = diverged(records)
    for (m, rate), value in real.items():
        forecast = told[m, rate]
        measured_in, predicted_in = (v is not None and v >= LEARNED for v in (value, forecast))
        agrees = measured_in == predicted_in
        color = ("#cfe8cf" if measured_in else "#eeeeee") if agrees else "#f4a742"
        _cell(left, rates.index(rate), mantissas.index(m), color, "✓" if agrees else "")
    for ax, arm, title in ((middle, "nearest", "(b) nearest"), (right, "stochastic", "(c) stochastic")):
        for (m, rate), value in medians(records, arm).items():
            shade = 1 - 0.75 * min(max(value or 0.0, 0.0), 1.0)
            text, hatched = "" if value is None else f"{value:.2f}", bad[rate][0] > 0
            x, y = rates.index(rate), mantissas.index(m)
            _cell(ax, x, y, (shade, shade, 1.0), text, hatched=hatched, dark=shade < 0.5)
        ax.set_title(title)
    left.set_title("(a) forecast agrees at 0.5")
    left.set_ylabel("mantissa bits")
    for ax in (left, middle, right):
        ax.set_xlim(-0.5, len(rates) - 0.5)
        ax.set_ylim(-0.5, len(mantissas) - 0.5)
        labels = [f"{rate:g}\n{bad[rate][0]}/{bad[rate][1]}" for rate in rates]
        ax.set_xticks(range(len(rates)), labels, fontsize="x-small")
        ax.set_xlabel("rate, and diverged/total references")
        ax.set_yticks(range(len(mantissas)), [str(m) for m in mantissas])
    return fig


def _cell(
    ax: Any, x: int, y: int, color: Any, text: str, *, hatched: bool = False, dark: bool = False
) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(
        Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="0.5", linewidth=0.4,
                  hatch="////" if hatched else None)
    )  # fmt: skip
    ink = "white" if dark and not hatched else "black"
    ax.text(x, y, text, ha="center", va="center", fontsize="x-small", color=ink)


# ---- the study ------------------------------------------------------------------------------------------

_PAPER: dict[str, Json] = {
    "testbed": CHOSEN.json(), "rates": [0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6],
    "boundary_rates": [0.1, 0.2, 0.4, 0.8],
    "seeds": [2021, 2022, 2023], "more_seeds": [2024, 2025, 2026], "mantissas": [1, 2, 3, 4, 5],
    "width": 64, "examples": 512, "steps": 3000,
}  # fmt: skip

STUDY = Study(
    name="phase-diagram",
    question="At which rates does training still learn when weights have one to five mantissa bits, and "
    "does an fp64 reference know?",
    units="one seed; mantissas that share its reference are paired coverage tests",
    not_claimed=(
        "a calibrated forecast of the final loss",
        "that a majority crossing stops learning",
        "anything about vendor four-bit formats",
    ),
    scales={
        "smoke": {**_PAPER, "rates": [0.05, 0.4, 1.6], "boundary_rates": [0.4], "seeds": [2021],
                  "more_seeds": [2024], "mantissas": [1, 3, 5], "width": 8, "examples": 64, "steps": 200},
        "small": {**_PAPER, "seeds": [2021], "more_seeds": [2024]},
        "paper": _PAPER,
    },
    stages=(
        Stage(name="reference", kind="prediction", cells=reference_cells, run=reference),
        Stage(name="arms", kind="outcome", cells=arm_cells, run=arms),
    ),
    estimands=(
        *(
            Estimand(name=f"learned.{arm}", what=f"median learned fraction, {arm}, robust",
                     compute=median_learned(arm))
            for arm in (*ARMS, "forecast")
        ),
        Estimand(name="lowest-rate-ratio", what="lowest rate in a window over that of the next mantissa",
                 compute=lowest_rate_ratio),
        Estimand(name="compression", what="lowest rate at the smallest mantissa over that at the largest",
                 compute=compression),
        Estimand(name="windows-matched", what="share of mantissas whose predicted window is the measured one",
                 compute=matches),
        Estimand(name="windows-matched-by-side", what="the same, with the reference's error before and after "
                 "the crossing", compute=matches_by_side),
        Estimand(name="slow-divergence", what="references that end at or above their starting error with "
                 "finite weights; they count as diverged", compute=slow_divergence),
        Estimand(name="stochastic-stable", what="median learned fraction, stochastic, at rates where no "
                 "reference diverged", compute=stochastic_at_stable_rates),
    ),
    gates=(
        Gate(name="never-downward", estimand="lowest-rate-ratio", scope="all", comparison=">=", threshold=1,
             why="fewer mantissa bits never admit a lower rate"),
        Gate(name="shrinks-upward", estimand="compression", scope="all", comparison=">", threshold=1,
             why="the window of the smallest mantissa starts at a higher rate"),
        Gate(name="stochastic-learns", estimand="stochastic-stable", scope="all", comparison=">=",
             threshold=LEARNED, why="stochastic rounding meets the criterion at every stable rate"),
        Gate(name="windows-predicted", estimand="windows-matched", scope="all", comparison=">=",
             threshold=0.8, why="the paper predicts four of five windows"),
    ),
    rules=(
        Rule(label="windows shrink upward as bits fall, stochastic rounding restores them, references know",
             passed=("never-downward", "shrinks-upward", "stochastic-learns", "windows-predicted")),
        Rule(label="windows shrink upward as bits fall, stochastic rounding restores them",
             passed=("never-downward", "shrinks-upward", "stochastic-learns")),
        Rule(label="windows shrink upward as bits fall", passed=("never-downward", "shrinks-upward")),
        Rule(label="windows do not shrink upward"),
    ),
    tables={"windows": table},
    figures={"e4": figure},
)  # fmt: skip


# ---- beside the paper -----------------------------------------------------------------------------------


def _window(arm: str, m: int) -> Any:
    return lambda records: _set(windows(records, arm).get(m, []))


def _matched(threshold: float, side: str = SIDE) -> Any:
    def count(records: Records) -> str:
        real, told = (windows(records, arm, threshold, side=side) for arm in ("nearest", "forecast"))
        return f"{sum(real[m] == told[m] for m in real)} of {len(real)}"

    return count


def _beyond(records: Records, arm: str, other: str) -> int:
    """(mantissa, rate) pairs in the windows of one but not of the other."""
    ours, theirs = windows(records, arm), windows(records, other)
    return sum(len(set(ours[m]) - set(theirs[m])) for m in ours)


def _stable(records: Records) -> str:
    return _set([rate for rate, (bad, _) in diverged(records).items() if bad == 0])


def _diverged_at_the_top(records: Records) -> str:
    found = diverged(records)
    return ", and ".join("{} of {}".format(*found[rate]) for rate in (0.8, 1.6) if rate in found)


def _survivors_add(records: Records) -> str:
    robust, alive = windows(records, "nearest"), windows(records, "nearest", robust=False)
    return "; ".join(f"m{m}: {_set(sorted(set(alive[m]) - set(robust[m])))}" for m in robust)


_PAPER_WINDOWS = {
    1: ("{0.2, 0.4}", "{0.4}"),
    2: ("{0.2, 0.4}", "{0.2, 0.4}"),
    3: ("{0.1, 0.2, 0.4}", "{0.1, 0.2, 0.4}"),
    4: ("{0.05, 0.1, 0.2, 0.4}", "{0.05, 0.1, 0.2, 0.4}"),
    5: ("{0.025, 0.05, 0.1, 0.2, 0.4}", "{0.025, 0.05, 0.1, 0.2, 0.4}"),
}
_START = "The student's start and the teacher's scale are not printed; edges of windows move with them."
_SIDES = (
    "The paper takes the reference's error 'at' the crossing and does not say on which side of the update."
)
_INFERRED = (
    "Start and teacher, which are not printed, were chosen by study testbed, on these very references: where "
    "predicted windows agree, they do by construction. Measured windows had no part in it."
)

PAPER = (
    *(
        Claim(claim=f"{kind} window, m = {m}", source="tab:e4-window", paper=pair[i], ours=_window(arm, m),
              note=note)
        for m, pair in _PAPER_WINDOWS.items()
        for i, (kind, arm, note) in enumerate(
            (("measured", "nearest", _START), ("predicted", "forecast", _INFERRED)))
    ),
    Claim(claim="windows that the reference predicts, at 0.5", source="tab:e4-window", paper="4 of 5",
          ours=_matched(0.5), note=_START),
    *(
        Claim(claim=f"the same, with the error {side} the crossing", source="tab:e4-window", paper="4 of 5",
              ours=_matched(0.5, side), note=_SIDES)
        for side in SIDES
    ),
    Claim(claim="windows that the reference predicts, at 0.7", source="app:e4", paper="5 of 5",
          ours=_matched(0.7), note=_START),
    Claim(claim="windows that the reference predicts, at 0.3", source="app:e4", paper="not universally",
          ours=_matched(0.3), note=_START),
    Claim(claim="rates and mantissas that the reference promises and runs do not keep",
          source="tab:e4-window", paper=0, ours=lambda records: _beyond(records, "forecast", "nearest")),
    Claim(claim="rates and mantissas that learn though the reference does not promise it",
          source="tab:e4-window", paper=1, ours=lambda records: _beyond(records, "nearest", "forecast"),
          note="A majority of frozen updates is not the end of learning: what still moves goes on."),
    Claim(claim="references and cells", source="app:e4", paper="36 and 180",
          ours=lambda records: f"{len(records['reference'])} and {len(records['arms'])}"),
    Claim(claim="rates at which no reference diverges", source="app:e4",
          paper="{0.0125, 0.025, 0.05, 0.1, 0.2, 0.4}", ours=_stable),
    Claim(claim="stochastic rounding: least median learned fraction at those rates", source="app:e4",
          paper="at least 0.5",
          ours=lambda records: min(v for v in stochastic_at_stable_rates(records).values() if v is not None)),
    Claim(claim="rates that the survivor convention adds", source="app:e4",
          paper="m1: {0.8}; m2: {0.8}; m3: {0.8}; m4: {0.8}; m5: {0.8}", ours=_survivors_add, note=_START),
    Claim(claim="references that end at or above their start with finite weights", source="app:predictor",
          paper="not printed", ours=lambda records: slow_divergence(records)["study"]),
    Claim(claim="references that diverge at 0.8, and at 1.6", source="fig:e4", paper="3 of 6, and 3 of 3",
          ours=_diverged_at_the_top),
    Claim(claim="median learned fraction, nearest, m = 1, rate 0.2", source="app:e4", paper=0.5195,
          ours=lambda records: medians(records, "nearest").get((1, 0.2)), note=_START),
    Claim(claim="median learned fraction, nearest, m = 2, rate 0.8", source="fig:e4", paper=0.34,
          ours=lambda records: medians(records, "nearest").get((2, 0.8)), note=_START),
)  # fmt: skip
