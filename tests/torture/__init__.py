"""Proof under fire: ``make torture``, and ``make torture-long`` for the form of some hours.

Every part is a list of trials: what is tried, how often, and what was lost, which must be nothing. The parts
write one table, ``results/torture.json``, and the table in docs/reliability.md is made from it: nobody types
a number. A trial that was not run is not in the table.
"""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "results" / "torture.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- made by make torture: begin -->", "<!-- end -->"


@dataclass
class Trial:
    """One line of the table. ``lost`` counts what must be zero; ``note`` has other figures."""

    part: str
    what: str
    tried: int
    lost: int
    seconds: float
    note: str = ""
    commit: str = ""
    """Of what was tried; ``+``: with changes."""


@dataclass(frozen=True)
class Effort:
    """How much: the short form takes minutes, the long one hours, of which parts can be asked for."""

    long: bool
    folder: Path
    only: str = ""
    most: int = 2**63
    """No trial is made more often."""
    again: bool = False
    """Whether what an earlier run found is to be found again."""

    def of(self, short: int, long: int) -> int:
        return min(long if self.long else short, self.most)

    def wants(self, what: str) -> bool:
        return re.search(self.only, what) is not None


Part = Callable[[Effort], Iterator[Trial]]


class Clock:
    """Seconds since the last time it was asked."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def __call__(self) -> float:
        now = time.perf_counter()
        self.last, before = now, self.last
        return now - before


def commit() -> str:
    """Return the commit of the sources, short, with a plus where they were changed since."""

    def said(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return said("rev-parse", "--short=7", "HEAD") + "+" * bool(said("status", "--porcelain", "src", "tests"))


def keep(trials: list[Trial]) -> list[Trial]:
    """Add trials to those of earlier runs: what is tried again replaces what was said of it, unless that was
    more. A loss is never replaced by fewer trials. One process at a time: two may each run a part."""
    with PAGE.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        kept = _kept(trials)
        page(kept)
    return kept


def _kept(trials: list[Trial]) -> list[Trial]:
    old = [Trial(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.is_file() else []
    table = {(t.part, t.what): t for t in old}
    for t in trials:
        before = table.get((t.part, t.what))
        if before is None or t.lost or t.tried >= before.tried:
            table[t.part, t.what] = t
    kept = [table[key] for key in sorted(table)]
    RESULTS.write_text(json.dumps([asdict(t) for t in kept], indent=1) + "\n")
    return kept


def page(trials: list[Trial]) -> None:
    """Put the table into the page."""
    lines = ["| | tried | lost | seconds | commit | |", "|---|---:|---:|---:|---|---|"]
    part = ""
    for t in trials:
        if t.part != part:
            part = t.part
            lines.append(f"| **{part}** | | | | | |")
        row = (t.what, f"{t.tried:,}", t.lost, f"{t.seconds:,.0f}", t.commit, t.note)
        lines.append(f"| {' | '.join(map(str, row))} |")
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{tail}")
