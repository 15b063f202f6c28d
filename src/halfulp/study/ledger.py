"""Keep the ledger: the events of a study in order, as lines that cannot be changed one by one.

Each line is one canonical JSON object. It holds its own digest (SHA-256 of the line without that field)
and the digest of the line before it, so the last line's digest stands for the whole history. Anyone who
rewrites history must rewrite all of it, and then its last digest is not the one that was printed when
the study was closed.

Records do not say when and by which process they were made, so that two runs can be compared byte by byte.
The ledger does, in the event that binds a record's digest: process id, the process's start in clock
ticks since boot, the boot's own id, and a number drawn by the process.

`check_order` checks that the events of a ledger could have happened: declared names, stages in turn,
conditions kept. It reads no other file, so it also works for evidence, of which only a part is at hand.
"""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, TamperingError
from halfulp.study.declaration import ALWAYS, EVENTS, FORMAT, MOST_BYTES, Protocol, check
from halfulp.study.protocol import Json, SealedStage

Event = dict[str, Json]


def process() -> Event:
    """Return the identity of this process; a fork is another."""
    return {"pid": (pid := os.getpid()), **_of(pid)}


@cache
def _of(_pid: int) -> Event:
    """Find when it started, and draw a number. Once: the system may take milliseconds to tell."""
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

    def stage_seal(self, stage: str, protocol: Protocol) -> Event:
        """Return the content of a stage's seal, once every cell of it has a record."""
        before = [earlier.name for earlier in protocol.before(stage) if earlier.name in self.stages]
        return {
            "format": FORMAT, "study": protocol.study, "stage": stage, "seal": self.seal,
            "before": self.stages[before[-1]] if before else "",
            "records": {cell: self.records[stage, cell] for cell in protocol.stage(stage).cells},
        }  # fmt: skip

    def append(self, *events: Mapping[str, Json], durable: bool = True) -> None:
        """Add events, with this process where they name one and none is given.

        They are on disk when this returns, if `durable`; otherwise with the next that is.
        """
        lines = []
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        if self.events:  # a clock that was set back does not turn history round
            now = max(now, self.events[-1]["at"])
        for event in events:
            body: Event = {"n": len(self.events), "previous": self.head, "at": now, **event}
            if "process" in EVENTS[event["event"]]:
                body.setdefault("process", process())
            body["digest"] = canonical.digest(body)
            self._take(body)
            lines.append(canonical.dumps(body) + b"\n")
        files.append(self.path, b"".join(lines), durable=durable)

    def _take(self, event: Event) -> None:
        """Take an event in; one that could not have happened after the others is damage."""
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
    """Read a ledger and check every line; a last line that is cut short counts as damage."""
    content = files.read(path, MOST_BYTES)
    if not content.endswith(b"\n"):
        raise CorruptionError(
            f"{path} is damaged: its last line is cut short. If a run was interrupted, run the study again."
        )
    return Ledger(path, _events(path, content.split(b"\n")[:-1]))


def reopen(path: Path) -> Ledger:
    """Read a ledger in order to continue it; first drop a last line that was cut short by a crash."""
    if not path.exists():
        return Ledger(path, [])
    content = files.read(path, MOST_BYTES)
    whole = content.rfind(b"\n") + 1
    reopened = Ledger(path, _events(path, content[:whole].split(b"\n")[:-1]))
    if whole < len(content):  # and only now, when it is known to be a ledger of ours
        files.cut(path, whole)
    return reopened


def begun(path: Path) -> bool:
    """Return True if a ledger has its first line; a line that is no event means damage or a foreign file."""
    if not path.exists():
        return False
    first, newline, _ = files.read(path, MOST_BYTES).partition(b"\n")
    return bool(newline and _events(path, [first]))


def torn(path: Path) -> bool:
    """Return True if a file is a ledger whose first line was cut short."""
    start, content = b'{"at":"', files.read(path, MOST_BYTES)
    return b"\n" not in content and content[: len(start)] == start[: len(content)]


def _events(path: Path, lines: Iterable[bytes]) -> list[Event]:
    events: list[Event] = []
    previous = ""
    for n, line in enumerate(lines):
        event = canonical.loads(line, f"{path}, line {n + 1},")
        kind = event.get("event") if isinstance(event, dict) else None
        if not isinstance(kind, str) or kind not in EVENTS:
            raise CorruptionError(f"{path} is damaged: line {n + 1} is not an event.")
        check(event, ALWAYS | EVENTS[kind], f"{path}, line {n + 1}")
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


# ---- what could have happened ----


def check_names(events: Ledger, protocol: Protocol) -> None:
    """Refuse events of stages and cells that were not declared."""
    cells = {stage.name: stage.cells for stage in protocol.stages}
    for event in events.events:
        if "stage" in event and event["stage"] not in cells:
            what = f"stage that the protocol does not have: {event['stage']!a}"
            raise CorruptionError(f"{events.path} names a {what}.")
        if "cell" in event and event["cell"] not in cells[event["stage"]]:
            what = f"cell that the protocol does not have: {event['stage']}/{event['cell']}"
            raise CorruptionError(f"{events.path} names a {what}.")


def check_order(events: Ledger, protocol: Protocol) -> None:
    """Refuse a cell that began before the stages ahead of it were settled, and a seal of other records."""
    check_names(events, protocol)
    settled: dict[str, bool] = {}  # sealed, or (False) not authorised
    begun: set[tuple[str, str]] = set()
    for event in events.events:
        kind = event["event"]
        if kind not in ("started", "retried", "finished", "recovered", "stage-sealed", "decided"):
            continue
        stage = protocol.stage(event["stage"])
        early = [s.name for s in protocol.before(stage.name) if s.name not in settled]
        where = f"{events.path}: "
        if "cell" in event:
            key = (stage.name, event["cell"])
            why = f"stage {early[0]} was not sealed" if early else ""
            why = why or ("it had not started" if kind == "finished" and key not in begun else "")
            if not why and conditional(stage, events) and not _authorised(stage, events, event):
                why = "its stage was not authorised"
            if why:
                raise TamperingError(f"{where}cell {'/'.join(key)} {kind} when {why}.")
            begun.add(key)
        elif early or stage.name in settled:
            raise TamperingError(f"{where}stage {stage.name} was {kind} out of turn.")
        elif kind == "decided":
            _check_decision(stage, event, events, settled)
            settled |= {} if event["authorised"] else {stage.name: False}
        else:
            missing = [cell for cell in stage.cells if (stage.name, cell) not in events.records]
            allowed = not conditional(stage, events) or _authorised(stage, events, event)
            if missing or not allowed:
                raise TamperingError(f"{where}stage {stage.name} was sealed out of turn.")
            if canonical.digest(events.stage_seal(stage.name, protocol)) != event["seal"]:
                path = events.path.parent / "seals" / f"{stage.name}.json"
                raise TamperingError(f"{path} is not the seal of the stage's records.")
            settled[stage.name] = True
    if events.closed is not None and set(settled) != {stage.name for stage in protocol.stages}:
        raise TamperingError(f"{events.path}: the study was closed before all its stages were sealed.")


def conditional(stage: SealedStage, events: Ledger) -> bool:
    """Return True if a stage needs a decision before it runs: it has gates, or reads what was not run."""
    return bool(stage.only_if) or bool(events.not_run & set(stage.reads))


def _authorised(stage: SealedStage, events: Ledger, event: Event) -> bool:
    decision = events.decided.get(stage.name)
    return decision is not None and decision["authorised"] and decision["n"] < event["n"]


def _check_decision(stage: SealedStage, event: Event, events: Ledger, settled: dict[str, bool]) -> None:
    """Refuse a decision that is not that of its gates; whether they passed is recomputed with the result."""
    unread = [name for name in stage.reads if settled.get(name) is False]
    follows = all(event["gates"].values()) and not unread
    if set(event["gates"]) != set(stage.only_if) or event["authorised"] != follows:
        raise TamperingError(f"{events.path}: the decision on stage {stage.name} is not that of its gates.")
