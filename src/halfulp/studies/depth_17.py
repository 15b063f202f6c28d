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

STUDY = shared.study(
    __name__, RUNS,
    shared.less(RUNS, "M", "source-P", ["target-P"]),
    shared.less(RUNS, "C1", "source-P", ["control-1"]),
    beside="P", highlight="source-P", faint=("control-1",),
)  # fmt: skip
