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

from halfulp.arms import Bundle, Masked
from halfulp.arms.masks import masters, recipes
from halfulp.studies import _allocation as shared

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
        source=2031, window=0.6, apart=False, attribute=shared.ROUNDS,
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
)  # fmt: skip
