"""The audit: what a run loses on each grid, before it is stored there and while it is."""

from halfulp.audit.recorder import Audit

__all__ = ["Audit"]
