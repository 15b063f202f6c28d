"""Read and write the folder of a study: the places of its files, and the form of a record.

::

    protocol.json                       what was declared
    study.py                            the study file, if it is the user's own
    seal.json                           digests of protocol, code, data, environment
    ledger.jsonl                        what happened
    records/STAGE/CELL.json             what a cell returned, bound to protocol, code and data
    attached/STAGE/CELL/NAME            files that a cell kept; their digests are in its record. One may be
                                        compressed after the end, as NAME.xz: what counts is its content
    seals/STAGE.json                    digests of all records of a stage
    evidence/NAME/                      what is used of another, closed study, as it lay there
    result.json                         estimands, gates, label
    work/                               lock, checkpoints, worker output: only while the study is open;
                                        while it is being sealed, the plan of that

Every JSON file is canonical. Records and stage seals depend only on what was declared, run and returned, and
not on time, process or host, so two runs can be compared byte by byte.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study.declaration import FORMAT, RECORD, RESULT, SEAL, STAGE_SEAL, Protocol, check, read_known
from halfulp.study.ledger import Ledger
from halfulp.study.ledger import read as read_ledger
from halfulp.study.protocol import Json, check_name
from halfulp.text import count, plain

Record = dict[str, Json]
CRATE, STATEMENT, ENVELOPE = "ro-crate-metadata.json", "statement.json", "statement.dsse.json"
EXPORTED = (CRATE, STATEMENT, ENVELOPE)
"""The files that an archive of a study holds beside the study's own."""
PACKED = ".xz"
_MANY = re.compile(rf"work/({files.ASIDE}|logs/worker-[0-9]+-[0-9]+\.log)")
"""The files that the engine puts in ``work`` under names with numbers."""


def identity(content: bytes) -> dict[str, Json]:
    """Return size and digest of a file, as a record or a plan names it."""
    return {"bytes": len(content), "sha256": canonical.sha256(content)}


class Store:
    """A study's folder. Reading a file checks it; only functions that say so write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.protocol_file = folder / "protocol.json"
        self.study_file = folder / "study.py"
        self.seal_file = folder / "seal.json"
        self.ledger_file = folder / "ledger.jsonl"
        self.result_file = folder / "result.json"
        self.work = folder / "work"
        self.lock_file = self.work / "lock"
        self.stop_file = self.work / "stop"  # while it is there, cells stop when they next save
        self.plan_file = self.work / "sealing.json"  # what a sealing is going to make

    @property
    def holder(self) -> str | None:
        """The process that holds the study's lock now, if one does."""
        return files.holder(self.lock_file) if self.lock_file.is_file() else None

    def record_file(self, stage: str, cell: str) -> Path:
        """Return the path of a cell's record."""
        return self.folder / "records" / stage / f"{cell}.json"

    def attached_file(self, stage: str, cell: str, name: str) -> Path:
        """Return the path of a file that a cell attached: of the compressed one, if only that is there."""
        path = self.folder / "attached" / stage / cell / name
        packed = path.with_name(name + PACKED)
        return packed if packed.is_file() and not path.exists() else path

    def stage_seal_file(self, stage: str) -> Path:
        """Return the path of a stage's seal."""
        return self.folder / "seals" / f"{stage}.json"

    def checkpoint_file(self, stage: str, cell: str) -> Path:
        """Return the path of an unfinished cell's state."""
        return self.work / "checkpoints" / stage / cell

    # ---- what was sealed ----

    def read_seal(self, expected: str) -> dict[str, Json]:
        """Read the seal, which must have the digest that the ledger or the caller knows."""
        return self._read(self.seal_file, expected, "the seal that the ledger names", SEAL)

    def read_protocol(self, sealed: Mapping[str, Json]) -> Protocol:
        """Read the protocol that a seal names; the two must be of one study."""
        path = self.protocol_file
        content = self._read(path, sealed["protocol"], "the protocol that was sealed", dict)
        protocol = Protocol(content, str(path))
        same = (sealed["study"], sealed["scale"]) == (protocol.study, protocol.scale)
        evidence = {one["name"] for one in protocol.evidence}
        same = same and set(sealed["data"]) == set(protocol.data)
        if not same or set(sealed.get("evidence", {})) != evidence:
            raise TamperingError(f"{self.seal_file} is not the seal of the study in {path}.")
        return protocol

    def _read(self, path: Path, digest: str, what: str, expected: Json) -> dict[str, Json]:
        """Read a JSON file with a known digest, of the shape that it must have."""
        value = canonical.loads(read_known(path, digest, what), path)
        if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
            raise CorruptionError(f"{path} has a format that this halfulp does not read.")
        check(value, expected, str(path))
        content: dict[str, Json] = value
        return content

    # ---- records ----

    def read_record(self, stage: str, cell: str, digest: str) -> Record:
        """Read a record with a known digest."""
        return self._read(self.record_file(stage, cell), digest, "the record that was made", RECORD)

    def read_attached(self, stage: str, cell: str, name: str, record: Record) -> bytes:
        """Read an attached file, whose digest its record holds."""
        if name not in record["attached"]:
            raise UsageError(f"Cell {cell} of stage {stage} attached no file {name[:120]!a}.")
        path, stated = self.attached_file(stage, cell, name), record["attached"][name]
        if path.name == name:
            return read_known(path, stated["sha256"], "the file that was attached", stated["bytes"])
        content = _unpacked(path, stated["bytes"])
        if canonical.sha256(content) != stated["sha256"]:
            raise TamperingError(f"{path} does not hold the file that was attached: its SHA-256 differs.")
        return content

    def check_attached(self, stage: str, cell: str, name: str, record: Record) -> None:
        """Check an attached file against its record, size first; files of any size are read in chunks."""
        path, stated = self.attached_file(stage, cell, name), record["attached"][name]
        if path.name != name:
            self.read_attached(stage, cell, name, record)
        elif files.sha256(path, stated["bytes"]) != stated["sha256"]:
            raise TamperingError(f"{path} is not the file that was attached: its SHA-256 differs.")

    def read_stage_seal(self, stage: str, digest: str) -> dict[str, Json]:
        """Read a stage's seal with a known digest."""
        return self._read(
            self.stage_seal_file(stage), digest, "the seal of the stage that was made", STAGE_SEAL
        )

    def read_result(self, ledger: Ledger) -> dict[str, Json]:
        """Read the result of a closed study, whose digest the ledger holds."""
        assert ledger.closed is not None
        what = "the result that was recorded"
        result = self._read(self.result_file, ledger.closed["result"], what, RESULT)
        if ledger.closed["label"] != result["label"]:
            raise TamperingError(
                f"{self.ledger_file} was closed with another label than {self.result_file} states."
            )
        return result

    # ---- the inventory ----

    def present(self) -> set[str]:
        """List every file, link and empty folder by its path from the top, without ``work``."""
        return set(_present(self.folder, self.folder))

    def strange_work(self, protocol: Protocol | None = None) -> list[str]:
        """List what lies in ``work`` and is not of the engine's making, by its path from the top.

        Before there is a protocol that is all but the lock, the plan and what is not yet in place.
        """
        known = {"work/", "work/lock", "work/sealing.json"}
        if protocol is not None:
            known |= {"work/stop", "work/logs/", "work/checkpoints/"}
            for stage in protocol.stages:
                known |= {f"work/checkpoints/{stage.name}/{cell}" for cell in ("", *stage.cells)}
        there = _present(self.work, self.folder) if self.work.is_dir() else ()
        return [name for name in there if name not in known and not _MANY.fullmatch(name)]

    def is_unfinished(self, name: str, protocol: Protocol) -> bool:
        """Return True if a study's cells, stages or end make a file or folder of this path, named or not."""
        folders, files_of_cells = {"records/", "attached/", "seals/"}, {self.result_file.name}
        for stage in protocol.stages:
            folders |= {f"records/{stage.name}/", f"attached/{stage.name}/"}
            folders |= {f"attached/{stage.name}/{cell}/" for cell in stage.cells}
            files_of_cells |= {f"records/{stage.name}/{cell}.json" for cell in stage.cells}
            files_of_cells.add(f"seals/{stage.name}.json")
        attached = name.count("/") == 3 and name[: name.rfind("/") + 1] in folders
        return name in folders | files_of_cells or attached

    def expected(
        self, sealed: Mapping[str, Json], ledger: Ledger, records: Mapping[tuple[str, str], Record]
    ) -> list[Path]:
        """List the files that a study has, given its ledger and records."""
        paths = [self.protocol_file, self.seal_file, self.ledger_file]
        paths += [self.study_file] if "sha256" in sealed["code"]["study"] else []
        paths += [self.stage_seal_file(stage) for stage in ledger.stages]
        paths += [self.record_file(*key) for key in ledger.records]
        paths += [
            self.attached_file(*key, name) for key, record in records.items() for name in record["attached"]
        ]
        return paths + ([self.result_file] if ledger.closed else [])


def pack(folder: Path) -> int:
    """Compress the attached files of a closed study where they lie, and return how many were compressed."""
    paths = [p for p in sorted((folder / "attached").rglob("*")) if p.is_file() and p.suffix != PACKED]
    for path in paths:
        files.put(path.with_name(path.name + PACKED), lzma.compress(files.read(path), preset=9))
        path.unlink()
    return len(paths)


def _unpacked(path: Path, size: int) -> bytes:
    """Decompress a file of at most some bytes."""
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    try:
        content = reader.decompress(files.read(path, size + 1024), size + 1)
    except lzma.LZMAError as error:
        raise CorruptionError(f"{path} is damaged: it is not a whole xz file ({error}).") from error
    if not reader.eof or reader.unused_data or len(content) != size:
        raise TamperingError(
            f"{path} does not hold the file that was attached: expected {size:,} bytes in one xz stream."
        )
    return content


def _present(folder: Path, top: Path) -> Iterator[str]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise files.refused_reading(folder, error) from error
    if not entries and folder != top:
        yield folder.relative_to(top).as_posix() + "/"
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            if not (folder == top and entry.name == "work"):
                yield from _present(entry, top)
        else:
            yield entry.relative_to(top).as_posix()


@dataclass(frozen=True)
class Binding:
    """The digests that a study's records are bound to: of its protocol, the code that ran, and its data."""

    protocol: Protocol
    code: str
    data: str

    @classmethod
    def of(cls, protocol: Protocol, sealed: Mapping[str, Json], code: str = "") -> Binding:
        """Build the binding from a seal; `code` is given if a recorded deviation lets other code run."""
        data = sealed["data"]
        if "evidence" in sealed:
            data = {"data": data, "evidence": sealed["evidence"]}
        return cls(protocol, code or canonical.digest(sealed["code"]), canonical.digest(data))

    def record(
        self,
        stage: str,
        cell: str,
        outcome: Mapping[str, Json],
        attached: Mapping[str, bytes],
        reason: str = "",
    ) -> Record:
        """Make the record of a cell; a record with a reason is marked as recovered, permanently."""
        for name in attached:
            check_name("attached file", name)
        protocol = self.protocol
        return {
            "format": FORMAT, "study": protocol.study, "scale": protocol.scale, "stage": stage, "cell": cell,
            "config": protocol.stage(stage).cells[cell], "protocol": protocol.digest, "code": self.code,
            "data": self.data, "outcome": outcome,
            "attached": {name: identity(content) for name, content in attached.items()},
            "origin": "recovered" if reason else "run", "reason": reason,
            "scientific_result": not reason and protocol.scale != "smoke",
        }  # fmt: skip

    def check(
        self, record: Record, stage: str, cell: str, reason: str, codes: Container[str], path: Path
    ) -> None:
        """Raise TamperingError if a record is not one of this cell under this seal."""
        expected = self.record(stage, cell, {}, {}, reason) | {"code": record.get("code")}
        free = {"outcome", "attached"}
        if set(record) != set(expected):
            wrong = sorted(set(record) ^ set(expected))
        else:
            wrong = sorted(key for key in set(expected) - free if record[key] != expected[key])
        if wrong or record["code"] not in codes:
            raise TamperingError(
                f"{path} is not the record of this cell under this seal: {', '.join(wrong or ['code'])}."
            )


# ---- how far a study is ----


@dataclass(frozen=True)
class StageStatus:
    """The status of one stage."""

    name: str
    kind: str
    done: int
    cells: int
    failed: int
    """The number of attempts that failed."""
    sealed: bool
    authorised: bool


@dataclass(frozen=True)
class Status:
    """The status of a study between its seal and its end."""

    study: str
    scale: str
    seal: str
    stages: list[StageStatus]
    notes: list[dict[str, str]]
    """Failures, recoveries and deviations, in order: ``event``, ``where`` and ``why``."""
    running: str | None
    """The process that is running it."""
    closed: str | None
    """The digest of its end."""
    label: str | None

    @classmethod
    def of(cls, store: Store) -> Status:
        """Read the status of a study's folder.

        Args:
            store: The folder of the study, which must be sealed.
        """
        events = read_ledger(store.ledger_file)
        protocol = store.read_protocol(store.read_seal(events.seal))
        stages = [
            StageStatus(
                stage.name, stage.kind,
                done=sum((stage.name, cell) in events.records for cell in stage.cells),
                cells=len(stage.cells),
                failed=sum(times for key, times in events.failures.items() if key[0] == stage.name),
                sealed=stage.name in events.stages,
                authorised=stage.name not in events.not_run,
            )
            for stage in protocol.stages
        ]  # fmt: skip
        notes = [
            {
                "event": event["event"],
                "where": f"{event['stage']}/{event['cell']}" if "cell" in event else "",
                "why": event.get("error") or event.get("reason") or "",
            }
            for event in events.events
            if event["event"] in ("failed", "recovered", "deviation")
        ]
        holder = store.holder
        return cls(
            protocol.study, protocol.scale, events.seal, stages, notes, None if not holder else str(holder),
            events.head if events.closed else None, events.closed["label"] if events.closed else None,
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Yield the status in words, line by line."""
        yield f"{self.study} ({self.scale}), seal sha256 {self.seal}"
        for stage in self.stages:
            failures = f", {count(stage.failed, 'failed attempt')}" if stage.failed else ""
            sealed = ", sealed" if stage.sealed else ""
            sealed = sealed if stage.authorised else ", not authorised"
            yield f"  {stage.name} ({stage.kind}): {stage.done} of {stage.cells} cells{failures}{sealed}"
        for note in self.notes:
            yield f"  {note['event']}{' ' if note['where'] else ''}{note['where']}: {plain(note['why'])}"
        if self.running is not None:
            yield f"process {self.running} is running it"
        if self.closed is not None:
            yield f"closed sha256 {self.closed}\nlabel {plain(self.label or '')}"
