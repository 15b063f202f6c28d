"""The folder of a study: what lies where, and what a record is.

::

    protocol.json                       what was declared
    study.py                            the study file, if it is the user's own
    seal.json                           digests of protocol, code, data, environment
    ledger.jsonl                        what happened
    records/STAGE/CELL.json             what a cell gave back, bound to protocol, code and data
    attached/STAGE/CELL/NAME            files that a cell kept; their digests are in its record
    seals/STAGE.json                    digests of all records of a stage
    evidence/NAME/                      what is used of another, closed study, as it lay there
    result.json                         estimands, gates, label
    work/                               lock, checkpoints, worker output: only while the study is open;
                                        while it is being sealed, the plan of that

Every JSON file is canonical. Records and stage seals depend on what was declared, run and given back, and
on nothing else (no time, no process, no host), so two runs can be compared byte by byte.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study import seal as seals
from halfulp.study import shape
from halfulp.study.declaration import FORMAT, Protocol
from halfulp.study.ledger import Ledger
from halfulp.study.protocol import Json, check_name

Record = dict[str, Json]
_MANY = re.compile(rf"work/({files.ASIDE}|logs/worker-[0-9]+-[0-9]+\.log)")
"""What the engine puts in ``work`` under names with numbers."""


def identity(content: bytes) -> dict[str, Json]:
    """How a file is named that belongs to a record or a plan."""
    return {"bytes": len(content), "sha256": canonical.sha256(content)}


class Store:
    """A study's folder. Reading checks; nothing is written but by the functions that say so."""

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
        """Where a cell's record lies."""
        return self.folder / "records" / stage / f"{cell}.json"

    def attached_file(self, stage: str, cell: str, name: str) -> Path:
        """Where a file lies that a cell attached."""
        return self.folder / "attached" / stage / cell / name

    def stage_seal_file(self, stage: str) -> Path:
        """Where a stage's seal lies."""
        return self.folder / "seals" / f"{stage}.json"

    def checkpoint_file(self, stage: str, cell: str) -> Path:
        """Where an unfinished cell keeps its state."""
        return self.work / "checkpoints" / stage / cell

    # ---- what was sealed ----

    def read_seal(self, expected: str) -> dict[str, Json]:
        """The seal, whose digest the ledger (or whoever asks) knows."""
        return self._read(self.seal_file, expected, "the seal that the ledger names", shape.SEAL)

    def read_protocol(self, sealed: Mapping[str, Json]) -> Protocol:
        """The protocol that a seal names; the two must be of one study."""
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
        """A JSON file with a known digest, of the shape that it must have."""
        content = files.read(path, shape.MOST_BYTES)
        if canonical.sha256(content) != digest:
            raise TamperingError(f"{path} is not {what}: its SHA-256 differs.")
        value = canonical.loads(content, path)
        if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
            raise CorruptionError(f"{path} has a format that this halfulp does not read.")
        shape.check(value, expected, str(path))
        found: dict[str, Json] = value
        return found

    # ---- records ----

    def read_record(self, stage: str, cell: str, digest: str) -> Record:
        """A record with a known digest."""
        return self._read(self.record_file(stage, cell), digest, "the record that was made", shape.RECORD)

    def read_attached(self, stage: str, cell: str, name: str, record: Record) -> bytes:
        """An attached file, whose digest its record holds."""
        path = self.attached_file(stage, cell, name)
        if name not in record["attached"]:
            raise UsageError(f"Cell {cell} of stage {stage} attached no file {name[:120]!a}.")
        stated = record["attached"][name]
        content = files.read(path, stated["bytes"])
        if canonical.sha256(content) != stated["sha256"]:
            raise TamperingError(f"{path} is not the file that was attached: its SHA-256 differs.")
        return content

    def check_attached(self, stage: str, cell: str, name: str, record: Record) -> None:
        """Hold an attached file against its record, size first; however large, it is read piece by piece."""
        path, stated = self.attached_file(stage, cell, name), record["attached"][name]
        if files.sha256(path, stated["bytes"]) != stated["sha256"]:
            raise TamperingError(f"{path} is not the file that was attached: its SHA-256 differs.")

    def read_stage_seal(self, stage: str, digest: str) -> dict[str, Json]:
        """A stage's seal with a known digest."""
        what = "the seal of the stage that was made"
        return self._read(self.stage_seal_file(stage), digest, what, shape.STAGE_SEAL)

    def read_result(self, ledger: Ledger) -> dict[str, Json]:
        """The result of a closed study, whose digest the ledger holds."""
        assert ledger.closed is not None
        what = "the result that was recorded"
        result = self._read(self.result_file, ledger.closed["result"], what, shape.RESULT)
        if ledger.closed["label"] != result["label"]:
            raise TamperingError(
                f"{self.ledger_file} was closed with another label than {self.result_file} states."
            )
        return result

    def stage_seal(self, stage: str, protocol: Protocol, ledger: Ledger) -> dict[str, Json]:
        """What a stage's seal says, once every cell of it has a record."""
        before = [earlier.name for earlier in protocol.before(stage) if earlier.name in ledger.stages]
        return {
            "format": FORMAT,
            "study": protocol.study,
            "stage": stage,
            "seal": ledger.seal,
            "before": ledger.stages[before[-1]] if before else "",
            "records": {cell: ledger.records[stage, cell] for cell in protocol.stage(stage).cells},
        }

    # ---- the inventory ----

    def present(self) -> set[str]:
        """Every file, link and empty folder, by its path from the top; ``work`` is left out."""
        return set(_present(self.folder, self.folder))

    def strange_work(self, protocol: Protocol | None = None) -> list[str]:
        """What lies in ``work`` and is not of the engine's making, by its path from the top.

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
        """Whether a study's cells, stages or end make a file or folder of this path, named or not."""
        folders, made = {"records/", "attached/", "seals/"}, {self.result_file.name}
        for stage in protocol.stages:
            folders |= {f"records/{stage.name}/", f"attached/{stage.name}/"}
            folders |= {f"attached/{stage.name}/{cell}/" for cell in stage.cells}
            made |= {f"records/{stage.name}/{cell}.json" for cell in stage.cells}
            made.add(f"seals/{stage.name}.json")
        attached = name.count("/") == 3 and name[: name.rfind("/") + 1] in folders
        return name in folders | made or attached

    def expected(
        self, sealed: Mapping[str, Json], ledger: Ledger, records: Mapping[tuple[str, str], Record]
    ) -> set[str]:
        """The files that a study has, given its ledger and records."""
        paths = [self.protocol_file, self.seal_file, self.ledger_file]
        paths += [self.study_file] if "sha256" in sealed["code"]["study"] else []
        paths += [self.stage_seal_file(stage) for stage in ledger.stages]
        paths += [self.record_file(*key) for key in ledger.records]
        paths += [
            self.attached_file(*key, name) for key, record in records.items() for name in record["attached"]
        ]
        paths += [self.result_file] if ledger.closed else []
        return {path.relative_to(self.folder).as_posix() for path in paths}


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
    """What a study's records are bound to: digests of its protocol, the code that ran, its data."""

    protocol: Protocol
    code: str
    data: str

    @classmethod
    def of(cls, protocol: Protocol, sealed: Mapping[str, Json], code: str = "") -> Binding:
        """That of a seal; `code` is given where a recorded deviation lets other code run."""
        data = sealed["data"]
        if "evidence" in sealed:
            data = {"data": data, "evidence": sealed["evidence"]}
        return cls(protocol, code or seals.code_digest(sealed), canonical.digest(data))

    def record(
        self,
        stage: str,
        cell: str,
        outcome: Mapping[str, Json],
        attached: Mapping[str, bytes],
        reason: str = "",
    ) -> Record:
        """The record of a cell; one with a reason is a recovered one, and says so for ever."""
        for name in attached:
            check_name("attached file", name)
        return {
            "format": FORMAT,
            "study": self.protocol.study,
            "scale": self.protocol.scale,
            "stage": stage,
            "cell": cell,
            "config": self.protocol.stage(stage).cells[cell],
            "protocol": self.protocol.digest,
            "code": self.code,
            "data": self.data,
            "outcome": outcome,
            "attached": {name: identity(content) for name, content in attached.items()},
            "origin": "recovered" if reason else "run",
            "reason": reason,
            "scientific_result": not reason and self.protocol.scale != "smoke",
        }

    def check(
        self, record: Record, stage: str, cell: str, reason: str, codes: Container[str], path: Path
    ) -> None:
        """Refuse a record that is not one of this cell under this seal."""
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
