"""``char-gpt``: when does a transformer freeze, and did its float32 reference say so?

The paper's one transformer whose majority crossing lies in the middle of training (section 3 and
appendix B): four layers, 0.8 million parameters, Shakespeare character by character. A float32 run
is audited on the grid with seven mantissa bits; where its frozen fraction crosses one half for good is
the forecast, which is sealed before any run on the grid starts. Then the same run is repeated with every
matrix rounded to the nearest code after each update.

*Persistent* crossing, because a small rate during the warmup freezes the majority at first: the step from
which f_t >= 1/2 to the end of what was observed. It says nothing of later.

Left open by the paper and chosen here: the two seeds; the initialisation, which is nanoGPT's in
distribution; the order of the data (:mod:`halfulp.models.training`); held-out batches; that
the timing gate is the paper's descriptive band of 15%. Stored are all tensors of two dimensions, embeddings
included: the paper's "decay group".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from halfulp.audit.crossings import TOLERANCE, crossing
from halfulp.audit.measures import ACCURATE_RMSE, compare
from halfulp.models.decoder import CHARACTER, Config
from halfulp.models.training import Recipe, Schedule
from halfulp.studies import arms
from halfulp.studies.claims import Claim
from halfulp.study.protocol import (
    Cell,
    Estimand,
    Gate,
    Records,
    Rule,
    Running,
    Stage,
    Study,
    Table,
    Values,
)
from halfulp.study.protocol import Config as Scale

GRID = "m7"
SEEDS = (1337, 1338)


def _scale(model: Config, updates: int, warmup: int, batch: int, eval_every: int) -> dict[str, Any]:
    schedule = Schedule(peak=6e-4, floor=6e-5, warmup=warmup, horizon=updates)
    recipe = Recipe(
        schedule=schedule, seed=0, updates=updates, batch=batch, context=model.context, eval_every=eval_every
    )
    return {"seeds": list(SEEDS), "model": asdict(model), "recipe": recipe.to_json()}


TINY = Config(layers=2, heads=2, width=32, context=32, vocabulary=65, hidden=128)
SCALES = {
    "smoke": _scale(TINY, updates=30, warmup=3, batch=4, eval_every=10),
    "small": _scale(CHARACTER, updates=600, warmup=20, batch=32, eval_every=50),
    "paper": _scale(CHARACTER, updates=3000, warmup=100, batch=32, eval_every=250),
}


# ---- stages -----------------------------------------------------------------------------------------


def _arms(scale: Scale, **how: Any) -> Iterator[Cell]:
    for seed in scale["seeds"]:
        recipe = Recipe.from_json({**scale["recipe"], "seed": seed})
        config = arms.declare(
            seed=seed, model=Config(**scale["model"]), recipe=recipe, corpus=arms.PLAYS, save_every=100, **how
        )
        yield Cell(name=f"seed-{seed}", config=config)


def reference_cells(scale: Scale) -> Iterator[Cell]:
    """A float32 run a seed, audited."""
    return _arms(scale, audit=[GRID])


def forecast_cells(scale: Scale) -> Iterator[Cell]:
    """A forecast a seed."""
    return (Cell(name=f"seed-{seed}", config={"seed": seed}) for seed in scale["seeds"])


def outcome_cells(scale: Scale) -> Iterator[Cell]:
    """The same runs with nearest write-back."""
    return _arms(scale, grid=GRID, policy="rne")


def forecast(running: Running) -> dict[str, Any]:
    """What the reference says of a run on the grid: the whole trajectory and its crossings."""
    f = arms.frozen(running.read("reference", running.name), GRID, "all-2d")
    return {"seed": running.config["seed"], "frozen": f.tolist(), **asdict(crossing(f))}


# ---- estimands --------------------------------------------------------------------------------------


_by_seed = functools.partial(arms.by_cell, "outcome")


def _measured(records: Records, cell: str) -> int | None:
    return crossing(arms.frozen(records["outcome"][cell], GRID, "all-2d")).persistent


def _predicted(records: Records, cell: str) -> int | None:
    step: int | None = records["forecast"][cell]["persistent"]
    return step


def _timing_error(records: Records, cell: str) -> float | None:
    predicted, measured = _predicted(records, cell), _measured(records, cell)
    if predicted is None or measured is None or min(predicted, measured) == 1:
        return None  # no crossing after the first step: nothing to time
    return abs(predicted - measured) / measured


def _rmse(records: Records, cell: str) -> float | None:
    measured = arms.frozen(records["outcome"][cell], GRID, "all-2d")
    return compare(records["forecast"][cell]["frozen"], measured).rmse


def _reference_loss(records: Records, cell: str) -> float | None:
    return arms.final_loss(records["reference"][cell])


def _outcome_loss(records: Records, cell: str) -> float | None:
    return arms.final_loss(records["outcome"][cell])


def _matched(records: Records, cell: str) -> float | None:
    return float(records["reference"][cell]["initial"] == records["outcome"][cell]["initial"])


predicted = _by_seed(_predicted)
measured = _by_seed(_measured)


def crossings(records: Records) -> Table:
    """One line a seed."""
    rows = [
        (
            cell,
            _predicted(records, cell),
            _measured(records, cell),
            _timing_error(records, cell),
            _rmse(records, cell),
            _reference_loss(records, cell),
            _outcome_loss(records, cell),
        )
        for cell in records["outcome"]
    ]
    columns = ("seed", "forecast", "measured", "timing error", "RMSE of f", "loss fp32", "loss m7")
    return Table(
        columns=columns, rows=rows, caption="Persistent majority crossing, in updates; held-out loss in nats."
    )


def trajectories(records: Records) -> Any:
    """Frozen fraction over updates: forecast and outcome, with their crossings."""
    from halfulp.report.style import COLOURS, GREY, new_figure, percent

    figure, panels = new_figure(1, len(records["outcome"]), sharey=True)
    for panel, (cell, record) in zip(panels, records["outcome"].items(), strict=True):
        told = records["forecast"][cell]
        for f, at, name, colour in (
            (told["frozen"], told["persistent"], "forecast", COLOURS[0]),
            (arms.frozen(record, GRID, "all-2d"), _measured(records, cell), "measured", COLOURS[1]),
        ):
            panel.plot(range(1, len(f) + 1), f, color=colour, label=name)
            if at is not None:
                panel.axvline(at, color=colour, linewidth=0.8, linestyle=":")
        panel.axhline(0.5, color=GREY, linewidth=0.8)
        panel.set_title(cell)
        panel.set_xlabel("update")
        percent(panel)
    panels[0].set_ylabel(f"updates lost on {GRID}")
    panels[0].legend()
    return figure


STUDY = Study(
    name="char-gpt",
    question="Does a float32 reference foretell at which update a character GPT's stored weights freeze?",
    units="one training seed",
    not_claimed=(
        "that the majority stays frozen beyond the updates observed",
        "that freezing is a loss plateau",
        "anything about seeds other than these two",
    ),
    scales=SCALES,
    stages=(
        Stage(name="reference", kind="reference", cells=reference_cells, run=arms.run),
        Stage(name="forecast", kind="prediction", cells=forecast_cells, run=forecast, reads=("reference",)),
        Stage(name="outcome", kind="outcome", cells=outcome_cells, run=arms.run),
    ),
    estimands=(
        Estimand(name="predicted", what="persistent crossing of the reference", compute=predicted),
        Estimand(name="measured", what="persistent crossing of the run on the grid", compute=measured),
        Estimand(
            name="timing-error",
            what="|predicted - measured| / measured; none where either is absent or the first update",
            compute=_by_seed(_timing_error),
        ),
        Estimand(name="rmse", what="of the forecast frozen fraction, all updates", compute=_by_seed(_rmse)),
        Estimand(name="loss-fp32", what="final held-out loss, nats", compute=_by_seed(_reference_loss)),
        Estimand(name="loss-rne", what="final held-out loss, nats", compute=_by_seed(_outcome_loss)),
        Estimand(
            name="matched", what="1 where both runs began from the same weights", compute=_by_seed(_matched)
        ),
    ),
    gates=(
        Gate(
            name="timed", estimand="timing-error", scope="all", comparison="<=", threshold=TOLERANCE,
            why="the paper's descriptive band around a timing ratio of one",
        ),
        Gate(
            name="tracked", estimand="rmse", scope="all", comparison="<=", threshold=ACCURATE_RMSE,
            why="the accuracy that appendix C asks of a forecast",
        ),
        Gate(name="matched", estimand="matched", scope="all", comparison="==", threshold=1.0),
    ),
    rules=(
        Rule(label="not matched", failed=("matched",)),
        Rule(label="crossing and trajectory foretold", passed=("timed", "tracked")),
        Rule(label="crossing foretold", passed=("timed",)),
        Rule(label="trajectory foretold, crossing not", passed=("tracked",)),
        Rule(label="not foretold"),
    ),
    data=("tinyshakespeare.txt",),
    tables={"crossings": crossings},
    figures={"trajectories": trajectories},
)  # fmt: skip


def _ours(values: Callable[[Records], Values], seed: int) -> Callable[[Records], float | None]:
    return lambda records: values(records).get(f"seed-{seed}")


PAPER = tuple(
    Claim(
        claim=f"persistent crossing of the character GPT, {name}, seed {i + 1}",
        source="appendix B (section 3)",
        paper=printed[i],
        ours=_ours(values, seed),
        note="the paper does not name its seeds, nor its device",
    )
    for i, seed in enumerate(SEEDS)
    for name, values, printed in (
        ("measured", measured, (1644, 1666)),
        ("predicted", predicted, (1640, 1669)),
    )
)
