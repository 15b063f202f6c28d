"""``matched-10k``: what nearest write-back costs against stochastic write-back, and nothing else.

Section 4 and appendix C (tab:e3-seeds). GPT-2 124M, two seeds, and for each of the grids e5m2 and
e4m3@128 two runs from the same projected codes that differ only in what is written after an optimizer
step: the nearest code, or a neighbour at random. A float32 run of the same seed is anchor and
reference. With L the held-out loss after the last update,

    R = (L_rne - L_sr) / (L_rne - L_fp32)

is the share of the gap that stochastic write-back wins back. **The anchor starts from the raw
initialisation, the two others from its projection**, so the numerator is the effect of the policy and R a
description against that anchor, not a causal share. The rule, fixed in advance: at least 90% in all four
cells, and each cell is decided on its own.

Beside the losses: what share of attention and feed-forward weights no update ever moved (weighted by
coordinates), how well the reference forecast the frozen fraction of the nearest runs by group, beside the
symmetric and the scalar forecast, and, which the paper's records could not tell, how many codes sit at the
ends of the range, are subnormal or zero.

Where we differ: the random bits of a write-back are a function of seed, tensor, update and coordinate, so
our runs can be repeated (the paper's could not: it lost the order of a Python set). Their seed is the
training seed plus one, as in the paper. The smaller scales have a smaller model, other text, and a shorter
horizon; the structure is the same.
"""

from __future__ import annotations

from functools import partial

from halfulp.arms import Bundle, figures, tables
from halfulp.arms.family import PAPER_GPT2, SMALL_GPT2, SMOKE_GPT2, at
from halfulp.measures.forecasts import RECOVERED
from halfulp.studies.declared import declared

EARLY = 0.3
"""Recovery is also taken at the first evaluation after this share of the run: update 3001 of 10,000."""

RUNS = Bundle(
    scales={
        "smoke": at(SMOKE_GPT2, updates=20, warmup=2, eval_every=5),
        "small": at(SMALL_GPT2, updates=1000, warmup=20, eval_every=50),
        "paper": at(PAPER_GPT2, updates=10_000, warmup=100, eval_every=250),
    },
    targets=(1337, 1338),
    conditions={"e5m2": {"grid": "e5m2"}, "e4m3": {"grid": "e4m3@128"}},
    arms={"rne": {"policy": "rne"}, "sr": {"policy": "sr"}},
    scopes=("attention", "mlp", "core", "embedding", "all-2d"),
)


STUDY = declared(
    __name__, RUNS,
    tables=tables(RUNS),
    figures={"policy-effect": partial(figures.policy_effect, RUNS, after=EARLY, target=RECOVERED)},
)  # fmt: skip
