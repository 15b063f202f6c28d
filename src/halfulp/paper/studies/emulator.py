"""Does a mantissa emulator stand for a real format, and does its reference say when it freezes?

The emulator computes in fp64 and rounds each stored weight to m mantissa bits after every step; its wide
exponent leaves mantissa resolution as the only difference between grids. Two questions:

1. *Timing*, in the simplest system there is: a linear readout of fixed tanh features
   (:func:`halfulp.paper.models.teacher.frozen_features`), 18 cells, references before runs.
2. *Is m = 7 bfloat16?* The same training with the weights in a ``torch.bfloat16`` tensor, its gradient cast
   to bfloat16 and ``torch.optim.SGD`` doing the update, all arithmetic of the network still fp64. The
   two frozen-fraction curves are compared step by step, in the readout and in the two-layer network (the
   convolutional network is compared in the `cnn` study).

The paper says "a fixed tanh random feature map with eight outputs": here many features, and eight outputs of
the readout. Left open by it and chosen here, on references: contexts of four values, 128 features (1,024
weights), a start N(0, 0.1**2), mantissas 6 to 11, rate 0.05, seeds 0 to 2, 3,000 steps (pooled rho where
references cross is then 0.72 to 0.79; the paper prints 0.707 where runs cross). The two-layer network has the
testbed that study `testbed` chose, rate 0.1 and seeds 0 to 3. A root mean square over steps depends on how
long one looks, so the horizon is part of the definition. It is computed from whole numbers: the sum over
steps of the squared difference of two counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from halfulp.paper.models.descent import BFLOAT16, apart, direct
from halfulp.paper.models.learning_forecasts import regression
from halfulp.paper.models.mlp import Series, Trainer, run
from halfulp.paper.models.teacher import CHOSEN, Problem, frozen_features
from halfulp.paper.studies import _timing as timing
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import declared, gate, rule, scaled
from halfulp.study.protocol import Cell, Config, Estimand, Json, Running, Stage

SYSTEM = "emulator"
KEYS = ("testbed", "rate", "steps", "examples", "features", "outputs", "width")


def reference_cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each seed."""
    for seed in config["seeds"]:
        c = {key: config[key] for key in (*KEYS, "mantissas")}
        yield Cell(name=f"seed={seed}", config={**c, "seed": seed})


def bf16_cells(config: Config) -> Iterator[Cell]:
    """Yield a cell for each network and seed that runs in bf16."""
    for network, which in (("frozen-features", ""), ("two-layer", "two_layer_")):
        for seed in config[f"{which}seeds"]:
            c = {key: config[key] for key in KEYS} | {"rate": config[f"{which}rate"]}
            yield Cell(name=f"{network}.seed={seed}", config={**c, "network": network, "seed": seed})


def _features(c: Config) -> Problem:
    n = c["examples"]
    return frozen_features(c["seed"], features=c["features"], readouts=c["outputs"], examples=n, tests=n)


def _train(cell: Running, **how: Any) -> tuple[Series, dict[str, Json]]:
    c, p = cell.config, _features(cell.config)
    series = run(Trainer(p.net, p.train, p.start, rate=c["rate"], **how), c["steps"], cell)
    return series, {"seed": c["seed"]}


def bf16(cell: Running) -> Mapping[str, Json]:
    """Run the emulator at m = 7 and a bfloat16 tensor under torch.optim.SGD, step by step."""
    c, grid = cell.config, BFLOAT16
    p = _features(c) if c["network"] == "frozen-features" else regression(c)
    rate = p.factor * c["rate"]
    emulated = run(Trainer(p.net, p.train, p.start, rate=rate, store=grid), c["steps"])
    torch_run = direct(p, rate, c["steps"], cell)
    return {
        "network": c["network"], "seed": c["seed"], "size": emulated.size, "steps": c["steps"],
        "direct": timing.measured(grid, torch_run.frozen, torch_run.squares, torch_run.size),
        "emulated": timing.measured(grid, emulated.frozen, emulated.squares, emulated.size),
        **apart(torch_run.frozen, emulated.frozen),
    }  # fmt: skip


TIMED = timing.Timed(system=SYSTEM, cells=reference_cells, train=_train)
STUDY = declared(
    __name__,
    stages=(*TIMED.stages, Stage(name="bf16", kind="outcome", cells=bf16_cells, run=bf16)),
    estimands=(*timing.ESTIMANDS, Estimand.of(timing.bf16_rmse), Estimand.of(timing.bf16_rho)),
    tables={"timing": timing.table},
    figures={"timing": timing.figure},
    question="Does rounding to m mantissa bits in fp64 stand for a real format, and is its onset forecast?",
    units="one precision and seed; cells that share a reference are paired coverage tests",
    not_claimed=(
        "that formats with a narrow exponent behave like their mantissa",
        "that low-precision arithmetic, as opposed to storage, behaves like this",
    ),
    gates=(
        *timing.GATES,
        gate("stands-for-bf16", "bf16-rmse <= 0.05", "what the paper calls accurate (appendix C)"),
    ),
    rules=(
        rule("the emulator stands for bfloat16 and its onset is predicted", *timing.PASSED,
            "stands-for-bf16"),
        rule("the emulator stands for bfloat16", "stands-for-bf16"),
        rule("the emulator does not stand for bfloat16"),
    ),
    scales=scaled(
        {"testbed": CHOSEN.json(), "rate": 0.05, "steps": 3000, "examples": 512, "features": 128,
            "outputs": 8, "seeds": [0, 1, 2], "mantissas": [6, 7, 8, 9, 10, 11], "width": 64,
            "two_layer_rate": 0.1, "two_layer_seeds": [0, 1, 2, 3]},
        smoke={"steps": 150, "examples": 64, "features": 8, "outputs": 4, "seeds": [0],
            "mantissas": [5, 7, 9], "width": 8, "two_layer_seeds": [0]},
        small={"seeds": [0], "two_layer_seeds": [0]},
    ),
)  # fmt: skip

_NOTE_HORIZON = "The paper does not print the horizon, the rate or the seeds of this root mean square."
_NOTE_CPU = "The paper says 'on bf16 hardware'; ours is torch.bfloat16 on a CPU, frozen features."
row = Beside(STUDY, "tab:transfer-app")
CLAIMS = (
    *timing.transferred(row, "emulator", "mantissa emulator", 18, 1.03, "83.3%", note=timing.OPEN),
    row("RMSE of m = 7 against a direct bfloat16 update, frozen features", 0.0018, "bf16-rmse",
        "frozen-features", source="app:arithmetic", note=_NOTE_HORIZON),
    row("RMSE of m = 7 against a direct bfloat16 update, two-layer", 0.0067, "bf16-rmse", "two-layer",
        source="app:arithmetic", note=_NOTE_HORIZON),
    row("pooled rho at the crossing, emulator, median", 0.707, "rho-at-crossing", "emulator",
        source="app:arithmetic", note=timing.POOLED),
    row("pooled rho at the crossing, bfloat16, median", 0.72, "bf16-rho", "frozen-features",
        source="app:arithmetic", note=_NOTE_CPU),
)  # fmt: skip
