"""``char-gpt``: when does a transformer freeze, and did its float32 reference say so?

The paper's one transformer whose majority crossing lies in the middle of training (section 3 and
appendix B): four layers, 0.8 million parameters, Shakespeare character by character. A float32 run
is audited on the grid with seven mantissa bits; where its frozen fraction crosses one half for good is
the forecast, which is sealed before any run on the grid starts. Then the same run is repeated with every
matrix rounded to the nearest code after each update.

*Persistent* crossing, because a small rate during the warmup freezes the majority at first: the update from
which f_t >= 1/2 to the end of what was observed. It says nothing of later.

Left open by the paper and chosen here: the two seeds; the initialisation, which is nanoGPT's in
distribution; the order of the data (:mod:`halfulp.models.training`); held-out batches; that
the timing gate is the paper's descriptive band of 15%. Stored are all tensors of two dimensions, embeddings
included: the paper's "decay group".
"""

from __future__ import annotations

from functools import partial

from halfulp.arms import Arm, Bundle, figures, tables
from halfulp.arms.arm import PLAYS
from halfulp.models.decoder import CHARACTER, DecoderConfig
from halfulp.models.training import Recipe, Schedule
from halfulp.studies.declared import declared

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

STUDY = declared(
    __name__, RUNS,
    tables=tables(RUNS, scopes=(SCOPE,)),
    figures={"trajectories": partial(figures.trajectories, RUNS, scope=SCOPE)},
)  # fmt: skip
