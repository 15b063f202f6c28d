"""A study's folder, read with every digest checked: the one way in for whoever wants to look at a study.

In order: the ledger (each line has its own digest and follows the one before), the seal that it names, the
protocol and study file that the seal names, every record that the ledger names, every file that a record
names, the seals of the stages, the order of events (no cell before the stages ahead of it were sealed), the
evidence, and the result. What is damaged is named and is an error (exit code 3). Nothing is recomputed and no
code of the study is run: that is `validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study import evidence, ledger, shape
from halfulp.study.declaration import Protocol
from halfulp.study.ledger import Ledger
from halfulp.study.order import check_names, check_order
from halfulp.study.outcomes import Outcomes
from halfulp.study.protocol import Json
from halfulp.study.store import Binding, Record, Store


@dataclass(frozen=True)
class Opened:
    """A study that was read; `result` is None as long as it is not closed."""

    store: Store
    events: Ledger
    sealed: dict[str, Json]
    protocol: Protocol
    by_cell: Mapping[tuple[str, str], Record]
    """Whole records, by stage and cell."""
    evidence: Mapping[str, evidence.Used]
    result: dict[str, Json] | None

    @property
    def records(self) -> Outcomes:
        """What estimands are given: stage -> cell -> what the cell gave back, of stages that are sealed."""
        cells = {
            stage.name: {cell: self.by_cell[stage.name, cell]["outcome"] for cell in stage.cells}
            for stage in self.protocol.stages
            if stage.name in self.events.stages
        }
        used = {name: one.outcomes() for name, one in self.evidence.items()}
        return Outcomes(cells, attached=self.attached, evidence=used, not_run=self.events.not_run)

    @property
    def files(self) -> set[str]:
        """The files that the folder must hold, by their paths from the top."""
        paths = [path for one in self.evidence.values() for path in one.paths]
        named = self.store.expected(self.sealed, self.events, self.by_cell)
        return named | {path.relative_to(self.store.folder).as_posix() for path in paths}

    @property
    def digest(self) -> str:
        """The ledger's last digest: of a closed study, the one that was printed when it was closed."""
        return self.events.head

    def attached(self, stage: str, cell: str, name: str) -> bytes:
        """A file that a cell attached."""
        if (stage, cell) not in self.by_cell:
            raise UsageError(f"{self.store.folder} has no record of cell {stage[:120]!a}/{cell[:120]!a}.")
        return self.store.read_attached(stage, cell, name, self.by_cell[stage, cell])


def open_study(folder: Path) -> Opened:
    """A study in any state."""
    store = Store(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not the folder of a study.")
    if not store.ledger_file.exists() and not store.seal_file.exists():
        raise CorruptionError(f"{store.ledger_file} is missing: {folder} holds no study, or a damaged one.")
    events = ledger.read(store.ledger_file)
    if not events.events:
        raise CorruptionError(f"{store.ledger_file} is empty.")
    sealed = store.read_seal(events.seal)
    protocol = store.read_protocol(sealed)
    _check_study_file(store, sealed)
    records = check_records(store, protocol, sealed, events)
    check_order(store, protocol, events)
    for stage, digest in events.stages.items():
        store.read_stage_seal(stage, digest)
    used = open_evidence(store, protocol, sealed)
    result = store.read_result(events) if events.closed is not None else None
    return Opened(store, events, sealed, protocol, records, used, result)


def open_evidence(store: Store, protocol: Protocol, sealed: Mapping[str, Json]) -> dict[str, evidence.Used]:
    """The evidence of a study, from its own folder."""
    return {
        one["name"]: evidence.opened(store.folder, one, sealed["evidence"][one["name"]])
        for one in protocol.evidence
    }


def open_closed(folder: Path) -> Opened:
    """A study that came to its end."""
    opened = open_study(folder)
    if opened.result is None:
        raise UsageError(f"{folder} is not closed: run the study to its end first.")
    return opened


def check_records(
    store: Store, protocol: Protocol, sealed: Mapping[str, Json], events: Ledger
) -> dict[tuple[str, str], Record]:
    """Every record that the ledger names, with the files attached to it; damage is named."""
    binding = Binding.of(protocol, sealed)
    codes = {binding.code, *(deviation["code"] for deviation in events.deviations)}
    check_names(store, protocol, events)
    records = {}
    for key, digest in events.records.items():
        record = store.read_record(*key, digest)
        path = store.record_file(*key)
        binding.check(record, *key, events.recovered.get(key, ""), codes, path)
        for name in record["attached"]:
            store.check_attached(*key, name, record)
        records[key] = record
    return records


def _check_study_file(store: Store, sealed: Mapping[str, Json]) -> None:
    stated = sealed["code"]["study"].get("sha256")
    if stated is None:
        return
    if canonical.sha256(files.read(store.study_file, shape.MOST_BYTES)) != stated:
        raise TamperingError(
            f"{store.study_file} is not the study file that was sealed: its SHA-256 differs."
        )
