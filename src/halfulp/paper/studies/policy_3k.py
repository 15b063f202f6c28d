"""``policy-3k``: two whole rounding policies, first projection included.

The paper's archived 3000-update intervention (appendix C, tab:e2-seeds). As in `matched-10k`, GPT-2 is
stored on e5m2 and e4m3@128 and what is written after an update is the nearest code or a neighbour at
random. Here the stochastic arm's *first projection* is random too, so its first codes are not those of the
nearest arm: the study contrasts whole policies, and only `matched-10k` isolates what is written after
updates. The float32 anchor starts from the raw initialisation.

``dense`` is the archived statistic: the equal mean of the shares of attention and mlp, not weighted by
coordinates. ``stays`` is the reference's forecast for stochastic rounding: the mean over coordinates of the
product of all probabilities to stay, with the gap in the direction of the proposal (the paper's archived
proxy used the symmetric one).

The paper registers no rule for these runs. Chosen here: 90% in every cell, as `matched-10k` asks.
"""

from __future__ import annotations

from halfulp.measures.forecasts import RECOVERED
from halfulp.paper.arms import Bundle, measures, standard
from halfulp.paper.arms.family import PAPER_GPT2, SMALL_GPT2, SMOKE_GPT2, three_thousand
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import OURS, declared, gate, rule

SEEDS = (1337, 1338, 42)
NEVER = ("dense", "core")

RUNS = Bundle(
    scales=three_thousand(SMOKE_GPT2, SMALL_GPT2, PAPER_GPT2),
    targets=SEEDS,
    conditions={"e5m2": {"grid": "e5m2"}, "e4m3": {"grid": "e4m3@128"}},
    arms={"rne": {"policy": "rne"}, "sr": {"policy": "sr", "projection": "stochastic"}},
    scopes=("dense", "core", "attention", "mlp", "embedding", "all-2d"),
    rehearse=("rne",),
)

ESTIMANDS = (
    RUNS.estimand("stays", "share that the reference expects sr never to move", measures.stays,
        scopes=["dense", "core"]),
)  # fmt: skip

STUDY = declared(
    __name__, RUNS, own=ESTIMANDS, **standard(RUNS, warmup=False, moved=NEVER, target=RECOVERED),
    question="How much of the loss of nearest rounding does stochastic rounding win back, as a whole policy?",
    units="one training seed on one grid; the grids share seeds and anchors, so they are paired",
    not_claimed=(
        "that what is written after an update explains the contrast: first projections differ, too",
        "that recovery is a causal share: the anchor starts from raw weights, the arms from codes",
        "anything about other realisations of the random bits: there is one a seed",
        "fp8 arithmetic: compute, gradients and moments are float32",
    ),
    gates=(
        gate("recovered", "recovery-sr >= 0.9",
            f"the rule of the matched runs; {OURS} here"),
        gate("material", "gap-rne > 0.1", "without a gap a recovery has no meaning"),
        gate("matched", "matched == 1", "same weights drawn, the stochastic arm from codes of its own"),
    ),
    rules=(
        rule("not matched", failed=("matched",)),
        rule("no material gap", failed=("material",)),
        rule("the whole policy wins back 90% in every cell", "recovered"),
        rule("the whole policy does not win back 90% in every cell"),
    ),
)  # fmt: skip

_NOTE = "GPT-2 124M, 3000 updates; smaller scales have another model, text and horizon"
row = Beside(STUDY, "tab:e2-seeds", _NOTE,
    units=("e5m2-1337", "e5m2-1338", "e5m2-42", "e4m3-1337", "e4m3-1338", "e4m3-42"))  # fmt: skip
CLAIMS = (
    *row.each("held-out loss, fp32, {}", (5.055, 5.029, 5.069, 5.055, 5.029, 5.069), "loss-fp32"),
    *row.each("held-out loss, nearest, {}", (6.701, 6.703, 6.7, 6.219, 6.237, 6.232), "loss-rne"),
    *row.each("held-out loss, stochastic, {}", (5.097, 5.102, 5.138, 5.076, 5.046, 5.081), "loss-sr"),
    *row.each("nearest loss gap, nats, {}", (1.646, 1.674, 1.632, 1.164, 1.209, 1.163), "gap-rne"),
    *row.each("recovery, {}", (0.9744, 0.9564, 0.9576, 0.9814, 0.9854, 0.9892), "recovery-sr"),
    *row.each("never moved, nearest, mean of attention and mlp, {} dense",
        ("about 0.626", "about 0.626", "about 0.626", "about 0.443", "about 0.443", "about 0.443"),
        "never-moved-rne", "{} dense", source="appendix C"),
    *row.each("never moved, stochastic, mean of attention and mlp, {} dense", ("essentially 0",
        "essentially 0", "essentially 0", "essentially 0", "essentially 0", "essentially 0"),
        "never-moved-sr", "{} dense", source="appendix C"),
)  # fmt: skip
