"""Find step counters that are kept in 16 bits: how far they can count, and which have stopped.

A whole number and one more are two values of bfloat16 up to 256, and of float16 up to 2048; from there on
``step += 1`` changes nothing. Then whatever depends on the count stands still, such as Adam's bias correction
or a schedule. An audit with ``states=True`` follows such numbers as it does moments
(:mod:`~halfulp.audit.sources.tracked`). A counter is recognised here by its changes: each of them is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from halfulp.text import count, shown
from halfulp.trace import Recorded


@dataclass(frozen=True, kw_only=True)
class Counter:
    """The counters of one name, one for each tensor."""

    role: str
    dtype: str
    tensors: int
    stopped: int
    """The number of tensors whose counter can no longer increase."""
    since: int | None
    """The first step that one of the counters missed."""

    @property
    def most(self) -> int:
        """The largest count that the dtype can reach."""
        return int(2 / torch.finfo(getattr(torch, self.dtype)).eps)

    @property
    def words(self) -> str:
        """Describe the counter in a sentence."""
        if not self.stopped:
            said = f"counts steps in {self.dtype}, which ends at {self.most:,}"
        else:
            said = (
                f"STOPPED at {self.most:,} in {self.stopped} of {count(self.tensors, 'tensor')}, from step "
                f"{self.since} on: {self.dtype} has no {self.most + 1:,}. What depends on it, such as a bias "
                "correction or a schedule, stands still"
            )
        return f"{shown(self.role)}: {said}. Keep it in float32, or as an integer."


def counters(trace: Recorded) -> list[Counter]:
    """Return the counters of a run's optimizers, as far as they were followed."""
    each = (_counter(role, beside) for role, beside in trace.roles.items() if beside.recorded)
    return [c for c in each if c is not None]


def _counter(role: str, beside: Recorded) -> Counter | None:
    """Return a role as a counter, if it is one."""
    dtypes = {str(t["dtype"]) for t in beside.tensors}
    if any(t["numel"] != 1 for t in beside.tensors) or len(dtypes) != 1:
        return None
    rows = beside.scan("grids", "step", "tensor", "frozen")
    proposed = np.repeat(beside.scan("tensors", "proposal_sq")["proposal_sq"], len(beside.grids))
    moved = rows["frozen"] == 0
    if (moved & (proposed != 1)).any():
        return None
    step, tensor = rows["step"], rows["tensor"]
    moved_last = np.zeros(len(beside.manifest["tensors"]), dtype=np.int64)
    np.maximum.at(moved_last, tensor[moved], step[moved])
    after = step > moved_last[tensor]
    since = int(step[after].min()) if after.any() else None
    return Counter(
        role=role,
        dtype=dtypes.pop(),
        tensors=len(beside.tensors),
        stopped=len(np.unique(tensor[after])),
        since=since,
    )
