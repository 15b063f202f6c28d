"""The same question as `two-layer`, in a convolutional network on real images.

A network of 105,866 weights (:mod:`halfulp.models.cnn`) learns 128 digits of MNIST by whole-batch descent on
cross-entropy, in fp64 as the other testbeds. References predict the first majority crossing on every grid;
then every grid is run; and the frozen-fraction curve of m = 7 is held against a direct bfloat16 update, as in
the `emulator` study.

Left open by the paper and chosen here: the first 128 training digits, and on references (which then cross
between updates 50 and 180, in all 15 cells) rate 0.05, mantissas 9 to 13, seeds 0 to 2, 200 steps; the
comparison with bfloat16 at seed 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from halfulp.measures.forecasts import ACCURATE_RMSE
from halfulp.models.cnn import Cnn, mnist, train
from halfulp.studies import _timing as timing
from halfulp.studies.claims import Claim
from halfulp.studies.emulator import BF16, bf16_rmse, curves
from halfulp.study.protocol import (
    Cell,
    Config,
    Estimand,
    Gate,
    Json,
    Rule,
    Running,
    Stage,
    Study,
)

SYSTEM = "cnn"
IMAGES, LABELS = "mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz"


def _references(config: Config) -> Iterator[tuple[str, Config]]:
    for rate in config["rates"]:
        for seed in config["seeds"]:
            shared = {key: config[key] for key in ("digits", "steps", "mantissas")}
            yield f"rate={rate}.seed={seed}", {**shared, "rate": rate, "seed": seed}


def reference_cells(config: Config) -> Iterator[Cell]:
    for name, c in _references(config):
        yield Cell(name=name, config=c)


def measured_cells(config: Config) -> Iterator[Cell]:
    for name, c in _references(config):
        for m in c["mantissas"]:
            yield Cell(name=f"{name}.m{m}", config={**c, "reference": name, "grid": f"m{m}"})


def bf16_cells(config: Config) -> Iterator[Cell]:
    for name, c in _references(config):
        if c["seed"] in config["bf16_seeds"]:
            yield Cell(name=name, config=c)


def _digits(cell: Running) -> tuple[torch.Tensor, torch.Tensor]:
    return mnist(cell.data(IMAGES), cell.data(LABELS), cell.config["digits"])


def reference(cell: Running) -> Mapping[str, Json]:
    """The predicted crossings of every grid."""
    c = cell.config
    grids = [f"m{m}" for m in c["mantissas"]]
    series = train(
        Cnn(c["seed"]), *_digits(cell), rate=c["rate"], steps=c["steps"], audit=grids, running=cell
    )
    return {
        "rate": c["rate"], "seed": c["seed"], "loss": [float(series.loss[0]), float(series.loss[-1])],
        "predicted": timing.forecast(grids, series.counts, series.size),
    }  # fmt: skip


def measure(cell: Running) -> Mapping[str, Json]:
    """The crossing of one run on a grid."""
    c = cell.config
    series = train(
        Cnn(c["seed"]), *_digits(cell), rate=c["rate"], steps=c["steps"], store=c["grid"], running=cell
    )
    return {
        "system": SYSTEM, "rate": c["rate"], "seed": c["seed"], "reference": c["reference"],
        "loss": [float(series.loss[0]), float(series.loss[-1])],
        **timing.measured(c["grid"], series.frozen, series.squares, series.size),
    }  # fmt: skip


def bf16(cell: Running) -> Mapping[str, Json]:
    """A bfloat16 tensor under torch.optim.SGD, beside a run at m = 7."""
    c = cell.config
    again = train(Cnn(c["seed"]), *_digits(cell), rate=c["rate"], steps=c["steps"], store=BF16)
    emulated = again.frozen.astype(np.int64)
    series = train(
        Cnn(c["seed"]), *_digits(cell), rate=c["rate"], steps=c["steps"], storage="bfloat16", running=cell
    )
    every = max(c["steps"] // 60, 1)
    return {
        "network": SYSTEM, "seed": c["seed"], "size": series.size, "steps": c["steps"],
        "squared_difference": int(((emulated - series.frozen) ** 2).sum()),
        "direct": timing.measured(BF16, series.frozen, series.squares, series.size),
        "curve": {"every": every, "direct": series.frozen[::every].tolist(),
                  "emulated": emulated[::every].tolist()},
    }  # fmt: skip


_PAPER: dict[str, Json] = {
    "rates": [0.05], "seeds": [0, 1, 2], "mantissas": [9, 10, 11, 12, 13], "digits": 128, "steps": 200,
    "bf16_seeds": [0],
}  # fmt: skip

STUDY = Study(
    name="cnn",
    question="Does a reference predict when a convolutional network's updates freeze, on real images?",
    units="one precision, rate and seed; cells that share a reference are paired coverage tests",
    not_claimed=(
        "that the network generalises: it learns 128 digits",
        "that cells which share a reference are independent",
    ),
    scales={
        "smoke": {**_PAPER, "rates": [0.2], "seeds": [0], "mantissas": [6, 7], "digits": 16, "steps": 20,
                  "bf16_seeds": [0]},
        "small": {**_PAPER, "seeds": [0], "bf16_seeds": [0]},
        "paper": _PAPER,
    },
    stages=(
        Stage(name="reference", kind="prediction", cells=reference_cells, run=reference),
        Stage(name="measured", kind="outcome", cells=measured_cells, run=measure),
        Stage(name="bf16", kind="outcome", cells=bf16_cells, run=bf16),
    ),
    data=(IMAGES, LABELS),
    estimands=(
        *timing.ESTIMANDS,
        Estimand(name="bf16-rmse", what="root mean square difference of frozen fractions, m = 7 against a "
                 "bfloat16 tensor, over steps and seeds", compute=bf16_rmse),
    ),
    gates=(
        *timing.gates(),
        Gate(name="stands-for-bf16", estimand="bf16-rmse", scope="all", comparison="<=",
             threshold=ACCURATE_RMSE, why="what the paper calls accurate (appendix C)"),
    ),
    rules=(
        Rule(label="onset is predicted in a convolutional network",
             passed=(*(gate.name for gate in timing.gates()), "stands-for-bf16")),
        Rule(label="median onset is predicted in a convolutional network",
             passed=("median-near-one.symmetric",)),
        Rule(label="onset is not predicted in a convolutional network"),
    ),
    tables={"timing": timing.table},
    figures={"timing": timing.figure, "bf16": curves},
)  # fmt: skip

PAPER = (
    *timing.transfer_rows(SYSTEM, "CNN, GD, cross-entropy", 15, 1.000, "100.0%"),
    Claim(claim="RMSE of m = 7 against a direct bfloat16 update, CNN", source="app:arithmetic", paper=2.2e-2,
          ours=lambda records: bf16_rmse(records).get(SYSTEM),
          note="The paper does not print the horizon, the rate or the batch of this comparison."),
)  # fmt: skip
