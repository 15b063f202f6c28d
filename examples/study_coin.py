"""A study of one's own in ten lines: do tosses of a coin agree with a prediction made before them?"""

import random

from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study


def seeds(config):
    return [Cell(name=f"seed-{seed}", config={"seed": seed}) for seed in range(config["seeds"])]


def forecast(cell):
    return {"heads": 0.5}


def toss(cell):
    coin = random.Random(cell.config["seed"])
    return {"heads": sum(coin.random() < 0.5 for _ in range(10_000)) / 10_000}


def error(records):
    said = records["forecast"]["coin"]["heads"]
    return {name: abs(outcome["heads"] - said) for name, outcome in records["toss"].items()}


study = Study(
    name="coin",
    question="Is a forecast of one half within two percentage points of the heads of every coin?",
    units="one coin: a generator with its own seed, tossed ten thousand times",
    not_claimed=("anything about coins that are not pseudo-random generators",),
    scales={"smoke": {"seeds": 3}, "small": {"seeds": 40}},
    stages=(
        Stage(name="forecast", kind="prediction", cells=lambda config: [Cell(name="coin")], run=forecast),
        Stage(name="toss", kind="outcome", cells=seeds, run=toss, reads=("forecast",)),
    ),
    estimands=(Estimand(name="error", what="distance of forecast and heads, by coin", compute=error),),
    gates=(Gate(name="close", estimand="error", scope="all", comparison="<=", threshold=0.02),),
    rules=(Rule(label="the forecast holds", passed=("close",)), Rule(label="the forecast fails")),
)
