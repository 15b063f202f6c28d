"""Run a pilot of an unmodified script: the script as it is, and again as its twins.

The reference is the script itself, audited. Its twins are the same script, a child process each: once in
float32, once per format, and once from slightly different weights, for the noise floor. Where a DataLoader
gives it batches, twins train on the first sequences of each (:mod:`halfulp.pilots.child`); elsewhere the
``--small`` arguments are put behind the script's own. Costs are measured in processor time; a twin ends as
soon as its first steps show that it would cost more than is left. A script's state cannot be forked from
outside, so a format whose twin the guard distrusts keeps the free point with its wider interval, and a note
says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfulp import files
from halfulp.audit.rehearsal.specs import Rehearse
from halfulp.audit.script.own_evaluation import OwnEvaluation
from halfulp.errors import HalfulpError, UsageError
from halfulp.pilots.estimates import Seen, Twin, floor_of
from halfulp.pilots.ladder import MOST
from halfulp.pilots.prices import Prices, priced
from halfulp.pilots.results import Results
from halfulp.text import tell
from halfulp.verdicts.intervals import SMALLEST, family_of

NO_SMALL = (
    "no twin was run: no torch DataLoader gives this script its training batches, so name the arguments that "
    "make them small, such as --small '--batch_size 1' (with gradient accumulation: one micro-batch). They "
    "come after its own."
)
NO_FORKS = (
    "{}: the twin is limited by noise, and a script cannot be forked from outside. Take a larger batch with "
    "--small, or write the training as a run and use hu.Pilot, which can."
)
REHEARSING = 0.5
"""Share of the budget that evaluations of rehearsals may take before the last one, which is always made."""


class ScriptError(HalfulpError):
    """Error raised when a run of the script fails; its output was shown or is in its log."""

    exit_code = 1


@dataclass(kw_only=True)
class ScriptPilot:
    """A pilot of a training script: its settings and the results of its runs.

    Args:
        script: The training script; None with ``module``.
        module: A module instead, as by ``python -m``.
        arguments: The script's own arguments.
        small: Arguments that turn the script into its twin, appended to the others; or one number: how many
            sequences of every batch of a DataLoader the twin takes. By default a twelfth of them.
        formats: Grids, each followed by a colon and a policy unless it rounds to nearest.
        evaluate: The script's function that returns the loss, ``FUNCTION`` or ``FUNCTION:KEY``.
        budget: Extra compute, as a share of the run itself.
        out: The folder of results, logs and the reference's trace.
        seed: Seed of stochastic rounding.
    """

    script: Path | None
    arguments: list[str]
    formats: list[str]
    evaluate: str
    budget: float
    out: Path
    module: str = ""
    small: list[str] = field(default_factory=list)
    seed: int = 0
    aside: bool = False
    """True to send the script's output to standard error, which keeps standard output for the answer."""
    paid: dict[str, float] = field(default_factory=dict, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    trace: Path | None = field(default=None, init=False)
    """The trace of the reference."""
    step: str = field(default="", init=False)
    """The update whose losses are compared, as the keys of results have it."""
    part: int | None = field(default=None, init=False)
    """How many sequences of every batch twins take; None where arguments make batches small."""

    def run(self) -> Prices:
        """Run the script and the twins that the budget pays for, and return what each format costs."""
        OwnEvaluation.of(self.evaluate)
        names = Rehearse(self.formats).names
        if self.script is not None and not self.script.is_file():
            raise UsageError(f"no script at {self.script}.")
        content = b"" if self.script is None else self.script.read_bytes()
        self.results = Results(self.out, {
            "script": None if self.script is None else str(self.script), "module": self.module,
            "digest": hashlib.sha256(content).hexdigest(), "arguments": self.arguments, "small": self.small,
            "formats": names, "evaluate": self.evaluate, "budget": self.budget, "seed": self.seed,
        })  # fmt: skip
        full = self._child("reference")
        if not full.get("real") or not full["as_if"]:
            raise UsageError(
                f"the script never evaluated its model after a step: {self.evaluate} gives the loss that is "
                "to be forecast. Name a function that the script calls when it has trained."
            )
        self.step = max(full["as_if"], key=int)
        if self.step != max(full["real"], key=int):
            self.notes.append(
                f"these are forecasts at update {self.step}: the budget paid for no later evaluation of "
                "rehearsals, and after the script's last one it trained on."
            )
        self.trace = Path(full["trace"])
        low = [dtype for dtype in full["dtypes"] if dtype not in ("float32", "float64")]
        if low:
            self.notes.append(
                f"this run itself stores weights in {', '.join(low)}, and loses updates as they do: gaps are "
                "over this run. For what a format costs over float32, have the script load float32 weights."
            )
        own = max(full["seconds"] - full["beside"], 1e-9)
        self.paid = {"rehearsals": full["beside"] / own}
        self.part = self._sequences(full["batch"])
        left = self.budget - self.paid["rehearsals"]
        twins = {}
        if self.part is None and not self.small:
            self.notes.append(NO_SMALL)
        elif left > 0:
            twins = self._twins(names, full, own)
        elif self.budget:
            self.notes.append("no twin was run: rehearsals and their evaluations took all of the budget.")
        seen = {spec: self._seen(spec, full, twins) for spec in names}
        low = [spec for spec in names if seen[spec].reads_low()]
        if low:
            self.notes.append(NO_FORKS.format(", ".join(low)))
        return Prices(
            prices=tuple(priced(spec, known) for spec, known in seen.items()),
            reference=self._loss(full), updates=int(self.step), weights=full["weights"],
            budget=self.budget, paid=self.paid, notes=tuple(self.notes),
        )  # fmt: skip

    def _sequences(self, batch: int) -> int | None:
        """Return how many sequences of a batch twins take; None where arguments make it small."""
        if self.small and not (len(self.small) == 1 and self.small[0].isdecimal()):
            return None
        if not self.small:
            return max(2, int(batch * MOST)) if batch > 2 else None
        count = int(self.small[0])
        if not 0 < count < batch:
            raise UsageError(
                f"--small {count}: expected fewer sequences than a training batch has, and the largest that "
                f"a DataLoader gave this script has {batch or 'none'}. A script that draws its batches by "
                "itself takes arguments instead, such as --small '--batch_size 1'."
            )
        return count

    @property
    def _twin_is(self) -> str:
        if self.part is None:
            return f"with {' '.join(self.small)} behind its arguments"
        return f"on the first {self.part} sequences of every batch"

    def _twins(self, names: list[str], full: dict[str, Any], own: float) -> dict[str, dict[str, Any]]:
        """Return the twins that the budget pays for, in the order of the formats."""
        tell(f"halfulp: twins {self._twin_is}")
        twins: dict[str, dict[str, Any]] = {}
        left = self.budget - sum(self.paid.values())
        share, unpaid = 0.0, list[str]()
        wanted = ("twin", *(f"twin {spec}" for spec in names), "nudged")
        for i, name in enumerate(wanted):
            if twins and share > left:
                unpaid += [name] * (name != "nudged")
                continue
            # The first says what one costs; half of the budget at most, for alone it says nothing.
            limit = left * own * (0.5 if not twins else 1.2)
            lasts = f"about {share * own:.0f} s" if twins else f"{limit:.0f} s at most"
            tell(f"halfulp: {name}, {i + 1} of {len(wanted)}: {lasts}")
            twin = self._child(name, limit, full["step"])
            cost = twin["seconds"] / own
            left -= cost
            share = max(share, cost)
            self.paid["twins"] = self.paid.get("twins", 0.0) + cost
            if not twin.get("real"):
                self.notes.append(self._too_dear(name, twin, own, len(names) + 1))
                return twins
            if twin["step"] != full["step"] or self.step not in twin["real"]:
                other = f"makes {twin['step']} updates, and {full['step']} without"
                if twin["step"] == full["step"]:
                    other = f"does not evaluate at update {self.step}, where it does without"
                raise UsageError(
                    f"{self._twin_is} the script {other}: a twin does as its script. Give numbers of steps "
                    "in --small, too; or, with a DataLoader, --small N, which keeps N sequences of every "
                    "batch and all else as it is."
                )
            twins[name] = twin
            if name == "twin" and twin["real"] == full["real"]:
                raise UsageError(
                    f"{self._twin_is} the script runs as without: a twin needs arguments that it takes, the "
                    "last one of each, and that make the batch smaller."
                )
        if unpaid:
            self.notes.append(
                f"{', '.join(unpaid)}: not run, a twin costs {share:.1%} and {left:.1%} is left."
            )
        return twins

    def _too_dear(self, name: str, twin: dict[str, Any], own: float, needed: int) -> str:
        whole = twin["whole"] / own
        return (
            f"{name}: ended at update {twin['step']} after {twin['seconds'] / own:.1%} of the run, for want "
            f"of budget: it would take {whole:.0%}, and {needed} are needed. A --budget of "
            f"{math.ceil(100 * (self.paid['rehearsals'] + needed * whole))}% pays for them; fewer formats "
            "need less, and so may other arguments in --small."
        )

    def _seen(self, spec: str, full: dict[str, Any], twins: dict[str, dict[str, Any]]) -> Seen:
        twin, floor, losses = None, SMALLEST, full["as_if"][self.step][spec]
        small = twins.get("twin")
        if small is not None and f"twin {spec}" in twins and self.step in small["as_if"]:
            twin = Twin(
                share=small["seconds"] / full["seconds"], reference=self._loss(small),
                upper=small["as_if"][self.step][spec]["upper"], real=self._loss(twins[f"twin {spec}"]),
            )  # fmt: skip
        if small is not None and "nudged" in twins:
            floor = floor_of(0.0, 0.0, self._loss(small), self._loss(twins["nudged"]))
        start = full["start"] if full["start"] is not None else max(full["real"].values())
        return Seen(
            start=start, reference=self._loss(full), upper=losses["upper"], point=losses["point"], twin=twin,
            floor=floor, family=family_of(spec),
        )  # fmt: skip

    def _loss(self, record: dict[str, Any]) -> float:
        """Return the loss at the update in question; a run that diverged has none."""
        loss = float(record["real"][self.step])
        return loss if loss == loss else math.inf

    def _child(self, name: str, seconds: float | None = None, steps: int = 0) -> dict[str, Any]:
        """Run the script once, unless it was run already; the output of twins goes to a log."""
        result: dict[str, Any] = self.results.once(name, lambda: self._run(name, seconds, steps))
        return result

    def _run(self, name: str, seconds: float | None, steps: int) -> dict[str, Any]:
        safe = hashlib.sha256(name.encode()).hexdigest()[:8]
        result, log = self.out / f"{safe}.json", self.out / f"{name.split(' ')[0]}-{safe}.log"
        files.make_folder(self.out)
        reference = name == "reference"
        job = {
            "script": None if self.script is None else str(self.script), "module": self.module,
            "arguments": self.arguments if reference or self.part else [*self.arguments, *self.small],
            "part": None if reference else self.part, "at": None if reference else int(self.step),
            "most": REHEARSING * self.budget,
            "formats": self.formats, "evaluate": self.evaluate, "seed": self.seed, "nudged": name == "nudged",
            "stored": name.partition(" ")[2] or None, "seconds": seconds, "steps": steps,
            "result": str(result.absolute()),
            "trace": str((self.out / "reference").absolute()) if reference else None,
        }  # fmt: skip
        command = [sys.executable, "-m", "halfulp.pilots.child", json.dumps(job)]
        if reference:
            code = subprocess.run(command, check=False, stdout=2 if self.aside else None).returncode
        else:
            with log.open("wb") as into:
                code = subprocess.run(command, check=False, stdout=into, stderr=subprocess.STDOUT).returncode
        if code != 0 or not result.exists():
            what = "the script" if reference else f"its {name}"
            where = "" if reference else f" What it said is in {log}."
            raise ScriptError(f"{what} ended with exit code {code}, so there is nothing to compare.{where}")
        results: dict[str, Any] = json.loads(result.read_bytes())
        result.unlink()
        return results
