"""A study that builds on another one, and stops where going on would make no sense.

halfulp study run study_coin.py
halfulp study run study_again.py --evidence first=runs/coin-small
"""

import random

from halfulp.study import Cell, Estimand, Evidence, Gate, Rule, Stage, Study


def chosen(cell):
    errors = cell.evidence("first").estimands["error"]
    return {"coins": sorted(errors, key=errors.get, reverse=True)[: cell.config["most"]]}


def toss(cell):
    coin = cell.read("chosen", "coins")["coins"][cell.config["rank"]]
    bits = random.Random(f"{coin}, again").getrandbits(200_000)
    return {"coin": coin, "heads": bits.bit_count() / 200_000}


def distance(records, least):
    errors = records.evidence["first"].estimands["error"]
    return {coin: errors[coin] / least for coin in records["chosen"]["coins"]["coins"]}


def ratio(records):
    errors = records.evidence["first"].estimands["error"]
    return {r["coin"]: abs(r["heads"] - 0.5) / errors[r["coin"]] for r in records["toss"].values()}


study = Study(
    name="again",
    question="Are coins that were far from one half closer to it when they are tossed again?",
    units="one coin of the first study",
    not_claimed=("anything about coins that were not chosen",),
    scales={"small": {"most": 3}},
    evidence=(Evidence(name="first", study="coin", estimands=("error",)),),
    stages=(
        Stage(
            name="chosen",
            kind="prediction",
            cells=lambda config: [Cell(name="coins", config={"most": config["most"]})],
            run=chosen,
        ),
        Stage(
            name="toss",
            kind="outcome",
            cells=lambda config: [Cell(name=f"rank-{i}", config={"rank": i}) for i in range(config["most"])],
            run=toss,
            reads=("chosen",),
            only_if=("far",),
        ),
    ),
    estimands=(
        Estimand(name="distance", what="error in units of `least`", compute=distance, args={"least": 0.001}),
        Estimand(name="ratio", what="error of the second tosses over that of the first", compute=ratio),
    ),
    gates=(
        Gate(name="far", estimand="distance", scope="all", comparison=">=", threshold=1),
        Gate(name="closer", estimand="ratio", scope="mean", comparison="<=", threshold=0.8),
    ),
    rules=(
        Rule(label="not_far", says="No coins were far enough to be tossed again.", not_run=("toss",)),
        Rule(label="regression_to_the_mean", says="Coins that were far are closer.", passed=("closer",)),
        Rule(label="loaded", says="Coins that were far are still far."),
    ),
)
