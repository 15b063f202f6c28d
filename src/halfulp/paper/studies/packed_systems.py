"""``packed-systems``: what do packed masters for a tenth of the tiles cost, in bytes and seconds?

The paper's preliminary systems measurement (appendix E, tab:p0-packed-systems): 15 fresh processes, three
repetitions of nearest write-back, packed source-P masters, blanket masters, a float32 run, and the float32
run that sums the scores. Persistent bytes of packed masters are their payload and an index a tile: 65,049,600
= 64,880,640 + 21,120 x 8 in the paper, four bytes an index here. Throughput is compared within repetitions:
the paper's three pairs are -0.556%, +0.352% and -0.259% (median -0.259%) against blanket; the ratio of the
arms' medians was +0.076% and misleads.

Descriptive: no number of seconds decides anything, and none is a claim about other machines. At ``small`` the
machine is a CPU, and the peak is that of the resident set.
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.paper.arms.mask_recipes import masters, recipes
from halfulp.paper.studies import _allocation as shared
from halfulp.paper.studies import _systems as systems
from halfulp.paper.studies import prospective_modern
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import gate, rule
from halfulp.study.protocol import Estimand

ARMS = ("rne", "source-P", "master", systems.FLOAT32, systems.TRACE)

assert prospective_modern.RUNS.masked is not None
RUNS = replace(
    prospective_modern.RUNS,
    scales={
        **prospective_modern.RUNS.scales,
        "small": shared.halved(replace(prospective_modern.RUNS.scales["small"], save_every=1000)),
    },
    arms={**shared.PLAIN, "eco": {"policy": "eco"}, **masters("source", "P")},
    masked=replace(
        prospective_modern.RUNS.masked, of_source=recipes(0.1, "P"), of_target={}, window=0.2
    ),
)  # fmt: skip

STUDY = systems.study(
    __name__, RUNS, ARMS,
    estimands=(
        *systems.contrast("source-P", "master"),
        *systems.contrast("source-P", "rne"),
        *systems.contrast(systems.TRACE, systems.FLOAT32),
        Estimand(
            name="unaccounted", what="bytes that packed masters keep beyond payload and indices",
            compute=systems.unaccounted, args={"arm": "source-P", "mask": "P"},
        ),
    ),
    question="What do packed masters for a tenth of the tiles cost beside blanket masters and beside none?",
    units="one repetition: every arm in a fresh process, in rotated order",
    not_claimed=(
        "any inference from three repetitions, or anything about other hardware",
        "a training outcome: nothing is evaluated",
        "complete costs: temporaries, allocators and Python are seen in the peak alone",
        "a break-even count: none was registered",
    ),
    gates=(
        gate("accounted", "unaccounted == 0", "payload and an index a tile, to the byte"),
    ),
    rules=(
        rule("measured", "accounted", says="Descriptive: seconds decide nothing."),
        rule("bytes not accounted for"),
    ),
)  # fmt: skip

_NOTE = "an RTX 5090 and 162 million weights in the paper; smaller scales run on a CPU"
row = Beside(STUDY, "tab:p0-packed-systems", _NOTE)
CLAIMS = (
    row("throughput against blanket, paired median", -0.00259, "paired-source-P-master", "median"),
    row("the same of the arms' medians, misleading", 0.00076, "unpaired-source-P-master", "median"),
    row("accounted wall against blanket, seconds", -1.402, "wall-source-P-master", "median"),
    row("peak against blanket, bytes", -584649728, "peak-source-P-master", "median"),
    row("throughput against nearest, arms' medians", -0.07196, "unpaired-source-P-rne", "median"),
    row("accounted wall against nearest, seconds", 24.939, "wall-source-P-rne", "median"),
    row("peak against nearest, bytes", 65846272, "peak-source-P-rne", "median"),
    row("bytes that persist against nearest", 65049600, "storage-source-P-rne", "median"),
    row("the source's scores, seconds more than without", 153.547, "wall-trace-fp32", "median"),
)  # fmt: skip
