"""A running audit on the terminal: what is being lost now, and where.

A :class:`LiveView` is a listener of an audit. It is called at every audited step and almost always returns
at once, after a look at the clock. A picture is made at most four times a second, and less often if that took
more than half a percent of the time. On a terminal the picture stays in its place; elsewhere it is a plain
line now and then, so that a log file stays readable. Everything goes to stderr: stdout is the script's own.

    with LiveView() as view, hu.Audit(optimizer, ["bf16"], model=model, listeners=[view]):
        train()

On a terminal, what the script prints appears above the picture. A script that draws there itself (a
progress bar on stderr) gets plain lines instead with ``lines=True``. How fast steps are is shown from the
second one on, and with ``steps=``, the number of the last one, when they will be done.
"""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from halfulp.text import is_terminal, percent, shown, time_left

INTERVAL, LINE_INTERVAL = 0.25, 10.0
"""Seconds between pictures, and between plain lines."""
SHARE = 0.005
"""Largest share of the time spent on making pictures."""
WORST = 5
BAR = 24


class Aside(Console):
    """Stderr beside a training: it falls silent when nobody listens any more. rich would end the process."""

    def __init__(self) -> None:
        super().__init__(stderr=True)

    def on_broken_pipe(self) -> None:
        """Stop writing."""
        self.quiet = True


class LiveView:
    """Show the summaries that an audit gives to its listeners.

    Args:
        console: Where to; by default stderr.
        lines: Print plain lines even on a terminal.
        steps: The number of the last step, for an estimate of the end.
    """

    def __init__(
        self, console: Console | None = None, *, lines: bool = False, steps: int | None = None
    ) -> None:
        self.console = Aside() if console is None else console
        self.lines = lines or not self.console.is_terminal
        self.steps = steps
        self.interval = LINE_INTERVAL if self.lines else INTERVAL
        self.seconds = 0.0
        """Spent here so far."""
        self._live: Live | None = None
        self._latest: dict[str, Any] | None = None
        self._due, self._cost = 0.0, 0.01
        self._began: tuple[float, int] | None = None
        """When the first step was seen, and its number."""

    def __enter__(self) -> LiveView:
        if not self.lines:
            self._live = Live(
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=is_terminal(sys.stdout),
                redirect_stderr=is_terminal(sys.stderr),
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def __call__(self, summary: dict[str, Any]) -> None:
        """Receive the summary of a step, as a listener."""
        self._latest = summary
        now = time.monotonic()
        if self._began is None:
            self._began = now, summary["step"]
        if now < self._due:
            return
        self._show()
        spent = time.monotonic() - now
        self._cost = min(self._cost, spent)  # the first one is slow, and others may have to wait for a core
        self._due = now + max(self.interval, self._cost / SHARE)
        self.seconds += spent

    def close(self) -> None:
        """Take the picture away; plain lines end with the last step."""
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()
            self._live = None
        elif self.lines and self._latest is not None:
            self._show()
        self._latest = None

    def _show(self) -> None:
        if self._latest is None:
            return
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone does not end a training
            if self._live is not None:
                self._live.update(picture(self._latest, self._pace()), refresh=True)
            elif self.lines:
                self.console.print(Text(line(self._latest, self._pace())), soft_wrap=True)

    def _pace(self) -> str:
        """Return how fast steps are, and when the last one will be done if its number is known."""
        if self._began is None or self._latest is None:
            return ""
        spent, done = time.monotonic() - self._began[0], self._latest["step"] - self._began[1]
        whole = 0 if self.steps is None else self.steps - self._began[1]
        return pace(spent, done) + time_left(spent, done, whole)


def pace(spent: float, done: int) -> str:
    """Return the speed of steps; empty if there is none yet.

    >>> pace(10, 42), pace(10, 4120), pace(10, 4), pace(0, 0)
    (', 4.2 steps/s', ', 412 steps/s', ', 2.5 s per step', '')
    """
    if done <= 0 or spent <= 0:
        return ""
    number = max(done / spent, spent / done)
    said = f"{number:.1f}" if number < 10 else f"{number:,.0f}"
    return f", {said} steps/s" if done > spent else f", {said} s per step"


def line(summary: dict[str, Any], speed: str = "") -> str:
    """Return one step in one line; ``speed``: what :func:`pace` says."""
    shares = ", ".join(f"{grid} {percent(share)}" for grid, share in summary["frozen"].items())
    bad = f"{summary['nonfinite']:,} weights NOT FINITE, " if summary.get("nonfinite") else ""
    most = "".join(f"; most in {shown(name)} ({grid}, {percent(x)})" for name, grid, x in worst(summary, 1))
    also = "".join(f"; {shown(name)} {percent(x)} ({grid})" for name, grid, x in beside(summary))
    return (
        f"halfulp: step {summary['step']}: {bad}updates lost {shares}{most}{also}{speed.replace(',', ';', 1)}"
    )


def beside(summary: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Return (role, grid, share lost) of moments and copies that are stored on the grid."""
    roles = summary.get("roles", {}).items()
    return [(name, grid, said["frozen"][grid]) for name, said in roles for grid in said["measured"]]


def worst(summary: dict[str, Any], most: int) -> list[tuple[str, str, float]]:
    """Return (tensor, grid, share) of the tensors that lose most, on the grid that loses most."""
    known = {g: share for g, share in summary["frozen"].items() if share == share}
    if not known:
        return []
    grid = max(known, key=lambda g: (known[g], g))
    there = ((name, shares[grid]) for name, shares in summary["tensors"].items())
    ranked = sorted((x for x in there if x[1] == x[1]), key=lambda x: (-x[1], x[0]))
    return [(name, grid, share) for name, share in ranked[:most]]


def picture(summary: dict[str, Any], speed: str = "") -> Table:
    """Return one step as a small table: grids with bars, then the worst tensors."""
    loss = "" if summary["loss"] != summary["loss"] else f", loss {summary['loss']:.4f}"
    table = Table.grid(padding=(0, 2))
    bad = f", {summary['nonfinite']:,} weights NOT FINITE" if summary.get("nonfinite") else ""
    table.title = Text(f"halfulp: step {summary['step']:,}{loss}{speed}{bad}", style="bold", justify="left")
    table.title_justify = "left"
    for grid, share in summary["frozen"].items():
        never = summary["never_moved"].get(grid)
        still = "" if never is None else f"{percent(never)} never moved"
        table.add_row(Text(grid), bar(share), Text(f"{percent(share):>6} lost", justify="right"), Text(still))
    for name, grid, share in (*worst(summary, WORST), *beside(summary)):
        table.add_row(Text(""), Text(shown(name, 40)), Text(f"{percent(share):>6} lost"), Text(f"on {grid}"))
    return table


def bar(share: float) -> Text:
    """Return a share as a bar, in eighths of a letter.

    >>> bar(0.5).plain
    '████████████            '
    """
    eighths = 0 if share != share else round(share * BAR * 8)
    filled = "█" * (eighths // 8) + ("" if eighths % 8 == 0 else " ▏▎▍▌▋▊▉"[eighths % 8])
    return Text(f"{filled:{BAR}}", style="dark_orange3" if share >= 0.5 else "default")
