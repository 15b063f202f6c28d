"""``depth-17``: does the procedure of `prospective-modern` repeat in a deeper decoder?

The paper's controlled migration (appendix E, tab:depth17-allocation): the same study with one field changed,
17 layers for 12, a mask regenerated from a source of that depth, and a narrower inventory: one
composition-matched control, no freeze arm. 19 runs, 18,600 updates; 25,728 of 257,280 tiles, 79,036,416
bytes.
With D the gap, T = R(source P), M = T - R(target P) and C1 = T - R(random_01): D >= 0.10, R(all) >= 0.90,
T >= 0.50, M >= -0.10 and C1 >= 0.15 in every target, and 0.60, -0.05, 0.25 in the mean. All pass: ``GO``.

At ``small`` 4 layers become 9, the next depth of which a tenth of the tiles is a whole number of them, and a
run has 40 updates of 120 on half the sequences, so that there is time for it.
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.arms.arm import Arm
from halfulp.arms.family import at
from halfulp.arms.masks import masters, recipes
from halfulp.studies import _allocation as shared
from halfulp.studies import prospective_modern
from halfulp.studies.claims import Claim, Printed, label_of, printed
from halfulp.study.protocol import Gate, Rule, Study

LAYERS = {"smoke": 7, "small": 9, "paper": 17}


def _deeper(scale: str, arm: Arm) -> Arm:
    return replace(arm, model=replace(arm.model, layers=LAYERS[scale]))


_SHALLOW = prospective_modern.RUNS
_SMALL = shared.halved(at(_SHALLOW.scales["small"], updates=40, warmup=4, eval_every=20, horizon=120))

assert _SHALLOW.masked is not None
RUNS = replace(
    _SHALLOW,
    scales={
        scale: _deeper(scale, arm)
        for scale, arm in {**_SHALLOW.scales, "small": _SMALL}.items()
    },
    arms={**shared.PLAIN, **masters("source", "P", "control-1"), **masters("target", "P")},
    masked=replace(_SHALLOW.masked, of_source=recipes(0.1, "P", controls=1), apart=False),
    rehearse=("rne", "source-P", "control-1"),
)  # fmt: skip

STUDY = Study(
    name="depth-17",
    question="Does a source's mask hold for other seeds in a deeper decoder, as it did in the shallower?",
    units="one target training seed; masks, tiles and the control are not replicates",
    not_claimed=(
        "that a mask holds across depths: it is made anew",
        "a trend with size: there are two depths, and the seeds are the same",
        "memory or time of a whole run: the budget counts bytes of masters",
    ),
    scales=RUNS.configs,
    stages=RUNS.stages,
    estimands=(
        *shared.estimands(RUNS),
        shared.less(RUNS, "M", "source-P", ["target-P"]),
        shared.less(RUNS, "C1", "source-P", ["control-1"]),
    ),
    gates=(
        Gate.of("D", "gap >= 0.1"),
        Gate.of("R-all", "recovery-master >= 0.9"),
        *shared.floors("recovery-source-P", 0.5, 0.6, "T"),
        *shared.floors("M", -0.1, -0.05),
        *shared.floors("C1", 0.15, 0.25),
        Gate.of("exact", "bytes-off == 0"),
        Gate.of("matched", "matched == 1"),
    ),
    rules=(
        Rule(label="not matched", failed=("matched",)),
        Rule(label="budget not met exactly", failed=("exact",)),
        Rule(
            label="GO", passed=("D", "R-all", "T", "T-mean", "M", "M-mean", "C1", "C1-mean"),
            says="The procedure repeats at this depth, with a mask of its own.",
        ),
        Rule(label="NO-GO", says="Not every floor is met."),
    ),
    scale_data=RUNS.data,
    tables=shared.tables(RUNS),
    figures=shared.figure(RUNS, "source-P", ("control-1",)),
)  # fmt: skip

_TABLE = "tab:depth17-allocation"
_PRINTED: Printed = {
    "gap": ("D: nearest loss gap, nats", _TABLE, (1.136, 1.145, 1.128)),
    "recovery-master": ("R(all)", _TABLE, (0.998, 0.988, 1.004)),
    "recovery-source-P": ("T: won back by the source's P", _TABLE, (0.659, 0.661, 0.672)),
    "M": ("M: source's P less target's P", _TABLE, (0.009, 0.009, 0.008)),
    "C1": ("C1: source's P less the control", _TABLE, (0.496, 0.491, 0.511)),
}

PAPER = (
    Claim("the rule", "appendix E", "GO", label_of(STUDY)),
    *printed(
        STUDY, RUNS.units, _PRINTED, note="198 million weights; the small scale is 2.8 million, 9 layers"
    ),
)
