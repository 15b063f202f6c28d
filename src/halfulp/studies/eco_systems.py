"""``eco-systems``: what does ECO cost beside nearest write-back, packed masters and blanket masters?

The paper's descriptive artifact (appendix E): four repetitions in rotated order of nearest, ECO, packed
source-P and blanket, 16 fresh processes. ECO's throughput over nearest was 0.899775, 0.902332, 0.899015 and
0.901190 (paired median 0.900483): two repetitions miss a nominal 0.90, which no artifact had sealed, so they
are no decision. ECO keeps no tensor that nearest does not. Here, too, seconds decide nothing.
"""

from __future__ import annotations

from halfulp.studies import _systems as systems
from halfulp.studies.declared import declared
from halfulp.studies.packed_systems import RUNS
from halfulp.study.protocol import Estimand

ARMS = ("rne", "eco", "source-P", "master")

STUDY = declared(
    __name__,
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
    scale_data=RUNS.data,
    tables={"processes": systems.measured},
)  # fmt: skip
