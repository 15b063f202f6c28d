"""Ranges of tiles on torch's own worker threads.

Kernels release the interpreter lock, so Python threads run them side by side; results never depend
on how many there are. The count follows ``torch.get_num_threads()``, so one setting governs both.

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
from functools import cache
from pathlib import Path
from typing import Any

import torch

GRAIN = 128  # tiles, about 10**5 coordinates: less is not worth a thread

_BLOCK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_pools: dict[int, ThreadPoolExecutor] = {}
_forked = False


def _leave_parent() -> None:
    global _forked
    _forked = True
    _pools.clear()


os.register_at_fork(after_in_child=_leave_parent)


def run(kernel: Callable[..., Any], count: int, *args: Any, grain: int = GRAIN) -> list[Any]:
    """Call kernel(*args, start, stop) over [0, count), in ranges; what the calls returned, in any order."""
    threads = min(torch.get_num_threads(), max(count // grain, 1))
    if threads == 1:
        return [kernel(*args, 0, count)]
    ranges = iter([(count * i // threads, count * (i + 1) // threads) for i in range(threads)])
    results: list[Any] = []
    errors: list[BaseException] = []

    def work(_: Any = None) -> None:
        try:
            for start, stop in ranges:  # each range goes to whoever asks first
                results.append(kernel(*args, start, stop))
        except BaseException as error:  # cannot pass through the team: raised below
            errors.append(error)

    parallel = None if _forked else _team()
    if parallel is not None:
        parallel(_BLOCK(work), None, threads, 0)
    else:
        if threads not in _pools:
            _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="halfulp")
        rest = [_pools[threads].submit(work) for _ in range(threads - 1)]
        work()
        for job in rest:
            job.result()
    if errors:
        raise errors[0]
    return results


@cache
def _team() -> Any:
    """``GOMP_parallel(block, data, threads, flags)`` of torch's OpenMP, if that has it."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            found = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            return None
        found.restype, found.argtypes = None, (_BLOCK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        return found
    return None
