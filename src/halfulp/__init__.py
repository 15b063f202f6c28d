"""Find the weight updates that a number format loses, and fix it.

An optimizer update smaller than half a gap of the grid on which weights are stored is rounded
away: the stored value does not change. This package defines the grids, the exact event, and
kernels fast enough to watch it.

Names are imported when they are first used, so that ``import halfulp`` costs next to nothing; `deprecation`
knows the names that were here before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halfulp import deprecation
from halfulp.version import __version__

if TYPE_CHECKING:
    from halfulp.allocation.masks import Mask, allocate
    from halfulp.audit.rehearsal.specs import Rehearse
    from halfulp.audit.session import Audit
    from halfulp.audit.sources.casts import CastAudit
    from halfulp.checkpoints import Receiver, Sync, check, diff
    from halfulp.contract import require
    from halfulp.errors import CorruptionError, HalfulpError, UsageError
    from halfulp.measures.events import frozen
    from halfulp.numbers.grids import Grid, grid
    from halfulp.numbers.streams import Stream
    from halfulp.pilots.pilot import Pilot
    from halfulp.trace import Memory, Trace
    from halfulp.verdicts.answer import verdict
    from halfulp.writeback import SGD, Adam, AdamW, Lion, TileMaster, WriteBack
    from halfulp.writeback.storage.native_weight import native

__all__ = [
    "SGD", "Adam", "AdamW", "Audit", "CastAudit", "CorruptionError", "Grid", "HalfulpError", "Lion",
    "Mask", "Memory", "Pilot", "Receiver", "Rehearse", "Stream", "Sync", "TileMaster", "Trace", "UsageError",
    "WriteBack", "__version__", "allocate", "check", "diff", "frozen", "grid", "native", "require",
    "verdict",
]  # fmt: skip

_PLACES = {
    "allocation.masks": ("Mask", "allocate"),
    "audit.sources.casts": ("CastAudit",),
    "audit.session": ("Audit",),
    "audit.rehearsal.specs": ("Rehearse",),
    "checkpoints": ("Receiver", "Sync", "check", "diff"),
    "contract": ("require",),
    "errors": ("CorruptionError", "HalfulpError", "UsageError"),
    "measures.events": ("frozen",),
    "numbers.grids": ("Grid", "grid"),
    "numbers.streams": ("Stream",),
    "pilots.pilot": ("Pilot",),
    "trace": ("Memory", "Trace"),
    "verdicts.answer": ("verdict",),
    "writeback": ("SGD", "Adam", "AdamW", "Lion", "TileMaster", "WriteBack"),
    "writeback.storage.native_weight": ("native",),
}
"""Names by the module that defines them, as imported above for type checkers."""
_MODULE = {name: f"halfulp.{place}" for place, names in _PLACES.items() for name in names}
_ROOMS = {
    "allocation", "audit", "checkpoints", "contract", "errors", "integrations", "kernels", "measures",
    "numbers", "pilots", "study", "trace", "verdicts", "writeback",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULE:
        value = getattr(importlib.import_module(_MODULE[name]), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f"halfulp.{name}")
    return deprecation.moved(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


deprecation.install()
