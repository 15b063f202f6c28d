"""Open a study with every digest checked: to look at it, to use it as evidence, to analyse it afterwards.

A study is read in this order: the ledger (each line has its own digest and follows the one before), the seal
that it names, the protocol and study file that the seal names, every record that the ledger names, every file
that a record names, the seals of the stages, the order of events (no cell before the stages ahead of it were
sealed), the evidence, and the result. What is damaged is named and is an error (exit code 3). Nothing is
recomputed and no code of the study is run: that is `validate`.

*Evidence* is what a study uses of another, closed one. When it is sealed, the user points at that one's
folder. It is validated, its closing digest is sealed, and what is used of it is copied to ``evidence/NAME``,
together with the ledger whose last line that digest is. So whoever has the new study can check, without the
old one, that each record is the one that the old study closed with.

A *retrospective* analysis was thought of after the outcomes. It has its own declaration, folder and label,
reads the records of a closed study and can change nothing there. Its label begins with ``retrospective:``,
and its result names the registered study, its digests and its label, so the two cannot be mistaken for one
another. It is not sealed, because there is nothing left to forecast; it can be recomputed, byte by byte, from
the study and the analysis file beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study import gates, ledger, loading
from halfulp.study.declaration import (
    FORMAT,
    MOST_BYTES,
    RETROSPECTIVE,
    Protocol,
    declared_args,
    declared_rule,
    read_known,
)
from halfulp.study.declaration import check as check_shape
from halfulp.study.ledger import Ledger
from halfulp.study.protocol import Estimand, Gate, Json, Outcomes, Rule, check_decisions, check_name
from halfulp.study.store import Binding, Record, Store

Key = tuple[str, str]  # stage and cell
Declared = Mapping[str, Json]  # an entry of the protocol's evidence
Identity = dict[str, Json]  # what the seal says of it
DECLARATION, ANALYSIS, RESULT = "retrospective.json", "analysis.py", "result.json"


@dataclass(frozen=True)
class Opened:
    """A study as it was read from its folder; `result` is None until the study is closed."""

    store: Store
    events: Ledger
    sealed: dict[str, Json]
    protocol: Protocol
    by_cell: Mapping[Key, Record]
    """Whole records, by stage and cell."""
    evidence: Mapping[str, Used]
    result: dict[str, Json] | None

    @property
    def records(self) -> Outcomes:
        """The records as estimands are given them: stage -> cell -> outcome, of stages that are sealed."""
        cells = {
            stage.name: {cell: self.by_cell[stage.name, cell]["outcome"] for cell in stage.cells}
            for stage in self.protocol.stages
            if stage.name in self.events.stages
        }
        used = {name: one.outcomes() for name, one in self.evidence.items()}
        return Outcomes(cells, attached=self.attached, evidence=used, not_run=self.events.not_run)

    def extra_files(self) -> set[str]:
        """List the files that the study does not name, by their paths from the top; none may be missing."""
        folder, present = self.store.folder, self.store.present()
        paths = self.store.expected(self.sealed, self.events, self.by_cell)
        paths += [path for one in self.evidence.values() for path in one.paths]
        expected = {path.relative_to(folder).as_posix() for path in paths}
        if missing := sorted(expected - present):
            raise CorruptionError(f"{folder / missing[0]} is missing, but the ledger names it.")
        return present - expected

    @property
    def digest(self) -> str:
        """The ledger's last digest; for a closed study, the one that was printed when it was closed."""
        return self.events.head

    def attached(self, stage: str, cell: str, name: str) -> bytes:
        """Return a file that a cell attached."""
        if (stage, cell) not in self.by_cell:
            raise UsageError(f"{self.store.folder} has no record of cell {stage[:120]!a}/{cell[:120]!a}.")
        return self.store.read_attached(stage, cell, name, self.by_cell[stage, cell])


def open_study(folder: Path) -> Opened:
    """Open a study in any state and check every digest.

    Args:
        folder: The folder of the study.

    Raises:
        UsageError: If there is no such folder.
        CorruptionError: If a file is missing or damaged.
        TamperingError: If a file is not the one that the ledger or the seal names.
    """
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
    if "sha256" in sealed["code"]["study"]:
        read_known(store.study_file, sealed["code"]["study"]["sha256"], "the study file that was sealed")
    ledger.check_names(events, protocol)
    records = _records(store, sealed, protocol, events, ["*"])
    for key, record in records.items():
        for name in record["attached"]:
            store.check_attached(*key, name, record)
    ledger.check_order(events, protocol)
    for stage, digest in events.stages.items():
        store.read_stage_seal(stage, digest)
    used = {
        one["name"]: open_evidence(folder, one, sealed["evidence"][one["name"]]) for one in protocol.evidence
    }
    result = store.read_result(events) if events.closed is not None else None
    return Opened(store, events, sealed, protocol, records, used, result)


def open_closed(folder: Path) -> Opened:
    """Open a closed study and check every digest.

    Args:
        folder: The folder of the study.

    Returns:
        The study; ``records``, ``result`` and ``attached(...)`` give its content.

    Raises:
        UsageError: If there is no such folder, or the study is not closed.
        CorruptionError: If a file is missing or damaged.
        TamperingError: If a file is not the one that the ledger or the seal names.
    """
    opened = open_study(folder)
    if opened.result is None:
        raise UsageError(f"{folder} is not closed: run the study to its end first.")
    return opened


def _records(
    store: Store, sealed: Mapping[str, Json], protocol: Protocol, events: Ledger, patterns: list[str]
) -> dict[Key, Record]:
    """Read the records that the ledger names and a pattern fits; damage is named."""
    binding = Binding.of(protocol, sealed)
    codes = {binding.code, *(deviation["code"] for deviation in events.deviations)}
    records = {}
    for key, digest in events.records.items():
        if _matches("/".join(key), patterns):
            records[key] = store.read_record(*key, digest)
            reason, path = events.recovered.get(key, ""), store.record_file(*key)
            binding.check(records[key], *key, reason, codes, path)
    return records


def _matches(text: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


# ---- evidence ----


class Used:
    """The part of a closed study that another study uses, with every digest checked."""

    def __init__(self, folder: Path, declared: Declared) -> None:
        store = Store(folder)
        events = ledger.read(store.ledger_file)
        self.name, self.store, self.digest = declared["name"], store, events.head
        if events.closed is None:
            raise UsageError(f"{folder} is not closed: evidence is of a study that is over.")
        sealed = store.read_seal(events.seal)
        protocol = store.read_protocol(sealed)
        expected, actual = (declared["study"], declared["scale"]), (protocol.study, protocol.scale)
        if expected != actual:
            raise UsageError(
                f"Evidence {self.name} must be of study {expected[0]} ({expected[1]}); {folder} is of "
                f"{actual[0]} ({actual[1]})."
            )
        ledger.check_order(events, protocol)
        self.result = store.read_result(events)
        cells = [*declared["records"], *(pattern.rpartition("/")[0] for pattern in declared["attached"])]
        self.records = _records(store, sealed, protocol, events, cells)
        self.files = {
            (*key, name)
            for key, record in self.records.items()
            for name in record["attached"]
            if _matches("/".join((*key, name)), declared["attached"])
        }
        self.paths = [store.ledger_file, store.seal_file, store.protocol_file, store.result_file]
        self.paths += [store.record_file(*key) for key in self.records]
        self.paths += [store.attached_file(*file) for file in sorted(self.files)]
        self.not_run = events.not_run
        self._check_found(declared)
        self.estimands = {name: self.result["estimands"][name] for name in declared["estimands"]}

    def _check_found(self, declared: Declared) -> None:
        """Refuse a study that lacks something which is declared to be used."""
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
        """The entry of the seal."""
        return {
            "study": self.result["study"], "scale": self.result["scale"], "closed": self.digest,
            "label": self.result["label"], "promoted": not self.result["not_promoted"],
        }  # fmt: skip

    def outcomes(self) -> Outcomes:
        """Return what cells and estimands are given."""
        cells: dict[str, dict[str, Mapping[str, Json]]] = {}
        for (stage, cell), record in self.records.items():
            cells.setdefault(stage, {})[cell] = record["outcome"]
        return Outcomes(
            cells, attached=self.attached, estimands=self.estimands, label=self.result["label"],
            not_run=self.not_run,
        )  # fmt: skip

    def attached(self, stage: str, cell: str, name: str) -> bytes:
        """Return a file that is used."""
        if (stage, cell, name) not in self.files:
            raise UsageError(
                f"Evidence {self.name} does not declare that it uses {stage}/{cell}/{name[:120]}."
            )
        return self.store.read_attached(stage, cell, name, self.records[stage, cell])


def open_evidence(folder: Path, declared: Declared, identity: Identity) -> Used:
    """Open the evidence in a study's folder and check it against the seal."""
    where = folder / "evidence" / declared["name"]
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


# ---- analyses after the fact ----


@dataclass(frozen=True, kw_only=True)
class Retrospective:
    """Estimands, gates and rules over the records of a closed study.

    Args:
        name: The name of the analysis.
        study: The name of the study that it analyses.
        why: The reason for the analysis, which is kept with it.
        estimands: The numbers to compute from the study's records.
        gates: Conditions on these estimands.
        rules: The rules that turn the gates into a label; the first that fits decides.

    Raises:
        UsageError: If there is no reason, or gates and rules name what does not exist.
    """

    name: str
    study: str
    why: str
    estimands: tuple[Estimand, ...]
    gates: tuple[Gate, ...]
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        check_name("retrospective", self.name)
        if not self.why.strip():
            raise UsageError(f"Retrospective {self.name} must say why it is made.")
        estimands = [estimand.name for estimand in self.estimands]
        check_decisions(f"Retrospective {self.name}", estimands, self.gates, self.rules)


def retrospect(out: Path, content: bytes, name: str, folder: Path, attribute: str = "") -> dict[str, Json]:
    """Analyse a closed study with the `Retrospective` of a file.

    Args:
        out: The folder of the closed study, which is not changed.
        content: The content of the Python file that holds the `Retrospective`.
        name: The name of that file, for error messages.
        folder: The folder for the analysis; it must be empty or not exist, and lie outside of `out`.
        attribute: The name of the `Retrospective` in the file; by default ``retrospective``.

    Returns:
        The result of the analysis.

    Raises:
        UsageError: If a folder cannot be used, or the analysis is of another study.
    """
    if folder.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"{folder} is inside the registered study, which an analysis must not touch.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already. Choose another folder for the analysis.")
    contents = analyse(out, content, name, attribute)
    for file, bytes_ in contents.items():
        files.put(folder / file, bytes_, folder / "work")
    files.remove_tree(folder / "work")
    value: dict[str, Json] = canonical.loads(contents[RESULT], folder / RESULT)
    return value


def analyse(out: Path, content: bytes, name: str, attribute: str = "") -> dict[str, bytes]:
    """Make the files of an analysis; the last of them is the result."""
    module = loading.module(content, name)
    attribute, analysis = loading.find(
        module, name, attribute, Retrospective, ("retrospective", "RETROSPECTIVE")
    )
    opened = open_closed(out)
    assert opened.result is not None
    protocol = opened.protocol
    if analysis.study != protocol.study:
        raise UsageError(f"{name} analyses study {analysis.study}, but {out} is study {protocol.study}.")
    values = gates.evaluate(analysis.estimands, opened.records)
    decision = gates.judge(analysis.gates, analysis.rules, values)
    declaration = canonical.dumps(
        {"format": FORMAT, "name": analysis.name, "study": analysis.study, "why": analysis.why,
         "attribute": attribute, "analysis": canonical.sha256(content),
         "estimands": [{"name": e.name, "what": e.what, **declared_args(e)} for e in analysis.estimands],
         "gates": [asdict(gate) for gate in analysis.gates],
         "rules": [declared_rule(rule) for rule in analysis.rules]}
    )  # fmt: skip
    registered = {
        "study": protocol.study, "scale": protocol.scale, "seal": opened.events.seal, "closed": opened.digest,
        "label": opened.result["label"],
    }  # fmt: skip
    computed = canonical.dumps(
        {"format": FORMAT, "retrospective": canonical.sha256(declaration), "registered": registered,
         "estimands": values, "gates": gates.gates_json(decision),
         "label": f"retrospective: {decision.label}", "scientific_result": False}
    )  # fmt: skip
    return {ANALYSIS: content, DECLARATION: declaration, RESULT: computed}


def check_retrospective(folder: Path, out: Path) -> dict[str, Json]:
    """Recompute an analysis from the registered study; return its result, or name the file that differs."""
    content = files.read(folder / DECLARATION, MOST_BYTES)
    declared = canonical.loads(content, folder / DECLARATION)
    check_shape(declared, RETROSPECTIVE, str(folder / DECLARATION))
    content = read_known(folder / ANALYSIS, declared["analysis"], f"the file that {DECLARATION} names")
    loading.allow_former_names(content)
    try:
        contents = analyse(out, content, ANALYSIS, declared["attribute"])
    except UsageError as error:
        raise TamperingError(f"{folder / DECLARATION} does not fit {ANALYSIS} and {out}: {error}") from None
    for file, expected in contents.items():
        if files.read(folder / file, MOST_BYTES) != expected:
            raise TamperingError(
                f"{folder / file} does not follow from the analysis and the records in {out}."
            )
    extra = sorted(Store(folder).present() - set(contents))
    if extra:
        raise CorruptionError(f"{folder / extra[0]} does not belong to the analysis.")
    value: dict[str, Json] = canonical.loads(contents[RESULT], folder / RESULT)
    return value
