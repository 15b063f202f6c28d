"""The same question as `two-layer`, in a convolutional network on real images.

A network of 105,866 weights (:mod:`halfulp.models.cnn`) learns 128 digits of MNIST by whole-batch descent on
cross-entropy, in fp64 as the other testbeds. References forecast the first majority crossing on every grid;
then every grid is run; and the frozen-fraction curve of m = 7 is held against a direct bfloat16 update, as in
the `emulator` study.

Left open by the paper and chosen here: the first 128 training digits, and on references (which then cross
between updates 50 and 180, in all 15 cells) rate 0.05, mantissas 9 to 13, seeds 0 to 2, 200 steps; the
comparison with bfloat16 at seed 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from halfulp.models import bfloat16
from halfulp.models.cnn import Cnn, mnist, train
from halfulp.studies import _timing as timing
from halfulp.studies.claims import claims_of
from halfulp.studies.declared import declared
from halfulp.study import Cell, Estimand, Running, Stage
from halfulp.study.protocol import Config, Json

SYSTEM = "cnn"
DATA = ("mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz")


def reference_cells(config: Config) -> Iterator[Cell]:
    return timing.each_rate_and_seed(config, ("digits", "steps", "mantissas"))


def measured_cells(config: Config) -> Iterator[Cell]:
    return timing.on_every_grid(reference_cells(config))


def bf16_cells(config: Config) -> Iterator[Cell]:
    return (cell for cell in reference_cells(config) if cell.config["seed"] in config["bf16_seeds"])


def _train(cell: Running, *, kept: bool = True, **how: Any) -> Any:
    c = cell.config
    images, labels = map(cell.data, DATA)
    digits = mnist(images, labels, c["digits"])
    if kept:
        how["running"] = cell
    return train(Cnn(c["seed"]), *digits, rate=c["rate"], steps=c["steps"], **how)


def _ran(cell: Running, series: Any) -> dict[str, Json]:
    ends = [float(series.loss[0]), float(series.loss[-1])]
    return {"rate": cell.config["rate"], "seed": cell.config["seed"], "loss": ends}


def reference(cell: Running) -> Mapping[str, Json]:
    """The forecast crossings of every grid."""
    series = _train(cell, audit=timing.grids(cell.config))
    forecast = timing.forecast(cell.config, series.counts, series.size)
    return {**_ran(cell, series), "predicted": forecast}


def measure(cell: Running) -> Mapping[str, Json]:
    """The crossing of one run on a grid."""
    grid = cell.config["grid"]
    series = _train(cell, store=grid)
    found = timing.measured(grid, series.frozen, series.squares, series.size)
    return {"system": SYSTEM, "reference": cell.config["reference"], **_ran(cell, series), **found}


def bf16(cell: Running) -> Mapping[str, Json]:
    """A bfloat16 tensor under torch.optim.SGD, beside a run at m = 7."""
    emulated = _train(cell, kept=False, store=bfloat16.GRID)
    series = _train(cell, storage="bfloat16")
    return {
        "network": SYSTEM, "seed": cell.config["seed"], "size": series.size, "steps": cell.config["steps"],
        "direct": timing.measured(bfloat16.GRID, series.frozen, series.squares, series.size),
        **bfloat16.apart(series.frozen, emulated.frozen),
    }  # fmt: skip


_PAPER: dict[str, Json] = {
    "rates": [0.05], "seeds": [0, 1, 2], "mantissas": [9, 10, 11, 12, 13], "digits": 128, "steps": 200,
    "bf16_seeds": [0],
}  # fmt: skip

STUDY = declared(
    __file__,
    gates=timing.GATES,
    scales={
        "smoke": {**_PAPER, "rates": [0.2], "seeds": [0], "mantissas": [6, 7], "digits": 16, "steps": 20},
        "small": {**_PAPER, "seeds": [0]},
        "paper": _PAPER,
    },
    stages=(
        Stage(name="reference", kind="prediction", cells=reference_cells, run=reference),
        Stage(name="measured", kind="outcome", cells=measured_cells, run=measure),
        Stage(name="bf16", kind="outcome", cells=bf16_cells, run=bf16),
    ),
    data=DATA,
    estimands=(*timing.ESTIMANDS, Estimand.of(timing.bf16_rmse)),
    tables={"timing": timing.table},
    figures={"timing": timing.figure, "bf16": timing.bf16_figure},
)  # fmt: skip

PAPER = claims_of(STUDY, __file__, timing.shown)
