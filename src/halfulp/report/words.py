"""Sentences: what a run would lose, as one would say it to a colleague.

Words follow the evidence. *Would be thrown away* is a forecast from another precision, *were* is what
happened; a policy that carries what it does not write *keeps codes* and loses nothing by that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from halfulp.audit import verdict
from halfulp.audit.findings import NOT_FINITE, Finding, cures
from halfulp.measures.crossings import Crossing
from halfulp.report.runs import POLICY_WORDS, Arms, Outcome, Run
from halfulp.text import shown

SEVERITIES = {
    "most updates are lost": "most",
    "some updates are lost": "some",
    "fine": "fine",
    NOT_FINITE: "unknown",
}


def percent(share: float | None, digits: int | None = None) -> str:
    """A share as people write it: no false precision, and never 0% or 100% for what is not.

    >>> [percent(x) for x in (0.0, 0.0000004, 0.0042, 0.634, 0.9996, 1.0, None)]
    ['0%', '<0.1%', '0.4%', '63%', '>99.9%', '100%', '-']
    """
    if share is None or share != share:
        return "-"
    if digits is None:
        digits = 0 if 0.1 <= share < 0.9 else 1
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    smallest = 10.0 ** -(digits + 2)
    if share < smallest:
        return f"<{smallest:.{digits}%}"
    if share > 1 - smallest:
        return f">{1 - smallest:.{digits}%}"
    return f"{share:.{digits}%}"


def arriving(finding: Finding) -> str:
    """How much of an update arrives: a share that may pass 1."""
    if finding.gain is None:
        return "-"
    return percent(finding.gain) if 0 <= finding.gain <= 1 else f"{finding.gain:.0%}"


def angle(finding: Finding) -> str | None:
    """Whether what arrives goes where it was proposed to."""
    return None if finding.cosine is None else f"cosine {finding.cosine:.2f} with what was proposed"


def points(difference: float, *, signed: bool = False) -> str:
    """A difference of shares, in percentage points.

    >>> points(0.0123), points(-0.02, signed=True)
    ('1.2 points', '-2.0 points')
    """
    return f"{100 * difference:{'+' if signed else ''}.1f} points"


def gap(nats: float) -> str:
    """A difference of losses.

    >>> gap(0.3331), gap(-0.0004), gap(float("inf"))
    ('+0.333', '-0.000', 'not finite')
    """
    return f"{nats:+.3f}" if math.isfinite(nats) else "not finite"


def scope_words(scope: str) -> str:
    """Whose updates."""
    known = {
        "all": "all weights",
        "all-2d": "the weight matrices",
        "core": "the attention and MLP weights",
    }
    return known.get(scope, f"the {shown(scope, 40)} weights")


def spec_words(spec: str) -> str:
    """A rehearsal, for people who do not know the names of policies.

    >>> spec_words("e4m3@128"), spec_words("bf16:sr")
    ('e4m3@128, nearest', 'bf16, stochastic')
    """
    grid, _, how = spec.partition(":")
    name = how.partition("(")[0] or "rne"
    return f"{grid}, {POLICY_WORDS.get(name, name)}"


def listed(names: Sequence[str]) -> str:
    """Names as a part of a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def headline(run: Run, findings: Sequence[Finding]) -> str:
    """The whole verdict in one sentence."""
    if not run.loses and not all(f.severity == NOT_FINITE for f in findings):
        kept = next(f for f in findings if f.grid == run.grid)
        return (
            f"On {kept.grid} with {run.policy_words} write-back, {percent(kept.never_moved)} of "
            f"{scope_words(run.scope)} never moved."
            if kept.never_moved is not None
            else f"{kept.grid} with {run.policy_words} write-back."
        )
    if all(f.severity == NOT_FINITE for f in findings):
        return "No update was finite, so nothing can be said of any grid."
    if len(findings) == 1:
        return sentence(run, findings[0])
    parts: list[str] = []
    extents = {
        "most": "most updates",
        "late": "most updates by the end",
        "some": "some",
        "fine": "hardly any",
    }
    for severity, ending in extents.items():
        grids = [f.grid for f in findings if _extent(f) == severity]
        if grids and not parts:
            throws = "would throw" if run.grid is None else "throws" if len(grids) == 1 else "throw"
            parts.append(f"{listed(grids)} {throws} away {ending}")
        elif grids:
            parts.append(f"{listed(grids)} {ending}")
    return "; ".join(parts) + "."


def _extent(finding: Finding) -> str:
    """The severity, with those apart that lose most updates at the end but not over the run."""
    severity = SEVERITIES[finding.severity]
    return "late" if severity == "most" and finding.lost < 0.5 else severity


def sentence(run: Run, finding: Finding) -> str:
    """What one grid does to a run."""
    whose = scope_words(run.scope)
    if not run.loses and finding.grid == run.grid:
        return (
            f"On {finding.grid}, {percent(finding.lost)} of {whose} kept their code at an average step. "
            f"With {run.policy_words} write-back that is not a loss: {verdict.why_kept(run.policy or '')}."
        )
    verb = "were" if finding.realized else "would be"
    said = f"On {finding.grid}, {percent(finding.lost)} of the updates of {whose} {verb} thrown away"
    late = f"{percent(finding.lost_late)} at the end"
    return f"{said}, {late}{_majority(run.gathered.crossing(finding.grid, run.scope), finding.lost_late)}."


def _majority(found: Crossing | None, late: float) -> str:
    """When a majority is lost, as the end of a sentence."""
    if found is None or found.category == "absent":
        return "; never a majority" if late >= 0.05 else ""
    if found.category == "undecided":
        return f"; more than half already at step {found.first}, the first that was audited"
    first = "the first step" if found.first == 1 else f"step {found.first}"
    if found.persistent == found.first:
        return f"; more than half of each step's from {first} on"
    if found.persistent is None:
        return f"; more than half of a step's first at {first}, and again less at the end"
    return f"; more than half of a step's first at {first}, and from step {found.persistent} to the end"


def offered(run: Run) -> list[tuple[str, str]]:
    """The policies that a page offers: (a column's head, the policy whose bytes it shows)."""
    offers = dict(cures(run.trace, run.trace.grids[0]))
    heads = [
        ("stochastic, ECO" if "eco" in offers else "stochastic", "sr"),
        ("Kahan in bf16", "kahan in bfloat16"),
        ("fp32 masters", "master"),
    ]
    return [(head, policy) for head, policy in heads if policy in offers]


def onset(found: Crossing | None) -> str:
    """When a majority of updates is lost, for a cell of a table."""
    if found is None:
        return "-"
    if found.category == "absent":
        return "never"
    if found.category == "undecided":
        return f"step {found.first} or before"
    first = "from step 1" if found.first == 1 else f"from step {found.first}"
    if found.persistent == found.first:
        return first
    later = "not to the end" if found.persistent is None else f"to the end from {found.persistent}"
    return f"{first}, {later}"


def loss(run: Run, group: Arms) -> str:
    """A run's final loss; of one that ended before the others, with the step."""
    if run.final_loss is None:
        return "-"
    last = int(run.gathered.steps[-1])
    early = last < max(int(r.gathered.steps[-1]) for r in group.members)
    return f"{run.final_loss:.3f}" + (f" (step {last})" if early else "")


def outcome_sentence(found: Outcome) -> str:
    """How a forecast met its outcome."""
    c, pair = found.comparison, found.timing
    forecast, measured = (percent(float(x.mean()), 1) for x in (found.forecast, found.outcome))
    said = (
        f"The forecast for {found.grid} was {forecast} of the updates of {scope_words(found.scope)} on "
        f"average, and {measured} were lost: off by {points(c.rmse)} (RMSE over {c.steps} steps). The best "
        f"constant, chosen afterwards, is off by {points(c.constant_rmse)}."
    )
    if found.rehearsed is not None:
        off = math.sqrt(float(np.mean((found.rehearsed - found.outcome) ** 2)))
        said += f" The rehearsal, which remembers what was lost, was off by {points(off)}."
    forecast, measured = (_when(x.first) for x in (pair.forecast, pair.measured))
    if forecast == measured == "never":
        return f"{said} A majority was never lost, as forecast."
    return f"{said} A majority was forecast {forecast}, and lost {measured}."


def _when(step: int | None) -> str:
    return "never" if step is None else "from the first step" if step == 1 else f"from step {step}"
