"""The audit: what a run loses on each grid, before it is stored there and while it is."""

from halfulp.audit.session import Audit
from halfulp.audit.settings import Measure, Recording
from halfulp.audit.sinks.alerts import Alert

__all__ = ["Alert", "Audit", "Measure", "Recording"]
