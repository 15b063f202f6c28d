"""``Alert``: say so, or stop, when a tensor loses most of its updates for some steps in a row.

It is a listener of an audit: ``hu.Audit(..., listeners=[hu.Alert(above=0.95, steps=20)])``, or on the command
line ``--alert 95%:20``. A tensor is named once, and again only after it has recovered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfulp.errors import UsageError
from halfulp.text import shown, tell

STOPPED = 1
"""The exit code of a process that an alert stopped: that of a gate that failed."""


@dataclass
class Alert:
    """Warn when a tensor loses more than ``above`` of its updates for ``steps`` audited steps in a row.

    ``stop``: then end the process, by ``SystemExit`` with code 1 out of the optimizer's ``step()``; the audit
    keeps what it recorded. ``grid``: only on this one, by name; None: on any that is audited.
    """

    above: float = 0.95
    steps: int = 20
    stop: bool = False
    grid: str | None = None
    told: list[str] = field(default_factory=list)
    """What was said, in order."""
    _running: dict[tuple[str, str], int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.above < 1 or self.steps < 1:
            raise UsageError(
                f"an alert is for more than a share below 1, for at least one step; not {self.above} and "
                f"{self.steps}."
            )

    def __call__(self, summary: Mapping[str, Any]) -> None:
        """Look at the summary of a step."""
        new = []
        for tensor, shares in summary["lost"].items():
            for grid, share in shares.items():
                if self.grid is not None and grid != self.grid:
                    continue
                run = self._running.get((tensor, grid), 0) + 1 if share > self.above else 0
                self._running[tensor, grid] = run
                if run == self.steps:
                    new.append(
                        f"{shown(tensor)} lost more than {self.above:.0%} of its updates on {grid} for "
                        f"{self.steps} steps in a row, at step {summary['step']}."
                    )
        self.told += new
        for line in new:
            tell(f"halfulp: ALERT: {line}")
        if new and self.stop:
            tell("halfulp: stopped by this alert.")
            raise SystemExit(STOPPED)
