"""``Alert``: say so, or stop, when a tensor loses most of its updates for some steps in a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfulp.deprecation import warn
from halfulp.errors import UsageError
from halfulp.text import shown, tell

STOPPED = 1
"""The exit code of a process that an alert stopped: that of a gate that failed."""


@dataclass
class Alert:
    """Warn when a tensor loses most of its updates for some steps in a row; a listener of an audit.

    A tensor is named once, and again only after it has recovered. Moments and copies (``states=``, ``also=``)
    are looked at as far as they are stored on the grid.

    Args:
        above: The share of updates that may be lost.
        steps: How many audited steps in a row may lose more than that, less one.
        stop: Then end the process, by ``SystemExit`` with code 1 out of ``step()``; the trace is kept.
        grid: Only on this grid, by name; None looks at all that are audited.

    Raises:
        UsageError: If no share can be above ``above``, or ``steps`` is less than one.

    >>> import torch
    >>> from halfulp.audit import Audit
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer, alert = torch.optim.SGD(model.parameters(), lr=1e-9), Alert(steps=2)
    >>> with Audit(optimizer, "bf16", model=model, listeners=[alert]):
    ...     for _ in range(3):
    ...         _ = model(torch.ones(1, 8)).sum().backward()
    ...         optimizer.step()
    >>> len(alert.messages)
    2
    """

    above: float = 0.95
    steps: int = 20
    stop: bool = False
    grid: str | None = None
    messages: list[str] = field(default_factory=list)
    """The messages issued so far, in order."""
    _running: dict[tuple[str, str], int] = field(default_factory=dict, repr=False)
    _seen: dict[str, int] = field(default_factory=dict, repr=False)
    """The newest step of every tracked state."""

    def __post_init__(self) -> None:
        if not 0 <= self.above < 1 or self.steps < 1:
            raise UsageError(
                f"an alert takes above= from 0 to below 1 and steps= of at least 1, not {self.above} and "
                f"{self.steps}."
            )

    @property
    def told(self) -> list[str]:
        """The former name of :attr:`messages`."""
        warn("Alert.told", "Alert.messages")
        return self.messages

    def __call__(self, summary: Mapping[str, Any]) -> None:
        """Look at the summary of a step."""
        new = self._look(summary, summary["tensors"], list(summary["frozen"]))
        for role, beside in summary.get("roles", {}).items():
            if self._seen.get(role) != beside["step"]:
                self._seen[role] = beside["step"]
                named = {f"{role} of {name}": shares for name, shares in beside["tensors"].items()}
                new += self._look(summary, named, beside["measured"])
        self.messages += new
        for line in new:
            tell(f"halfulp: ALERT: {line}")
        if new and self.stop:
            tell("halfulp: stopped by this alert.")
            raise SystemExit(STOPPED)

    def _look(
        self, summary: Mapping[str, Any], tensors: Mapping[str, Mapping[str, float]], grids: Sequence[str]
    ) -> list[str]:
        """Return what there is to say of tensors on some grids."""
        new = []
        for tensor, shares in tensors.items():
            for grid in (g for g in grids if self.grid in (None, g)):
                share = shares[grid]
                run = self._running.get((tensor, grid), 0) + 1 if share > self.above else 0
                self._running[tensor, grid] = run
                if run == self.steps:
                    new.append(
                        f"{shown(tensor)} lost more than {self.above:.0%} of its updates on {grid} for "
                        f"{self.steps} steps in a row, at step {summary['step']}."
                    )
        return new
