"""Sentences: what a run would lose, as one would say it to a colleague.

Words follow the evidence. *Would lose* is a forecast from another precision, *lost* is what happened; a
policy that carries what it does not write *keeps codes* and loses nothing by that. How bad a grid is, and so
whether one may say "hardly any", is decided in :func:`halfulp.verdicts.findings.severity`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from halfulp.measures.crossings import Majority
from halfulp.report.runs import POLICY_WORDS, Arms, Outcome, Run
from halfulp.text import percent
from halfulp.verdicts.findings import (
    DISTORTED,
    FINE,
    MOST,
    NOT_FINITE,
    SOME,
    STRONGLY,
    UNASKED,
    Finding,
    cures,
)

SEVERITIES = {MOST: "most", STRONGLY: "most", SOME: "some", DISTORTED: "some", FINE: "fine",
              NOT_FINITE: "unknown", UNASKED: "unknown"}  # fmt: skip
"""The mark of a table row, by severity."""


def angle(finding: Finding) -> str | None:
    """Describe how well the direction of the arriving update matches the proposed one."""
    return None if finding.cosine is None else f"cosine {finding.cosine:.2f} with what was proposed"


def points(difference: float, *, signed: bool = False) -> str:
    """Return a difference of shares, in percentage points.

    >>> points(0.0123), points(-0.02, signed=True)
    ('1.2 points', '-2.0 points')
    """
    return f"{100 * difference:{'+' if signed else ''}.1f} points"


def gap(nats: float) -> str:
    """Return a difference of losses.

    >>> gap(0.3331), gap(-0.0004), gap(float("inf"))
    ('+0.333', '-0.000', 'not finite')
    """
    return f"{nats:+.3f}" if math.isfinite(nats) else "not finite"


def spec_words(spec: str) -> str:
    """Return a rehearsal, for people who do not know the names of policies.

    >>> spec_words("e4m3@128"), spec_words("bf16:sr")
    ('e4m3@128, nearest', 'bf16, stochastic')
    """
    grid, _, how = spec.partition(":")
    name = how.partition("(")[0] or "rne"
    return f"{grid}, {POLICY_WORDS.get(name, name)}"


def listed(names: Sequence[str]) -> str:
    """Join names as part of a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def kept_by(run: Run, finding: Finding) -> str:
    """Name policies that keep the updates, with their bytes per weight."""
    offers = dict(cures(run.trace, finding.grid))
    return (
        ", ".join(f"{name} {offers[name]:.3g}" for name in ("sr", "eco", "master") if name in offers) or "-"
    )


def lasting(majority: Majority | None) -> str:
    """Say when a majority of updates is lost, for a cell of a table."""
    return "none that lasts" if majority is None else majority.when


def loss(run: Run, group: Arms) -> str:
    """Return a run's final loss, with the step if it ended before the others."""
    if run.final_loss is None:
        return "-"
    last = int(run.gathered.steps[-1])
    early = last < max(int(r.gathered.steps[-1]) for r in group.members)
    return f"{run.final_loss:.3f}" + (f" (step {last})" if early else "")


def outcome_sentence(outcome: Outcome) -> str:
    """Say how a forecast met its outcome."""
    c = outcome.comparison
    forecast, measured = (percent(float(x.mean()), 1) for x in (outcome.forecast, outcome.outcome))
    said = (
        f"The forecast for {outcome.grid} was that a step leaves {forecast} of the weights unchanged on "
        f"average, and {measured} were: off by {points(c.rmse)} (RMSE over {c.steps} steps). The best "
        f"constant, chosen afterwards, is off by {points(c.constant_rmse)}."
    )
    if outcome.rehearsed is not None:
        off = math.sqrt(float(np.mean((outcome.rehearsed - outcome.outcome) ** 2)))
        said += f" The rehearsal, which remembers what was lost, was off by {points(off)}."
    forecast, measured = (lasting(x) for x in outcome.majorities)
    if outcome.majorities == (None, None):
        return f"{said} No majority lasted, as forecast."
    return f"{said} A majority was forecast: {forecast}; measured: {measured}."
