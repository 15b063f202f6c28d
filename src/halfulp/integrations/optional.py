"""Libraries that may not be there, and what the callbacks share."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halfulp.audit.rehearsal.as_if import Evaluation, RandomState
from halfulp.audit.script.apart import LONGER, PATIENCE, ApartError, can_fork, in_fork
from halfulp.audit.session import Audit
from halfulp.errors import MissingError, UsageError
from halfulp.integrations.piloted import PilotedRun
from halfulp.integrations.scalars import Scalars
from halfulp.pilots.prices import Prices
from halfulp.pilots.rungs import Make
from halfulp.text import plain, tell
from halfulp.trace import Trace, free_folder, newest_folder
from halfulp.verdicts.answer import verdict, whence


def base_class(*places: str) -> Any:
    """Return the first class ``module:name`` whose module can be imported; ``object`` if none can.

    Modules stay importable without the library that they integrate; :func:`require` reports it on use.
    """
    loaded = [p for p in places if p.partition(":")[0] in sys.modules]
    for place in [*loaded, *places]:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    return object


def require(*modules: str) -> Any:
    """Return the first module that can be imported.

    Raises:
        MissingError: If none can; the message says what to install.
    """
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    names = " or ".join(m.partition(".")[0] for m in modules)
    raise MissingError(f"This needs {names}, which is not installed. Run: pip install {names.split()[0]}")


class AuditedRun:
    """An audit that lives from the start of a trainer's run to its end."""

    def __init__(
        self, grids: Any, out: str | Path | None, show_verdict: bool, options: dict[str, Any],
        pilot: Sequence[str] = (), budget: float = 0.15,
    ) -> None:  # fmt: skip
        self.piloted = PilotedRun(pilot, budget, options) if pilot else None
        self.grids, self.out, self.show_verdict, self.options = grids, out, show_verdict, options
        self.scalars, self.reported = Scalars(), 0
        """The values for the trainer's own loggers, and the last step that was reported to them."""
        self.audit: Audit | None = None
        self.folder: Path | None = None
        self.measure: str | None = None
        """The measure whose losses the trace holds: the first that was evaluated."""
        self.trouble: str | None = None
        """Why as-if evaluation stopped, if it did."""
        self.verified: set[str] = set()
        self._limit = 3600.0
        """Seconds that a forked evaluation may take; how long one lasts is known from the first."""
        self.evaluation: Evaluation | None = None
        """The newest recorded evaluation with its rehearsals."""

    @property
    def prices(self) -> Prices | None:
        """What the formats of ``pilot=`` cost, once training has ended."""
        return None if self.piloted is None else self.piloted.prices

    def start(
        self,
        optimizers: Any,
        model: Any,
        usual: Path,
        done: int,
        twin: Make | None = None,
        updates: float = 0,
    ) -> None:
        """Run the twins of piloted formats, then begin (or continue) at the step after ``done``."""
        if self.piloted is not None and twin is not None:
            folder = Path(self.out or usual)
            self.piloted.before(twin, int(updates), folder.with_name(f"{folder.name}-pilot"), done)
        self.stop()
        goes_on = self.options.get("resume", done > 0)
        automatic = newest_folder if goes_on else free_folder
        self.folder = automatic(usual) if self.out is None else Path(self.out)
        settings = {"first_step": done + 1, "model": model, **self.options, "resume": goes_on}
        audit = Audit(optimizers, self.grids, out=self.folder, **settings)
        audit.start()
        self.audit, self.folder = audit, audit.out  # numbered, if it was taken
        self.scalars, self.reported = Scalars(), done

    def news(self) -> dict[str, float]:
        """Return the tags and values of the newest audited step for a logger; empty if already reported."""
        newest = {} if self.audit is None else self.audit.latest
        if not newest or newest["step"] <= self.reported:
            return {}
        self.reported = newest["step"]
        return self.scalars.of(newest)

    def _apart(self, again: Callable[[], float]) -> float:
        if not can_fork():
            return float(again())
        began = time.perf_counter()
        loss, _ = in_fork(lambda: float(again()), self._limit)
        self._limit = PATIENCE + LONGER * (time.perf_counter() - began)
        return loss

    def evaluated(
        self, name: str, real: float, again: Callable[[], float], *, verify: bool = False
    ) -> dict[str, float]:
        """Record an evaluation, repeat it as if for every rehearsal, and return the values for a logger.

        Tags are ``NAME_as_if/SPEC`` for the point, with ``/lower`` and ``/upper`` for the bounds. An
        evaluation that cannot be repeated is reported, and not attempted again. Where this process can be
        forked, ``again`` is called in forks, so that a module's state is as if it had validated once. With
        ``verify``, the first call checks that ``again`` returns the real loss for the model as it is.
        """
        if self.audit is None:
            return {}
        self.measure = self.measure or name
        known = [real]
        specs: list[str] | None = [] if self.trouble else None
        record = name == self.measure
        try:
            if verify and name not in self.verified and self.audit.rehearsals and not self.trouble:
                drawn = RandomState()
                try:
                    _check(self._apart(again), real)
                finally:
                    drawn.put_back()
                self.verified.add(name)
            evaluation = self.audit.evaluate(
                lambda: known.pop() if known else self._apart(again), specs=specs, record=record
            )
        except Exception as error:
            text = str(error)
            self.trouble = text if isinstance(error, ApartError) else f"{type(error).__name__}: {text}"
            tell(
                f"halfulp: {name} could not be evaluated as if ({plain(self.trouble)}). Training goes on; no "
                "losses of rehearsals are recorded from here on."
            )
            self.audit.evaluate(lambda: real, specs=[], record=record)
            return {}
        if record:
            self.evaluation = evaluation
        ends = {"point": "", "lower": "/lower", "upper": "/upper"}
        return {
            f"{name}_as_if/{spec}{ends[bound]}": loss
            for spec, losses in evaluation.losses.items()
            for bound, loss in losses.items()
        }

    def end(self) -> None:
        """Stop at the end of the training, and say what each piloted format costs."""
        self.stop()
        if self.piloted is not None:
            self.piloted.after(self.evaluation)

    def stop(self) -> None:
        """Make everything durable and print the verdict; do nothing if no audit is running."""
        audit, self.audit = self.audit, None
        if audit is None or self.folder is None:
            return
        audit.stop()
        if self.show_verdict and audit.writes:
            trace = Trace.open(self.folder)
            tell(*verdict(trace).lines, "", whence(trace, self.folder))


def _check(own: float, real: float) -> None:
    if not math.isclose(own, real, rel_tol=1e-4, abs_tol=1e-6):
        raise UsageError(f"evaluating the same model again gives {own:g}, not {real:g}")
