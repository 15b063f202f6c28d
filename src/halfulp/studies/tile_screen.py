"""``tile-screen``: does weighting a tile's leverage by how often its updates are lost choose better tiles?

The paper's registered exact-payload screen (appendix E, tab:allocator-pilot), one deployment seed. A float32
run of 600 updates sums, for every tile of 768 coordinates, how often the update would be lost (F), how far it
points downhill (L), and both at once (C). At exactly 10% and 20% of the bytes of all masters, tiles chosen by
C are to win back at least 0.03 more of the gap than the best of F, L and five random masks, at one budget at
least; otherwise the follow-up is not authorised. It was not: +0.001 and -0.002.

``R`` is one more score, which decides nothing: what a tile costs in the rehearsal of the nearest run. Masks
of 10% are rehearsed before they are run. At ``small`` a tile is a row of 128, a run 40 updates of 120.
"""

from __future__ import annotations

from halfulp.arms import Bundle, Masked
from halfulp.studies import _allocation as shared
from halfulp.study.protocol import Estimand, Records, Values

BUDGETS = (10, 20)
RANDOM = {percent: tuple(shared.at_random(percent)) for percent in BUDGETS}
_SCORES = ("C", "L", "F", "R")

RUNS = Bundle(
    scales=shared.THOUSAND,
    targets=(2027,),
    conditions=shared.E5M2,
    arms={
        **shared.PLAIN, **shared.masters(*(shared.named(s, p) for p in BUDGETS for s in _SCORES)),
        **shared.masters(*RANDOM[10], *RANDOM[20]),
    },
    rehearse=("rne", "C-10", "L-10", "F-10", "R-10", "random-1-10"),
    masked=Masked(
        window=0.6, apart=False, attribute=shared.ROUNDS,
        of_source={
            **shared.by_scores(_SCORES, *BUDGETS), **shared.at_random(10), **shared.at_random(20)
        },
    ),
    unit="seed-{seed}",
    reference="seed-{seed}",
)  # fmt: skip


def promotion(found: Records) -> Values:
    """The advantage of C over the best comparator, by budget, as the larger of the two."""
    at = [_above(percent) for percent in BUDGETS]
    by_budget = [estimand.compute(found, **estimand.args) for estimand in at]
    return {
        unit: max((v for values in by_budget if (v := values[unit]) is not None), default=None)
        for unit in RUNS.units
    }


def _above(percent: int) -> Estimand:
    rivals = [shared.named(s, percent) for s in ("L", "F")] + list(RANDOM[percent])
    what = "L, F and random masks"
    return shared.less(RUNS, f"above-{percent}", shared.named("C", percent), rivals, what)


STUDY = shared.study(
    __name__, RUNS,
    *(_above(percent) for percent in BUDGETS),
    Estimand(name="promotion", what="the larger of above-10 and above-20", compute=promotion),
    *(
        shared.less(RUNS, f"ninth-above-L-{p}", shared.named("R", p), [shared.named("L", p)])
        for p in BUDGETS
    ),
    beside="C-10", highlight="C-10", faint=(*RANDOM[10], *RANDOM[20]),
)  # fmt: skip
