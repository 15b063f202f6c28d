"""Measure the share of its steps that a low-precision run really takes: the gain, <u, d> / |d|**2.

u is the written update and d the proposed one, which is not observable when an optimizer steps narrow weights
itself. For Adam and AdamW it follows from the moments after the step, in float32; a write-back has it in its
telemetry. It is measured in the first steps, then in every sixteenth audited step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from halfulp.audit.meter.tensor import Watched
from halfulp.audit.ranks import world
from halfulp.audit.sources.states import groups_of
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.rules import decay_of, rule_of

FIRST, EACH = 4, 16


class Gain:
    """The mean gain of a run's steps."""

    def __init__(self) -> None:
        self._seen = 0
        self._sum, self._steps = 0.0, 0

    @property
    def mean(self) -> float | None:
        """The mean over the steps that were looked at, if there were any."""
        return self._sum / self._steps if self._steps else None

    def look(self, optimizer: torch.optim.Optimizer, seen: Sequence[Watched]) -> None:
        """Look at a step that is over, while the values before it are still there."""
        self._seen += 1
        if self._seen > FIRST and self._seen % EACH:
            return
        try:
            gain = _gain(optimizer, seen)
        except Exception:  # a state that only looks like Adam's: no gain, and the training is not harmed
            return
        if gain is not None and math.isfinite(gain):
            self._sum, self._steps = self._sum + gain, self._steps + 1


def _gain(optimizer: torch.optim.Optimizer, seen: Sequence[Watched]) -> float | None:
    """Return the gain of a step; None if it is unknown."""
    if isinstance(optimizer, WriteBack):
        return optimizer.events.gain if world() == 1 else None  # of shards it asks all ranks
    narrow = [w for w in seen if w.tensor.dtype.itemsize == 2 and not w.sharded]
    known = narrow if rule_of(optimizer) is not None else []
    groups = groups_of(optimizer)
    pairs = [p for w in known if (p := _products(optimizer, w, groups[w.tensor])) is not None]
    square = sum(p[1] for p in pairs)
    return sum(p[0] for p in pairs) / square if square > 0 else None


def _products(
    optimizer: torch.optim.Optimizer, w: Watched, group: dict[str, Any]
) -> tuple[float, float] | None:
    """<u, d> and |d|**2 of a tensor that Adam or AdamW has stepped; None of any other."""
    state = optimizer.state.get(w.tensor, {})
    if w.before is None or not {"step", "exp_avg", "exp_avg_sq"} <= set(state) or group.get("amsgrad"):
        return None
    (beta1, beta2), step = (float(b) for b in group["betas"]), float(state["step"])
    # Copies, of float32 moments too: what follows works in place, and the optimizer's own must stay.
    m, v = (state[name].detach().to(torch.float32, copy=True).flatten() for name in ("exp_avg", "exp_avg_sq"))
    before, after = w.before.float().flatten(), w.values().detach().float().flatten()  # narrow, so copies
    rate, decay = decay_of(optimizer, group)
    size = v.div_(1 - beta2**step).sqrt_().add_(float(group["eps"]))
    d = m.div_(1 - beta1**step).div_(size).mul_(-float(group["lr"])).sub_(before, alpha=rate * decay)
    return float(torch.dot(after.sub_(before), d)), float(torch.dot(d, d))
