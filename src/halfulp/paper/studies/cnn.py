"""The same question as `two-layer`, in a convolutional network on real images.

A network of 105,866 weights (`models.convolutional`) learns 128 digits of MNIST by whole-batch
descent on cross-entropy, in fp64 as the other testbeds. References forecast the first majority crossing on
every grid; then every grid is run; and the frozen-fraction curve of m = 7 is compared with a direct bfloat16
update, as in the `emulator` study.

Left open by the paper and chosen here on references: rate 0.05, mantissas 9 to 13, seeds 0 to 2; the
comparison with bfloat16 at seed 0. Examples and horizon are those of the paper's other testbeds, 512 and 3000
steps. ``small`` has the first 128 digits and 200 steps (every reference crosses between updates 50 and 180),
``medium`` as many digits and 1000 steps: a root mean square over steps depends on the horizon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from halfulp.paper.models.convolutional import Cnn, mnist
from halfulp.paper.models.descent import BFLOAT16, apart, descend
from halfulp.paper.studies import _timing as timing
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import declared, gate, rule, scaled
from halfulp.study.protocol import Cell, Config, Estimand, Json, Running, Stage

SYSTEM = "cnn"
DATA = ("mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz")


def reference_cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each rate and seed."""
    return timing.each_rate_and_seed(config, ("digits", "steps", "mantissas"))


def bf16_cells(config: Config) -> Iterator[Cell]:
    """Yield the reference cells that also run in bf16."""
    return (cell for cell in reference_cells(config) if cell.config["seed"] in config["bf16_seeds"])


def _train(cell: Running, *, kept: bool = True, **how: Any) -> tuple[Any, dict[str, Json]]:
    """Run the descent of a cell, and return it with what every record says of it."""
    c = cell.config
    images, labels = map(cell.data, DATA)
    net, (x, y) = Cnn(c["seed"]), mnist(images, labels, c["digits"])
    if kept:
        how["running"] = cell
    series = descend(lambda w: net.gradient(w, x, y), net.start, rate=c["rate"], steps=c["steps"], **how)
    return series, {"rate": c["rate"], "seed": c["seed"], "loss": [float(series.loss[i]) for i in (0, -1)]}


def bf16(cell: Running) -> Mapping[str, Json]:
    """Run a bfloat16 tensor under torch.optim.SGD, beside a run at m = 7."""
    emulated, _ = _train(cell, kept=False, store=BFLOAT16)
    series, _ = _train(cell, bfloat16=True)
    return {
        "network": SYSTEM, "seed": cell.config["seed"], "size": series.size, "steps": cell.config["steps"],
        "direct": timing.measured(BFLOAT16, series.frozen, series.squares, series.size),
        **apart(series.frozen, emulated.frozen),
    }  # fmt: skip


TIMED = timing.Timed(system=SYSTEM, cells=reference_cells, train=_train)
STUDY = declared(
    __name__,
    stages=(*TIMED.stages, Stage(name="bf16", kind="outcome", cells=bf16_cells, run=bf16)),
    data=DATA,
    estimands=(*timing.ESTIMANDS, Estimand.of(timing.bf16_rmse)),
    tables={"timing": timing.table},
    figures={"timing": timing.figure},
    question="Does a reference forecast when a convolutional network's updates freeze, on real images?",
    units="one precision, rate and seed; cells that share a reference are paired coverage tests",
    not_claimed=(
        "that the network generalises: it learns a few hundred digits",
        "that cells which share a reference are independent",
    ),
    gates=(
        *timing.GATES,
        gate("stands-for-bf16", "bf16-rmse <= 0.05", "what the paper calls accurate (appendix C)"),
    ),
    rules=(
        rule("onset is predicted in a convolutional network", *timing.PASSED, "stands-for-bf16"),
        rule("median onset is predicted in a convolutional network", "median-near-one.symmetric"),
        rule("onset is not predicted in a convolutional network"),
    ),
    scales=scaled(
        {"rates": [0.05], "seeds": [0, 1, 2], "mantissas": [9, 10, 11, 12, 13], "digits": 512,
            "steps": 3000, "bf16_seeds": [0]},
        smoke={"rates": [0.2], "seeds": [0], "mantissas": [6, 7], "digits": 16, "steps": 20},
        small={"digits": 128, "steps": 200},
        medium={"digits": 128, "steps": 1000},
    ),
)  # fmt: skip

_NOTE_HORIZON = "The paper does not print the horizon, the rate or the batch of this comparison."
row = Beside(STUDY, "tab:transfer-app")
CLAIMS = (
    *timing.transferred(row, "cnn", "CNN, GD, cross-entropy", 15, 1.0, "100.0%", note=timing.OPEN),
    row("RMSE of m = 7 against a direct bfloat16 update, CNN", 0.022, "bf16-rmse", "cnn",
        source="app:arithmetic", note=_NOTE_HORIZON),
)  # fmt: skip
