"""``eco-comparator``: what does ECO win back where the source's mask was tested?

The paper's post hoc comparator (section 5): ECO, which keeps the rounding error in the first moment and no
master at all, on the sealed anchors of `prospective-modern`. Float32, nearest and source-P runs are evidence;
three ECO runs are new. It was declared after those outcomes were known and says so in its label. Our
`prospective-modern` has an ECO arm of its own, which decides nothing there; ``apart`` says how far these runs
end from it (its arithmetic has changed in the last bits since).
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.arms import Anchors, measures, records
from halfulp.studies import _allocation as shared
from halfulp.studies import prospective_modern
from halfulp.study.outcomes import Outcomes
from halfulp.study.protocol import Estimand, Evidence, Records, Values

EVIDENCE = "prospective"
_KNOWN = ("rne", "master", "source-P")

RUNS = replace(
    prospective_modern.RUNS,
    arms={"eco": {"policy": "eco"}},
    masked=None,
    anchors=Anchors(evidence=EVIDENCE, bundle=prospective_modern.RUNS, arms=_KNOWN),
)


def apart(found: Records) -> Values:
    """How far the loss is from that of the evidence's own ECO arm, nats."""
    assert isinstance(found, Outcomes)
    before = found.evidence[EVIDENCE]["outcome"]
    made = {}
    for unit in RUNS.over(found):
        ours = measures.loss(unit, "eco")
        theirs = records.loss(before[prospective_modern.RUNS.cell(unit.name, "eco")])
        made[unit.name] = None if ours is None or theirs is None else abs(ours - theirs)
    return made


STUDY = shared.study(
    __name__, RUNS,
    shared.less(RUNS, "above-source", "eco", ["source-P"]),
    Estimand.of(apart),
    highlight="eco",
    evidence=(
        Evidence(
            name=EVIDENCE, study="prospective-modern",
            records=("reference/*", *(f"outcome/*-{arm}" for arm in (*_KNOWN, "eco"))),
        ),
    ),
)  # fmt: skip
