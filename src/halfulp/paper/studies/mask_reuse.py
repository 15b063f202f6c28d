"""``mask-reuse``: does one source's mask, fixed before, hold for other seeds?

The paper's held-out reuse (appendix E, tab:fixed-mask-reuse-recoveries). One source's tiles by gradient
times update (P), by freeze (F), and as many of every tensor as P at random places, all fixed before any
target runs; each target's own P, which nobody would have in time, beside them. With R the share of the gap
won back, M = R(source P) - R(target P) and S = R(source P) - the larger of the source's F and the control: R
is at least 0.50, M at least -0.10 and S at least 0.15 in every target, and 0.60, -0.05, 0.25 in the mean.

``source-R``, by what tiles cost in the source's rehearsal, is one more arm that decides nothing. The source's
masks are rehearsed by every target's float32 run before they are run.
"""

from __future__ import annotations

from halfulp.paper.arms import Bundle, Masked
from halfulp.paper.arms.mask_recipes import masters, recipes
from halfulp.paper.studies import _allocation as shared
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import gate, rule

RIVALS = ("source-F", "control-1")

RUNS = Bundle(
    scales=shared.THOUSAND,
    targets=(2035, 2036, 2037),
    conditions=shared.E5M2,
    arms={
        **shared.PLAIN, **masters("source", "P"), **masters("target", "P"),
        **masters("source", "F", "control-1", "R"),
    },
    rehearse=("rne", "source-P", "source-F", "control-1", "source-R"),
    masked=Masked(
        source=2031, window=0.6, attribute=shared.ROUNDS,
        of_source={
            **recipes(0.1, "P", "F", controls=1), "R": {"score": "R", "rehearsal": 0, "share": 0.1}
        },
        of_target=recipes(0.1, "P"),
    ),
    unit="target-{seed}",
    reference="target-{seed}",
)  # fmt: skip

STUDY = shared.study(
    __name__, RUNS,
    shared.less(RUNS, "M", "source-P", ["target-P"]),
    shared.less(RUNS, "D_F", "source-P", ["source-F"]),
    shared.less(RUNS, "D_C", "source-P", ["control-1"]),
    shared.less(RUNS, "S", "source-P", RIVALS),
    shared.less(RUNS, "ninth", "source-R", ["source-P"]),
    beside="P", highlight="source-P", faint=("control-1",),
    question="Does one source's mask, fixed before, hold for other seeds as their own would?",
    units="one target training seed; masks, tiles and the control are not replicates",
    not_claimed=(
        "that the source's own result was unknown when its mask was fixed",
        "anything about other masks, models, data or budgets, or a population of controls: it is one",
        "memory or time of a whole run: the budget counts bytes of masters",
    ),
    gates=(
        *shared.floors(blanket=0.9),
        gate("R", "recovery-source-P >= 0.5"),
        gate("R-mean", "recovery-source-P >= 0.6", scope="mean"),
        gate("M", "M >= -0.1"),
        gate("M-mean", "M >= -0.05", scope="mean"),
        gate("S", "S >= 0.15"),
        gate("S-mean", "S >= 0.25", scope="mean"),
    ),
    rules=(
        *shared.UNMET,
        rule("positive", "R", "R-mean", "M", "M-mean", "S", "S-mean",
            says="The source's mask holds for the targets, unchanged."),
        rule("negative", says="Not every floor is met."),
    ),
)  # fmt: skip

_NOTE = "GPT-2 124M; the small scale is 1.3 million weights"
row = Beside(STUDY, "tab:fixed-mask-reuse-recoveries", _NOTE,
    units=("target-2035", "target-2036", "target-2037"))  # fmt: skip
CLAIMS = (
    row("the rule", "positive", row.label, source="appendix E", note=""),
    *row.each("won back by masters everywhere, {}", (0.993, 1.006, 0.97), "recovery-master"),
    *row.each("won back by the source's P, {}", (0.69, 0.686, 0.678), "recovery-source-P"),
    *row.each("won back by the target's own P, {}", (0.706, 0.683, 0.671), "recovery-target-P"),
    *row.each("won back by the source's F, {}", (0.04, 0.036, 0.041), "recovery-source-F"),
    *row.each("won back by the control, {}", (0.161, 0.155, 0.145), "recovery-control-1"),
    *row.each("source's P less target's P, {}", (-0.0165, 0.0032, 0.0075), "M"),
    *row.each("source's P less source's F, {}", (0.65, 0.65, 0.637), "D_F"),
    *row.each("source's P less the control, {}", (0.529, 0.531, 0.533), "D_C"),
)  # fmt: skip
