"""``char-gpt``: when does a transformer freeze, and did its float32 reference say so?

The paper's one transformer whose majority crossing lies in the middle of training (section 3 and
appendix B): four layers, 0.8 million parameters, Shakespeare character by character. A float32 run
is audited on the grid with seven mantissa bits; where its frozen fraction crosses one half for good is
the forecast, which is sealed before any run on the grid starts. Then the same run is repeated with every
matrix rounded to the nearest code after each update.

*Persistent* crossing, because a small rate during the warmup freezes the majority at first: the update from
which f_t >= 1/2 to the end of what was observed. It says nothing of later.

Left open by the paper and chosen here: the two seeds; the initialisation, which is nanoGPT's in
distribution; the order of the data (:mod:`halfulp.paper.models.training`); held-out batches; that
the timing gate is the paper's descriptive band of 15%. Stored are all tensors of two dimensions, embeddings
included: the paper's "decay group".
"""

from __future__ import annotations

from functools import partial

from halfulp.paper.arms import Arm, Bundle, measures, plots, tables
from halfulp.paper.arms.arm import PLAYS
from halfulp.paper.models.decoder import CHARACTER, DecoderConfig
from halfulp.paper.models.training import Recipe, Schedule
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import declared, gate, rule

SCOPE = "all-2d"
TINY = DecoderConfig(layers=2, heads=2, width=32, context=32, vocabulary=65, hidden=128)


def _scale(model: DecoderConfig, updates: int, warmup: int, batch: int, eval_every: int) -> Arm:
    schedule = Schedule(peak=6e-4, floor=6e-5, warmup=warmup, horizon=updates)
    recipe = Recipe(
        schedule=schedule, updates=updates, batch=batch, context=model.context, eval_every=eval_every
    )
    return Arm(model=model, recipe=recipe, corpus=PLAYS, save_every=100)


RUNS = Bundle(
    scales={
        "smoke": _scale(TINY, updates=30, warmup=3, batch=4, eval_every=10),
        "small": _scale(CHARACTER, updates=600, warmup=20, batch=32, eval_every=50),
        "paper": _scale(CHARACTER, updates=3000, warmup=100, batch=32, eval_every=250),
    },
    targets=(1337, 1338),
    conditions={"m7": {"grid": "m7"}},
    arms={"rne": {"policy": "rne"}},
    scopes=(SCOPE,),
    unit="seed-{seed}",
    reference="seed-{seed}",
)

ESTIMANDS = (
    RUNS.estimand("predicted", "persistent crossing of the reference", measures.onset, scope="all-2d"),
    RUNS.estimand("measured", "persistent crossing of the run on the grid", measures.onset,
        scope="all-2d", arm="rne"),
    RUNS.estimand("timing-error",
        "|predicted - measured| / measured; none where either is absent or the first update",
        measures.timing_error, scope="all-2d"),
    RUNS.estimand("rmse", "of the forecast frozen fraction, all updates", measures.forecast_rmse,
        scope="all-2d"),
    RUNS.estimand("loss-fp32", "final held-out loss, nats", measures.loss, arm="fp32"),
    RUNS.estimand("loss-rne", "final held-out loss, nats", measures.loss, arm="rne"),
    RUNS.estimand("matched", "1 where both runs began from the same weights", measures.matched),
)  # fmt: skip

STUDY = declared(
    __name__, RUNS, own=ESTIMANDS,
    tables=tables(RUNS, scopes=(SCOPE,)),
    figures={"trajectories": partial(plots.trajectories, RUNS, scope=SCOPE)},
    question="Does a float32 reference forecast at which update a character GPT's stored weights freeze?",
    units="one training seed",
    not_claimed=(
        "that the majority stays frozen beyond the updates observed",
        "that freezing is a loss plateau",
        "anything about seeds other than these two",
    ),
    gates=(
        gate("timed", "timing-error <= 0.15", "the paper's descriptive band around a timing ratio of one"),
        gate("tracked", "rmse <= 0.05", "the accuracy that appendix C asks of a forecast"),
        gate("matched", "matched == 1"),
    ),
    rules=(
        rule("not matched", failed=("matched",)),
        rule("crossing and trajectory foretold", "timed", "tracked"),
        rule("crossing foretold", "timed"),
        rule("trajectory foretold, crossing not", "tracked"),
        rule("not foretold"),
    ),
)  # fmt: skip

_NOTE = "the paper does not name its seeds, nor its device"
row = Beside(STUDY, "appendix B (section 3)", units=("seed-1337", "seed-1338"))
CLAIMS = (
    *row.each("persistent crossing, measured, {}", (1644, 1666), "measured", note=_NOTE),
    *row.each("persistent crossing, forecast, {}", (1640, 1669), "predicted", note=_NOTE),
)  # fmt: skip
