"""``depth-17``: does the procedure of `prospective-modern` repeat in a deeper decoder?

The paper's controlled migration (appendix E, tab:depth17-allocation): the same study with one field changed,
17 layers for 12, a mask regenerated from a source of that depth, and a narrower inventory: one
composition-matched control, no freeze arm. 19 runs, 18,600 updates; 25,728 of 257,280 tiles, 79,036,416
bytes.
With D the gap, T = R(source P), M = T - R(target P) and C1 = T - R(random_01): D >= 0.10, R(all) >= 0.90,
T >= 0.50, M >= -0.10 and C1 >= 0.15 in every target, and 0.60, -0.05, 0.25 in the mean. All pass: ``GO``.

At ``small`` 4 layers become 9, the next depth of which a tenth of the tiles is a whole number of them, and a
run has 40 updates of 120 on half the sequences, so that there is time for it; at ``medium`` 200 of 600.
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.paper.arms.arm import Arm
from halfulp.paper.arms.family import at
from halfulp.paper.arms.mask_recipes import masters, recipes
from halfulp.paper.studies import _allocation as shared
from halfulp.paper.studies import prospective_modern
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import gate, rule

LAYERS = {"smoke": 7, "small": 9, "medium": 9, "paper": 17}


def _deeper(scale: str, arm: Arm) -> Arm:
    return replace(arm, model=replace(arm.model, layers=LAYERS[scale]))


_SHALLOW = prospective_modern.RUNS
_MEDIUM = shared.halved(_SHALLOW.scales["small"])
_SMALL = at(_MEDIUM, updates=40, warmup=4, eval_every=20, horizon=120)

assert _SHALLOW.masked is not None
RUNS = replace(
    _SHALLOW,
    scales={
        scale: _deeper(scale, arm)
        for scale, arm in {**_SHALLOW.scales, "small": _SMALL, "medium": _MEDIUM}.items()
    },
    arms={**shared.PLAIN, **masters("source", "P", "control-1"), **masters("target", "P")},
    masked=replace(_SHALLOW.masked, of_source=recipes(0.1, "P", controls=1)),
    rehearse=("rne", "source-P", "control-1"),
)  # fmt: skip

STUDY = shared.study(
    __name__, RUNS,
    shared.less(RUNS, "M", "source-P", ["target-P"]),
    shared.less(RUNS, "C1", "source-P", ["control-1"]),
    beside="P", highlight="source-P", faint=("control-1",),
    question="Does a source's mask hold for other seeds in a deeper decoder, as it did in the shallower?",
    units="one target training seed; masks, tiles and the control are not replicates",
    not_claimed=(
        "that a mask holds across depths: it is made anew",
        "a trend with size: there are two depths, and the seeds are the same",
        "memory or time of a whole run: the budget counts bytes of masters",
    ),
    gates=(
        gate("D", "gap >= 0.1"),
        gate("R-all", "recovery-master >= 0.9"),
        gate("T", "recovery-source-P >= 0.5"),
        gate("T-mean", "recovery-source-P >= 0.6", scope="mean"),
        gate("M", "M >= -0.1"),
        gate("M-mean", "M >= -0.05", scope="mean"),
        gate("C1", "C1 >= 0.15"),
        gate("C1-mean", "C1 >= 0.25", scope="mean"),
        gate("exact", "bytes-off == 0"),
        gate("matched", "matched == 1"),
    ),
    rules=(
        rule("not matched", failed=("matched",)),
        rule("budget not met exactly", failed=("exact",)),
        rule("GO", "D", "R-all", "T", "T-mean", "M", "M-mean", "C1", "C1-mean",
            says="The procedure repeats at this depth, with a mask of its own."),
        rule("NO-GO", says="Not every floor is met."),
    ),
)  # fmt: skip

_NOTE = "198 million weights; the small scale is 2.8 million, 9 layers"
row = Beside(STUDY, "tab:depth17-allocation", _NOTE,
    units=("target-1249306074", "target-1629484925", "target-695340460"))  # fmt: skip
CLAIMS = (
    row("the rule", "GO", row.label, source="appendix E", note=""),
    *row.each("D: nearest loss gap, nats, {}", (1.136, 1.145, 1.128), "gap"),
    *row.each("R(all), {}", (0.998, 0.988, 1.004), "recovery-master"),
    *row.each("T: won back by the source's P, {}", (0.659, 0.661, 0.672), "recovery-source-P"),
    *row.each("M: source's P less target's P, {}", (0.009, 0.009, 0.008), "M"),
    *row.each("C1: source's P less the control, {}", (0.496, 0.491, 0.511), "C1"),
)  # fmt: skip
