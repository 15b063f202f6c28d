"""Run cells in a worker process, and check before each one that it may start.

A `Session` lives in the process that runs cells. It trusts no one: it reads the sealed protocol itself,
checks that its own code is the code that was named, and refuses a cell unless every earlier stage is sealed.
So neither a coordinator nor a job typed by hand can start an outcome before the predictions are fixed.

A worker process (``python -m halfulp.study.worker``) takes cells and returns answers as JSON lines in pipes::

    -> {"do":"open","out":...,"seal":...,"code":...,"folder":...,"hashed":...,"replay":...}
    <- {"answer":"ready","process":{...}}     or {"answer":"refused","error":...}
    -> {"do":"run","stage":...,"cell":...,"seals":{...}}
    <- {"answer":"progress",...} ...
    <- {"answer":"finished","outcome":...,"attached":...}  or  failed, stopped, refused

What a cell prints goes to standard error. When the pipe closes, the parent is gone and the worker ends at
once, even in the middle of a cell.
"""

from __future__ import annotations

import base64
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO

from halfulp import canonical, documents, files
from halfulp.errors import DiskError, HalfulpError, TamperingError, UsageError
from halfulp.study import ledger, loading, provenance
from halfulp.study.declaration import changes
from halfulp.study.evidence import open_evidence
from halfulp.study.gates import authorise
from halfulp.study.protocol import Config, Json, Outcomes, SealedStage, check_name
from halfulp.study.store import Store

Message = dict[str, Json]
PROGRESS_SECONDS = 0.5
DURABLE_SECONDS = 1.0


class Stopped(BaseException):
    """Raised when a cell that was asked to stop has saved. No Exception, so that cells do not catch it."""


class Session:
    """The cells of one sealed study, in this process."""

    def __init__(
        self, out: Path, seal: str, code: str, folder: Path | None, *,
        hashed: Mapping[str, Json] | None = None, replay: bool = False,
    ) -> None:  # fmt: skip
        self.store = Store(out)
        self.seal = seal
        self.sealed = self.store.read_seal(seal)
        self.protocol = self.store.read_protocol(self.sealed)
        source = loading.load_sealed(self.sealed["code"]["study"], self.store.study_file, folder)
        if code:
            own = provenance.as_sealed(self.sealed, source)
            if canonical.digest(own) != code:
                changed = provenance.listed(list(changes(self.sealed["code"], own, "code")))
                raise TamperingError(
                    f"The halfulp of this worker is not the one that runs the study; changed:\n{changed}"
                )
        self.study = source.study
        self.folder = folder
        self.hashed = hashed or {}  # by the process that started this one; see `provenance.hash_data`
        self.replay = replay
        self.tell: Callable[[Message], None] = lambda message: None
        self.data = cache(self._find_data)  # each is checked once per process
        self.evidence = cache(self._open_evidence)
        self._stage_seal = cache(self._read_stage_seal)
        self._settled: dict[str, bool] = {}  # stage -> whether it was authorised, as this process finds

    def run(self, stage: str, cell: str, stage_seals: Mapping[str, str]) -> Message:
        """Run a cell; the answer is ``finished``, ``failed``, ``stopped`` or ``refused``."""
        answer: Message = {"stage": stage, "cell": cell, "process": ledger.process()}
        try:
            running = CellRun(self, stage, cell, self._check_sealed(stage, cell, stage_seals))
        except (UsageError, TamperingError) as error:
            return answer | refusal(error)
        try:
            outcome = self.study.stage(stage).run(running)
            if not isinstance(outcome, Mapping):
                raise UsageError(f"A cell gives back a mapping, not a {type(outcome).__name__}.")
            size = len(canonical.dumps(outcome))
            if size > documents.MOST_BYTES:
                raise UsageError(
                    f"A cell gives back at most {documents.MOST_BYTES:,} bytes of JSON, not {size:,}. Attach "
                    "the rest as files (cell.attach)."
                )
        except Stopped:
            return answer | {"answer": "stopped"}
        except DiskError as error:  # the cell did nothing wrong
            return answer | refusal(error)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return answer | {"answer": "failed", "error": text, "traceback": traceback.format_exc()}
        attached = {name: base64.b64encode(content).decode() for name, content in running.attached.items()}
        return answer | {"answer": "finished", "outcome": outcome, "attached": attached}

    def _check_sealed(self, stage: str, cell: str, given: Mapping[str, str]) -> dict[str, Message]:
        """Return the seals of all earlier stages, or refuse."""
        if cell not in self.protocol.stage(stage).cells:
            raise UsageError(f"Stage {stage} of study {self.protocol.study} has no cell {cell[:120]!a}.")
        seals: dict[str, Message] = {}
        for earlier in self.protocol.before(stage):
            if not self._authorised(earlier, seals):
                continue
            if earlier.name not in given or not self.store.stage_seal_file(earlier.name).exists():
                raise UsageError(
                    f"Cell {stage}/{cell} may not start: {earlier.kind} stage {earlier.name} is not sealed."
                )
            seals[earlier.name] = self._stage_seal(earlier.name, given[earlier.name])
        if not self._authorised(self.protocol.stage(stage), seals):
            raise UsageError(f"Cell {stage}/{cell} may not start: its stage is not authorised.")
        return seals

    def _authorised(self, stage: SealedStage, sealed: Mapping[str, Message]) -> bool:
        """Return True if a stage's gates passed, computed here from the records of the stages before it."""
        if stage.name not in self._settled:
            not_run = {name for name, authorised in self._settled.items() if not authorised}
            authorised = not not_run & set(stage.reads)
            if stage.only_if:
                cells = {
                    name: {cell: self._record(name, cell, one)["outcome"] for cell in one["records"]}
                    for name, one in sealed.items()
                }
                evidence = {one["name"]: self.evidence(one["name"]) for one in self.protocol.evidence}

                def attached(stage: str, cell: str, name: str) -> bytes:
                    record = self._record(stage, cell, sealed[stage])
                    return self.store.read_attached(stage, cell, name, record)

                records = Outcomes(cells, attached=attached, evidence=evidence, not_run=not_run)
                authorised &= all(authorise(self.study, self.protocol, stage, records).values())
            self._settled[stage.name] = authorised
        return self._settled[stage.name]

    def _record(self, stage: str, cell: str, sealed: Message) -> Message:
        return self.store.read_record(stage, cell, sealed["records"][cell])

    def declared(self, name: str) -> Mapping[str, Json]:
        """Return the protocol's entry for evidence."""
        for one in self.protocol.evidence:
            if one["name"] == name:
                return one
        raise UsageError(f"The study declares no evidence {name[:120]!a}.")

    def _open_evidence(self, name: str) -> Outcomes:
        declared = self.declared(name)
        return open_evidence(self.store.folder, declared, self.sealed["evidence"][name]).outcomes()

    def _read_stage_seal(self, stage: str, digest: str) -> Message:
        content = self.store.read_stage_seal(stage, digest)
        if content["seal"] != self.seal:
            path = self.store.stage_seal_file(stage)
            raise TamperingError(f"{path} belongs to another seal of the study.")
        return content

    def _find_data(self, name: str) -> Path:
        if name not in self.protocol.data:
            raise UsageError(f"The study declares no data set {name[:120]!a}.")
        path = provenance.locate(name, self.folder)
        current = provenance.hash_data([name], self.folder, self.hashed)[name]
        if any(current[key] != value for key, value in self.sealed["data"][name].items()):
            raise TamperingError(f"{path} is not the data set {name} that was sealed: its SHA-256 differs.")
        return path


class CellRun:
    """The :class:`~halfulp.study.protocol.Running` of one cell."""

    def __init__(self, session: Session, stage: str, cell: str, sealed: Mapping[str, Message]) -> None:
        self.name = cell
        self.config: Config = session.protocol.stage(stage).cells[cell]
        self.attached: dict[str, bytes] = {}
        self._session, self._stage, self._sealed = session, stage, sealed
        self._reads = session.protocol.stage(stage).reads
        self._checkpoint = session.store.checkpoint_file(stage, cell)
        self._reported = self._saved = time.monotonic()

    def _record(self, stage: str, cell: str) -> Message:
        if stage not in self._reads:
            raise UsageError(f"Stage {self._stage} does not declare that it reads stage {stage[:120]!a}.")
        if cell not in self._sealed[stage]["records"]:
            raise UsageError(f"Stage {stage} has no cell {cell[:120]!a}.")
        return self._session.store.read_record(stage, cell, self._sealed[stage]["records"][cell])

    def evidence(self, name: str) -> Outcomes:
        """Return evidence that the study declares, once the stage before it is sealed."""
        after = self._session.declared(name).get("after", "")
        if after and after not in self._sealed:
            raise UsageError(
                f"Cell {self._stage}/{self.name} may not open evidence {name}: stage {after} is not sealed."
            )
        return self._session.evidence(name)

    def read(self, stage: str, cell: str) -> Mapping[str, Json]:
        """Return the outcome of a cell of an earlier stage."""
        outcome: Mapping[str, Json] = self._record(stage, cell)["outcome"]
        return outcome

    def read_bytes(self, stage: str, cell: str, name: str) -> bytes:
        """Return a file that a cell of an earlier stage attached."""
        return self._session.store.read_attached(stage, cell, name, self._record(stage, cell))

    def attach(self, name: str, content: bytes) -> None:
        """Keep a file beside the record."""
        check_name("attached file", name)
        self.attached[name] = bytes(content)

    def data(self, name: str) -> Path:
        """Return the path of a data set that the study names."""
        return self._session.data(name)

    def save(self, state: bytes) -> None:
        """Keep a checkpoint, and stop here if the run was asked to stop."""
        if not self._session.replay:
            now = time.monotonic()
            durable = now - self._saved >= DURABLE_SECONDS  # a cell that saves often is not slowed down
            self._saved = now if durable else self._saved
            content = canonical.sha256(state).encode() + state
            files.put(self._checkpoint, content, self._session.store.work, durable=durable)
        if self._session.store.stop_file.exists():
            raise Stopped

    def load(self) -> bytes | None:
        """Return the last checkpoint, or None."""
        if self._session.replay or not self._checkpoint.is_file():
            return None
        content = self._checkpoint.read_bytes()
        digest, state = content[:64], content[64:]
        return state if canonical.sha256(state).encode() == digest else None  # damaged: begin again

    def progress(self, done: float, total: float) -> None:
        """Report how far the cell has come."""
        now = time.monotonic()
        if total > 0 and now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            share = min(max(float(done) / float(total), 0.0), 1.0)
            answer: Message = {"answer": "progress", "stage": self._stage, "cell": self.name, "share": share}
            self._session.tell(answer)


def open_session(request: Message) -> Session:
    """Open the session that another process asks for."""
    folder = Path(request["folder"]) if request["folder"] else None
    session = Session(
        Path(request["out"]), request["seal"], request["code"], folder,
        hashed=request["hashed"], replay=request["replay"],
    )  # fmt: skip
    limit_threads(session.protocol.threads)
    settle_gpus()
    return session


def refusal(error: HalfulpError) -> Message:
    """Return the answer that says why nothing was run."""
    return {"answer": "refused", "error": str(error), "exit_code": error.exit_code}


def limit_threads(number: int) -> int:
    """Set the threads of torch, which is loaded already; return how many there were."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    return before


def settle_gpus() -> None:
    """Set the options that affect a GPU's numbers, if there is one: no TF32, deterministic algorithms."""
    import torch

    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True, warn_only=True)


class Worker:
    """The conversation with the parent."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self.source, self.sink = source, sink
        self.requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.session: Session | None = None

    def listen(self) -> None:
        """Take requests until the pipe closes; in a thread, so that closing is noticed during a cell."""
        for line in self.source:
            self.requests.put(canonical.parse(line))
        os._exit(0)

    def tell(self, message: Message) -> None:
        """Send a message to the parent."""
        self.sink.write(canonical.dumps(message) + b"\n")
        self.sink.flush()

    def work(self) -> None:
        """Answer requests in an endless loop."""
        while True:
            request = self.requests.get()
            try:
                self.tell(self.answer(request))
            except BrokenPipeError:
                os._exit(0)

    def answer(self, request: Message) -> Message:
        """Answer a request of the parent; an error becomes a message."""
        try:
            if request["do"] == "open":
                self.session = open_session(request)
                self.session.tell = self.tell
                return {"answer": "ready", "process": ledger.process()}
            if self.session is None:
                return refusal(UsageError("No study is open."))
            return self.session.run(request["stage"], request["cell"], request["seals"])
        except HalfulpError as error:
            return refusal(error)


def main() -> None:
    """Keep the real standard output for the conversation; whatever prints goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    worker = Worker(sys.stdin.buffer, sink)
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.work()


if __name__ == "__main__":
    main()
