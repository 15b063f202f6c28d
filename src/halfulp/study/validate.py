"""Validate a study, trusting nothing but the seal and the raw records.

The folder is read with every digest checked (`evidence.open_study`), its inventory is taken (no file too many
or too few), and its result is computed again from the records with the sealed gates and rules. Damage is an
error that names the file (exit code 3). Chosen cells can be run again and compared bit for bit.

Validation alone cannot distinguish a study from one that was forged as a whole. For that it needs something
from outside: a digest that was published at seal or close, or a public key.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from halfulp import canonical
from halfulp.errors import CorruptionError, HalfulpError, TamperingError, UsageError
from halfulp.study import gates, loading, provenance
from halfulp.study.declaration import Protocol, changes
from halfulp.study.evidence import Opened, open_study
from halfulp.study.executor import Local, Opening
from halfulp.study.gates import RecomputationError
from halfulp.study.ledger import Ledger
from halfulp.study.protocol import Json
from halfulp.study.publish import check_statement
from halfulp.study.store import EXPORTED, Binding, Store
from halfulp.study.worker import Message
from halfulp.text import count, plain

# On another processor or with other libraries, sums of the same numbers are taken in another order. A sum of
# 1e5 doubles is then off by at most about 1e5 * 2**-53 = 1.1e-11 of the sum of magnitudes. Relative to the
# estimand's largest value, so that one near zero may differ by what the others do.
ROUNDING = 1e-10


@dataclass
class Validation:
    """The report of a validation: what was authenticated, what was recomputed, and what was not checked."""

    study: str = ""
    scale: str = ""
    label: str = ""
    says: str = ""
    scientific_result: bool = False
    authenticated: list[str] = field(default_factory=list)
    recomputed: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if there is no problem, else 1; corruption and tampering are raised, not reported."""
        return 1 if self.problems else 0

    def lines(self) -> Iterator[str]:
        """Yield the page, line by line."""
        yield f"{self.study} ({self.scale})"
        parts = {
            "authenticated": self.authenticated, "recomputed": self.recomputed,
            "NOT checked": self.not_checked, "PROBLEMS": self.problems,
        }  # fmt: skip
        for title, texts in parts.items():
            if texts:
                yield f"\n{title}"
                yield from (f"  - {plain(line)}" for line in texts)
        yield ""
        if self.label:
            note = "" if self.scientific_result else " (not a scientific result)"
            yield f"label: {plain(self.label)}{note}"
        if self.says:
            yield f"       {plain(self.says)}"
        yield "valid" if not self.problems else "NOT valid: see the problems above"


def validate(
    folder: Path,
    *,
    expect: str | None = None,
    strict_code: bool = False,
    code: bool = True,
    replay: Sequence[str] | None = None,
    data_folder: Path | None = None,
    public_key: Path | None = None,
    workers: int | None = None,
    strict_provenance: bool = False,
) -> Validation:
    """Check every digest of a study's folder and recompute its result.

    Args:
        folder: The folder of the study.
        expect: A digest that was printed when the study was sealed or closed.
        strict_code: True to report code that differs from the sealed code as a problem.
        code: False to leave out what needs the study's own code.
        replay: Cells to run again and compare bit for bit; an empty list means all, None means none.
        data_folder: The folder of data files that the study file names relative to itself.
        public_key: An ed25519 key (PEM) that must have signed the exported statement.
        workers: The number of worker processes of a replay; by default as many as fit on the cores.
        strict_provenance: True to report a seal that names no commit of halfulp as a problem.

    Returns:
        A report of what was authenticated, recomputed and not checked, with its problems.

    Raises:
        CorruptionError: If a file is missing or damaged.
        TamperingError: If a file, or the study, is not the expected one.
        UsageError: If the folder holds no study, or ``expect`` is empty.
    """
    check_expected(expect)
    running = Store(folder).holder
    opened = open_study(folder)
    events, protocol = opened.events, opened.protocol
    page = Validation(study=protocol.study, scale=protocol.scale)
    if expect is not None or public_key is None:
        _expect(expect, events, page)
    _check_inventory(opened, page)
    if strict_provenance:
        _check_commit(opened, page)
    if public_key is not None or any((folder / name).exists() for name in EXPORTED):
        page.authenticated.append(check_statement(folder, public_key))
    page.authenticated += _counted(opened)
    if opened.result is None:
        done = f"{len(events.records)} of {sum(len(s.cells) for s in protocol.stages)} cells have records"
        by = f"; process {running} is running it now" if running else ""
        page.problems.append(f"incomplete: {done}, the study is not closed{by}. Run it again to go on.")
        return page
    _check_result(opened, opened.result, page, code=code, strict=strict_code)
    if replay is not None:
        _replay(opened, page, replay, data_folder, workers)
    else:
        page.not_checked.append("that the cells give these records: no cell was run again (--replay does)")
    return page


def check_expected(digest: str | None) -> None:
    """Refuse an empty digest, such as that of a shell variable that is not set: it would check nothing."""
    if digest is not None and not digest.strip():
        raise UsageError(
            "--expect is empty: give the digest that was printed when the study was sealed or closed, or "
            "leave the option out."
        )


def _expect(expect: str | None, events: Ledger, page: Validation) -> None:
    if expect is None:
        page.not_checked.append(
            "that this is the study that was published: give the digest printed at seal or close (--expect)"
        )
    elif events.closed is not None and expect == events.closed["digest"]:
        page.authenticated.append("the closing digest is the expected one: history, records and result")
    elif expect == events.seal:
        page.authenticated.append("the seal's digest is the expected one: protocol, code, data, environment")
        page.not_checked.append("records and result against an outside digest: the seal came before them")
    else:
        raise TamperingError(
            f"{events.path.parent} is not the expected study: neither its seal ({events.seal}) nor its "
            f"closing digest ({events.closed['digest'] if events.closed else 'none'}) is {expect[:80]!a}."
        )


def _check_commit(opened: Opened, page: Validation) -> None:
    """Ask that the seal names a commit, and that its code is that commit's, where that can be looked up."""
    commit = provenance.sealed_commit(opened.sealed)
    if not commit:
        why = "no commit" if opened.sealed["git"]["package"] is None else "a commit with changes beside it"
        page.problems.append(
            f"the seal names {why}: nobody can look up the code it ran (--strict-provenance)"
        )
        return
    other = provenance.not_of_commit(opened.sealed)
    if other is None:
        page.not_checked.append(f"the code against commit {commit[:12]}, which is not known here")
    elif other:
        page.problems.append(
            f"{count(len(other), 'sealed file')} of commit {commit[:12]} is another there: {other[0]}"
        )
    else:
        page.authenticated.append(f"the sealed code is that of commit {commit[:12]}, file by file")


def _check_inventory(opened: Opened, page: Validation) -> None:
    store, events = opened.store, opened.events
    extra = sorted(opened.extra_files() - set(EXPORTED if events.closed else ()))  # these are checked apart
    leftover = [name for name in extra if name.startswith(("records/", "attached/", "seals/"))]
    if events.closed is None and extra == leftover:
        if leftover:
            page.not_checked.append(
                f"{count(len(leftover), 'file')} that an interrupted run left and the ledger does not name"
            )
    elif events.closed is None and "result.json" in extra:
        raise CorruptionError(
            f"{store.result_file} is there, but {store.ledger_file} does not say that the study was closed: "
            "it was shortened, or the run was stopped at its last step. Run the study again to close it."
        )
    elif extra:
        raise CorruptionError(f"{store.folder / extra[0]!s} does not belong to the study: no event names it.")
    for name in store.strange_work(opened.protocol) if events.closed else ():
        raise CorruptionError(f"{store.folder / name} does not belong to the study, which is closed.")


def _check_result(
    opened: Opened, stored: dict[str, Json], page: Validation, *, code: bool, strict: bool
) -> None:
    """Compute the result again; the stored one must be what follows from the records."""
    store, events, sealed, protocol = opened.store, opened.events, opened.sealed, opened.protocol
    page.label, page.scientific_result = stored["label"], stored["scientific_result"]
    page.says = stored.get("says", "")
    strange = sorted(set(stored["estimands"]) ^ set(protocol.estimands))
    if strange:
        known = "declares" if strange[0] in protocol.estimands else "does not declare"
        raise TamperingError(
            f"{store.result_file} does not follow from the records: its estimands are not those of the "
            f"protocol, which {known} {strange[0]}."
        )
    if not code:
        again = gates.assemble(protocol, events, sealed.get("evidence", {}), stored["estimands"])
        _same_result(store, stored, again, moved=False)
        page.recomputed.append("gates and label, from the estimands that result.json states")
        page.problems.append(
            "estimands were not recomputed from the records, because no code was run (--no-code)"
        )
        return
    try:
        source = loading.load_sealed(sealed["code"]["study"], store.study_file)
        moved = _compare_code(opened, source, page, strict)
        numbers = gates.values(source.study, protocol, opened.records)
    except (Exception, SystemExit) as error:  # of the study's own code, which may have moved on
        raise RecomputationError(
            f"{store.result_file} cannot be recomputed by this halfulp: {type(error).__name__}: {error}"
        ) from error
    again = gates.assemble(protocol, events, sealed.get("evidence", {}), numbers)
    rounded = _same_result(store, stored, again, moved=moved)
    values = count(sum(len(units) for units in again["estimands"].values()), "value")
    how = f"; {rounded} of them agree only to {ROUNDING:g}, on other code or hardware" if rounded else ""
    how = how or ", bit for bit"
    page.recomputed.append(f"{values} of {count(len(again['estimands']), 'estimand')}{how}")
    page.recomputed.append(
        f"{count(len(again['gates']), 'gate')} and the label, with the sealed thresholds and rules"
    )


def _compare_code(opened: Opened, source: loading.Source, page: Validation, strict: bool) -> bool:
    """State how code and environment differ from the sealed ones; return whether they do."""
    code, environment = provenance.as_sealed(opened.sealed, source), provenance.environment()
    now = {"code": code, "data": opened.sealed["data"], "environment": environment}
    changed = provenance.compare(opened.sealed, now)
    try:
        declared = Protocol.of(source.study, opened.protocol.scale)
        redeclared = list(changes(opened.protocol.content, declared.content))
    except (Exception, SystemExit) as error:  # of the study's own code, which may have moved on
        redeclared = [f"it cannot be declared: {type(error).__name__}: {error}"]
    if "code" in changed:
        page.not_checked.append(
            f"the sealed code itself: this halfulp differs in {count(len(changed['code']), 'place')}, "
            f"{changed['code'][0]} ..."
        )
        if strict:
            page.problems.append("the code is not the sealed code (--strict-code)")
    else:
        page.authenticated.append("the code that recomputes is the sealed code, file by file")
    if redeclared and (strict or not changed):  # the sealed code must declare what was sealed
        option = " (--strict-code)" if changed else ""
        page.problems.append(f"the sealed protocol is not what the code declares: {redeclared[0]}{option}")
    elif redeclared:
        page.not_checked.append(
            f"the study as the code declares it today, which differs: {redeclared[0]} ..."
        )
    if "environment" in changed:
        page.not_checked.append(
            f"the sealed environment, which is not this one: {changed['environment'][0]} ..."
        )
    return bool(changed)


def _same_result(store: Store, stored: dict[str, Json], again: dict[str, Json], *, moved: bool) -> int:
    """Compare a stored result with the recomputed one, and refuse it if it differs.

    Args:
        store: Where the stored one is.
        stored: The result as it was stored.
        again: The result as it was recomputed.
        moved: True on other code or hardware: there numbers may differ by rounding.

    Returns:
        How many values differ by rounding.
    """
    rounded = 0

    def near(old: float | None, new: float | None, scale: float) -> bool:
        return moved and old is not None and new is not None and abs(old - new) <= ROUNDING * scale

    old_rest, new_rest = (
        {k: v for k, v in result.items() if k not in ("estimands", "gates")} for result in (stored, again)
    )
    different = list(changes(old_rest, new_rest))
    for name, units in again["estimands"].items():
        before = stored["estimands"].get(name, {})
        scale = max((abs(value) for value in units.values() if value is not None), default=0.0)
        if set(before) != set(units):
            different.append(f"estimands.{name}: the units differ")
            continue
        for unit, value in units.items():
            if near(before[unit], value, scale):
                rounded += before[unit] != value
            elif before[unit] != value:
                different.append(f"estimands.{name}.{unit}: stored {before[unit]}, recomputed {value}")
        for old, new in zip(stored["gates"], again["gates"], strict=False):
            same = old["value"] == new["value"] or near(old["value"], new["value"], scale)
            if new["estimand"] == name and not same:
                different.append(f"gates.{new['name']}: stored {old['value']}, recomputed {new['value']}")
    decided = [[{k: g[k] for k in g if k != "value"} for g in r["gates"]] for r in (stored, again)]
    if decided[0] != decided[1]:
        different.append("gates: the decisions differ")
    if different:
        why = "other code or another environment than the sealed" if moved else "the sealed code"
        error = f"{store.result_file} does not follow from the records, by {why}: {different[0]}."
        raise RecomputationError(error) if moved else TamperingError(error)
    return rounded


def _counted(opened: Opened) -> list[str]:
    """Say what was authenticated, in numbers, and what the ledger says that a reader must know."""
    sealed, events, records = opened.sealed, opened.events, opened.by_cell
    attached = sum(len(record["attached"]) for record in records.values())
    processes = {event["process"]["nonce"] for event in events.events if event["event"] == "finished"}
    parts = [
        "the seal", "the protocol", *(["the study file"] if "sha256" in sealed["code"]["study"] else []),
        count(len(records), "record"), count(attached, "attached file"),
        count(len(events.stages), "stage seal"), *(f"evidence {name}" for name in sealed.get("evidence", {})),
    ]  # fmt: skip
    lines = [
        f"{count(len(events.events), 'event')} of the ledger: digests, chain, and the order of stages",
        f"{', '.join(parts)}: all digests, canonical bytes, no file too many or too few",
        f"the {len(processes)} processes that made the records are identified in the ledger",
    ]
    for name, one in sealed.get("evidence", {}).items():
        lines.append(f"evidence {name} is of {one['study']} ({one['scale']}), closed with {one['closed']}")
    for stage in sorted(events.not_run):
        lines.append(f"stage {stage} was not authorised by its gates, and none of its cells ran")
    failures = sum(events.failures.values())
    if failures:
        again = f"the protocol tries again {opened.protocol.retries} times a run"
        lines.append(f"{count(failures, 'failed attempt')} ({again})")
    for stage, cell in sorted(events.recovered):
        lines.append(f"record {stage}/{cell} was made by hand: {events.recovered[stage, cell]}")
    for deviation in events.deviations:
        changed = count(len(deviation["changes"]), "change")
        lines.append(f"deviation from the seal: {deviation['reason']} ({changed})")
    for part, state in sealed["git"].items():
        if state is not None and state["dirty"]:
            lines.append(f"the git tree of the {part} was dirty when the study was sealed")
    return lines


def _replay(
    opened: Opened, page: Validation, names: Sequence[str], folder: Path | None, workers: int | None
) -> None:
    """Run cells again (all, if none is named); differences become problems of the page."""
    protocol, events, records = opened.protocol, opened.events, opened.by_cell
    hashed: Mapping[str, Json] = {}
    with suppress(HalfulpError):  # the cells that need the data say what is wrong with it
        hashed = provenance.hash_data(protocol.data, folder)
    opening = Opening(
        opened.store.folder, events.seal, "", folder, protocol.threads, replay=True, on_gpu=protocol.on_gpu,
        hashed=hashed,
    )  # fmt: skip
    chosen = [protocol.cell(name) for name in names] or list(records)
    by_hand = [key for key in chosen if key in events.recovered]
    timed = [key for key in chosen if key not in by_hand and protocol.stage(key[0]).clocks]
    waiting = deque(key for key in chosen if key not in by_hand + timed)
    executor = Local(opening, workers)
    same, under_way = 0, 0
    try:
        while waiting or under_way:
            while waiting and under_way < executor.capacity:
                executor.submit(*waiting.popleft(), dict(events.stages))
                under_way += 1
            for answer in executor.wait(1.0):
                if answer["answer"] == "progress":
                    continue
                under_way -= 1
                problem = _compare_record(answer, opened)
                same += not problem
                page.problems += [problem] if problem else []
    finally:
        executor.close()
    again = len(chosen) - len(timed)
    page.recomputed.append(f"{same} of {again} cells run again left the same record, bit for bit")
    for stage, cell in by_hand:
        page.not_checked.append(f"cell {stage}/{cell} was not run again: its record was made by hand")
    for stage, cell in timed:
        page.not_checked.append(f"cell {stage}/{cell} was not run again: its record holds clocks")
    if len(chosen) < len(records):
        page.not_checked.append(f"the other {len(records) - len(chosen)} cells were not run again")


def _compare_record(answer: Message, opened: Opened) -> str:
    """Say how a replayed record differs from the stored one; nothing if it does not."""
    if answer["answer"] != "finished":
        where = f"cell {answer['stage']}/{answer['cell']} " if "cell" in answer else ""
        return f"replay: {where}{answer['answer']}: {answer.get('error', '')}"
    stage, cell = answer["stage"], answer["cell"]
    before = opened.by_cell[stage, cell]
    attached = {name: base64.b64decode(text) for name, text in answer["attached"].items()}
    binding = Binding.of(opened.protocol, opened.sealed)
    again = binding.record(stage, cell, answer["outcome"], attached) | {"code": before["code"]}
    if canonical.dumps(again) == canonical.dumps(before):
        return ""
    return f"replay: cell {stage}/{cell} gave another record: {next(changes(before, again))}"
