"""Sealing, running and closing a study.

The engine alone writes, in an order that makes every crash harmless:

* A seal holds from the moment the ledger's first line is on disk.
* A record counts from the moment the ledger names its digest, and the ledger names it only when it is
  durable. A record that the ledger does not name is removed and its cell run again.
* A stage is sealed when all its cells have records; cells of the next stage start after that, and the
  processes that run them check it again.
* A study is closed when its result, computed from records that were read back, is on disk.

Cells that finish within a tenth of a second are committed together, so that short ones do not wait for the
disk one by one.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import CorruptionError, DiskError, HalfulpError, TamperingError, UsageError
from halfulp.study import ledger, sealing
from halfulp.study import seal as seals
from halfulp.study.declaration import Protocol, SealedStage
from halfulp.study.evidence import gather
from halfulp.study.executor import Executor, Opening, open_executor
from halfulp.study.export import EXPORTED
from halfulp.study.interrupts import Interrupted, Interrupts
from halfulp.study.ledger import Ledger
from halfulp.study.loading import Source
from halfulp.study.order import conditional
from halfulp.study.progress import Progress, Quiet
from halfulp.study.protocol import Json
from halfulp.study.reading import open_study
from halfulp.study.result import assemble, authorise, values
from halfulp.study.running import Message
from halfulp.study.store import Binding, Store
from halfulp.text import plain, quoted, tell

WAIT_SECONDS = 0.2
TOGETHER = 64  # records committed at once, at most
ERROR_LENGTH = 500


class FailedError(HalfulpError):
    """A cell failed as often as the protocol allows; a study is not complete."""

    exit_code = 1


@dataclass
class OpenStudy:
    """An open study: its folder, its lock held, and everything about it checked."""

    source: Source
    store: Store
    ledger: Ledger
    sealed: dict[str, Json]
    protocol: Protocol
    binding: Binding
    attempts: dict[tuple[str, str], int] = field(default_factory=dict)  # of this run


def seal(source: Source, scale: str, out: Path, *, evidence: Mapping[str, Path] | None = None) -> str:
    """Seal a study in a folder, or find it sealed there as it is now; gives the seal's digest."""
    with sealing.taken(Store(out)):
        return _open(source, scale, out, "", evidence or {}).ledger.seal


def run(
    source: Source,
    scale: str,
    out: Path,
    *,
    executor: str = "local",
    workers: int | None = None,
    deviation: str = "",
    progress: Progress | None = None,
    evidence: Mapping[str, Path] | None = None,
) -> dict[str, Json]:
    """Run a study to its end, from wherever it is; gives its result."""
    progress = progress or Quiet()
    with sealing.taken(Store(out)):
        study = _open(source, scale, out, deviation, evidence or {})
        if study.ledger.closed is None:
            progress.sealed(study.ledger.seal, study.protocol)
            _run_stages(study, executor, workers, progress)
            _close(study)
        result = study.store.read_result(study.ledger)
        _clear_work(study)
        return result


# ---- opening ----------------------------------------------------------------------------------------


def _open(source: Source, scale: str, out: Path, deviation: str, given: Mapping[str, Path]) -> OpenStudy:
    """Seal the folder if it is new; otherwise check that everything is still what was sealed."""
    store = Store(out)
    protocol = Protocol.of(source.study, scale)
    events = ledger.reopen(store.ledger_file)
    if not events.events:
        return _seal(source, store, protocol, events, given)
    sealed = store.read_seal(events.seal)
    now = seals.make(source, protocol, sealed.get("evidence", {}), whole="noted" not in sealed)
    sealed_protocol = store.read_protocol(sealed)
    changed = seals.refuse_changes(out, sealed, sealed_protocol, now, protocol)
    for name, identity in gather(protocol.evidence, given)[0].items() if given else ():
        if identity != sealed["evidence"][name]:
            raise TamperingError(f"{given[name]} is not the evidence {name} that {out} was sealed with.")
    study = OpenStudy(source, store, events, sealed, protocol, Binding.of(protocol, sealed))
    if changed and events.closed is None:
        _deviate(study, changed, seals.code_digest(now), deviation)
    _check_files(study)
    return study


def _seal(
    source: Source, store: Store, protocol: Protocol, events: Ledger, given: Mapping[str, Path]
) -> OpenStudy:
    evidence, copies = gather(protocol.evidence, given)
    now = seals.make(source, protocol, evidence)
    content = canonical.dumps(now)
    made = {f"evidence/{name}": copy for name, copy in copies.items()}
    made |= {} if source.content is None else {store.study_file.name: source.content}
    made |= {store.protocol_file.name: protocol.bytes, store.seal_file.name: content}
    sealing.begin(store, made)
    files.put_all([(store.folder / name, made[name]) for name in made], store.work)
    events.append({"event": "sealed", "seal": canonical.sha256(content), "process": ledger.process()})
    files.remove(store.plan_file)
    return OpenStudy(source, store, events, now, protocol, Binding.of(protocol, now))


def _deviate(study: OpenStudy, changed: dict[str, list[str]], code: str, reason: str) -> None:
    """Other code or another machine than the sealed: refused, or recorded for ever."""
    lines = [line for part in changed.values() for line in part]
    known = study.ledger.deviations[-1] if study.ledger.deviations else None
    if not (known and known["changes"] == lines):
        if not reason.strip():
            raise TamperingError(
                f"{study.store.folder} was sealed with another {' and '.join(changed)}; changed since:\n"
                f"{seals.listed(lines)}\n"
                "Put it back, or seal anew in a folder of its own (--out). To go on all the same, say why "
                "with --deviation: the ledger will hold it, and the label will not be promoted."
            )
        study.ledger.append(
            {"event": "deviation", "reason": plain(reason), "changes": lines, "code": code,
             "process": ledger.process()}
        )  # fmt: skip
    study.binding = Binding.of(study.protocol, study.sealed, code)


def _check_files(study: OpenStudy) -> None:
    """What the ledger names must be there, unharmed; a record that it does not name is not a record."""
    store, events = study.store, study.ledger
    strange = store.strange_work(study.protocol)
    if strange and events.closed is None:
        raise _strange(store, strange[0])
    expected = open_study(store.folder).files
    present = store.present()
    missing = sorted(expected - present)
    if missing:
        raise CorruptionError(f"{store.folder / missing[0]} is missing, but the ledger names it.")
    for name in sorted(present - expected - set(EXPORTED)):
        if events.closed is None and store.is_unfinished(name, study.protocol):
            files.remove_any(store.folder / name)
        else:
            raise _strange(store, name)


def _clear_work(study: OpenStudy) -> None:
    """Of a study that is closed; what it did not put in ``work`` itself is not removed with it, but told."""
    strange = study.store.strange_work(study.protocol)
    if strange:
        tell(f"halfulp: {study.store.folder / strange[0]} does not belong to the study; move it away.")
    else:
        files.remove_tree(study.store.work)


def _strange(store: Store, name: str) -> CorruptionError:
    return CorruptionError(
        f"{store.folder / name} does not belong to the study. Move it away, then run again."
    )


# ---- running ----------------------------------------------------------------------------------------


def _run_stages(study: OpenStudy, executor: str, workers: int | None, progress: Progress) -> None:
    opening = Opening(
        study.store.folder, study.ledger.seal, study.binding.code, study.source.folder,
        study.protocol.threads, logs=study.store.work / "logs",
    )  # fmt: skip
    running: Executor | None = None
    files.remove(study.store.stop_file)
    try:
        with progress, Interrupts() as interrupts:
            for stage in study.protocol.stages:
                if stage.name in study.ledger.stages or not _authorised(study, stage, progress):
                    continue
                waiting = [cell for cell in stage.cells if (stage.name, cell) not in study.ledger.records]
                progress.stage(stage, len(stage.cells) - len(waiting))
                if waiting:
                    running = running or open_executor(executor, opening, workers)
                    _run_cells(study, stage, deque(waiting), running, interrupts, progress)
                _seal_stage(study, stage.name)
    finally:
        if running is not None:
            running.close()


def _authorised(study: OpenStudy, stage: SealedStage, progress: Progress) -> bool:
    """Whether a stage may run; where gates decide on that, the ledger holds what they said."""
    if conditional(stage, study.ledger) and stage.name not in study.ledger.decided:
        opened = open_study(study.store.folder)
        gates = authorise(study.source.study, study.protocol, stage, opened.records)
        authorised = all(gates.values()) and not study.ledger.not_run & set(stage.reads)
        study.ledger.append(
            {"event": "decided", "stage": stage.name, "authorised": authorised, "gates": gates,
             "process": ledger.process()}
        )  # fmt: skip
    if stage.name in study.ledger.not_run:
        failed = [name for name, passed in study.ledger.decided[stage.name]["gates"].items() if not passed]
        why = f"failed: {', '.join(failed)}" if failed else "it reads a stage that was not run"
        progress.say(f"stage {stage.name} is not authorised ({why}): none of its cells runs")
        return False
    return True


def _run_cells(
    study: OpenStudy,
    stage: SealedStage,
    waiting: deque[str],
    executor: Executor,
    interrupts: Interrupts,
    progress: Progress,
) -> None:
    under_way = 0
    failed: list[str] = []
    finished: list[Message] = []
    due = 0.0
    while waiting or under_way:
        if interrupts.count and not interrupts.told:
            interrupts.told = True
            files.put(study.store.stop_file, b"", study.store.work)
            progress.say(
                "stopping: running cells stop when they next save; press Ctrl-C again to end them at once"
            )
        if interrupts.count > 1:
            break
        while waiting and under_way < executor.capacity and not failed and not interrupts.count:
            _begin(study, stage.name, waiting.popleft(), executor, progress)
            under_way += 1
        if not under_way:
            break
        for answer in executor.wait(WAIT_SECONDS if not finished else max(0.0, due - time.monotonic())):
            kind = answer["answer"]
            if kind == "progress":
                progress.share(answer["cell"], answer["share"])
                continue
            if kind == "refused":
                _commit(study, finished, progress)
                raise _refused(answer)
            under_way -= 1
            if kind == "finished":
                due = due if finished else time.monotonic() + executor.patience
                finished.append(answer)
            elif kind == "stopped":
                progress.ended(answer["cell"], "stopped")
            elif _fail(study, answer, progress):
                waiting.appendleft(answer["cell"])
            else:
                failed.append(answer["error"])
        if finished and (time.monotonic() >= due or len(finished) >= TOGETHER):
            _commit(study, finished, progress)
            finished = []
    _commit(study, finished, progress)
    if failed:
        raise FailedError(
            f"{plain(failed[0])}\nThe study stops here (its protocol's retries: {study.protocol.retries}). "
            "Records that were made are kept; run again to try the cell again."
        )
    if interrupts.count:
        said = "Interrupted. Records that were made are kept; run again to go on."
        raise Interrupted(said, interrupts.number)


def _refused(answer: Message) -> HalfulpError:
    kinds = {kind.exit_code: kind for kind in (UsageError, TamperingError, DiskError)}
    return kinds.get(answer.get("exit_code", 0), UsageError)(answer["error"])


def _begin(study: OpenStudy, stage: str, cell: str, executor: Executor, progress: Progress) -> None:
    again = (stage, cell) in study.ledger.failures
    study.ledger.append(
        {"event": "retried" if again else "started", "stage": stage, "cell": cell}, durable=False
    )
    study.attempts[stage, cell] = study.attempts.get((stage, cell), 0) + 1
    executor.submit(stage, cell, dict(study.ledger.stages))
    progress.began(cell)


def _fail(study: OpenStudy, answer: Message, progress: Progress) -> bool:
    """Note a failure; whether the cell may be tried again."""
    stage, cell = answer["stage"], answer["cell"]
    study.ledger.append(
        {"event": "failed", "stage": stage, "cell": cell, "error": plain(answer["error"])[:ERROR_LENGTH]}
    )
    again = study.attempts[stage, cell] <= study.protocol.retries
    answer["error"] = f"Cell {stage}/{cell} failed: {answer['error']}"
    progress.ended(cell, "failed, tried again" if again else "failed")
    progress.say(quoted(answer.get("traceback") or answer["error"]))
    return again


def _commit(study: OpenStudy, answers: list[Message], progress: Progress) -> None:
    """Make records durable, then let the ledger name them."""
    if not answers:
        return
    store, items, events = study.store, [], []
    for answer in answers:
        stage, cell = answer["stage"], answer["cell"]
        attached = {name: base64.b64decode(text) for name, text in answer["attached"].items()}
        items += [(store.attached_file(stage, cell, name), content) for name, content in attached.items()]
        content = canonical.dumps(study.binding.record(stage, cell, answer["outcome"], attached))
        items.append((store.record_file(stage, cell), content))
        events.append(
            {"event": "finished", "stage": stage, "cell": cell, "record": canonical.sha256(content),
             "process": answer["process"]}
        )  # fmt: skip
    files.put_all(items, store.work)
    study.ledger.append(*events)
    for answer in answers:
        checkpoint = store.checkpoint_file(answer["stage"], answer["cell"])
        if checkpoint.exists():
            files.remove(checkpoint)
        progress.ended(answer["cell"], "finished")


def _seal_stage(study: OpenStudy, stage: str) -> None:
    content = canonical.dumps(study.store.stage_seal(stage, study.protocol, study.ledger))
    files.put(study.store.stage_seal_file(stage), content, study.store.work)
    digest, identity = canonical.sha256(content), ledger.process()
    study.ledger.append({"event": "stage-sealed", "stage": stage, "seal": digest, "process": identity})


def _close(study: OpenStudy) -> None:
    """Judge what was recorded, from the disk; the ledger's last line binds the result."""
    opened = open_study(study.store.folder)
    numbers = values(study.source.study, study.protocol, opened.records)
    result = assemble(study.protocol, study.ledger, study.sealed.get("evidence", {}), numbers)
    content = canonical.dumps(result)
    files.put(study.store.result_file, content, study.store.work)
    digest, identity = canonical.sha256(content), ledger.process()
    study.ledger.append(
        {"event": "validated", "result": digest, "process": identity},
        {"event": "closed", "result": digest, "label": result["label"], "process": identity},
    )
