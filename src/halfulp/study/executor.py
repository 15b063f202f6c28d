"""Where cells run: worker processes of this machine (`Local`), or this very process (`Inline`).

An executor takes jobs and gives answers; it knows nothing of records or ledgers, which only the engine
writes. So the same cells leave the same records wherever they ran.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from halfulp import canonical, files
from halfulp.errors import UsageError
from halfulp.study.running import Message, Session, limit_threads

NAMES = ("local", "ray", "inline")
LAST_LINES = 5


@dataclass(frozen=True)
class Opening:
    """What a session is opened with."""

    out: Path
    seal: str
    code: str
    folder: Path | None
    threads: int
    replay: bool = False
    logs: Path | None = None

    def session(self) -> Session:
        """A session in this process."""
        return Session(self.out, self.seal, self.code, self.folder, replay=self.replay)

    def message(self) -> Message:
        """The same, for another process."""
        folder = str(self.folder.resolve()) if self.folder else ""
        return {
            "do": "open", "out": str(self.out.resolve()), "seal": self.seal, "code": self.code,
            "folder": folder, "replay": self.replay,
        }  # fmt: skip


class Executor(Protocol):
    """Something that runs cells."""

    capacity: int
    patience: float
    """For how many seconds a finished cell may wait for others, to be committed with them."""

    def submit(self, stage: str, cell: str, seals: dict[str, str]) -> None:
        """Begin a cell; at most `capacity` at a time."""

    def wait(self, seconds: float) -> list[Message]:
        """The answers that came, after at most so long."""

    def close(self) -> None:
        """End everything, running cells included."""


def open_executor(name: str, opening: Opening, workers: int | None) -> Executor:
    """An executor by name."""
    if name == "local":
        return Local(opening, workers)
    if name == "inline":
        return Inline(opening)
    if name == "ray":
        from halfulp.study.ray_executor import Ray

        return Ray(opening, workers)
    raise UsageError(f"There is no executor {name[:40]!a}; known: {', '.join(NAMES)}.")


def default_workers(threads: int) -> int:
    """As many as fit on the cores that this process may use."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return max(1, cores // threads)


def thread_variables(threads: int) -> dict[str, str]:
    """The environment of a worker: threads fixed before any library starts them, hashing fixed too."""
    names = (
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
        "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS", "RAYON_NUM_THREADS",
    )  # fmt: skip
    return {name: str(threads) for name in names} | {"PYTHONHASHSEED": "0"}


class Inline:
    """One cell after the other in this process: for tests and debuggers."""

    capacity = 1
    patience = 0.0  # the next cell may take hours

    def __init__(self, opening: Opening) -> None:
        self.session = opening.session()
        self.threads = limit_threads(opening.threads, opening.threads)
        self.jobs: list[tuple[str, str, dict[str, str]]] = []

    def submit(self, stage: str, cell: str, seals: dict[str, str]) -> None:
        self.jobs.append((stage, cell, seals))

    def wait(self, seconds: float) -> list[Message]:
        jobs, self.jobs = self.jobs, []
        answers = [self.session.run(*job) for job in jobs]
        return [
            canonical.parse(canonical.dumps(answer)) for answer in answers
        ]  # as if it had come through a pipe

    def close(self) -> None:
        self.jobs.clear()
        limit_threads(*self.threads)


class Local:
    """Worker processes that stay for many cells; one that dies is replaced."""

    patience = 0.1

    def __init__(self, opening: Opening, workers: int | None = None) -> None:
        self.opening = opening
        self.capacity = workers or default_workers(opening.threads)
        self.selector = selectors.DefaultSelector()
        self.idle: list[_Process] = []
        self.busy: list[_Process] = []

    def submit(self, stage: str, cell: str, seals: dict[str, str]) -> None:
        process = self.idle.pop() if self.idle else self._spawn()
        process.job = (stage, cell)
        self.busy.append(process)
        process.send({"do": "run", "stage": stage, "cell": cell, "seals": seals})

    def wait(self, seconds: float) -> list[Message]:
        answers: list[Message] = []
        for key, _ in self.selector.select(seconds if self.busy else 0):
            process: _Process = key.data
            messages, alive = process.receive()
            for message in messages:
                if message["answer"] == "ready":
                    continue
                answers.append(message)
                if message["answer"] != "progress" and process in self.busy:
                    process.job = None
                    self.busy.remove(process)
                    self.idle.append(process)
            if not alive:
                answers += self._lost(process)
        return answers

    def close(self) -> None:
        for process in self.busy:
            process.kill()
        for process in self.busy + self.idle:
            self.selector.unregister(process.output)
            process.end()
        self.busy, self.idle = [], []
        self.selector.close()

    def _spawn(self) -> _Process:
        process = _Process(self.opening)
        self.selector.register(process.output, selectors.EVENT_READ, process)
        process.send(self.opening.message())
        return process

    def _lost(self, process: _Process) -> list[Message]:
        self.selector.unregister(process.output)
        error = process.end()
        if process in self.idle:
            self.idle.remove(process)
            return []
        self.busy.remove(process)
        assert process.job is not None
        stage, cell = process.job
        return [{"answer": "lost", "stage": stage, "cell": cell, "error": error}]


class _Process:
    """One worker process and the pipes to it."""

    def __init__(self, opening: Opening) -> None:
        environment = os.environ | thread_variables(opening.threads)
        log: IO[bytes] | int = subprocess.DEVNULL
        self.log: Path | None = None
        if opening.logs is not None:
            files.make_folder(opening.logs)
            self.log = opening.logs / f"worker-{os.getpid()}-{len(list(opening.logs.iterdir()))}.log"
            log = open(self.log, "wb")  # noqa: SIM115  # closed below, once the child has it
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "halfulp.study.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )  # fmt: skip
        if not isinstance(log, int):
            log.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.buffer = bytearray()
        self.job: tuple[str, str] | None = None

    def send(self, message: Message) -> None:
        try:
            self.input.write(canonical.dumps(message) + b"\n")
            self.input.flush()
        except BrokenPipeError:
            return  # it is dead; its closed output tells

    def receive(self) -> tuple[list[Message], bool]:
        """What it said, and whether it can say more."""
        content = os.read(self.output.fileno(), 1 << 20)
        seen = len(self.buffer)
        self.buffer += content
        if b"\n" not in content:
            return [], bool(content)
        end = self.buffer.rindex(b"\n", seen) + 1
        lines = bytes(self.buffer[:end]).splitlines()
        del self.buffer[:end]
        return [canonical.parse(line) for line in lines], True

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> str:
        """Close the pipes, wait, and say how it ended."""
        with contextlib.suppress(BrokenPipeError):
            self.input.close()
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.output.close()
        if code < 0:
            hint = "; was memory short?" if -code == signal.SIGKILL else ""
            ended = f"the worker process was killed by signal {-code} ({signal.Signals(-code).name}){hint}"
        else:
            ended = f"the worker process ended with exit code {code}"
        return ended + self._tail()

    def _tail(self) -> str:
        if self.log is None or not self.log.exists():
            return ""
        lines = self.log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:]
        return f"; its last lines: {' | '.join(lines)}" if lines else ""
