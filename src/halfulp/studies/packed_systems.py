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

from halfulp.arms.masks import masters, recipes
from halfulp.studies import _allocation as shared
from halfulp.studies import _systems as systems
from halfulp.studies import prospective_modern
from halfulp.studies.declared import declared
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
        prospective_modern.RUNS.masked, of_source=recipes(0.1, "P"), of_target={}, apart=False, window=0.2
    ),
)  # fmt: skip

STUDY = declared(
    __name__,
    scales=systems.configs(RUNS),
    stages=systems.stages(RUNS, ARMS),
    estimands=(
        *systems.contrast("source-P", "master"),
        *systems.contrast("source-P", "rne"),
        *systems.contrast(systems.TRACE, systems.FLOAT32),
        Estimand(
            name="unaccounted", what="bytes that packed masters keep beyond payload and indices",
            compute=systems.unaccounted, args={"arm": "source-P", "mask": "P"},
        ),
    ),
    scale_data=RUNS.data,
    tables={"processes": systems.measured},
)  # fmt: skip
