"""Ranges of tiles on torch's own worker threads.

Results never depend on how many threads there are. The count follows ``torch.get_num_threads()``, so one
setting governs both.

Between two torch operations the workers of its OpenMP team do not sleep: they spin, each on a
core, for a few milliseconds. Threads of ours would have to share those cores with them, and gain
nothing (measured: 1.0x from a second thread on two cores). So a kernel is given to the team itself,
by the entry point that compiled ``#pragma omp parallel`` blocks call: its workers are awake and
start at once (2.0x). Plain threads do the work where torch has no such team (another OpenMP, macOS),
and in a forked child, which has the parent's teams but none of their threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from halfulp.kernels.team import launcher

GRAIN = 32  # tiles, about 25,000 coordinates: less is not worth a thread
FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
ALONE = (0, 0, 0)

_pools: dict[int, ThreadPoolExecutor] = {}
_forked = False


def _leave_parent() -> None:
    global _forked
    _forked = True
    _pools.clear()


os.register_at_fork(after_in_child=_leave_parent)


def run(kernel: Any, count: int, *args: Any, grain: int = GRAIN) -> int:
    """Call kernel(*args, start, stop) over [0, count), in ranges; the sum of what the calls returned."""
    launch, threads = launcher(kernel), min(torch.get_num_threads(), max(count // grain, 1))
    if threads == 1:
        parts = [launch(ALONE, 1, 0, count, *args)]
    elif not _forked and (team := _team()) != ALONE:
        parts = [launch(team, threads, 0, count, *args)]
    else:
        if threads not in _pools:
            _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="halfulp")
        ends = [count * i // threads for i in range(threads + 1)]
        jobs = [partial(launch, ALONE, 1, *ends[i : i + 2], *args) for i in range(threads)]
        rest = [_begun(_pools[threads], job) for job in jobs[1:]]
        parts = [jobs[0](), *(result() for result in rest)]
    if any(failed for _, failed in parts):
        raise MemoryError("a kernel could not have the memory for its tile.")
    return sum(total for total, _ in parts)


def _begun(pool: ThreadPoolExecutor, job: Callable[[], Any]) -> Callable[[], Any]:
    """What gives the result of a job that a pool is at; or the job itself, where the interpreter is ending: a
    thread of the user's may still train then, but a pool takes no more."""
    try:
        return pool.submit(job).result
    except RuntimeError:
        return job


@cache
def _team() -> tuple[int, ...]:
    """The addresses of torch's OpenMP that :func:`~halfulp.kernels.team.fork` takes, if it has them."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return ALONE
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            opened = ctypes.CDLL(str(library))
            found = [getattr(opened, name) for name in FUNCTIONS]
        except (OSError, AttributeError):
            return ALONE
        return tuple(ctypes.cast(f, ctypes.c_void_p).value or 0 for f in found)
    return ALONE
