"""Evidence: records of another study, which is closed, for a study that builds on it.

A study declares which study its evidence is of, and what of it it uses. When it is sealed, the user points
at the closed study's folder. That one is validated, its closing digest is sealed, and what is used of it is
copied to ``evidence/NAME`` in the new study's folder, together with the ledger whose last line that digest
is. So whoever has the new study can check, without the old one, that each record is the one that the old
study closed with: ledger, seal, protocol, result and every record and file that is used are read against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from halfulp import files
from halfulp.errors import TamperingError, UsageError
from halfulp.study import ledger
from halfulp.study.order import check_order
from halfulp.study.outcomes import Outcomes
from halfulp.study.protocol import Json
from halfulp.study.store import Binding, Record, Store

Declared = Mapping[str, Json]  # an entry of the protocol's evidence
Identity = dict[str, Json]  # what the seal says of it


def place(folder: Path, name: str) -> Path:
    """Where the evidence of a study lies."""
    return folder / "evidence" / name


class Used:
    """What is used of a closed study's folder, every digest checked."""

    def __init__(self, folder: Path, declared: Declared) -> None:
        store = Store(folder)
        events = ledger.read(store.ledger_file)
        self.name, self.store, self.digest = declared["name"], store, events.head
        if events.closed is None:
            raise UsageError(f"{folder} is not closed: evidence is of a study that is over.")
        sealed = store.read_seal(events.seal)
        protocol = store.read_protocol(sealed)
        asked, found = (declared["study"], declared["scale"]), (protocol.study, protocol.scale)
        if asked != found:
            raise UsageError(
                f"Evidence {self.name} must be of study {asked[0]} ({asked[1]}); {folder} is of "
                f"{found[0]} ({found[1]})."
            )
        check_order(store, protocol, events)
        self.result = store.read_result(events)
        self.paths = [store.ledger_file, store.seal_file, store.protocol_file, store.result_file]
        self.records: dict[tuple[str, str], Record] = {}
        binding, codes = Binding.of(protocol, sealed), {d["code"] for d in events.deviations}
        cells = [*declared["records"], *(pattern.rpartition("/")[0] for pattern in declared["attached"])]
        for key, digest in events.records.items():
            if _matches("/".join(key), cells):
                record = store.read_record(*key, digest)
                reason = events.recovered.get(key, "")
                binding.check(record, *key, reason, codes | {binding.code}, store.record_file(*key))
                self.records[key] = record
                self.paths.append(store.record_file(*key))
        self.files = {
            (*key, name)
            for key, record in self.records.items()
            for name in record["attached"]
            if _matches("/".join((*key, name)), declared["attached"])
        }
        self.paths += [store.attached_file(*file) for file in sorted(self.files)]
        self.not_run = {stage for stage, event in events.decided.items() if not event["authorised"]}
        self._check_found(declared)
        self.estimands = {name: self.result["estimands"][name] for name in declared["estimands"]}

    def _check_found(self, declared: Declared) -> None:
        """Everything that is declared to be used must be there."""
        records, attached = ["/".join(key) for key in self.records], ["/".join(file) for file in self.files]
        missing = [p for p in declared["records"] if not any(fnmatchcase(r, p) for r in records)]
        missing += [p for p in declared["attached"] if not any(fnmatchcase(a, p) for a in attached)]
        missing += [name for name in declared["estimands"] if name not in self.result["estimands"]]
        if missing:
            raise UsageError(
                f"Evidence {self.name} uses {missing[0]!a}, which {self.store.folder} does not have."
            )

    @property
    def identity(self) -> Identity:
        """How the seal names it."""
        return {
            "study": self.result["study"],
            "scale": self.result["scale"],
            "closed": self.digest,
            "label": self.result["label"],
            "promoted": not self.result["not_promoted"],
        }

    def outcomes(self) -> Outcomes:
        """What cells and estimands are given."""
        cells: dict[str, dict[str, Mapping[str, Json]]] = {}
        for (stage, cell), record in self.records.items():
            cells.setdefault(stage, {})[cell] = record["outcome"]
        return Outcomes(
            cells, attached=self.attached, estimands=self.estimands, label=self.result["label"],
            not_run=self.not_run,
        )  # fmt: skip

    def attached(self, stage: str, cell: str, name: str) -> bytes:
        """A file that is used."""
        if (stage, cell, name) not in self.files:
            raise UsageError(
                f"Evidence {self.name} does not declare that it uses {stage}/{cell}/{name[:120]}."
            )
        return self.store.read_attached(stage, cell, name, self.records[stage, cell])


def _matches(text: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def gather(
    declared: Sequence[Declared], given: Mapping[str, Path]
) -> tuple[dict[str, Identity], dict[str, bytes]]:
    """What the seal says of evidence, and the files to copy; every study that is pointed at is validated."""
    from halfulp.study.validate import validate

    unknown = sorted(set(given) - {one["name"] for one in declared})
    if unknown:
        raise UsageError(f"The study declares no evidence {unknown[0][:120]!a}.")
    identities, copies = {}, {}
    for one in declared:
        name = one["name"]
        if name not in given:
            raise UsageError(
                f"The study needs evidence {name}, a closed study {one['study']} ({one['scale']}): "
                f"--evidence {name}=FOLDER."
            )
        page = validate(given[name])
        if page.exit_code:
            raise UsageError(f"{given[name]} is no evidence, because it is not valid: {page.problems[0]}")
        used = Used(given[name], one)
        identities[name] = used.identity
        for path in used.paths:
            copies[f"{name}/{path.relative_to(used.store.folder).as_posix()}"] = files.read(path)
    return identities, copies


def opened(folder: Path, declared: Declared, identity: Identity) -> Used:
    """The evidence that lies in a study's folder, held against what was sealed."""
    where = place(folder, declared["name"])
    try:
        used = Used(where, declared)
    except UsageError as error:
        raise TamperingError(f"{where} is not the evidence that was sealed: {error}") from None
    if used.identity != identity:
        raise TamperingError(
            f"{where} is not the evidence that was sealed: it closed with {used.digest}, not "
            f"{identity['closed']}."
        )
    for stage, cell, name in sorted(used.files):
        used.store.check_attached(stage, cell, name, used.records[stage, cell])
    return used
