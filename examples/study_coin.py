"""A study of one's own in one short file: do coins agree with a forecast that was sealed before the tosses?

halfulp study run study_coin.py
"""

import json
import random

from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study


def coins(config):
    return [Cell(name=f"coin-{seed}", config={"seed": seed}) for seed in range(config["coins"])]


def forecast(cell):
    return {"heads": 0.5}


def toss(cell):
    done, heads = json.loads(cell.load() or "[0, 0]")
    for block in range(done, 20):
        coin = random.Random(f"coin {cell.config['seed']}, block {block}")
        heads += sum(coin.random() < 0.5 for _ in range(10_000))
        cell.save(json.dumps([block + 1, heads]).encode())
    return {"heads": heads / 200_000}


def error(records):
    said = records["forecast"]["any"]["heads"]
    return {name: abs(outcome["heads"] - said) for name, outcome in records["toss"].items()}


study = Study(
    name="coin",
    question="Is a forecast of one half within half a percentage point of the heads of every coin?",
    units="one coin: a pseudo-random generator with its own seed, tossed 200,000 times",
    not_claimed=("anything about coins made of metal",),
    scales={"smoke": {"coins": 3}, "small": {"coins": 40}},
    stages=(
        Stage(name="forecast", kind="prediction", cells=lambda config: [Cell(name="any")], run=forecast),
        Stage(name="toss", kind="outcome", cells=coins, run=toss, reads=("forecast",)),
    ),
    estimands=(Estimand(name="error", what="distance of forecast and heads, by coin", compute=error),),
    gates=(Gate(name="close", estimand="error", scope="all", comparison="<=", threshold=0.005),),
    rules=(Rule(label="the forecast holds", passed=("close",)), Rule(label="the forecast fails")),
)
