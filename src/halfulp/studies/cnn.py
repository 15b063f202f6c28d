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
from halfulp.studies.declared import declared
from halfulp.study.protocol import Cell, Config, Estimand, Json, Running, Stage

SYSTEM = "cnn"
DATA = ("mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz")


def reference_cells(config: Config) -> Iterator[Cell]:
    return timing.each_rate_and_seed(config, ("digits", "steps", "mantissas"))


def bf16_cells(config: Config) -> Iterator[Cell]:
    return (cell for cell in reference_cells(config) if cell.config["seed"] in config["bf16_seeds"])


def _train(cell: Running, *, kept: bool = True, **how: Any) -> tuple[Any, dict[str, Json]]:
    """A run, and what every record says of it."""
    c = cell.config
    images, labels = map(cell.data, DATA)
    digits = mnist(images, labels, c["digits"])
    if kept:
        how["running"] = cell
    series = train(Cnn(c["seed"]), *digits, rate=c["rate"], steps=c["steps"], **how)
    return series, {"rate": c["rate"], "seed": c["seed"], "loss": [float(series.loss[i]) for i in (0, -1)]}


def bf16(cell: Running) -> Mapping[str, Json]:
    """A bfloat16 tensor under torch.optim.SGD, beside a run at m = 7."""
    emulated, _ = _train(cell, kept=False, store=bfloat16.GRID)
    series, _ = _train(cell, storage="bfloat16")
    return {
        "network": SYSTEM, "seed": cell.config["seed"], "size": series.size, "steps": cell.config["steps"],
        "direct": timing.measured(bfloat16.GRID, series.frozen, series.squares, series.size),
        **bfloat16.apart(series.frozen, emulated.frozen),
    }  # fmt: skip


TIMED = timing.Timed(system=SYSTEM, cells=reference_cells, train=_train)
STUDY = declared(
    __name__,
    stages=(
        *TIMED.stages,
        Stage(name="bf16", kind="outcome", cells=bf16_cells, run=bf16),
    ),
    data=DATA,
    estimands=(*timing.ESTIMANDS, Estimand.of(timing.bf16_rmse)),
    tables={"timing": timing.table},
    figures={"timing": timing.figure, "bf16": timing.bf16_figure},
)  # fmt: skip

shown = timing.shown
