"""``gain-rate``: after masters are added, which learning rate?

People who train on a coarse grid find a rate that works; then they add fp32 masters and must lower it, about
threefold in one public account. One reason is at hand: where small updates are lost, less of every update
arrives than the optimizer proposed. With d proposed and u written,

    gain = <u, d> / |d|**2,

as :attr:`halfulp.writeback.telemetry.Events.gain` has it. A run with masters loses nothing, so at the same
rate its steps are longer. If that is all, masters want the rate of the nearest run times its gain.

**Nearest runs** go up a ladder of peak rates, a factor of two a rung, on three grids and two seeds: a *unit*
is a grid and a seed. The best rate of a unit is where a parabola through the best rung and its neighbours,
over the logarithm of the rate, has its lowest held-out loss. **Forecast**, sealed: that rate, times the mean
gain of the run at the best rung. **Then** the same with masters, and one run with masters at the forecast
rate itself. On the decoders of the smaller scales bf16 loses little: there the forecast is "the same rate".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from halfulp.drawing import COLOURS, new_figure
from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.family import PAPER_MODERN, SMALL_MODERN, SMOKE_MODERN, at, narrow
from halfulp.paper.arms.run import device, digest
from halfulp.paper.models.decoder import Decoder
from halfulp.paper.models.training import Training, adamw
from halfulp.paper.studies.declared import declared, gate, rule
from halfulp.paper.tokens import files_of, open_corpus
from halfulp.paper.values import finite, known, less
from halfulp.study import Cell, Estimand, Running, Stage, Table
from halfulp.study.protocol import Config, Json, Records, Values
from halfulp.writeback import WriteBack

GRIDS = {"bf16": "bf16", "e4m3": "e4m3@128", "e5m2": "e5m2"}
SEEDS = (72001, 72002)
MIDDLE = {"smoke": 6e-4, "small": 3.6e-3, "paper": 6e-4}
RUNGS = {"smoke": (-1, 0, 1), "small": (-2, -1, 0, 1, 2, 3), "paper": (-3, -2, -1, 0, 1, 2, 3)}
"""Powers of two by which a ladder's rates differ from the middle."""
LENGTHS = {"smoke": (6, 2), "small": (200, 20), "paper": (3000, 100)}
"""Updates and warmup."""


def _arm(scale: str) -> Arm:
    shared = {"smoke": SMOKE_MODERN, "small": SMALL_MODERN, "paper": PAPER_MODERN}[scale]
    if scale == "small":
        shared = narrow(shared, 192)
    updates, warmup = LENGTHS[scale]
    return at(shared, updates=updates, warmup=warmup, eval_every=updates)


def _with_peak(arm: Arm, peak: float) -> Arm:
    schedule = replace(arm.recipe.schedule, peak=peak, floor=peak / 10)
    return replace(arm, recipe=replace(arm.recipe, schedule=schedule))


# ---- stages ---------------------------------------------------------------------------------------------


def ladder(config: Config, policy: str) -> Iterator[Cell]:
    """Yield a run at every rate of every unit."""
    for name, grid in GRIDS.items():
        for seed in SEEDS:
            arm = replace(Arm.from_json(config["arm"]), grid=grid, policy=policy, seed=seed)
            for rung in config["rungs"]:
                scaled = _with_peak(arm, config["middle"] * 2.0**rung)
                yield Cell(name=f"{name}-{seed}-{rung:+d}", config={"arm": scaled.to_json(), "rung": rung})


def nearest(config: Config) -> Iterator[Cell]:
    """Nearest write-back."""
    yield from ladder(config, "rne")


def forecasts(config: Config) -> Iterator[Cell]:
    """One a unit: which nearest runs it reads."""
    for name in GRIDS:
        for seed in SEEDS:
            unit = f"{name}-{seed}"
            yield Cell(name=unit, config={"cells": [f"{unit}-{rung:+d}" for rung in config["rungs"]]})


def masters(config: Config) -> Iterator[Cell]:
    """Masters at every rate, and at the rate that was forecast."""
    yield from ladder(config, "master")
    for name, grid in GRIDS.items():
        for seed in SEEDS:
            arm = replace(Arm.from_json(config["arm"]), grid=grid, policy="master", seed=seed)
            settings = {"arm": arm.to_json(), "forecast": f"{name}-{seed}"}
            yield Cell(name=f"{name}-{seed}-forecast", config=settings)


def train(running: Running) -> dict[str, Json]:
    """A run: its held-out loss, and how much of its proposals arrived, at an average update and by tenths."""
    arm = Arm.from_json(running.config["arm"])
    if "forecast" in running.config:
        arm = _with_peak(arm, running.read("forecast", running.config["forecast"])["rate"])
    train_on, held_out = open_corpus(running.data, arm.corpus, arm.model.vocabulary)
    model = Decoder(arm.model, seed=arm.seed, device=device(arm.device))
    assert arm.grid is not None and arm.policy is not None
    optimizer = WriteBack(adamw(model, arm.recipe), arm.grid, arm.policy, model=model, seed=arm.stream_seed)
    start, gains = digest(model), []
    training = Training(model, optimizer, train_on, arm.recipe, held_out=held_out)
    while not training.done:
        training.step()
        gains.append(optimizer.events.gain)
        running.progress(training.update, arm.recipe.updates)
    loss, frozen = training.evaluate(), optimizer.events.frozen
    there = [g for g in gains if g is not None and math.isfinite(g)]
    tenth = max(len(there) // 10, 1)
    return {
        "rate": arm.recipe.schedule.peak, "start": start, "loss": finite(loss),
        "gain": statistics.fmean(there) if there else None, "frozen_last": frozen,
        "gains": [statistics.fmean(there[i : i + tenth]) for i in range(0, len(there), tenth)],
    }  # fmt: skip


def foretell(running: Running) -> Mapping[str, Json]:
    """Return the best nearest rate times the gain of the run that was nearest to it."""
    runs = [running.read("nearest", cell) for cell in running.config["cells"]]
    best, rung = lowest(runs)
    gain = runs[rung]["gain"]
    return {"nearest": best, "rung": rung, "gain": gain, "rate": None if gain is None else best * gain}


def lowest(ladder_: list[Mapping[str, Json]]) -> tuple[float, int]:
    """The rate at which the loss is lowest, by a parabola through the best rung and its neighbours over the
    logarithm of the rate, and the place of that rung; at an end of the ladder, the rung itself.

    >>> lowest([{"rate": r, "loss": (i - 1.25) ** 2} for i, r in enumerate((1.0, 2.0, 4.0))])
    (2.378414230005442, 1)
    """
    losses = [math.inf if run["loss"] is None else run["loss"] for run in ladder_]
    best = min(range(len(losses)), key=lambda i: losses[i])
    if not 0 < best < len(losses) - 1 or not all(map(math.isfinite, losses[best - 1 : best + 2])):
        return float(ladder_[best]["rate"]), best
    left, here, right = losses[best - 1 : best + 2]
    bend = left - 2 * here + right
    off = 0.5 * (left - right) / bend if bend > 0 else 0.0
    return float(ladder_[best]["rate"] * 2.0**off), best


# ---- estimands ------------------------------------------------------------------------------------------


def units(records: Records) -> list[str]:
    """List the units that have a forecast."""
    return list(records["forecast"])


def rungs(records: Records, stage: str, unit: str) -> list[Mapping[str, Json]]:
    """Return the runs of a unit's ladder, lowest rate first."""
    cells = records[stage].items()
    measured = [r for cell, r in cells if cell.startswith(f"{unit}-") and "forecast" not in cell]
    return sorted(measured, key=lambda r: float(r["rate"]))


def gain(records: Records) -> Values:
    """Of the nearest run at the best rung: how much of an average update arrived."""
    return {unit: records["forecast"][unit]["gain"] for unit in units(records)}


def inside(records: Records) -> Values:
    """Rungs between a best one and the nearer end of its ladder, the fewer of both policies."""
    margins: dict[str, float | None] = {}
    for unit in units(records):
        each = [rungs(records, stage, unit) for stage in ("nearest", "outcome")]
        places = [(lowest(runs)[1], len(runs)) for runs in each]
        margins[unit] = float(min(min(i, n - 1 - i) for i, n in places))
    return margins


def nearest_rate(records: Records) -> Values:
    """Best peak rate with nearest write-back."""
    return {unit: records["forecast"][unit]["nearest"] for unit in units(records)}


def master_rate(records: Records) -> Values:
    """Best peak rate with masters."""
    return {unit: lowest(rungs(records, "outcome", unit))[0] for unit in units(records)}


def rate_change(records: Records) -> Values:
    """Rungs by which masters want another rate than nearest: log2 of the one over the other."""
    return _log2_ratio(master_rate(records), nearest_rate(records))


def forecast_change(records: Records) -> Values:
    """The same, as forecast: log2 of the gain."""
    rates = {unit: records["forecast"][unit]["rate"] for unit in units(records)}
    return _log2_ratio(rates, nearest_rate(records))


def forecast_error(records: Records) -> Values:
    """Rungs between the forecast rate and the best with masters."""
    came = rate_change(records)
    return _sizes({u: less(said, came[u]) for u, said in forecast_change(records).items()})


def same_error(records: Records) -> Values:
    """Rungs between the rate of the nearest run and the best with masters."""
    return _sizes(rate_change(records))


def _sizes(values: Values) -> Values:
    return {u: None if v is None else abs(v) for u, v in values.items()}


def nearer(records: Records) -> Values:
    """How many rungs nearer the forecast is than the same rate."""
    same = same_error(records)
    return {u: less(same[u], error) for u, error in forecast_error(records).items()}


def cost(records: Records) -> Values:
    """Loss of masters at the forecast rate above the best of their ladder, nats."""
    return {u: _above(records, u, records["outcome"][f"{u}-forecast"]["loss"]) for u in units(records)}


def cost_of_same(records: Records) -> Values:
    """Loss of masters at the best rung of nearest above the best of their ladder, nats."""
    costs = {}
    for unit in units(records):
        rung = records["forecast"][unit]["rung"]
        costs[unit] = _above(records, unit, rungs(records, "outcome", unit)[rung]["loss"])
    return costs


def _above(records: Records, unit: str, loss: float | None) -> float | None:
    others = known(r["loss"] for r in rungs(records, "outcome", unit))
    return less(loss, min(others, default=None))


def _log2_ratio(over: Values, under: Values) -> Values:
    ratios: dict[str, float | None] = {}
    for unit, a in over.items():
        b = under[unit]
        ratios[unit] = math.log2(a / b) if a is not None and b is not None and a > 0 else None
    return ratios


def matched(records: Records) -> Values:
    """1 where all runs of a unit began from the same codes."""
    starts = {
        u: {
            r["start"] for s in ("nearest", "outcome") for c, r in records[s].items() if c.startswith(f"{u}-")
        }
        for u in units(records)
    }
    return {unit: float(len(digests) == 1) for unit, digests in starts.items()}


# ---- pictures -------------------------------------------------------------------------------------------


def rates_table(records: Records) -> Table:
    """Tabulate the gain, the rates and their cost for every unit."""
    each = (gain, nearest_rate, master_rate, rate_change, forecast_change, cost, cost_of_same)
    values = [compute(records) for compute in each]
    return Table(
        columns=("unit", "gain", "best rate, nearest", "best rate, masters", "change, log2",
                 "forecast, log2", "cost at the forecast", "cost at the same rate"),
        rows=[(unit, *(value[unit] for value in values)) for unit in units(records)],
        caption="Peak rates; held-out loss of masters above the best of their ladder, nats.",
    )  # fmt: skip


def ladders(records: Records) -> Any:
    """Held-out loss over the peak rate: nearest, masters (dashed), masters at the forecast rate (a dot)."""
    figure, panels = new_figure(1, len(GRIDS), height=3.4)
    for panel, (name, grid) in zip(panels, GRIDS.items(), strict=True):
        for colour, seed in zip(COLOURS, SEEDS, strict=False):
            for stage, line in (("nearest", "-"), ("outcome", "--")):
                runs = [r for r in rungs(records, stage, f"{name}-{seed}") if r["loss"] is not None]
                panel.plot([r["rate"] for r in runs], [r["loss"] for r in runs], line, color=colour)
            forecast = records["outcome"][f"{name}-{seed}-forecast"]
            if forecast["loss"] is not None:
                panel.plot([forecast["rate"]], [forecast["loss"]], "o", color=colour)
        panel.set_xscale("log", base=2)
        panel.set_title(grid)
        panel.set_xlabel("peak rate")
    panels[0].set_ylabel("held-out loss, nats")
    return figure


STUDY = declared(
    __name__,
    scales={
        scale: {"arm": _arm(scale).to_json(), "middle": MIDDLE[scale], "rungs": list(RUNGS[scale])}
        for scale in MIDDLE
    },
    stages=(
        Stage(name="nearest", kind="reference", cells=nearest, run=train),
        Stage(name="forecast", kind="prediction", cells=forecasts, run=foretell, reads=("nearest",)),
        Stage(name="outcome", kind="outcome", cells=masters, run=train, reads=("forecast",)),
    ),
    estimands=tuple(map(Estimand.of, (
        gain, nearest_rate, master_rate, rate_change, forecast_change, forecast_error, same_error, nearer,
        cost, cost_of_same, inside, matched,
    ))),
    scale_data={scale: files_of(_arm(scale).corpus) for scale in MIDDLE},
    tables={"rates": rates_table},
    figures={"ladders": ladders},
    question=(
        "Does the gain of a run with nearest write-back foretell the learning rate that the same run wants "
        "with masters?"
    ),
    units="a grid and a seed: a ladder of rates with each policy",
    not_claimed=(
        "that the best rate of a short run is that of a long one",
        (
            "anything about fine-tuning, whose updates are smaller beside the weights than those of a run "
            "from the start"
        ),
        "that gain is the only reason why masters want another rate",
        "that a ladder of a few rates finds a best rate to better than half a rung",
    ),
    gates=(
        gate("inside", "inside >= 1", "a best rate at the end of its ladder is not known"),
        gate("lower", "rate-change < 0", "the premise: with masters people must lower their rate",
            scope="mean"),
        gate("foretold", "forecast-error <= 0.5", "half a rung: a factor of the root of two"),
        gate("nearer", "nearer > 0", "better than to keep the rate", scope="mean"),
        gate("harmless", "cost <= 0.02", "whoever takes the forecast rate should lose nothing that matters"),
        gate("matched", "matched == 1"),
    ),
    rules=(
        rule("not matched", failed=("matched",)),
        rule("not decided: a best rate lies at the end of its ladder", failed=("inside",)),
        rule("gain foretells the rate", "lower", "foretold", "nearer", "harmless"),
        rule("gain foretells the rate, but a run there loses more than asked", "lower", "foretold", "nearer"),
        rule("gain tells better than the same rate, not the rate", "lower", "nearer"),
        rule("masters want a lower rate, and gain does not tell it", "lower"),
        rule("masters want no lower rate here"),
    ),
)  # fmt: skip
