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

from halfulp.arms import Bundle, standard
from halfulp.arms.family import PAPER_GPT2, SMALL_GPT2, SMOKE_GPT2, three_thousand
from halfulp.measures.forecasts import RECOVERED
from halfulp.studies.declared import declared

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

STUDY = declared(__name__, RUNS, **standard(RUNS, warmup=False, moved=NEVER, target=RECOVERED))
