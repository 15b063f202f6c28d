"""The ledger: what happened, in order, as lines that cannot be changed one by one.

One canonical JSON object a line. Each holds its own digest (SHA-256 of the line without that field)
and the digest of the line before it, so the last line's digest stands for the whole history. Whoever
rewrites history must rewrite all of it, and then its last digest is not the one that was printed when
the study was closed.

Records hold nothing of when and by whom they were made, so that two runs can be compared byte by byte;
that is here, in the event that binds a record's digest: process id, the process's start in clock
ticks since boot, the boot's own id, and a number drawn by the process.
"""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError
from halfulp.study import shape
from halfulp.study.protocol import Json

Event = dict[str, Json]


def process() -> Event:
    """The identity of this process; a fork is another."""
    return {"pid": (pid := os.getpid()), **_of(pid)}


@cache
def _of(_pid: int) -> Event:
    """When it started, and a word of its own. Asked once: the system may take milliseconds to tell."""
    try:
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        start, boot = 0, ""
    return {"start": start, "boot": boot, "nonce": secrets.token_hex(8)}


class Ledger:
    """The events of a study's folder, and what follows from them."""

    def __init__(self, path: Path, events: list[Event]) -> None:
        self.path = path
        self.events: list[Event] = []
        self.records: dict[tuple[str, str], str] = {}  # (stage, cell) -> digest of its record
        self.recovered: dict[tuple[str, str], str] = {}  # -> reason
        self.failures: dict[tuple[str, str], int] = {}
        self.stages: dict[str, str] = {}  # sealed stage -> digest of its seal
        self.decided: dict[str, Event] = {}  # stage -> the decision whether it runs, where there is one
        self.deviations: list[Event] = []
        self.closed: Event | None = None
        for event in events:
            self._take(event)

    @property
    def head(self) -> str:
        """The digest of the last event."""
        return str(self.events[-1]["digest"]) if self.events else ""

    @property
    def not_run(self) -> frozenset[str]:
        """The stages that were not authorised."""
        return frozenset(stage for stage, event in self.decided.items() if not event["authorised"])

    @property
    def seal(self) -> str:
        """The digest of seal.json that the first event names."""
        return str(self.events[0]["seal"]) if self.events else ""

    def append(self, *events: Mapping[str, Json], durable: bool = True) -> None:
        """Add events. They are on disk when this returns, if `durable`; otherwise with the next that is."""
        lines = []
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        if self.events:  # a clock that was set back does not turn history round
            now = max(now, self.events[-1]["at"])
        for event in events:
            body: Event = {"n": len(self.events), "previous": self.head, "at": now, **event}
            body["digest"] = canonical.digest(body)
            self._take(body)
            lines.append(canonical.dumps(body) + b"\n")
        files.append(self.path, b"".join(lines), durable=durable)

    def _take(self, event: Event) -> None:
        """Follow the protocol of events; what could not have happened in this order is damage."""
        kind, key = event["event"], (event.get("stage", ""), event.get("cell", ""))
        last = self.events[-1] if self.events else None
        if last is not None and event["at"] < last["at"]:
            raise self._wrong(event, f"its time, {event['at']}, is before that of the event ahead of it")
        if self.closed is not None:
            raise self._wrong(event, "comes after the study was closed")
        if (kind == "sealed") == bool(self.events):
            raise self._wrong(event, "a ledger begins with its seal, once")
        if kind in ("finished", "recovered"):
            if key in self.records:
                raise self._wrong(event, "the cell has a record already")
            self.records[key] = event["record"]
            if kind == "recovered":
                self.recovered[key] = event["reason"]
        elif kind in ("started", "retried") and key in self.records:
            raise self._wrong(event, "the cell has a record already")
        elif kind == "failed":
            self.failures[key] = self.failures.get(key, 0) + 1
        elif kind == "stage-sealed":
            self.stages[event["stage"]] = event["seal"]
        elif kind == "decided":
            self.decided[event["stage"]] = event
        elif kind == "deviation":
            self.deviations.append(event)
        elif kind == "closed":
            if last is None or (last["event"], last.get("result")) != ("validated", event["result"]):
                raise self._wrong(event, "a study is closed with the result that was validated just before")
            self.closed = event
        if kind in ("started", "retried", "finished", "recovered"):
            if key[0] in self.stages:
                raise self._wrong(event, f"stage {key[0]} was sealed before")
            if key[0] in self.not_run:
                raise self._wrong(event, f"stage {key[0]} was not authorised")
        self.events.append(event)

    def _wrong(self, event: Event, why: str) -> CorruptionError:
        return CorruptionError(f"{self.path} is damaged: event {event['n']} ({event['event']}): {why}.")


def read(path: Path) -> Ledger:
    """A ledger, every line checked; a last line that is cut short is damage too."""
    content = files.read(path, shape.MOST_BYTES)
    if not content.endswith(b"\n"):
        raise CorruptionError(
            f"{path} is damaged: its last line is cut short. If a run was interrupted, run the study again."
        )
    return Ledger(path, _events(path, content.split(b"\n")[:-1]))


def reopen(path: Path) -> Ledger:
    """A ledger to go on with: a last line that was cut short by a crash is dropped first."""
    if not path.exists():
        return Ledger(path, [])
    content = files.read(path, shape.MOST_BYTES)
    whole = content.rfind(b"\n") + 1
    found = Ledger(path, _events(path, content[:whole].split(b"\n")[:-1]))
    if whole < len(content):  # and only now, when it is known to be a ledger of ours
        files.cut(path, whole)
    return found


def begun(path: Path) -> bool:
    """Whether a ledger has its first line; one that is no event is damage, or a file of somebody else's."""
    if not path.exists():
        return False
    first, newline, _ = files.read(path, shape.MOST_BYTES).partition(b"\n")
    return bool(newline and _events(path, [first]))


def torn(path: Path) -> bool:
    """Whether a file is a ledger whose first line was cut short."""
    start, content = b'{"at":"', files.read(path, shape.MOST_BYTES)
    return b"\n" not in content and content[: len(start)] == start[: len(content)]


def _events(path: Path, lines: Iterable[bytes]) -> list[Event]:
    events: list[Event] = []
    previous = ""
    for n, line in enumerate(lines):
        event = canonical.loads(line, f"{path}, line {n + 1},")
        kind = event.get("event") if isinstance(event, dict) else None
        if not isinstance(kind, str) or kind not in shape.EVENTS:
            raise CorruptionError(f"{path} is damaged: line {n + 1} is not an event.")
        shape.check(event, shape.ALWAYS | shape.EVENTS[kind], f"{path}, line {n + 1}")
        body = {key: value for key, value in event.items() if key != "digest"}
        if canonical.digest(body) != event["digest"]:
            raise CorruptionError(
                f"{path} is damaged or was edited: line {n + 1} does not have its own digest."
            )
        if event["n"] != n or event["previous"] != previous:
            raise CorruptionError(f"{path} is damaged: line {n + 1} does not follow the line before it.")
        previous = event["digest"]
        events.append(event)
    return events
