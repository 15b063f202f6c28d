"""halfulp: which weight updates a number format throws away, and what to do about it.

An optimizer update smaller than half a gap of the grid on which weights are stored is rounded
away: the stored value does not change. This package defines the grids, the exact event, and
kernels fast enough to watch it.
"""

from halfulp.audit.alerts import Alert
from halfulp.audit.casts import CastAudit
from halfulp.audit.recorder import Audit
from halfulp.audit.rehearsal import Rehearse
from halfulp.audit.replay import replay
from halfulp.audit.verdict import verdict
from halfulp.errors import CorruptionError, HalfulpError, TamperingError, UsageError, VersionError
from halfulp.events import frozen, margin, phase, rho, symmetric_frozen
from halfulp.grids import Grid, float_grid, grid, integer_grid
from halfulp.masks import Mask, allocate
from halfulp.stored import Change, Check, Sync, check
from halfulp.streams import Stream
from halfulp.trace import Memory, Trace
from halfulp.version import __version__
from halfulp.writeback import (
    ECO,
    SGD,
    Adam,
    AdamW,
    Dispatch,
    Kahan,
    Lion,
    Master,
    TileMaster,
    WriteBack,
    native,
)  # fmt: skip

__all__ = [
    "ECO", "SGD", "Adam", "AdamW", "Alert", "Audit", "CastAudit", "Change", "Check", "CorruptionError",
    "Dispatch", "Grid", "HalfulpError", "Kahan", "Lion", "Mask",
    "Master", "Memory", "Rehearse", "Stream", "Sync", "TamperingError", "TileMaster", "Trace",
    "UsageError", "VersionError", "WriteBack", "__version__", "allocate", "check", "float_grid", "frozen",
    "grid", "integer_grid", "margin", "native", "phase", "replay", "rho", "symmetric_frozen", "verdict",
]  # fmt: skip
