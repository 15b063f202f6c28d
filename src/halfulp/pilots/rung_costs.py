"""Processor time of the rungs of a pilot, measured on a few steps before any is run.

A twin on one sequence of 64 would take a 64th of the run if a step were nothing but arithmetic. Most of a
small model's step is Python, though, and then it takes half of the run, or more. So a budget in time is
planned with measured steps: on whole batches, with rehearsals beside them, and on the smallest and the
largest part that a twin may take, stored in a format. Between these two parts the cost is a straight line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halfulp.audit.rehearsal.as_if import number
from halfulp.audit.session import Audit
from halfulp.pilots import rungs
from halfulp.pilots.ladder import MOST
from halfulp.pilots.rungs import Clock


@dataclass(frozen=True, kw_only=True)
class RungCosts:
    """The costs of rungs as shares of a plain run, and the seconds that such a run takes."""

    run: float
    """Seconds of processor time."""
    rehearsals: float
    parts: Mapping[str, float]
    """Twins, by the sequences of a batch."""
    stored: float
    """The whole run, stored in a format: what the shares of forks are of."""
    measuring: float
    """The cost of measuring this."""

    def twin(self, part: int) -> float:
        """Return what a twin on the first sequences of every batch costs."""
        known = sorted((int(p), share) for p, share in self.parts.items())
        (low, least), (high, most) = known[0], known[-1]
        return least if high == low else least + (most - least) * (part - low) / (high - low)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as JSON."""
        return asdict(self)


def measured(training: rungs.Factory, batch: int) -> RungCosts:
    """Make a few steps of each kind, of a run that is thrown away, and return what whole runs would take."""
    spent, updates = Clock(), training.updates
    run, count = training.begin(), max(1, min(3, updates // 200))
    rungs.advance(run, 1, None)  # the first step of any run is slower
    step = _step(run, count, None)
    evaluating = Clock()
    number(run.evaluate())
    evaluation = evaluating.seconds
    whole = updates * step + evaluation
    with Audit(run.optimizer, training.rehearse.each[0].grid, model=run.model, rehearse=training.rehearse):
        rungs.advance(run, 1, None)
        beside = max(0.0, _step(run, count, None) - step)
    rungs.stored(run, training.formats[0], training.seed)
    stored = updates * _step(run, count, None) / whole
    most = max(1, math.ceil(batch * MOST))
    parts = {}
    for part in {1, most} if batch > 1 else ():
        parts[str(part)] = (updates * _step(run, count, part) + evaluation) / whole
    as_if = 3 * len(training.formats) * evaluation
    return RungCosts(
        run=whole, rehearsals=(updates * beside + as_if) / whole, parts=parts, stored=max(1.0, stored),
        measuring=spent.seconds / whole,
    )  # fmt: skip


def _step(run: rungs.PilotRun, count: int, part: int | None) -> float:
    """Return the seconds of the quickest of a few steps."""
    seconds = []
    for update in range(1, count + 1):
        clock = Clock()
        rungs.advance(run, update, part)
        seconds.append(clock.seconds)
    return min(seconds)
