"""Define ``Pilot``, which spends a little extra compute to learn what each number format would cost a run.

The ladder, within a budget of extra processor time (:mod:`halfulp.pilots.ladder` has the rule):

1. the reference, in full: the run itself, with every format rehearsed beside it (this is free);
2. twins: reference and formats really run on the first sequences of every batch, and the reference once more
   from weights that differ by a hair, which measures the noise floor;
3. forks, of the formats whose twins the guard distrusts, or of all where no twin could be paid: from the
   rehearsed point's codes, and where it can be paid from both bounds' codes as well.

The cost of steps is measured first, on a few of them. Rungs that do not fit the budget are not run, and a
note says what they would cost. Twins run first: their results decide where forks may be needed, and the
reference sets its state aside there.
With ``out=`` a pilot that was killed can continue: finished runs are not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from halfulp import deprecation
from halfulp.audit.rehearsal.as_if import number
from halfulp.errors import UsageError
from halfulp.outputs import finite
from halfulp.pilots import run_states, rungs
from halfulp.pilots.estimates import Forks, Seen, Twin, floor_of
from halfulp.pilots.ladder import SLACK, Cost, Ladder, fork_plan
from halfulp.pilots.prices import Prices, priced
from halfulp.pilots.results import Results
from halfulp.pilots.rung_costs import RungCosts, measured
from halfulp.verdicts.intervals import SMALLEST, family_of


class Pilot:
    """Forecast what each format costs a training, within a budget of extra compute.

    Args:
        make: A factory of runs (:mod:`halfulp.pilots.rungs` defines a run).
        formats: Grids, each followed by a colon and a policy unless it rounds to nearest:
            ``["e4m3@128", "bf16:sr"]``.
        updates: Number of updates in the full run.
        budget: Extra compute for all formats together, as a share of the run itself.
        cost: What a run on the first b sequences of every batch takes, as a share of the run. By default
            everything is measured in processor time; ``lambda b: b / 64`` counts sequences instead, and
            takes rehearsals as free.
        out: A folder from which an interrupted pilot continues; None saves nothing.
        seed: Seed of stochastic rounding.
        save_every: Ignored: a run that was interrupted is made again.

    Raises:
        UsageError: If a format, the budget or the run cannot be used.

    >>> import torch
    >>> class Run:
    ...     def __init__(self):
    ...         self.model = torch.nn.Linear(4, 1)
    ...         self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
    ...
    ...     def batch(self, update):
    ...         return torch.ones(8, 4)
    ...
    ...     def step(self, batch, update):
    ...         self.optimizer.zero_grad()
    ...         self.model(batch).square().mean().backward()
    ...         self.optimizer.step()
    ...
    ...     def evaluate(self):
    ...         return self.model(torch.ones(8, 4)).square().mean().item()
    >>> pilot = Pilot(Run, ["bf16"], updates=4, budget=2.0, cost=lambda b: b / 8)
    >>> prices = pilot.run()
    >>> prices["bf16"].spec, pilot.left < 2.0
    ('bf16', True)
    """

    def __init__(
        self,
        make: rungs.Make,
        formats: list[str] | tuple[str, ...],
        *,
        updates: int,
        budget: float = 0.15,
        cost: Cost | None = None,
        out: str | Path | None = None,
        seed: int = 0,
        save_every: int | None = None,
    ) -> None:
        if save_every is not None:
            deprecation.warn("Pilot(save_every=...)", "Pilot(...), which saves whole runs")
        if not 0 <= budget <= 10 or updates < 1:
            raise UsageError(
                "a pilot needs updates from 1 and a budget from 0 to 10 (0.15 is 15%); found "
                f"updates={updates}, budget={budget}."
            )
        self.training = rungs.Factory(make=make, updates=updates, formats=tuple(formats), seed=seed)
        self.formats = self.training.rehearse.names
        self.budget, self.cost = budget, cost
        self.folder = None if out is None else Path(out)
        self.notes: list[str] = []
        self._results: Results | None = None
        self._costs: RungCosts | None = None
        self._spent: dict[str, float] = {}
        self._run_takes, self._weights = 1.0, 0

    @property
    def paid(self) -> dict[str, float]:
        """The cost of each purpose, as a share of the run."""
        return {what: spent / self._run_takes for what, spent in self._spent.items()}

    @property
    def left(self) -> float:
        """The remaining budget, as a share of the run."""
        return self.budget - sum(self.paid.values()) + SLACK

    def run(self) -> Prices:
        """Make the runs and price each format.

        Returns:
            The cost of each format, with its interval.

        Raises:
            UsageError: If the run cannot be used.
        """
        twins = self.before()
        share, bounds = self._forks_planned(twins)
        update = round(self.training.updates * (1 - share))
        full = self._reference(update if share else 0, bounds)
        seen = self._seen(full, twins)
        if share:
            self._forks(seen, share, bounds, update)
        run_states.put_generators(self.training.random)
        return self._prices(seen, full)

    def before(self) -> dict[str, Any]:
        """Make what comes before the run itself: measure steps, and run the twins that the budget pays for.

        Returns:
            The results of the twins, for :meth:`after`.

        Raises:
            UsageError: If the run cannot be used.
        """
        sample = self.training.begin()
        self.notes, batch = [], 1
        try:
            batch = rungs.size(sample.batch(1)) if self.budget else 1
        except UsageError as error:
            self.notes.append(f"no twin was run: {error}")
        self._weights = sum(p.numel() for p in sample.model.parameters() if p.requires_grad and p.dim() >= 2)
        question = {
            "formats": self.formats, "updates": self.training.updates, "budget": self.budget,
            "seed": self.training.seed, "batch": batch, "weights": self._weights,
        }  # fmt: skip
        self._results = Results(self.folder, question)
        self._measure(batch)
        twins = self._twins(batch)
        run_states.put_generators(self.training.random)
        return twins

    def start(self) -> float:
        """Return the loss before the first update."""
        loss: float = self._once("start", lambda: number(self.training.begin().evaluate()))
        run_states.put_generators(self.training.random)
        return loss

    def after(self, twins: dict[str, Any], full: rungs.Reference) -> Prices:
        """Price each format by the twins and a reference that was run elsewhere, with rehearsals."""
        reference = _to_json(full)
        return self._prices(self._seen(reference, twins), reference)

    def _prices(self, seen: dict[str, Seen], full: dict[str, Any]) -> Prices:
        low = [spec for spec, known in seen.items() if known.reads_low() and known.forks is None]
        if low:
            self.notes.append(
                f"{', '.join(low)}: the twin is limited by noise, and no fork was run. A larger budget pays "
                "for larger twins, and where hu.Pilot makes the run itself for a fork."
            )
        return Prices(
            prices=tuple(priced(spec, known) for spec, known in seen.items()), reference=full["real"],
            updates=self.training.updates, weights=self._weights, budget=self.budget, paid=self.paid,
            notes=tuple(self.notes),
        )  # fmt: skip

    # ---- what it costs ----

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        assert self._results is not None
        return self._results.once(name, make)

    def _measure(self, batch: int) -> None:
        """Measure what rungs take, and count the rehearsals, which are always made, as paid."""
        self._spent, self._run_takes = {}, 1.0
        if self.budget and self.cost is None:
            costs = RungCosts(**self._once("costs", lambda: measured(self.training, batch).to_json()))
            self._costs = costs
            self._run_takes = costs.run
            self._spent = {"rehearsals": costs.rehearsals * costs.run, "timing": costs.measuring * costs.run}

    def _paid_run(self, name: str, purpose: str, counted: float, make: Callable[[], float]) -> float:
        """Return the loss of a run, infinite if it diverged, and count what it took."""

        def timed() -> dict[str, Any]:
            clock = rungs.Clock()
            return {"loss": finite(make()), "seconds": clock.seconds}

        result = self._once(name, timed)
        self._pay(purpose, counted, result["seconds"])
        return _loss(result["loss"])

    def _pay(self, purpose: str, counted: float, seconds: float) -> None:
        took = seconds if self.cost is None else counted
        self._spent[purpose] = self._spent.get(purpose, 0.0) + took

    def _note_unpaid(self, what: list[str], rung: str, share: float) -> None:
        if what:
            self.notes.append(
                f"{', '.join(what)}: no {rung} was run, for it takes {share:.1%} of the run and "
                f"{max(0.0, self.left):.1%} of the budget is left."
            )

    # ---- rungs ----

    def _ladder(self, batch: int) -> Ladder:
        cost = self.cost if self._costs is None else self._costs.twin
        return Ladder(budget=self.left, formats=len(self.formats), batch=batch, cost=cost)

    def _twins(self, batch: int) -> dict[str, Any]:
        """Return the losses of the twins that the budget pays for; none if it does not pay for two runs."""
        ladder, training = self._ladder(batch), self.training
        part = ladder.part
        if part is None:
            if self.budget and batch > 1:
                needed = (len(self.formats) + 1) * ladder.share(1) + self.budget - self.left
                self.notes.append(
                    f"no twin was run: on 1 of {batch} sequences one takes {ladder.share(1):.1%} of the run, "
                    f"and {len(self.formats) + 1} are needed. A budget of {needed:.0%} pays for them; fewer "
                    "formats need less."
                )
            return {}
        share, purpose = ladder.share(part), f"twins on {part} of {batch} sequences"
        small = self._once("twin reference", lambda: _to_json(rungs.reference(training, part)))
        self._pay(purpose, share, small["seconds"] + small["beside"])
        real, unpaid, dearest = dict[str, float](), list[str](), share
        for spec in self.formats:
            if dearest > self.left:
                unpaid.append(spec)
                continue
            before = self.left
            real[spec] = self._paid_run(
                f"twin {spec}", purpose, share, partial(rungs.twin, training, spec, part)
            )
            dearest = max(dearest, before - self.left)
        self._note_unpaid(unpaid, "twin", dearest)
        twins = {"share": share, "reference": small, "real": real, "nudged": None}
        if dearest <= self.left:
            twins["nudged"] = self._paid_run("nudged", "floor", share, lambda: rungs.nudged(training, part))
        return twins if real else {}

    def _forks_planned(self, twins: dict[str, Any]) -> tuple[float, tuple[str, ...]]:
        """Return the largest share of the run to fork, and the codes to fork from."""
        floor = self._floor(twins)
        suspects = [s for s in self.formats if (t := _twin(twins, s)) is None or t.shallow(floor)]
        takes = 1.0 if self._costs is None else self._costs.stored
        return fork_plan(self.left / takes, len(suspects))

    @staticmethod
    def _floor(twins: dict[str, Any], full: dict[str, Any] | None = None) -> float:
        """Return the noise floor, or the smallest one if it was not measured."""
        if not twins or twins["nudged"] is None:
            return SMALLEST
        real, again = (0.0, 0.0) if full is None else (full["real"], _loss(full["again"]))
        return floor_of(real, again, _loss(twins["reference"]["real"]), twins["nudged"])

    def _reference(self, fork_at: int, bounds: tuple[str, ...]) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            reference = rungs.reference(self.training, fork_at={fork_at} - {0}, bounds=bounds or ("point",))
            self._forked = reference.forked.get(fork_at)
            if self.folder is not None and self._forked is not None:
                run_states.save(self._forked, self.folder / "forked.safetensors")
            return _to_json(reference)

        full: dict[str, Any] = self._once("reference", make)
        if self._costs is not None:
            self._run_takes, self._spent["rehearsals"] = max(full["seconds"], SLACK), full["beside"]
        if full["real"] is None:
            raise UsageError("the reference itself diverged, so there is nothing that a format could cost.")
        return full

    def _forks(self, seen: dict[str, Seen], share: float, bounds: tuple[str, ...], update: int) -> None:
        """Fork every format without a twin that can be trusted, from the point's codes first."""
        unpaid, dearest = [], share
        for spec in [s for s in self.formats if seen[s].twin is None or seen[s].reads_low()]:
            losses = {}
            for bound in sorted(bounds, key=lambda b: b != "point"):
                if dearest > self.left:
                    unpaid.append(f"{spec} from {bound}")
                    continue
                before = self.left
                losses[bound] = self._paid_run(
                    f"fork {spec} {bound}", "forks", share,
                    partial(self._fork, spec, bound, update),
                )  # fmt: skip
                dearest = max(dearest, before - self.left)
            if "point" in losses:
                seen[spec] = replace(seen[spec], forks=Forks(share=share, losses=losses))
        self._note_unpaid(unpaid, "fork", dearest)

    def _fork(self, spec: str, bound: str, update: int) -> float:
        if getattr(self, "_forked", None) is None:
            assert self.folder is not None
            self._forked = run_states.load(self.folder / "forked.safetensors")
        assert self._forked is not None and self._forked["update"] == update
        return rungs.fork(self.training, spec, bound, self._forked)

    def _seen(self, full: dict[str, Any], twins: dict[str, Any]) -> dict[str, Seen]:
        floor, as_if = self._floor(twins, full), full["as_if"]
        return {
            spec: Seen(
                start=_loss(full["start"]), reference=full["real"], upper=_loss(as_if[spec]["upper"]),
                point=_loss(as_if[spec]["point"]), twin=_twin(twins, spec), floor=floor,
                family=family_of(spec),
            )
            for spec in self.formats
        }  # fmt: skip


def _twin(twins: dict[str, Any], spec: str) -> Twin | None:
    if not twins or spec not in twins["real"]:
        return None
    small = twins["reference"]
    return Twin(
        share=twins["share"], reference=_loss(small["real"]), upper=_loss(small["as_if"][spec]["upper"]),
        real=twins["real"][spec],
    )  # fmt: skip


def _to_json(full: rungs.Reference) -> dict[str, Any]:
    """Return what a reference ended with; a loss that is not finite is None."""
    kept = ("start", "real", "again", "as_if", "seconds", "beside")
    values: dict[str, Any] = finite({name: getattr(full, name) for name in kept})
    return values


def _loss(kept: float | None) -> float:
    """Return a loss from JSON."""
    return math.inf if kept is None else kept
