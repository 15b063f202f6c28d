"""``eco-systems``: what does ECO cost beside nearest write-back, packed masters and blanket masters?

The paper's descriptive artifact (appendix E): four repetitions in rotated order of nearest, ECO, packed
source-P and blanket, 16 fresh processes. ECO's throughput over nearest was 0.899775, 0.902332, 0.899015 and
0.901190 (paired median 0.900483): two repetitions miss a nominal 0.90, which no artifact had sealed, so they
are no decision. ECO keeps no tensor that nearest does not. Here, too, seconds decide nothing.
"""

from __future__ import annotations

from halfulp.paper.studies import _systems as systems
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import gate, rule
from halfulp.paper.studies.packed_systems import RUNS
from halfulp.study.protocol import Estimand

ARMS = ("rne", "eco", "source-P", "master")

STUDY = systems.study(
    __name__, RUNS, ARMS, count=4,
    estimands=(
        *systems.contrast("eco", "rne"),
        *systems.contrast("eco", "source-P"),
        *systems.contrast("source-P", "master"),
        Estimand(
            name="kept", what="bytes more that ECO keeps than nearest", compute=systems.more,
            args={"arm": "eco", "over": "rne", "what": "persistent_bytes"},
        ),
    ),
    question="What does ECO cost in time and bytes beside nearest, packed and blanket masters?",
    units="one repetition: every arm in a fresh process, in rotated order",
    not_claimed=(
        "a decision: no threshold on seconds was sealed before the measurement",
        "a training outcome, fp8 arithmetic, production cost, or anything about other hardware",
    ),
    gates=(
        gate("kept", "kept == 0", "the error is in the moment: there is no tensor of its own"),
    ),
    rules=(
        rule("measured", "kept", says="Descriptive: seconds decide nothing."),
        rule("eco keeps more than nearest"),
    ),
)  # fmt: skip

_NOTE = "an RTX 5090 and 162 million weights in the paper, as ratios less one; smaller scales run on a CPU"
row = Beside(STUDY, "appendix E", _NOTE)
CLAIMS = (
    *row.each("throughput of eco over nearest, {}", {"repetition-1": -0.100225, "repetition-2": -0.097668,
        "repetition-3": -0.100985, "repetition-4": -0.09881}, "throughput-eco-rne"),
    row("the same, paired median", -0.099517, "paired-eco-rne", "median"),
    row("peak of eco less packed, bytes", -65846272, "peak-eco-source-P", "median"),
    row("bytes that persist, eco less nearest", 0, "kept", "median"),
)  # fmt: skip
