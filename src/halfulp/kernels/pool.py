"""Ranges of tiles on plain threads.

Kernels release the interpreter lock, so ordinary threads run them side by side; results never
depend on how many there are. The count follows ``torch.get_num_threads()``, so one setting
governs both. Small jobs stay on the calling thread: handing work over costs tens of microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch

GRAIN = 128  # tiles, about 10**5 coordinates: less is not worth a thread

_pools: dict[int, ThreadPoolExecutor] = {}
# A forked child has the parent's executors but none of their threads.
os.register_at_fork(after_in_child=_pools.clear)


def run(kernel: Callable[..., Any], count: int, *args: Any, grain: int = GRAIN) -> list[Any]:
    """Call kernel(*args, start, stop) over [0, count), in ranges; what the calls returned."""
    threads = min(torch.get_num_threads(), max(count // grain, 1))
    if threads == 1:
        return [kernel(*args, 0, count)]
    bounds = [count * i // threads for i in range(threads + 1)]
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads - 1, thread_name_prefix="halfulp")
    rest = [_pools[threads].submit(kernel, *args, a, b) for a, b in pairwise(bounds[1:])]
    return [kernel(*args, bounds[0], bounds[1]), *(job.result() for job in rest)]
