"""Libraries that may not be there, and what the callbacks share."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfulp.audit.as_if import RandomState
from halfulp.audit.recorder import Audit
from halfulp.audit.verdict import verdict
from halfulp.errors import MissingError, UsageError
from halfulp.integrations.scalars import Scalars
from halfulp.text import plain, tell
from halfulp.trace import Trace, free_folder, newest_folder


def base_class(*places: str) -> Any:
    """The first class ``module:name`` whose module can be imported; ``object`` if none can.

    Modules stay importable without the library they are for; :func:`require` tells who makes use of them.
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
    """The first module that can be imported, or an error that says what to install."""
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    names = " or ".join(m.partition(".")[0] for m in modules)
    raise MissingError(f"this needs {names}, which is not installed: pip install {names.split()[0]}")


class AuditedRun:
    """An audit that lives from the start of a trainer's run to its end."""

    def __init__(
        self, grids: Any, out: str | Path | None, show_verdict: bool, options: dict[str, Any]
    ) -> None:
        self.grids, self.out, self.show_verdict, self.options = grids, out, show_verdict, options
        self.scalars, self.reported = Scalars(), 0
        """What the trainer's own loggers are told, and of which step they were told last."""
        self.audit: Audit | None = None
        self.folder: Path | None = None
        self.measure: str | None = None
        """Whose losses the trace holds: the first that was evaluated."""
        self.trouble: str | None = None
        """Why nothing is evaluated as if any more."""
        self.verified: set[str] = set()

    def start(self, optimizers: Any, model: Any, usual: Path, done: int) -> None:
        """Begin at the step after ``done``; a run that goes on goes on with its trace."""
        self.stop()
        goes_on = self.options.get("resume", done > 0)
        self.folder = (
            Path(self.out)
            if self.out is not None
            else newest_folder(usual)
            if goes_on
            else free_folder(usual)
        )
        settings = {"first_step": done + 1, "model": model, **self.options, "resume": goes_on}
        audit = Audit(optimizers, self.grids, out=self.folder, **settings)
        audit.start()
        self.audit, self.folder = audit, audit.out  # numbered, if it was taken
        self.scalars, self.reported = Scalars(), done

    def news(self) -> dict[str, float]:
        """Tags and values of the newest step that was audited, for a logger; none if it knows them."""
        newest = {} if self.audit is None else self.audit.latest
        if not newest or newest["step"] <= self.reported:
            return {}
        self.reported = newest["step"]
        return self.scalars.of(newest)

    def evaluated(
        self, name: str, real: float, again: Callable[[], float], *, verify: bool = False
    ) -> dict[str, float]:
        """Take an evaluation, and ``again`` as if for every rehearsal: what a logger is to be told.

        Tags are ``NAME_as_if/SPEC`` for the point, with ``/lower`` and ``/upper`` for the bounds. What
        cannot be evaluated again is said, and left alone from then on. ``verify``: whether ``again`` gives
        the real loss for the model as it is must be seen the first time.
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
                    _check(again(), real)
                finally:
                    drawn.put_back()
                self.verified.add(name)
            found = self.audit.evaluate(lambda: known.pop() if known else again(), specs=specs, record=record)
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"
            tell(
                f"halfulp: {name} could not be evaluated as if ({plain(self.trouble)}). Training goes on; no "
                "losses of rehearsals are recorded from here on."
            )
            self.audit.evaluate(lambda: real, specs=[], record=record)
            return {}
        ends = {"point": "", "lower": "/lower", "upper": "/upper"}
        return {
            f"{name}_as_if/{spec}{ends[bound]}": loss
            for spec, losses in found.losses.items()
            for bound, loss in losses.items()
        }

    def stop(self) -> None:
        """Make everything durable and say what was found; nothing if it is not running."""
        audit, self.audit = self.audit, None
        if audit is None or self.folder is None:
            return
        audit.stop()
        if self.show_verdict and audit.writes:
            tell(*verdict(Trace.open(self.folder)).lines)
            tell("", f"The trace is in {plain(str(self.folder))}.")


def _check(own: float, real: float) -> None:
    if not math.isclose(own, real, rel_tol=1e-4, abs_tol=1e-6):
        raise UsageError(f"evaluating the same model again gives {own:g}, not {real:g}")
