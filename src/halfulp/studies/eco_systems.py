"""``eco-systems``: what does ECO cost beside nearest write-back, packed masters and blanket masters?

The paper's descriptive artifact (appendix E): four repetitions in rotated order of nearest, ECO, packed
source-P and blanket, 16 fresh processes. ECO's throughput over nearest was 0.899775, 0.902332, 0.899015 and
0.901190 (paired median 0.900483): two repetitions miss a nominal 0.90, which no artifact had sealed, so they
are no decision. ECO keeps no tensor that nearest does not. Here, too, seconds decide nothing.
"""

from __future__ import annotations

from halfulp.studies import _systems as systems
from halfulp.studies.claims import Claim, value_of
from halfulp.studies.packed_systems import RUNS
from halfulp.study.protocol import Estimand, Gate, Rule, Study

ARMS = ("rne", "eco", "source-P", "master")

STUDY = Study(
    name="eco-systems",
    question="What does ECO cost in time and bytes beside nearest, packed and blanket masters?",
    units="one repetition: every arm in a fresh process, in rotated order",
    not_claimed=(
        "a decision: no threshold on seconds was sealed before the measurement",
        "a training outcome, fp8 arithmetic, production cost, or anything about other hardware",
    ),
    scales=systems.configs(RUNS),
    stages=systems.stages(RUNS, ARMS, count=4),
    estimands=(
        *systems.contrast("eco", "rne"),
        *systems.contrast("eco", "source-P"),
        *systems.contrast("source-P", "master"),
        Estimand(
            name="kept", what="bytes more that ECO keeps than nearest", compute=systems.more,
            args={"arm": "eco", "over": "rne", "what": "persistent_bytes"},
        ),
    ),
    gates=(Gate.of("kept", "kept == 0", "the error is in the moment: there is no tensor of its own"),),
    rules=(
        Rule(label="measured", passed=("kept",), says="Descriptive: seconds decide nothing."),
        Rule(label="eco keeps more than nearest"),
    ),
    scale_data=RUNS.data,
    tables={"processes": systems.measured},
)  # fmt: skip

_NOTE = "an RTX 5090 and 162 million weights in the paper, as ratios less one; smaller scales run on a CPU"
PAPER = (
    *(
        Claim(f"throughput of eco over nearest, repetition {i}", "appendix E", paper,
              value_of(STUDY, "throughput-eco-rne", f"repetition-{i}"), _NOTE)
        for i, paper in enumerate((-0.100225, -0.097668, -0.100985, -0.098810), 1)
    ),
    Claim("the same, paired median", "appendix E", -0.099517,
          value_of(STUDY, "paired-eco-rne", "median"), _NOTE),
    Claim("peak of eco less packed, bytes", "appendix E", -65846272,
          value_of(STUDY, "peak-eco-source-P", "median"), _NOTE),
    Claim("bytes that persist, eco less nearest", "appendix E", 0, value_of(STUDY, "kept", "median"), _NOTE),
)  # fmt: skip
