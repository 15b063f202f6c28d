"""Define ``Pilot``, which spends a little extra compute to learn what each number format would cost a run.

The ladder, within a budget of extra compute counted in sequences:

1. the reference, in full: the run itself, with every format rehearsed beside it (this is free);
2. twins: reference and formats really run on the first sequences of every batch, and the reference once more
   from a hair beside its start, which measures the floor;
3. forks, of the formats whose twins the guard distrusts, or of all where no twin could be paid: from the
   rehearsed point's codes, and where it can be paid from both bounds' codes as well.

Twins run first: their results decide where forks may be needed, and the reference saves its state there.
With ``out=`` a pilot that was killed can continue: finished runs are not repeated, and the reference
continues from its last saved state.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from halfulp.errors import UsageError
from halfulp.pilots import run_states, rungs
from halfulp.pilots.estimates import Forks, Seen, Twin, floor_of
from halfulp.pilots.ladder import Ladder, fork_plan
from halfulp.pilots.prices import Prices, priced
from halfulp.pilots.results import Results
from halfulp.verdicts.intervals import SMALLEST, family_of


class Pilot:
    """Forecast what each format costs a training, within a budget of extra compute.

    Args:
        make: A factory of runs (:mod:`halfulp.pilots.rungs` defines a run).
        formats: Grids, each followed by a colon and a policy unless it rounds to nearest:
            ``["e4m3@128", "bf16:sr"]``.
        updates: Number of updates in the full run.
        budget: Extra compute for all formats together, as a share of the run itself.
        out: A folder from which an interrupted pilot continues; None saves nothing.
        seed: Seed of stochastic rounding.
        save_every: Number of updates between saves of the reference, if there is a folder.

    Raises:
        UsageError: If a format, the budget or the run cannot be used.
    """

    def __init__(
        self,
        make: rungs.Make,
        formats: list[str] | tuple[str, ...],
        *,
        updates: int,
        budget: float = 0.15,
        out: str | Path | None = None,
        seed: int = 0,
        save_every: int = 500,
    ) -> None:
        if not 0 <= budget <= 10 or updates < 1 or save_every < 1:
            raise UsageError(
                f"a pilot needs updates and save_every from 1 and a budget from 0 (0.15 is 15%); found "
                f"updates={updates}, save_every={save_every}, budget={budget}."
            )
        self.training = rungs.Factory(make=make, updates=updates, formats=tuple(formats), seed=seed)
        self.formats = self.training.rehearse.names
        self.budget, self.save_every = budget, save_every
        self.folder = None if out is None else Path(out)
        self.paid: dict[str, float] = {}
        self.notes: list[str] = []
        self._results: Results | None = None

    @property
    def left(self) -> float:
        """The remaining budget, as a share of the run."""
        return self.budget - sum(self.paid.values()) + 1e-9

    def run(self) -> Prices:
        """Make the runs and price each format.

        Returns:
            The cost of each format, with its interval.

        Raises:
            UsageError: If the run cannot be used.
        """
        sample = self.training.begin()
        self.paid, self.notes, batch = {}, [], 1
        try:
            batch = rungs.size(sample.batch(1)) if self.budget else 1
        except UsageError as error:
            self.notes.append(f"no twin was run: {error}")
        weights = sum(p.numel() for p in sample.model.parameters() if p.requires_grad and p.dim() >= 2)
        asked = {
            "formats": self.formats, "updates": self.training.updates, "budget": self.budget,
            "seed": self.training.seed, "batch": batch, "weights": weights,
        }  # fmt: skip
        self._results = Results(self.folder, asked)
        part = Ladder(budget=self.budget, formats=len(self.formats), batch=batch).part
        twins = {} if part is None else self._twins(part, batch)
        share, bounds = self._forks_planned(twins)
        update = round(self.training.updates * (1 - share))
        full = self._reference(update if share else 0, bounds)
        seen = self._seen(full, twins)
        forked = [f for f in self.formats if share and (not twins or seen[f].reads_low())]
        for spec in forked:
            losses = {
                b: self._loss(f"fork {spec} {b}", lambda s=spec, b=b: self._fork(s, b, update))
                for b in bounds
            }
            forks = Forks(share=share, losses=losses)
            seen[spec] = Seen.from_json({**seen[spec].to_json(), "forks": forks.__dict__})
        if forked:
            self.paid["forks"] = len(forked) * len(bounds) * share
        prices = [priced(spec, known) for spec, known in seen.items()]
        run_states.put_generators(self.training.random)
        return Prices(
            prices=tuple(prices), reference=full["real"], updates=self.training.updates, weights=weights,
            budget=self.budget, paid=self.paid, notes=tuple(self.notes),
        )  # fmt: skip

    # ---- rungs ----

    def _once(self, name: str, make: Any) -> Any:
        assert self._results is not None
        return self._results.once(name, make)

    def _loss(self, name: str, make: Any) -> float:
        """Return the loss of a run, infinite if it diverged."""
        found = self._once(name, lambda: _kept(make()))
        return math.inf if found is None else float(found)

    def _twins(self, part: int, batch: int) -> dict[str, Any]:
        share, training = part / batch, self.training
        small = self._once("twin reference", lambda: _told(rungs.reference(training, part)))
        real = {f: self._loss(f"twin {f}", lambda f=f: rungs.twin(training, f, part)) for f in self.formats}
        self.paid[f"twins on {part} of {batch} sequences"] = (1 + len(real)) * share
        found = {"share": share, "reference": small, "real": real, "nudged": None}
        if share <= self.left:
            found["nudged"] = self._loss("nudged", lambda: rungs.nudged(training, part))
            self.paid["floor"] = share
        return found

    def _forks_planned(self, twins: dict[str, Any]) -> tuple[float, tuple[str, ...]]:
        """Return the largest share of the run to fork, and the codes to fork from."""
        floor = self._floor(twins)
        suspects = [f for f in self.formats if not twins or _twin(twins, f).shallow(floor)]
        return fork_plan(self.left, len(suspects))

    @staticmethod
    def _floor(twins: dict[str, Any]) -> float:
        """Return the floor as far as twins tell it."""
        if not twins or twins["nudged"] is None:
            return SMALLEST
        return floor_of(0.0, 0.0, _loss(twins["reference"]["real"]), twins["nudged"])

    def _reference(self, fork_at: int, bounds: tuple[str, ...]) -> dict[str, Any]:
        keep = None if self.folder is None else rungs.Keep(self.folder / "reference", self.save_every)

        def make() -> dict[str, Any]:
            found = rungs.reference(
                self.training, fork_at={fork_at} - {0}, bounds=bounds or ("point",), keep=keep
            )
            self._forked = found.forked.get(fork_at)
            if self.folder is not None and self._forked is not None:
                run_states.save(self._forked, self.folder / "forked.safetensors")
            own = max(found.seconds - found.beside, 1e-9)
            return {**_told(found), "beside": round(found.beside / own, 4)}

        full: dict[str, Any] = self._once("reference", make)
        self.paid = {"rehearsals": full["beside"], **self.paid} if self.budget else self.paid
        if full["real"] is None:
            raise UsageError("the reference itself diverged, so there is nothing that a format could cost.")
        return full

    def _fork(self, spec: str, bound: str, update: int) -> float:
        if getattr(self, "_forked", None) is None:
            assert self.folder is not None
            self._forked = run_states.load(self.folder / "forked.safetensors")
        assert self._forked is not None and self._forked["update"] == update
        return rungs.fork(self.training, spec, bound, self._forked)

    def _seen(self, full: dict[str, Any], twins: dict[str, Any]) -> dict[str, Seen]:
        found, floor = {}, SMALLEST
        if twins and twins["nudged"] is not None:
            floor = floor_of(
                full["real"], _loss(full["again"]), _loss(twins["reference"]["real"]), twins["nudged"]
            )
        for spec in self.formats:
            twin = _twin(twins, spec) if twins else None
            losses = full["as_if"][spec]
            found[spec] = Seen(
                start=full["start"], reference=full["real"], upper=_loss(losses["upper"]),
                point=_loss(losses["point"]), twin=twin, floor=floor, family=family_of(spec),
            )  # fmt: skip
        return found


def _twin(twins: dict[str, Any], spec: str) -> Twin:
    small = twins["reference"]
    return Twin(
        share=twins["share"], reference=_loss(small["real"]), upper=_loss(small["as_if"][spec]["upper"]),
        real=twins["real"][spec],
    )  # fmt: skip


def _told(found: rungs.Reference) -> dict[str, Any]:
    as_if = {spec: {b: _kept(x) for b, x in losses.items()} for spec, losses in found.as_if.items()}
    return {"start": found.start, "real": _kept(found.real), "again": _kept(found.again), "as_if": as_if}


def _kept(loss: float) -> float | None:
    """Return a loss for JSON: None if it is not finite."""
    return loss if math.isfinite(loss) else None


def _loss(kept: float | None) -> float:
    return math.inf if kept is None else kept
