"""Run a study to its end.

The engine alone writes, in an order that makes every crash harmless:

* A seal holds from the moment the ledger's first line is on disk.
* A record counts from the moment the ledger names its digest, and the ledger names it only when it is
  durable. A record that the ledger does not name is removed and its cell run again.
* A stage is sealed when all its cells have records; cells of the next stage start after that, and the
  processes that run them check it again.
* A study is closed when its result, computed from records that were read back, is on disk.

Cells that finish within a tenth of a second are committed together, so that short ones do not wait for the
disk one by one. Ctrl-C (or SIGTERM, as a cluster sends it) asks running cells to stop when they next save; a
second one ends them at once.

A record can be made by hand if a cell could not leave its own (`recover`). It lets a study continue to its
end, and it is marked permanently: in the record (``origin``, ``reason``, ``scientific_result`` false) and in
the ledger. The two must agree, and a study with such a record is not promoted to any label except one that
its protocol declares for this case.
"""

from __future__ import annotations

import base64
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from halfulp import canonical, files
from halfulp.errors import DiskError, HalfulpError, TamperingError, UsageError
from halfulp.study import gates, ledger
from halfulp.study.evidence import open_study
from halfulp.study.executor import Executor, Opening, executor_kind
from halfulp.study.ledger import conditional
from halfulp.study.loading import Source
from halfulp.study.protocol import Json, SealedStage
from halfulp.study.seal import OpenStudy, lock_folder, open_or_seal
from halfulp.study.store import Binding, Store
from halfulp.study.worker import Message
from halfulp.text import plain, quoted, tell, time_left

LINE_SECONDS = 10.0
WAIT_SECONDS = 0.2
TOGETHER = 64  # records committed at once, at most
ERROR_LENGTH = 500


class FailedError(HalfulpError):
    """Raised when a cell failed as often as the protocol allows; the study is not complete."""

    exit_code = 1


class Interrupted(HalfulpError):  # noqa: N818  # not an error of anybody's
    """Raised when the user or a cluster stopped a run; the exit code is the shell's for that signal."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@dataclass
class Interrupts:
    """Interruptions (SIGINT, SIGTERM), counted instead of raised in the middle of a write."""

    count: int = 0
    number: int = signal.SIGINT  # the signal that came last
    announced: bool = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count interruptions while this is entered; only the main thread ever gets them."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {one: signal.signal(one, self._note) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = number


class Progress:
    """The progress of a run, as lines on standard error if `shown`."""

    def __init__(self, *, shown: bool = False) -> None:
        self.shown = shown
        self.name, self.total, self.done, self.before = "", 0, 0, 0
        self.shares: dict[str, float] = {}
        self.since = self.last = time.monotonic()

    def say(self, text: str) -> None:
        """Show a message."""
        if self.shown:
            tell(text)

    def stage(self, stage: SealedStage, done: int) -> None:
        """Begin or resume a stage."""
        self.name, self.total, self.done, self.before = stage.name, len(stage.cells), done, done
        self.shares, self.since = {}, time.monotonic()
        self.say(f"stage {stage.name} ({stage.kind}): {done} of {self.total} cells finished")

    def share(self, cell: str, share: float) -> None:
        """Note how far a cell is; say how far the stage is, if that was not said lately."""
        self.shares[cell] = share
        self._say_now_and_then()

    def ended(self, cell: str, how: str) -> None:
        """Note that a cell finished, failed or stopped."""
        self.shares.pop(cell, None)
        self.done += how == "finished"
        if how != "finished":
            self.say(f"cell {self.name}/{cell}: {how}")
        self._say_now_and_then()

    def _say_now_and_then(self) -> None:
        now = time.monotonic()
        if self.done == self.total or now - self.last >= LINE_SECONDS:
            self.last = now
            worked = self.done - self.before + sum(self.shares.values())
            left = time_left(now - self.since, worked, self.total - self.before)
            self.say(f"stage {self.name}: {self.done} of {self.total} cells finished{left}")


def seal(source: Source, scale: str, out: Path, *, evidence: Mapping[str, Path] | None = None) -> str:
    """Seal a study in a folder, or check that it is sealed there as it is now.

    Args:
        source: The study, as `load` returns it.
        scale: The scale to seal; each scale has a folder of its own.
        out: The folder of the study; it is made if it does not exist.
        evidence: The folders of the closed studies that this one declares as evidence, by name.

    Returns:
        The SHA-256 digest of the seal.

    Raises:
        UsageError: If the folder holds something else, or declared evidence is missing or not valid.
        TamperingError: If the folder was sealed with another study, code or environment.
    """
    with lock_folder(Store(out)):
        return open_or_seal(source, scale, out, "", evidence or {}).ledger.seal


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
    """Run a study to its end, resuming from wherever it stopped.

    Args:
        source: The study, as `load` returns it.
        scale: The scale to run; each scale has a folder of its own.
        out: The folder of the study; it is sealed first if it is new.
        executor: The name of the executor: ``local``, ``inline`` or ``ray``.
        workers: The number of worker processes; by default as many as fit on the cores.
        deviation: The reason to go on although code or environment changed since the seal; it is recorded.
        progress: Where progress is reported; by default nowhere.
        evidence: The folders of the closed studies that this one declares as evidence, by name.

    Returns:
        The result of the study, as its ``result.json`` holds it.

    Raises:
        FailedError: If a cell failed as often as the protocol allows.
        Interrupted: If the user or a cluster stopped the run; run it again to go on.
        UsageError: If the folder holds something else, declared evidence is missing or not valid, the
            executor is unknown, or there is a `deviation` for a study that is closed.
        TamperingError: If the folder was sealed with another study, or with other code and there is no
            `deviation`.
    """
    progress = progress or Progress()
    kind = executor_kind(executor)
    with lock_folder(Store(out)):
        study = open_or_seal(source, scale, out, deviation, evidence or {})
        if study.ledger.closed is None:
            protocol = study.protocol
            progress.say(f"{protocol.study} ({protocol.scale}), seal {study.ledger.seal}")
            _run_stages(study, kind, workers, progress)
            _close(study)
        elif deviation and not any(d["reason"] == plain(deviation) for d in study.ledger.deviations):
            raise UsageError(f"{out} is closed: nothing is left that could deviate. Leave --deviation out.")
        result = study.store.read_result(study.ledger)
        strange = study.store.strange_work(study.protocol)
        if strange:  # what the study did not put in ``work`` itself is not removed with it
            tell(f"halfulp: {study.store.folder / strange[0]} does not belong to the study; move it away.")
        else:
            files.remove_tree(study.store.work)
        return result


def _run_stages(
    study: OpenStudy, executor: Callable[..., Executor], workers: int | None, progress: Progress
) -> None:
    opening = Opening(
        study.store.folder, study.ledger.seal, study.binding.code, study.source.folder,
        study.protocol.threads, logs=study.store.work / "logs", on_gpu=study.protocol.on_gpu,
        hashed=study.hashed,
    )  # fmt: skip
    running: Executor | None = None
    files.remove(study.store.stop_file)
    try:
        interrupts = Interrupts()
        with interrupts.counted():
            for stage in study.protocol.stages:
                if stage.name in study.ledger.stages or not _authorised(study, stage, progress):
                    continue
                waiting = [cell for cell in stage.cells if (stage.name, cell) not in study.ledger.records]
                progress.stage(stage, len(stage.cells) - len(waiting))
                if waiting:
                    running = running or executor(opening, workers)
                    _StageRun(study, stage, running, interrupts, progress).run(waiting)
                _seal_stage(study, stage.name)
    finally:
        if running is not None:
            running.close()


def _authorised(study: OpenStudy, stage: SealedStage, progress: Progress) -> bool:
    """Return True if a stage may run; if gates decide on it, their decision is in the ledger."""
    if conditional(stage, study.ledger) and stage.name not in study.ledger.decided:
        opened = open_study(study.store.folder)
        passed = gates.authorise(study.source.study, study.protocol, stage, opened.records)
        authorised = all(passed.values()) and not study.ledger.not_run & set(stage.reads)
        study.ledger.append(
            {"event": "decided", "stage": stage.name, "authorised": authorised, "gates": passed}
        )
    if stage.name in study.ledger.not_run:
        failed = [name for name, passed in study.ledger.decided[stage.name]["gates"].items() if not passed]
        why = f"failed: {', '.join(failed)}" if failed else "it reads a stage that was not run"
        progress.say(f"stage {stage.name} is not authorised ({why}): none of its cells runs")
        return False
    return True


class _StageRun:
    """The run of a stage's cells: as many at a time as the executor takes, until all have records.

    Once a cell has failed for good, or the run is interrupted, no further cell begins; records of cells that
    still finish are kept.
    """

    def __init__(
        self, study: OpenStudy, stage: SealedStage, executor: Executor, interrupts: Interrupts,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.study, self.stage, self.executor = study, stage, executor
        self.interrupts, self.progress = interrupts, progress
        self.under_way = 0
        self.failed: list[str] = []
        self.finished: list[Message] = []
        """Answers whose records are not on the disk yet; at the time ``due`` they are put there."""
        self.due = 0.0

    def run(self, cells: Iterable[str]) -> None:
        """Run these cells to their end, or raise what kept them from it."""
        waiting = deque(cells)
        while waiting or self.under_way:
            self._pass_interrupt_on()
            if self.interrupts.count > 1:
                break
            free = self.executor.capacity if not self.failed and not self.interrupts.count else 0
            while waiting and self.under_way < free:
                self._begin(waiting.popleft())
            if not self.under_way:
                break
            seconds = max(0.0, self.due - time.monotonic()) if self.finished else WAIT_SECONDS
            for answer in self.executor.wait(seconds):
                if self._take(answer):
                    waiting.appendleft(answer["cell"])
            if self.finished and (time.monotonic() >= self.due or len(self.finished) >= TOGETHER):
                self._commit()
        self._commit()
        if self.failed:
            raise FailedError(
                f"{plain(self.failed[0])}\nThe study stops here (its protocol's retries: "
                f"{self.study.protocol.retries}). Records that were made are kept; run again to try the cell "
                "again."
            )
        if self.interrupts.count:
            said = "Interrupted. Records that were made are kept; run again to go on."
            raise Interrupted(said, self.interrupts.number)

    def _pass_interrupt_on(self) -> None:
        """Tell the cells of a first interrupt, by a file that they look for when they save."""
        if self.interrupts.count and not self.interrupts.announced:
            self.interrupts.announced = True
            files.put(self.study.store.stop_file, b"", self.study.store.work)
            self.progress.say(
                "stopping: running cells stop when they next save; press Ctrl-C again to end them at once"
            )

    def _begin(self, cell: str) -> None:
        study, key = self.study, (self.stage.name, cell)
        kind = "retried" if key in study.ledger.failures else "started"
        study.ledger.append({"event": kind, "stage": self.stage.name, "cell": cell}, durable=False)
        study.attempts[key] = study.attempts.get(key, 0) + 1
        self.executor.submit(*key, dict(study.ledger.stages))
        self.progress.shares[cell] = 0.0
        self.under_way += 1

    def _take(self, answer: Message) -> bool:
        """Take an answer of the executor; return True if its cell is to be tried again."""
        kind = answer["answer"]
        if kind == "progress":
            self.progress.share(answer["cell"], answer["share"])
            return False
        if kind == "refused":
            self._commit()
            raise _refused(answer)
        self.under_way -= 1
        if kind == "finished":
            if not self.finished:
                self.due = time.monotonic() + self.executor.patience
            self.finished.append(answer)
        elif kind == "stopped":
            self.progress.ended(answer["cell"], "stopped")
        else:
            return self._fail(answer)
        return False

    def _fail(self, answer: Message) -> bool:
        """Note a failure; return True if the cell may be tried again."""
        study, key, error = self.study, (answer["stage"], answer["cell"]), answer["error"]
        study.ledger.append(
            {"event": "failed", "stage": key[0], "cell": key[1], "error": plain(error)[:ERROR_LENGTH]}
        )
        again = study.attempts[key] <= study.protocol.retries
        error = f"Cell {'/'.join(key)} failed: {error}"
        self.progress.ended(answer["cell"], "failed, tried again" if again else "failed")
        self.progress.say(quoted(answer.get("traceback") or error))
        if not again:
            self.failed.append(error)
        return again

    def _commit(self) -> None:
        """Make the records of finished cells durable, then let the ledger name them."""
        answers, self.finished = self.finished, []
        if not answers:
            return
        study, store, items, events = self.study, self.study.store, [], []
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
            self.progress.ended(answer["cell"], "finished")


def _refused(answer: Message) -> HalfulpError:
    kinds = {kind.exit_code: kind for kind in (UsageError, TamperingError, DiskError)}
    return kinds.get(answer.get("exit_code", 0), UsageError)(answer["error"])


def _seal_stage(study: OpenStudy, stage: str) -> None:
    content = canonical.dumps(study.ledger.stage_seal(stage, study.protocol))
    files.put(study.store.stage_seal_file(stage), content, study.store.work)
    study.ledger.append({"event": "stage-sealed", "stage": stage, "seal": canonical.sha256(content)})


def _close(study: OpenStudy) -> None:
    """Judge what was recorded, from the disk; the ledger's last line binds the result."""
    opened = open_study(study.store.folder)
    numbers = gates.values(study.source.study, study.protocol, opened.records)
    result = gates.assemble(study.protocol, study.ledger, study.sealed.get("evidence", {}), numbers)
    content = canonical.dumps(result)
    files.put(study.store.result_file, content, study.store.work)
    digest = canonical.sha256(content)
    study.ledger.append(
        {"event": "validated", "result": digest},
        {"event": "closed", "result": digest, "label": result["label"]},
    )


def recover(out: Path, cell: str, outcome: Mapping[str, Json], reason: str) -> None:
    """Add a record made by hand for a cell that could not leave one; it is never promoted.

    Args:
        out: The folder of the study.
        cell: The cell, as ``stage/cell``, or by its name if only one stage has it.
        outcome: The content of the record, as the cell would have returned it.
        reason: The reason, which stays in the record.

    Raises:
        UsageError: If there is no reason, the cell has a record, or its stage may not run yet.
    """
    if not reason.strip():
        raise UsageError("A recovered record needs a reason.")
    store = Store(out)
    with files.lock(store.lock_file):
        events = ledger.reopen(store.ledger_file)
        sealed = store.read_seal(events.seal)
        protocol = store.read_protocol(sealed)
        stage, name = protocol.cell(cell)
        settled = {*events.stages, *events.not_run}
        unsealed = [earlier.name for earlier in protocol.before(stage) if earlier.name not in settled]
        if unsealed:
            raise UsageError(
                f"Cell {stage}/{name} cannot be recovered: stage {unsealed[0]} is not sealed yet."
            )
        if conditional(protocol.stage(stage), events) and not events.decided.get(stage, {}).get("authorised"):
            raise UsageError(f"Cell {stage}/{name} cannot be recovered: its stage is not authorised.")
        if events.closed or (stage, name) in events.records:
            raise UsageError(f"Cell {stage}/{name} has a record; records are not replaced.")
        record = Binding.of(protocol, sealed).record(stage, name, outcome, {}, plain(reason))
        content = canonical.dumps(record)
        files.put(store.record_file(stage, name), content, store.work)
        digest = canonical.sha256(content)
        events.append(
            {"event": "recovered", "stage": stage, "cell": name, "record": digest, "reason": plain(reason)}
        )
