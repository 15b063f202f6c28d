"""Libraries that may not be there, and what the callbacks share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from halfulp.audit.recorder import Audit
from halfulp.audit.verdict import verdict
from halfulp.text import plain
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
    raise ImportError(f"this needs {names}, which is not installed: pip install {names.split()[0]}")


class AuditedRun:
    """An audit that lives from the start of a trainer's run to its end."""

    def __init__(
        self, grids: Any, out: str | Path | None, show_verdict: bool, options: dict[str, Any]
    ) -> None:
        self.grids, self.out, self.show_verdict, self.options = grids, out, show_verdict, options
        self.audit: Audit | None = None
        self.folder: Path | None = None

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

    def stop(self) -> None:
        """Make everything durable and say what was found; nothing if it is not running."""
        audit, self.audit = self.audit, None
        if audit is None or self.folder is None:
            return
        audit.stop()
        if self.show_verdict and audit.writes:
            print(verdict(Trace.open(self.folder)), file=sys.stderr)
            print(f"\nThe trace is in {plain(str(self.folder))}.", file=sys.stderr)
