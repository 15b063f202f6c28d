"""``loss-forecast``: does one float32 run say, in nats, what a number format would cost?

Beside a float32 reference the codes of the runs that did *not* happen are kept and moved by the reference's
own proposals: a *rehearsal* (:mod:`halfulp.audit.rehearsal`). Its held-out loss is the forecast of a run with
nearest write-back on that grid: ``point``, with a pull towards the reference, between ``lower``, the
projection, and ``upper``, the open loop. All of that is sealed; then the runs are made.

**The square.** Three kinds of decoder x three peak rates, and three horizons laid over them so that every
kind, rate and horizon meets every other once: nine units with a seed each. One reference a unit rehearses
four grids: bf16, e4m3@128, e5m2, and mxfp4, in blocks of 32. A *cell* is a unit and a grid; the rules are
about cells where a run on the grid ends more than 0.1 nats above the reference.

**Policies and masks.** Three more seeds, e5m2: rehearsals of ``sr`` and of masters everywhere must forecast
(nearly) nothing where (nearly) nothing is lost. And the ninth score, R, a tile's share of the forecast gap,
in two rounds (half the budget, another rehearsal with these masters, the rest), against the paper's P: which
of two masks of the same bytes leaves less of the gap. Both choose from the target's own reference.

The rule, fixed with the seal: the order of formats is right in every unit (pairs of which one costs more than
0.1 nats); every such cell lies inside its bounds; the point forecast is within 30% in every and within 15% in
the median cell; rehearsed frozen fractions have a smaller RMSE than projected ones on 8-bit grids; R leaves
less of the gap than P in the mean of three seeds.

The smaller scales have smaller decoders of the same kinds and other text. The pull is the library's default,
chosen on runs of other seeds (docs/loss-forecast.md); nothing here was tuned after the seal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from halfulp.drawing import COLOURS, GREY, new_figure
from halfulp.paper.arms import Bundle, measures
from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.bundle import Unit
from halfulp.paper.arms.family import (
    PAPER_GPT2,
    PAPER_MODERN,
    PAPER_NEOX,
    SMALL_GPT2,
    SMALL_MODERN,
    SMALL_NEOX,
    SMOKE_GPT2,
    SMOKE_MODERN,
    SMOKE_NEOX,
    at,
    narrow,
)
from halfulp.paper.arms.mask_recipes import make_masks
from halfulp.paper.arms.predictions import forecast_losses
from halfulp.paper.arms.run import run
from halfulp.paper.studies.declared import declared, gate, rule
from halfulp.paper.values import known, less
from halfulp.study.protocol import Cell, Config, Estimand, Records, Stage, Table, Values

GRIDS = {"bf16": "bf16", "e4m3": "e4m3@128", "e5m2": "e5m2", "mxfp4": "mxfp4"}
EIGHT_BITS = ("e4m3", "e5m2")
MATERIAL = 0.1
"""Nats: the rules speak of cells above it."""
SCOPE = "all-2d"
BUDGET = 0.1
ROUNDS = {"of": ["e5m2"], "moments": 3, "points": 4, "batches": 16}
"""Settings for the attribution of a rehearsal: the mean of three moments of the run."""

KINDS = {
    "gpt2": {"smoke": SMOKE_GPT2, "small": SMALL_GPT2, "paper": PAPER_GPT2},
    "modern": {"smoke": SMOKE_MODERN, "small": SMALL_MODERN, "paper": PAPER_MODERN},
    "neox": {"smoke": SMOKE_NEOX, "small": SMALL_NEOX, "paper": PAPER_NEOX},
}
NARROW = {"gpt2": 256, "modern": 192, "neox": 256}
"""Hidden widths at the scale small."""
RATES = {"low": 9e-4, "middle": 1.8e-3, "high": 3.6e-3}
"""The small family's own rate, half of it, and twice."""
PAPER_RATES = {"low": 3e-4, "middle": 6e-4, "high": 1.2e-3}
HORIZONS = {"smoke": (6, 8, 10), "small": (300, 1000, 3000), "paper": (300, 1000, 3000)}

SQUARE = {
    "gpt2-low-300": ("gpt2", "low", 0, 71001), "gpt2-middle-1000": ("gpt2", "middle", 1, 71002),
    "gpt2-high-3000": ("gpt2", "high", 2, 71003), "modern-low-1000": ("modern", "low", 1, 71004),
    "modern-middle-3000": ("modern", "middle", 2, 71005), "modern-high-300": ("modern", "high", 0, 71006),
    "neox-low-3000": ("neox", "low", 2, 71007), "neox-middle-300": ("neox", "middle", 0, 71008),
    "neox-high-1000": ("neox", "high", 1, 71009),
}  # fmt: skip
"""Kind, rate, the place of the horizon among three, and seed, by name."""
SEEDS = (71011, 71012, 71013)
POLICIES = {"rne": "rne", "sr": "sr", "master": "master"}


def _arm(kind: str, scale: str, rate: str, place: int) -> Arm:
    """Return a run of a kind at a rate to a horizon."""
    shared, updates = KINDS[kind][scale], HORIZONS[scale][place]
    peak = (PAPER_RATES if scale == "paper" else RATES)[rate]
    if scale == "small":
        shared = replace(narrow(shared, NARROW[kind]), tile=64, save_every=500)
    schedule = replace(shared.recipe.schedule, peak=peak, floor=peak / 10)
    shared = replace(shared, recipe=replace(shared.recipe, schedule=schedule), tables=False)
    return at(shared, updates=updates, warmup=min(100, updates // 10), eval_every=max(updates // 3, 2))


def _unit(name: str, kind: str, rate: str, place: int, seed: int) -> Bundle:
    return Bundle(
        scales={scale: _arm(kind, scale, rate, place) for scale in HORIZONS},
        targets=(seed,),
        conditions={name: {"grid": grid} for name, grid in GRIDS.items()},
        arms={"rne": {"policy": "rne"}},
        rehearse=("rne",),
        unit=f"{name}-{{condition}}",
        reference=name,
    )


RUNS = {name: _unit(name, *how) for name, how in SQUARE.items()}
MASKED = Bundle(
    scales={scale: _arm("modern", scale, "middle", 0) for scale in HORIZONS},
    targets=SEEDS,
    conditions={"e5m2": {"grid": "e5m2"}},
    arms={
        **{arm: {"policy": policy} for arm, policy in POLICIES.items()},
        "P": {"policy": "tile-master", "mask": ("first", "P")},
        "R": {"policy": "tile-master", "mask": ("second", "R")},
    },
    rehearse=tuple(POLICIES),
    unit="policies-{seed}",
    reference="policies-{seed}",
)
BUNDLES = {**RUNS, "policies": MASKED}


# ---- stages -----------------------------------------------------------------------------------------------


def references(config: Config) -> Iterator[Cell]:
    """Float32 runs that rehearse; those for masks sum scores and attribute the rehearsal, too."""
    for name, runs in RUNS.items():
        yield from runs.references(config[name])
    for cell in MASKED.references(config["policies"]):
        arm = Arm.from_json(cell.config)
        yield replace(
            cell, config=replace(arm, scores=("e5m2", arm.recipe.updates), attribute=ROUNDS).to_json()
        )


def first_masks(config: Config) -> Iterator[Cell]:
    """By P, all of the budget; by R, half of it."""
    made = {"P": {"score": "P", "share": BUDGET}, "half": {"score": "R", "rehearsal": 0, "share": BUDGET / 2}}
    yield from _masks(config, "reference", made)


def again(config: Config) -> Iterator[Cell]:
    """The same float32 runs, rehearsing a run that has masters for the first half."""
    spec = "e5m2:tiles(half)"
    for cell in MASKED.references(config["policies"]):
        arm = replace(
            Arm.from_json(cell.config), rehearse=(spec,), masks={"stage": "first-masks", "cell": cell.name},
            attribute={**ROUNDS, "of": [spec]},
        )  # fmt: skip
        yield replace(cell, config=arm.to_json())


def second_masks(config: Config) -> Iterator[Cell]:
    """By R, the second half of the budget beside the first."""
    for cell in _masks(config, "again", {}):
        keep = {"stage": "first-masks", "cell": cell.name, "name": "half"}
        mask = {"score": "R", "rehearsal": 0, "share": BUDGET, "keep": keep}
        yield replace(cell, config={**cell.config, "masks": {"R": mask}})


def _masks(config: Config, stage: str, masks: dict[str, Any]) -> Iterator[Cell]:
    tile = Arm.from_json(config["policies"]["arm"]).tile
    for unit in MASKED.units:
        yield Cell(name=unit, config={"stage": stage, "cell": unit, "tile": tile, "masks": masks})


def forecasts(config: Config) -> Iterator[Cell]:
    """Yield the losses of every rehearsal, sealed before any outcome."""
    for name, runs in BUNDLES.items():
        yield from runs.forecasts(config[name])


def outcomes(config: Config) -> Iterator[Cell]:
    """Yield every run on a grid."""
    for name, runs in BUNDLES.items():
        yield from runs.outcomes(config[name])


# ---- estimands --------------------------------------------------------------------------------------------


def units(found: Records) -> list[Unit]:
    """Tabulate every cell of the square."""
    return [unit for runs in RUNS.values() for unit in runs.over(found)]


def each(measure: Callable[..., float | None], found: Records, material: bool = False, **how: Any) -> Values:
    """A measure of the square's cells, or of those with a gap."""
    chosen = [u for u in units(found) if not material or (measures.gap(u) or 0.0) > MATERIAL]
    return {unit.name: measure(unit, **how) for unit in chosen}


def gaps(found: Records) -> Values:
    """Final loss of nearest above float32."""
    return each(measures.gap, found)


def forecast(found: Records, bound: str) -> Values:
    """The same, as it was forecast."""
    return each(measures.forecast_gap, found, bound=bound)


def inside(found: Records) -> Values:
    """Return how far a run ends inside its bounds."""
    return each(measures.inside, found, material=True)


def ratio(found: Records, bound: str) -> Values:
    """Forecast gap over measured gap."""
    return each(measures.gap_ratio, found, material=True, bound=bound)


def error(found: Records) -> Values:
    """Return how far the point forecast is off, as a share of the gap."""
    return each(measures.gap_error, found, material=True)


def median_error(found: Records) -> Values:
    """The median of these."""
    each = error(found)
    there = known(each.values())
    return {"median": statistics.median(there) if there and len(there) == len(each) else None}


def misordered(found: Records) -> Values:
    """Pairs of formats in the wrong order, by unit of the square."""
    return {name: measures.misordered(runs.over(found), above=MATERIAL) for name, runs in RUNS.items()}


def rehearsed_rmse(found: Records) -> Values:
    """RMSE of the rehearsed frozen fraction."""
    return _eight_bits(each(measures.forecast_rmse, found, scope=SCOPE, predictor="rehearsed"))


def projected_rmse(found: Records) -> Values:
    """RMSE of the projected frozen fraction."""
    return _eight_bits(each(measures.forecast_rmse, found, scope=SCOPE, predictor="matched"))


def rmse_ratio(found: Records) -> Values:
    """The first over the second."""
    return _eight_bits(each(measures.rmse_ratio, found, scope=SCOPE, predictor="rehearsed", over="matched"))


def _eight_bits(values: Values) -> Values:
    return {unit: value for unit, value in values.items() if unit.rpartition("-")[2] in EIGHT_BITS}


def masked(found: Records, arm: str) -> Values:
    """Final loss of an arm of the three seeds above float32."""
    return {unit.name: measures.gap(unit, arm) for unit in MASKED.over(found)}


def saved(found: Records) -> Values:
    """Return how much less of the gap R leaves than P, in nats."""
    r, p = masked(found, "R"), masked(found, "P")
    return {u: less(p[u], r[u]) for u in r}


def quiet(found: Records) -> Values:
    """Return how far the forecasts of sr and masters are from the measured gaps, the larger of the two."""
    made = {}
    for unit in MASKED.over(found):
        off = [less(measures.forecast_gap(unit, a), measures.gap(unit, a)) for a in ("sr", "master")]
        made[unit.name] = None if None in off else max(map(abs, known(off)))
    return made


def matched(found: Records) -> Values:
    """1 where the arms began as declared."""
    return {u.name: measures.matched(u) for runs in BUNDLES.values() for u in runs.over(found)}


# ---- pictures -----------------------------------------------------------------------------------------


def cells_table(found: Records) -> Table:
    """Tabulate the measured and the forecast gap of every cell."""
    rows = [
        (
            unit.name, measures.loss(unit, "fp32"), measures.gap(unit),
            *(measures.forecast_gap(unit, bound=bound) for bound in ("lower", "point", "upper")),
            measures.gap_ratio(unit),
            *(measures.forecast_rmse(unit, SCOPE, predictor=p) for p in ("rehearsed", "matched")),
        )
        for unit in units(found)
    ]  # fmt: skip
    return Table(
        columns=("cell", "fp32", "gap", "lower", "point", "upper", "point over gap", "RMSE",
                 "RMSE of projection"),
        rows=rows,
        caption="Held-out loss in nats after the last update: of fp32, and gaps to it, measured and "
        "forecast; RMSE of the frozen fraction, rehearsed and projected.",
    )  # fmt: skip


def policies_table(found: Records) -> Table:
    """Tabulate the three seeds: forecast and measured gaps by policy, and the gaps that two masks leave."""
    rows = [
        (
            unit.name,
            *(x for a in POLICIES for x in (measures.forecast_gap(unit, a), measures.gap(unit, a))),
            measures.gap(unit, "P"), measures.gap(unit, "R"),
        )
        for unit in MASKED.over(found)
    ]  # fmt: skip
    named = [f"{a}, {what}" for a in POLICIES for what in ("forecast", "measured")]
    return Table(
        columns=("seed", *named, "masters by P", "masters by R"), rows=rows,
        caption=f"Gaps to fp32 in nats, e5m2; masters for {BUDGET:.0%} of all bytes.",
    )  # fmt: skip


def attributed_table(found: Records) -> Table:
    """Tabulate the sums of shares beside the gaps that they are shares of."""
    rows = [
        (cell, stage, moment["update"], sum(moment["sum"].values()), sum(moment["gap"].values()))
        for stage in ("reference", "again")
        for cell, record in found[stage].items()
        for moment in record.get("attributed", ())
    ]
    return Table(
        columns=("seed", "round", "update", "sum of shares", "gap"), rows=rows,
        caption="Path-integrated gradients on training text, at four points, beside the difference in loss.",
    )  # fmt: skip


def against_measured(found: Records) -> Any:
    """Forecast against measured gap, a cell a point, between its bounds; on the line they agree."""
    figure, (panel,) = new_figure(1, 1, height=4.2)
    for colour, grid in zip(COLOURS, GRIDS, strict=False):
        for name, runs in RUNS.items():
            (unit,) = runs.over(found, grid)
            gap = measures.gap(unit)
            lower, point, upper = (measures.forecast_gap(unit, bound=b) for b in ("lower", "point", "upper"))
            if gap is None or lower is None or point is None or upper is None:
                continue
            panel.plot([gap, gap], [max(lower, 1e-3), upper], color=colour, linewidth=1, alpha=0.6)
            label = GRIDS[grid] if name == next(iter(RUNS)) else None
            panel.plot([gap], [point], "o", color=colour, label=label)
    ends = [1e-3, 10.0]
    panel.plot(ends, ends, color=GREY, linewidth=0.8)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("measured gap to fp32, nats")
    panel.set_ylabel("forecast; lines from lower to upper")
    panel.legend()
    return figure


# ---- the study ----------------------------------------------------------------------------------------

STUDY = declared(
    __name__,
    scales={
        scale: {name: runs.configs[scale] for name, runs in BUNDLES.items()} for scale in HORIZONS
    },
    stages=(
        Stage(name="reference", kind="reference", cells=references, run=run),
        Stage(name="first-masks", kind="prediction", cells=first_masks, run=make_masks, reads=("reference",)),
        Stage(name="again", kind="reference", cells=again, run=run, reads=("first-masks",)),
        Stage(
            name="second-masks", kind="prediction", cells=second_masks, run=make_masks,
            reads=("first-masks", "again"),
        ),
        Stage(name="forecast", kind="prediction", cells=forecasts, run=forecast_losses, reads=("reference",)),
        Stage(
            name="outcome", kind="outcome", cells=outcomes, run=run, reads=("first-masks", "second-masks")
        ),
    ),
    estimands=(
        Estimand(name="gap", what="final loss of nearest above fp32, nats", compute=gaps),
        *(
            Estimand(
                name=f"forecast-{b}", what=f"the same as forecast, {b}", compute=partial(forecast, bound=b)
            )
            for b in ("lower", "point", "upper")
        ),
        Estimand(name="misordered", what="pairs of formats in the wrong order, by unit", compute=misordered),
        Estimand(name="inside", what="nats from the nearer bound; negative outside", compute=inside),
        *(
            Estimand(
                name=f"ratio-{b}", what=f"forecast over measured gap, {b}", compute=partial(ratio, bound=b)
            )
            for b in ("point", "upper")
        ),
        Estimand(name="error", what="distance of that ratio, point, from one", compute=error),
        Estimand(name="median-error", what="its median over cells", compute=median_error),
        Estimand(name="rmse", what="of the rehearsed frozen fraction", compute=rehearsed_rmse),
        Estimand(name="rmse-projection", what="of the projected frozen fraction", compute=projected_rmse),
        Estimand(name="rmse-ratio", what="the first over the second", compute=rmse_ratio),
        *(
            Estimand(
                name=f"gap-{arm}", what=f"of {arm} on e5m2, nats", compute=partial(masked, arm=arm)
            )
            for arm in MASKED.arms
        ),
        Estimand(name="saved", what="nats that R leaves less than P", compute=saved),
        Estimand(name="quiet", what="forecasts of sr and masters, nats off", compute=quiet),
        Estimand(name="matched", what="1 where the arms began as declared", compute=matched),
    ),
    scale_data={scale: MASKED.data[scale] for scale in HORIZONS},
    tables={"cells": cells_table, "policies": policies_table, "attribution": attributed_table},
    figures={"against-measured": against_measured},
    question="Does one float32 run say, in nats, what a number format would cost?",
    units="a cell: one decoder, rate, horizon and seed on one grid; the grids of a unit share its reference",
    not_claimed=(
        "that the bounds are bounds: they are observed, not proved",
        "that the pull holds for other optimizers, models or horizons: it is a rule of thumb",
        "anything about fp8 arithmetic: compute, gradients and moments are float32",
        "that R is the best score, or that two rounds are enough",
    ),
    gates=(
        gate("order", "misordered == 0"),
        gate("bracket", "inside > 0"),
        gate("every", "error <= 0.3"),
        gate("median", "median-error <= 0.15"),
        gate("frozen", "rmse-ratio < 1"),
        gate("ninth", "saved > 0", scope="mean"),
        gate("quiet", "quiet <= 0.1",
            "what loses nothing must be forecast to lose nothing; decides no label here"),
        gate("matched", "matched == 1"),
    ),
    rules=(
        rule("not matched", failed=("matched",)),
        rule("loss is forecast: order, bounds, size, frozen fractions; R beats P", "order", "bracket",
            "every", "median", "frozen", "ninth"),
        rule("loss is forecast: order, bounds, size; not every other gate passes", "order", "bracket",
            "every", "median"),
        rule("loss is forecast in order and within bounds, not in size", "order", "bracket"),
        rule("loss is forecast in order only", "order"),
        rule("loss is not forecast"),
    ),
)  # fmt: skip
