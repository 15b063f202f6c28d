"""Run cells in worker processes of this machine (`Local`), in this process (`Inline`), or on a Ray cluster.

An executor takes jobs and returns answers; it knows nothing of records or ledgers, which only the engine
writes. So the same cells leave the same records wherever they run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from halfulp import canonical, files
from halfulp.errors import HalfulpError, UsageError
from halfulp.study.protocol import Json
from halfulp.study.worker import Message, Session, limit_threads, open_session, refusal

LAST_LINES = 5


@dataclass(frozen=True)
class Opening:
    """The study, code and threads that a session is opened with."""

    out: Path
    seal: str
    code: str
    folder: Path | None
    threads: int
    replay: bool = False
    logs: Path | None = None
    on_gpu: bool = False
    """True if cells name a GPU as their device."""
    hashed: Mapping[str, Json] = field(default_factory=dict)
    """The data sets as this process hashed them, so that workers need not; see `provenance.hash_data`."""

    @functools.cached_property
    def gpus(self) -> int:
        """The number of GPUs of this machine that the cells may use, one worker each."""
        return gpu_count() if self.on_gpu else 0

    def session(self) -> Session:
        """Open a session in this process."""
        return Session(self.out, self.seal, self.code, self.folder, hashed=self.hashed, replay=self.replay)

    def message(self) -> Message:
        """Return this opening as a message for another process."""
        folder = str(self.folder.resolve()) if self.folder else ""
        return {
            "do": "open", "out": str(self.out.resolve()), "seal": self.seal, "code": self.code,
            "folder": folder, "hashed": dict(self.hashed), "replay": self.replay,
        }  # fmt: skip


class Executor(Protocol):
    """Something that runs cells."""

    capacity: int
    patience: float
    """For how many seconds a finished cell may wait for others, to be committed with them."""

    def submit(self, stage: str, cell: str, seals: dict[str, str]) -> None:
        """Start a cell; at most `capacity` cells may run at a time."""

    def wait(self, seconds: float) -> list[Message]:
        """Wait for answers, up to a time limit, and return those that came."""

    def close(self) -> None:
        """Stop everything, including running cells."""


def executor_kind(name: str) -> Callable[..., Executor]:
    """Return the executor of a name, to be opened with an opening and a number of workers."""
    kinds: dict[str, Callable[..., Executor]] = {"local": Local, "ray": Ray, "inline": Inline}
    if name not in kinds:
        raise UsageError(f"There is no executor {name[:40]!a}; known: {', '.join(kinds)}.")
    return kinds[name]


def default_workers(threads: int) -> int:
    """Return how many workers fit on the cores that this process may use."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return max(1, cores // threads)


def gpu_count() -> int:
    """Return how many GPUs torch sees."""
    import torch

    return torch.cuda.device_count()


def thread_variables(threads: int) -> dict[str, str]:
    """Return the environment of a worker: threads fixed before any library starts them, and hashing."""
    names = (
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS",
        "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS", "RAYON_NUM_THREADS",
    )  # fmt: skip
    fixed = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # the latter for deterministic sums
    return {name: str(threads) for name in names} | fixed


class Inline:
    """An executor that runs one cell after another in this process, for tests and debuggers."""

    capacity = 1
    patience = 0.0  # the next cell may take hours

    def __init__(self, opening: Opening, workers: int | None = None) -> None:
        self.session = opening.session()
        self.threads = limit_threads(opening.threads)
        self.jobs: list[tuple[str, str, dict[str, str]]] = []

    def submit(self, stage: str, cell: str, seals: dict[str, str]) -> None:
        """Queue a cell."""
        self.jobs.append((stage, cell, seals))

    def wait(self, seconds: float) -> list[Message]:
        """Run the queued cells and return their messages."""
        jobs, self.jobs = self.jobs, []
        answers = [self.session.run(*job) for job in jobs]
        return [canonical.parse(canonical.dumps(answer)) for answer in answers]  # as through a pipe

    def close(self) -> None:
        """Drop what is queued and restore the number of threads."""
        self.jobs.clear()
        limit_threads(self.threads)


class Local:
    """Worker processes that each run many cells; a worker that dies is replaced.

    Where cells use GPUs there is one worker per GPU, unless more are asked for, and each sees only one GPU.
    """

    patience = 0.1

    def __init__(self, opening: Opening, workers: int | None = None) -> None:
        self.opening = opening
        self.capacity = workers or opening.gpus or default_workers(opening.threads)
        self.selector = selectors.DefaultSelector()
        self.idle: list[_Process] = []
        self.busy: list[_Process] = []

    def submit(self, stage: str, cell: str, seals: dict[str, str]) -> None:
        """Send a cell to an idle process, or to a new one."""
        process = self.idle.pop() if self.idle else self._spawn()
        process.job = (stage, cell)
        self.busy.append(process)
        process.send({"do": "run", "stage": stage, "cell": cell, "seals": seals})

    def wait(self, seconds: float) -> list[Message]:
        """Return the messages that arrive within ``seconds``."""
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
        """End every process."""
        for process in self.busy:
            process.process.kill()
        for process in self.busy + self.idle:
            self.selector.unregister(process.output)
            process.end()
        self.busy, self.idle = [], []
        self.selector.close()

    def _spawn(self) -> _Process:
        used = [process.gpu for process in self.busy + self.idle]
        gpu = min(range(self.opening.gpus), key=used.count, default=None)
        process = _Process(self.opening, gpu)
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
        return [_lost(stage, cell, error)]


def _only(gpu: int | None) -> dict[str, str]:
    """Return what lets a process see one GPU alone, of those that this one sees."""
    if gpu is None:
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": given.split(",")[gpu].strip() if given else str(gpu)}


def _lost(stage: str, cell: str, error: str) -> Message:
    return {"answer": "lost", "stage": stage, "cell": cell, "error": error}


class _Process:
    """One worker process and the pipes to it."""

    def __init__(self, opening: Opening, gpu: int | None = None) -> None:
        self.gpu = gpu
        environment = os.environ | thread_variables(opening.threads) | _only(gpu)
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
        """Return what it said, and whether it can say more."""
        content = os.read(self.output.fileno(), 1 << 20)
        seen = len(self.buffer)
        self.buffer += content
        if b"\n" not in content:
            return [], bool(content)
        end = self.buffer.rindex(b"\n", seen) + 1
        lines = bytes(self.buffer[:end]).splitlines()
        del self.buffer[:end]
        return [canonical.parse(line) for line in lines], True

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


class Ray:
    """One task of a Ray cluster per cell; Ray does not retry, because the protocol decides that.

    Tasks are given JSON text and give JSON text back. The study's folder must be on a file system that all
    nodes see, and halfulp installed on them; a node whose halfulp differs is refused by its own session.
    ``RAY_ADDRESS`` names a cluster; without it one is started on this machine for the run.
    """

    patience = 0.1

    def __init__(self, opening: Opening, workers: int | None) -> None:
        try:
            ray = importlib.import_module("ray")
        except ImportError:
            raise UsageError("The ray executor needs Ray: pip install 'halfulp[ray]'.") from None
        self.ray: Any = ray
        self.opening = canonical.dumps(opening.message()).decode()
        self.started = not ray.is_initialized()
        if self.started:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            local: Message = {}
            if "RAY_ADDRESS" not in os.environ:
                cpus = (workers or opening.gpus or default_workers(opening.threads)) * opening.threads
                local = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
                local |= {"num_gpus": opening.gpus} if opening.gpus else {}
            ray.init(log_to_driver=False, configure_logging=False, **local)
        there = ray.cluster_resources()
        cpus, gpus = int(there.get("CPU", 1)), int(there.get("GPU", 0)) if opening.on_gpu else 0
        self.capacity = workers or gpus or max(1, cpus // opening.threads)
        self.task = ray.remote(
            num_cpus=opening.threads,
            num_gpus=min(1.0, gpus / self.capacity),  # workers that are asked for share GPUs
            max_retries=0,
            runtime_env={"env_vars": thread_variables(opening.threads)},
        )(run_in_ray)
        self.pending: dict[Any, tuple[str, str]] = {}

    def submit(self, stage: str, cell: str, seals: dict[str, str]) -> None:
        """Send a cell to the cluster."""
        job = canonical.dumps({"stage": stage, "cell": cell, "seals": seals}).decode()
        self.pending[self.task.remote(self.opening, job)] = (stage, cell)

    def wait(self, seconds: float) -> list[Message]:
        """Return the messages that arrive within ``seconds``."""
        references = list(self.pending)
        ready, _ = self.ray.wait(references, num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self.ray.wait(references, num_returns=len(references), timeout=0)
        return [self._answer(reference) for reference in ready]

    def _answer(self, reference: Any) -> Message:
        stage, cell = self.pending.pop(reference)
        try:
            answer: Message = canonical.parse(self.ray.get(reference))
        except self.ray.exceptions.RayError as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            return _lost(stage, cell, f"the Ray task was lost: {text[0]}")
        return answer

    def close(self) -> None:
        """Cancel what is pending; end a cluster that was started here."""
        for reference in self.pending:
            self.ray.cancel(reference, force=True)
        self.pending = {}
        if self.started:
            self.ray.shutdown()


def run_in_ray(opening: str, job: str) -> str:
    """Run a cell, in a process of Ray's."""
    try:
        request = canonical.parse(job)
        answer = _session(opening).run(request["stage"], request["cell"], request["seals"])
    except HalfulpError as error:
        answer = refusal(error)
    return canonical.dumps(answer).decode()


@functools.lru_cache(maxsize=1)
def _session(opening: str) -> Session:
    return open_session(canonical.parse(opening))
