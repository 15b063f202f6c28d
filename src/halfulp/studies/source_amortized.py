"""``source-amortized``: one float32 run, sealed, against three targets that it has never seen.

The paper's prospective audit (section 4.2, appendix C): a NeoX-style decoder on e4m3@128. One *source* seed
is trained in float32 and audited; its forecast is sealed before any target starts. Then each of three fresh
targets has a *privileged* float32 reference of its own, and one nearest run, the outcome: seven runs.
Micro-batches of one sequence, twelve to an update (at ``small`` three of four, to save time), and attention
by plain matrix products. Scope: the core, weighted by coordinates, after the warmup.

Registered: training validity, variation, absolute accuracy, skill against the best constant in hindsight,
regret against the target's own reference, and *directional specificity*: is the directional event better
than the simpler ones? In the paper all pass but the last, in every target. Specificity never decides the
label; it says how to read it.

Not printed by the paper and chosen here: the seeds, used by no other study; that all float32 runs start
from the projected codes, as those of `neox-transfer`; and thresholds: E <= 0.05; V >= 0.10; a skill of at
least 0.36, which is E <= 0.8 E_const; a regret of at most 0.01; specificity E < min(E_symmetric, E_rho); a
reference that falls by a nat; a finite loss; no code at the ends of the range.
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.arms import Arm, Bundle, standard
from halfulp.arms.family import PAPER_NEOX, SMALL_NEOX, SMOKE_NEOX, three_thousand
from halfulp.studies.declared import declared

SCOPE = "core"


def _accumulated(arm: Arm, micro: int) -> Arm:
    """Some sequences at a time, math-only attention."""
    return replace(arm, recipe=replace(arm.recipe, micro=micro), attention="math")


_SCALES = three_thousand(SMOKE_NEOX, SMALL_NEOX, PAPER_NEOX)


RUNS = Bundle(
    scales={name: _accumulated(arm, 4 if name == "small" else 1) for name, arm in _SCALES.items()},
    targets=(693147, 915965, 202056),
    conditions={"e4m3": {"grid": "e4m3@128"}},
    arms={"rne": {"policy": "rne"}},
    anchor="projected",
    scopes=(SCOPE, "all-2d"),
    rehearse=("rne",),
    forecast_from=577215,
    unit="target-{seed}",
    reference="target-{seed}",
)

STUDY = declared(__name__, RUNS, **standard(RUNS, warmup=False, scopes=(SCOPE,)))
