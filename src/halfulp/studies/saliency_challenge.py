"""``saliency-challenge``: is leverage better than plain scores, or than where its tiles lie?

The paper's sequential challenge (appendix E, tab:saliency-challenge). Evidence: the float32 and nearest
anchors, the leverage arm and the sealed masks of `leverage-primary`. New runs at exactly 10%: six scores
(freeze F, gradient G, update U, weight W, Taylor T, gradient times update P) and two structural controls, as
many random tiles within the tied matrix, and as many of every tensor as leverage has at random places. The
rule: leverage less the best score is positive in every seed and 0.05 in the mean, and the same holds against
the best structural control. The paper prints no floors for the latter; they are the same here. A stage at 20%
runs only after that. In the paper P was above L in one seed, so the result is negative.

``R-10``, what a tile costs in the rehearsal, is a ninth arm that decides nothing.
"""

from __future__ import annotations

from halfulp.arms import Anchors, Bundle
from halfulp.studies import _allocation as shared
from halfulp.studies import leverage_primary
from halfulp.studies.leverage_primary import NINTH, SCORES, STRUCTURAL
from halfulp.study.protocol import Evidence

EVIDENCE, LATER = "leverage", "stage-2"
FAMILY = tuple(f"{score}-10" for score in SCORES)
CONTROLS = tuple(f"{name}-10" for name in STRUCTURAL)
DECIDES = ("scores", "scores-mean", "structure", "structure-mean")

RUNS = Bundle(
    scales=leverage_primary.RUNS.scales,
    targets=leverage_primary.RUNS.targets,
    conditions=shared.E5M2,
    arms={
        **shared.masters(*FAMILY, *CONTROLS, f"{NINTH}-10"),
        **shared.masters(*(f"{name}-20" for name in ("L", *SCORES, *STRUCTURAL)), stage=LATER),
    },
    anchors=Anchors(
        evidence=EVIDENCE, bundle=leverage_primary.RUNS, arms=("rne", "master", "L-10")
    ),
    only_if={LATER: ("material", "blanket", "exact", "matched", *DECIDES)},
    unit="seed-{seed}",
    reference="seed-{seed}",
)  # fmt: skip

STUDY = shared.study(
    __name__, RUNS,
    shared.less(RUNS, "above-scores", "L-10", FAMILY, "the six scores"),
    shared.less(RUNS, "above-structure", "L-10", CONTROLS, "the structural controls"),
    shared.less(RUNS, "ninth-above-scores", f"{NINTH}-10", ("L-10", *FAMILY), "L and the six scores"),
    beside="L-10", highlight="L-10", faint=CONTROLS,
    evidence=(
        Evidence(
            name=EVIDENCE, study="leverage-primary",
            records=("outcome/*-rne", "outcome/*-master", "outcome/*-L-10", "reference/*", "source/*"),
            attached=("source/*/masks.safetensors",),
        ),
    ),
)  # fmt: skip
