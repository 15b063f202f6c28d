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
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}


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
    if rule_of(optimizer) is None:
        return None
    groups, decays = groups_of(optimizer), {id(g): decay_of(optimizer, g) for g in optimizer.param_groups}
    dot = square = 0.0
    for w in seen:
        if w.before is None or w.tensor.dtype.itemsize != 2 or w.sharded:
            continue
        group, state = groups[w.tensor], optimizer.state.get(w.tensor, {})
        if state.keys() >= MOMENTS and not group.get("amsgrad"):
            u, d = _written_and_proposed(w, w.before, state, group, decays[id(group)])
            dot, square = dot + float(torch.dot(u, d)), square + float(torch.dot(d, d))
    return dot / square if square > 0 else None


def _written_and_proposed(
    w: Watched, before: torch.Tensor, state: dict[str, Any], group: dict[str, Any], decay: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return u and d of a tensor that Adam or AdamW has stepped."""
    (beta1, beta2), step = map(float, group["betas"]), float(state["step"])
    # Copies, of float32 moments too: what follows works in place, and the optimizer's own must stay.
    m, v = [state[k].detach().to(torch.float32, copy=True).flatten() for k in ("exp_avg", "exp_avg_sq")]
    before, after = before.float().flatten(), w.whole().detach().float().flatten()  # narrow, so copies
    size = v.div_(1 - beta2**step).sqrt_().add_(float(group["eps"]))
    d = m.div_(1 - beta1**step).div_(size).mul_(-float(group["lr"])).sub_(before, alpha=decay[0] * decay[1])
    return after.sub_(before), d
