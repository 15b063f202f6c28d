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
from halfulp.studies.claims import Claim, Printed, label_of, printed
from halfulp.study.outcomes import Outcomes
from halfulp.study.protocol import Estimand, Evidence, Gate, Records, Rule, Study, Values

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


STUDY = Study(
    name="eco-comparator",
    question="Does ECO, without any master, win back more than the source's mask did?",
    units="one target training seed",
    not_claimed=(
        "a prospective result: the anchors and the mask's outcomes were known",
        "anything about GPT-2 or the budgets of gpt2-pareto",
        "memory or time of a whole run",
    ),
    scales=RUNS.configs,
    evidence=(
        Evidence(
            name=EVIDENCE, study="prospective-modern",
            records=("reference/*", *(f"outcome/*-{arm}" for arm in (*_KNOWN, "eco"))),
        ),
    ),
    stages=RUNS.stages,
    estimands=(
        *shared.estimands(RUNS),
        shared.less(RUNS, "above-source", "eco", ["source-P"]),
        Estimand.of(apart),
    ),
    gates=(
        Gate.of("material", "gap > 0.1"),
        Gate.of("matched", "matched == 1"),
        Gate.of("above-source", "above-source > 0", "post hoc: the order was known in the paper"),
    ),
    rules=(
        Rule(label="not matched", failed=("matched",)),
        Rule(label="no material gap", failed=("material",)),
        Rule(
            label="post hoc: eco is above the source's mask", passed=("above-source",),
            says="At no bytes of masters, in every target.",
        ),
        Rule(label="post hoc: eco is not above the source's mask in every target"),
    ),
    scale_data=RUNS.data,
    tables=shared.tables(RUNS),
    figures=shared.figure(RUNS, "eco"),
)  # fmt: skip

_PRINTED: Printed = {
    "recovery-eco": ("won back by eco, without masters", "section 5", ("0.964 to 0.966",) * 3),
    "recovery-source-P": ("won back by the source's P", "section 5", (0.604, 0.610, 0.607)),
}

PAPER = (
    Claim("the order", "section 5", "post hoc: eco is above the source's mask", label_of(STUDY)),
    *printed(STUDY, RUNS.units, _PRINTED, note="162 million weights; the small scale is 1.8 million"),
)
