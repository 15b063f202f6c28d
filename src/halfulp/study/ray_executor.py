"""The same cells as tasks of a Ray cluster (extra ``ray``).

Tasks are given JSON text and give JSON text back. The study's folder must be on a file system that all
nodes see, and halfulp installed on them; a node whose halfulp differs is refused by its own session.
``RAY_ADDRESS`` names a cluster; without it one is started on this machine for the run.
"""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any

from halfulp import canonical
from halfulp.errors import HalfulpError, UsageError
from halfulp.study.executor import Opening, default_workers, thread_variables
from halfulp.study.running import Message, Session, limit_threads


class Ray:
    """One task a cell; Ray does not retry, because the protocol decides that."""

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
                cpus = (workers or default_workers(opening.threads)) * opening.threads
                local = {"address": "local", "num_cpus": cpus, "include_dashboard": False}
            ray.init(log_to_driver=False, configure_logging=False, **local)
        cpus = int(ray.cluster_resources().get("CPU", 1))
        self.capacity = workers or max(1, cpus // opening.threads)
        self.task = ray.remote(
            num_cpus=opening.threads,
            max_retries=0,
            runtime_env={"env_vars": thread_variables(opening.threads)},
        )(run_job)
        self.pending: dict[Any, tuple[str, str]] = {}

    def submit(self, stage: str, cell: str, seals: dict[str, str]) -> None:
        job = canonical.dumps({"stage": stage, "cell": cell, "seals": seals}).decode()
        self.pending[self.task.remote(self.opening, job)] = (stage, cell)

    def wait(self, seconds: float) -> list[Message]:
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
            return {
                "answer": "lost",
                "stage": stage,
                "cell": cell,
                "error": f"the Ray task was lost: {text[0]}",
            }
        return answer

    def close(self) -> None:
        for reference in self.pending:
            self.ray.cancel(reference, force=True)
        self.pending = {}
        if self.started:
            self.ray.shutdown()


def run_job(opening: str, job: str) -> str:
    """A cell, in a process of Ray's."""
    try:
        asked = canonical.parse(job)
        answer = _session(opening).run(asked["stage"], asked["cell"], asked["seals"])
    except HalfulpError as error:
        answer = {"answer": "refused", "error": str(error), "exit_code": error.exit_code}
    return canonical.dumps(answer).decode()


@functools.lru_cache(maxsize=1)
def _session(opening: str) -> Session:
    given = canonical.parse(opening)
    folder = Path(given["folder"]) if given["folder"] else None
    session = Session(Path(given["out"]), given["seal"], given["code"], folder, replay=given["replay"])
    limit_threads(session.protocol.threads, session.protocol.threads)
    return session
