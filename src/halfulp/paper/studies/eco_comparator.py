"""``eco-comparator``: what does ECO win back where the source's mask was tested?

The paper's post hoc comparator (section 5): ECO, which keeps the rounding error in the first moment and no
master at all, on the sealed anchors of `prospective-modern`. Float32, nearest and source-P runs are evidence;
three ECO runs are new. It was declared after those outcomes were known and says so in its label. Our
`prospective-modern` has an ECO arm of its own, which decides nothing there; ``apart`` says how far these runs
end from it (its arithmetic has changed in the last bits since).
"""

from __future__ import annotations

from dataclasses import replace

from halfulp.paper.arms import Anchors, measures, records
from halfulp.paper.studies import _allocation as shared
from halfulp.paper.studies import prospective_modern
from halfulp.paper.studies.claims import Beside
from halfulp.paper.studies.declared import gate, rule
from halfulp.study.protocol import Estimand, Evidence, Outcomes, Records, Values

EVIDENCE = "prospective"
_KNOWN = ("rne", "master", "source-P")

RUNS = replace(
    prospective_modern.RUNS,
    arms={"eco": {"policy": "eco"}},
    masked=None,
    anchors=Anchors(evidence=EVIDENCE, bundle=prospective_modern.RUNS, arms=_KNOWN),
)


def apart(outcomes: Records) -> Values:
    """How far the loss is from that of the evidence's own ECO arm, nats."""
    assert isinstance(outcomes, Outcomes)
    before = outcomes.evidence[EVIDENCE]["outcome"]
    distances = {}
    for unit in RUNS.over(outcomes):
        ours = measures.loss(unit, "eco")
        theirs = records.loss(before[prospective_modern.RUNS.cell(unit.name, "eco")])
        distances[unit.name] = None if ours is None or theirs is None else abs(ours - theirs)
    return distances


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
    question="Does ECO, without any master, win back more than the source's mask did?",
    units="one target training seed",
    not_claimed=(
        "a prospective result: the anchors and the mask's outcomes were known",
        "anything about GPT-2 or the budgets of gpt2-pareto",
        "memory or time of a whole run",
    ),
    gates=(
        gate("material", "gap > 0.1"),
        gate("matched", "matched == 1"),
        gate("above-source", "above-source > 0", "post hoc: the order was known in the paper"),
    ),
    rules=(
        rule("not matched", failed=("matched",)),
        rule("no material gap", failed=("material",)),
        rule("post hoc: eco is above the source's mask", "above-source",
            says="At no bytes of masters, in every target."),
        rule("post hoc: eco is not above the source's mask in every target"),
    ),
)  # fmt: skip

_NOTE = "162 million weights; the small scale is 1.8 million"
row = Beside(STUDY, "appendix E", _NOTE, units=("target-1249306074", "target-1629484925", "target-695340460"))
CLAIMS = (
    row("the order", "post hoc: eco is above the source's mask", row.label, source="section 5", note=""),
    *row.each("won back by eco, without masters, {}", ("0.964 to 0.966", "0.964 to 0.966", "0.964 to 0.966"),
        "recovery-eco", source="section 5"),
    *row.each("won back by the source's P, {}", (0.604, 0.61, 0.607), "recovery-source-P",
        source="section 5"),
)  # fmt: skip
