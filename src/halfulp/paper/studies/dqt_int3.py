"""``dqt-int3``: does training converge when the weights are three-bit integers and nothing else is kept?

The paper's Study 3 (section 4.5), after DQT (Zhao et al., arXiv 2412.04787): a Llama-shaped decoder of 134.1
million weights whose every tensor holds signed INT3 values over one scale, in float32 containers. After every
AdamW step all weights are rounded stochastically at the scale that the old signed maximum gives. Products
are in float16 (on a CPU in bfloat16) by autocast, what enters a block's matrices is rounded to 8 bits a token
with straight-through gradients, moments are float32; attention is eager, activations of blocks are computed
again in the backward (not reentrant). When a gradient is not finite, the loss scale is halved and the *same*
batch is tried again: neither the data, nor the schedule, nor the stream of random bits moves on.

One run of one seed. Six checkpoints, evenly spaced from the start to the end, are files; cells of a second
stage read them and evaluate them anew. The rule is on those losses: a fall of at least one nat, and at most
6.0 at the end.

Not printed by the paper and chosen here: a floor of zero for the cosine, a context of 1024, clipping at 1,
weight decay inside AdamW as torch has it (DQT's source decays after the step, which differs by rate times
decay of the step). At smaller scales the final gate says nothing: a uniform guess over 80 characters has 4.38
nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from halfulp.paper.arms import direct
from halfulp.paper.arms.arm import PLAYS, WIKIPEDIA, Arm
from halfulp.paper.models.decoder import LLAMA, DecoderConfig
from halfulp.paper.models.training import Recipe, Schedule
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import declared, gate, rule
from halfulp.paper.tokens import files_of
from halfulp.study.protocol import Cell, Config, Estimand, Records, Stage, Table, Values

CELL, EVALUATIONS = "seed-42", 6


def _arm(
    model: DecoderConfig, corpus: dict[str, str], *, rate: float, every: int, warmup: int, **how: Any
) -> Arm:
    updates = every * (EVALUATIONS - 1)
    schedule = Schedule(peak=rate, floor=0.0, warmup=warmup, horizon=updates)
    recipe = Recipe(
        schedule=schedule, updates=updates, eval_every=every, context=model.context, betas=(0.9, 0.999),
        epsilon=1e-6, weight_decay=0.01, half=True, loss_scale=65536.0, checkpointing=True, **how,
    )  # fmt: skip
    return Arm(
        model=model, recipe=recipe, corpus=corpus, seed=42, stream_seed=43, grid="int3/dqt", policy="dqt",
        attention="math", device="auto", save_every=max(1, every // 2),
    )  # fmt: skip


def _small(width: int) -> DecoderConfig:
    return replace(
        LLAMA, layers=2, heads=4, width=width, context=64, vocabulary=80, hidden=2 * width, std=0.07
    )


ARMS = {
    "smoke": _arm(_small(32), PLAYS, rate=1.5e-3, every=2, warmup=2, batch=4, eval_batches=2),
    "small": _arm(_small(64), PLAYS, rate=1.5e-3, every=80, warmup=14, batch=16, micro=8, eval_batches=4),
    "paper": _arm(
        LLAMA, WIKIPEDIA, rate=5e-4, every=11134, warmup=2000, batch=256, micro=8, eval_batches=2
    ),
}  # fmt: skip


def cells(config: Config) -> Iterator[Cell]:
    """Yield the only run."""
    yield Cell(name=CELL, config=config["arm"])


def checkpoints(config: Config) -> Iterator[Cell]:
    """Yield every checkpoint of the run."""
    every = Arm.from_json(config["arm"]).recipe.eval_every
    for i in range(EVALUATIONS):
        yield Cell(name=f"evaluation-{i}", config={"arm": config["arm"], "cell": CELL, "update": i * every})


def replayed(records: Records) -> Values:
    """Held-out loss of every checkpoint, from its file."""
    return {name: record["loss"] for name, record in records["replay"].items()}


def _ends(records: Records) -> tuple[float, float]:
    ordered = sorted(records["replay"].values(), key=lambda record: int(record["update"]))
    return ordered[0]["loss"], ordered[-1]["loss"]


def decrease(records: Records) -> Values:
    """From the first checkpoint to the last."""
    first, last = _ends(records)
    return {CELL: first - last}


def final(records: Records) -> Values:
    """Of the last checkpoint."""
    return {CELL: _ends(records)[1]}


def agrees(records: Records) -> Values:
    """1 where a checkpoint's file has the loss that the run noted when it was written."""
    noted = records["train"][CELL]["losses"]
    return {name: float(r["loss"] == noted[str(r["update"])]) for name, r in records["replay"].items()}


def distinct(records: Records) -> Values:
    """The most distinct values of any tensor."""
    return {name: float(record["values"]) for name, record in records["replay"].items()}


def retried(records: Records) -> Values:
    """Return how often a batch was tried again."""
    return {CELL: float(len(records["train"][CELL]["backoffs"]))}


def curve(records: Records) -> Table:
    """Tabulate the six losses."""
    ordered = sorted(records["replay"].values(), key=lambda record: int(record["update"]))
    return Table(
        columns=("update", "held-out loss, nats", "distinct values, most"),
        rows=[(r["update"], r["loss"], r["values"]) for r in ordered],
        caption="From the files of the checkpoints.",
    )


_WHAT = {
    replayed: "held-out loss of a checkpoint's file, nats", decrease: "fall over the six, nats",
    final: "the last of them, nats", agrees: "1 where the run noted the same",
    distinct: "most distinct values of a tensor", retried: "batches tried again after an overflow",
}  # fmt: skip

STUDY = declared(
    __name__,
    scales={scale: {"arm": arm.to_json()} for scale, arm in ARMS.items()},
    scale_data={scale: files_of(arm.corpus) for scale, arm in ARMS.items()},
    stages=(
        Stage(name="train", kind="outcome", cells=cells, run=direct.train),
        Stage(name="replay", kind="outcome", cells=checkpoints, run=direct.replay, reads=("train",)),
    ),
    estimands=tuple(Estimand(name=f.__name__, what=what, compute=f) for f, what in _WHAT.items()),
    tables={"checkpoints": curve},
    question=(
        "Does training converge when weights are three-bit integers over a scale and nothing else is kept "
        "of them?"
    ),
    units="one run of one seed; checkpoints and evaluations are not replicates",
    not_claimed=(
        "native INT3 storage or arithmetic, or its memory or speed: values live in float32 containers",
        "a reproduction of DQT's own training script or of a number that it reports",
        "anything about other seeds, texts or models",
    ),
    gates=(
        gate("agrees", "agrees == 1", "losses come from checkpoint files, not from the run's notes"),
        gate("three-bits", "distinct <= 8", "a tensor of INT3 has eight values at most"),
        gate("decrease", "decrease >= 1", "the frozen positive rule"),
        gate("final", "final <= 6", "the frozen positive rule"),
    ),
    rules=(
        rule("inconclusive_invalid_dqt_replay", failed=("agrees",),
            says="A checkpoint's file does not have the loss that was noted."),
        rule("inconclusive_invalid_dqt_replay", failed=("three-bits",), says="A tensor is not INT3."),
        rule("dqt_direct_state_int3_convergence_supported", "decrease", "final",
            says="The loss fell by a nat or more, to 6.0 or less."),
        rule("dqt_direct_state_int3_convergence_not_supported",
            says="The loss did not fall as far as the rule asks."),
    ),
)  # fmt: skip

_NOTE = (
    "134.1 million weights, 55,670 updates of 256 sequences; smaller scales have another model, text and "
    "horizon, and bfloat16 for float16"
)
row = Beside(STUDY, "section 4.5", _NOTE)
CLAIMS = (
    row("registered label", "dqt_direct_state_int3_convergence_supported", row.label, note=""),
    *row.each("held-out loss of the checkpoint, nats, {}", {"evaluation-0": 10.4825, "evaluation-1": 3.3788,
        "evaluation-2": 3.3156, "evaluation-3": 3.2521, "evaluation-4": 3.2018, "evaluation-5": 3.1754},
        "replayed"),
    row("fall over the six, nats", 7.3071, "decrease", "seed-42"),
    row("batches tried again after an overflow", 3, "retried", "seed-42"),
)  # fmt: skip
