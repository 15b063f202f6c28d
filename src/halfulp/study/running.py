"""Running one cell: what its function is given, and what must hold before it may start.

A `Session` lives in the process that runs cells. It trusts no one: it reads the sealed protocol itself,
checks that its own code is the code it is told, and refuses a cell unless every earlier stage is sealed,
so no coordinator (nor a hand that types a job) can start an outcome before the predictions are fixed.
"""

from __future__ import annotations

import base64
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from halfulp import canonical, documents, files
from halfulp.errors import DiskError, TamperingError, UsageError
from halfulp.study import evidence, ledger, loading
from halfulp.study import seal as seals
from halfulp.study.declaration import SealedStage, changes
from halfulp.study.outcomes import Outcomes
from halfulp.study.protocol import Config, Json, check_name
from halfulp.study.result import authorise
from halfulp.study.store import Store

Message = dict[str, Json]
PROGRESS_SECONDS = 0.5
DURABLE_SECONDS = 1.0


class Stopped(BaseException):
    """A cell was asked to stop and has just saved. Not an Exception, so that cells do not catch it."""


class Session:
    """The cells of one sealed study, in this process."""

    def __init__(self, out: Path, seal: str, code: str, folder: Path | None, *, replay: bool = False) -> None:
        self.store = Store(out)
        self.seal = seal
        self.sealed = self.store.read_seal(seal)
        self.protocol = self.store.read_protocol(self.sealed)
        source = loading.load_sealed(self.sealed["code"]["study"], self.store.study_file, folder)
        if code:
            _check_code(code, {"code": seals.as_sealed(self.sealed, source)}, self.sealed)
        self.study = source.study
        self.folder = folder
        self.replay = replay
        self.tell: Callable[[Message], None] = lambda message: None
        self._data: dict[str, Path] = {}
        self._seals: dict[tuple[str, str], Message] = {}  # those that were checked, by stage and digest
        self._evidence: dict[str, Outcomes] = {}
        self._settled: dict[str, bool] = {}  # stage -> whether it was authorised, as this process finds

    def run(self, stage: str, cell: str, stage_seals: Mapping[str, str]) -> Message:
        """Run a cell; the answer is ``finished``, ``failed``, ``stopped`` or ``refused``."""
        answer: Message = {"stage": stage, "cell": cell, "process": ledger.process()}
        try:
            running = CellRun(self, stage, cell, self._check_sealed(stage, cell, stage_seals))
        except (UsageError, TamperingError) as error:
            return answer | {"answer": "refused", "error": str(error), "exit_code": error.exit_code}
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
            return answer | {"answer": "refused", "error": str(error), "exit_code": error.exit_code}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return answer | {"answer": "failed", "error": text, "traceback": traceback.format_exc()}
        attached = {name: base64.b64encode(content).decode() for name, content in running.attached.items()}
        return answer | {"answer": "finished", "outcome": outcome, "attached": attached}

    def _check_sealed(self, stage: str, cell: str, given: Mapping[str, str]) -> dict[str, Message]:
        """The seals of all earlier stages, or a refusal."""
        if cell not in self.protocol.stage(stage).cells:
            raise UsageError(f"Stage {stage} of study {self.protocol.study} has no cell {cell[:120]!a}.")
        found: dict[str, Message] = {}
        for earlier in self.protocol.before(stage):
            if not self._authorised(earlier, found):
                continue
            if earlier.name not in given or not self.store.stage_seal_file(earlier.name).exists():
                raise UsageError(
                    f"Cell {stage}/{cell} may not start: {earlier.kind} stage {earlier.name} is not sealed."
                )
            found[earlier.name] = self._stage_seal(earlier.name, given[earlier.name])
        if not self._authorised(self.protocol.stage(stage), found):
            raise UsageError(f"Cell {stage}/{cell} may not start: its stage is not authorised.")
        return found

    def _authorised(self, stage: SealedStage, sealed: Mapping[str, Message]) -> bool:
        """Whether a stage's gates passed; worked out here, from the records of the stages before it."""
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

    def opened_after(self, name: str) -> str:
        """The stage that must be sealed before a cell may open this evidence; none by default."""
        return str(self._declared(name).get("after", ""))

    def _declared(self, name: str) -> Mapping[str, Json]:
        for one in self.protocol.evidence:
            if one["name"] == name:
                return one
        raise UsageError(f"The study declares no evidence {name[:120]!a}.")

    def evidence(self, name: str) -> Outcomes:
        """Evidence, checked once a process."""
        if name not in self._evidence:
            used = evidence.opened(self.store.folder, self._declared(name), self.sealed["evidence"][name])
            self._evidence[name] = used.outcomes()
        return self._evidence[name]

    def _stage_seal(self, stage: str, digest: str) -> Message:
        if (stage, digest) not in self._seals:
            content = self.store.read_stage_seal(stage, digest)
            if content["seal"] != self.seal:
                raise TamperingError(
                    f"{self.store.stage_seal_file(stage)} belongs to another seal of the study."
                )
            self._seals[stage, digest] = content
        return self._seals[stage, digest]

    def data(self, name: str) -> Path:
        """A data set, checked once a process."""
        if name not in self._data:
            if name not in self.protocol.data:
                raise UsageError(f"The study declares no data set {name[:120]!a}.")
            path = seals.locate(name, self.folder)
            if seals.data_identity(name, self.folder) != self.sealed["data"][name]:
                raise TamperingError(
                    f"{path} is not the data set {name} that was sealed: its SHA-256 differs."
                )
            self._data[name] = path
        return self._data[name]


class CellRun:
    """The :class:`~halfulp.study.protocol.Running` of one cell."""

    def __init__(self, session: Session, stage: str, cell: str, sealed: Mapping[str, Message]) -> None:
        self.name = cell
        self.config: Config = session.protocol.stage(stage).cells[cell]
        self.attached: dict[str, bytes] = {}
        self._session, self._stage, self._sealed = session, stage, sealed
        self._reads = session.protocol.stage(stage).reads
        self._checkpoint = session.store.checkpoint_file(stage, cell)
        self._told = self._saved = time.monotonic()

    def _record(self, stage: str, cell: str) -> Message:
        if stage not in self._reads:
            raise UsageError(f"Stage {self._stage} does not declare that it reads stage {stage[:120]!a}.")
        if cell not in self._sealed[stage]["records"]:
            raise UsageError(f"Stage {stage} has no cell {cell[:120]!a}.")
        return self._session.store.read_record(stage, cell, self._sealed[stage]["records"][cell])

    def evidence(self, name: str) -> Outcomes:
        after = self._session.opened_after(name)
        if after and after not in self._sealed:
            raise UsageError(
                f"Cell {self._stage}/{self.name} may not open evidence {name}: stage {after} is not sealed."
            )
        return self._session.evidence(name)

    def read(self, stage: str, cell: str) -> Mapping[str, Json]:
        outcome: Mapping[str, Json] = self._record(stage, cell)["outcome"]
        return outcome

    def read_bytes(self, stage: str, cell: str, name: str) -> bytes:
        return self._session.store.read_attached(stage, cell, name, self._record(stage, cell))

    def attach(self, name: str, content: bytes) -> None:
        check_name("attached file", name)
        self.attached[name] = bytes(content)

    def data(self, name: str) -> Path:
        return self._session.data(name)

    def save(self, state: bytes) -> None:
        if not self._session.replay:
            now = time.monotonic()
            durable = now - self._saved >= DURABLE_SECONDS  # a cell that saves often is not slowed down
            self._saved = now if durable else self._saved
            content = canonical.sha256(state).encode() + state
            files.put(self._checkpoint, content, self._session.store.work, durable=durable)
        if self._session.store.stop_file.exists():
            raise Stopped

    def load(self) -> bytes | None:
        if self._session.replay or not self._checkpoint.is_file():
            return None
        content = self._checkpoint.read_bytes()
        digest, state = content[:64], content[64:]
        return state if canonical.sha256(state).encode() == digest else None  # damaged: begin again

    def progress(self, done: float, total: float) -> None:
        now = time.monotonic()
        if total > 0 and now - self._told >= PROGRESS_SECONDS:
            self._told = now
            share = min(max(float(done) / float(total), 0.0), 1.0)
            self._session.tell(
                {"answer": "progress", "stage": self._stage, "cell": self.name, "share": share}
            )


def _check_code(expected: str, own: Message, sealed: Message) -> None:
    if seals.code_digest(own) != expected:
        lines = list(changes(sealed["code"], own["code"], "code"))
        raise TamperingError(
            f"The halfulp of this worker is not the one that runs the study; changed:\n{seals.listed(lines)}"
        )


def limit_threads(of_torch: int, of_numba: int) -> tuple[int, int]:
    """Set the threads of libraries that are loaded already; gives what they were."""
    import numba
    import torch

    before = torch.get_num_threads(), int(numba.get_num_threads())
    torch.set_num_threads(of_torch)
    numba.set_num_threads(min(of_numba, int(numba.config.NUMBA_NUM_THREADS)))
    return before
