"""Implement ``eco``: error feedback through an optimizer's first moment (arXiv 2601.22101).

The stored value is q' = Q(z), the error e = z - q'. Instead of keeping e, it is written into the
first moment m so that the next step brings it back. For Adam and AdamW, with c1 = 1 - b1**t and
D = sqrt(v / (1 - b2**t)) + eps, a step is -(lr / c1) m / D, and

    m <- m + (c1 / lr) (1 - 1 / b1) D e

For SGD with momentum b a step is -lr m, so that D = c1 = 1. A coordinate that stays frozen
without decay ends with m / b1: its momentum grows until it crosses half a gap.

An error that the moment cannot hold is not fed back: where the sum is not finite (at a learning rate of 1e-40
the factor alone exceeds float32), m stays as it is. The same holds at learning rate zero.

Not every optimizer has a suitable moment. Lion steps by a sign, so the size of its moment has no effect;
Adagrad and RMSprop without momentum have none; Nesterov's look-ahead needs another factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.kernels import Carry, Written
from halfulp.numbers.grids import Grid
from halfulp.writeback.policies.policy import Kernel, Policy, Step
from halfulp.writeback.rules import decouples
from halfulp.writeback.sharding import local


@dataclass(frozen=True)
class ECO(Policy):
    """Error feedback: write Q(z) and add the error to the first moment (arXiv 2601.22101, algorithm 3).

    Args:
        rounding: How Q rounds: ``nearest`` or ``stochastic``.
        decay_exact: Multiply the feedback by 1 - lr * weight_decay, which makes decoupled decay exact.

    Raises:
        UsageError: If an option has another value.

    >>> ECO(decay_exact=True).spec
    'eco(rounding=nearest,decay_exact=True)'
    """

    name: ClassVar[str] = "eco"
    words: ClassVar[str] = "ECO"
    offers: ClassVar[tuple[tuple[str, float], ...]] = (("eco", 0.0),)
    rounding: Literal["nearest", "stochastic"] = "nearest"
    decay_exact: bool = False

    @property
    def stochastic(self) -> bool:  # type: ignore[override]  # an option here
        """Return True if the rounding is stochastic."""
        return self.rounding == "stochastic"

    @property
    def kernel(self) -> Kernel:  # type: ignore[override]  # by its options
        """Return how the fused pass makes this policy."""
        return Kernel(mode=self.rounding, keeps="error", decay_exact=self.decay_exact)

    def check(self, grid: Grid, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Refuse an optimizer without momentum, or without decoupled decay where it is asked for."""
        check_moments(optimizer, group)
        if self.decay_exact and not decouples(optimizer, group):
            raise UsageError(
                "eco's decay_exact is for decoupled weight decay, which "
                f"{type(optimizer).__name__} does not have: use AdamW."
            )

    def after(self, step: Step) -> Written:
        """Round, and feed the rounding error back into the momentum."""
        error = torch.empty_like(step.z, memory_format=torch.contiguous_format).zero_()
        written = step.write(self.rounding, carry=Carry(error, add=False))
        step.finish()
        feed_back(error, step.group, step.moments, decay_exact=self.decay_exact)
        return written


def check_moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Refuse an optimizer whose first moment cannot carry the error."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        if float(group["betas"][0]) <= 0:
            raise UsageError(
                f"eco feeds errors back through {kind}'s first moment, which betas[0] = 0 removes: use "
                "kahan, master or sr."
            )
        return
    if isinstance(optimizer, torch.optim.SGD):
        if group["momentum"] > 0 and not group["nesterov"]:
            return
        raise UsageError(
            "eco needs SGD with momentum and without nesterov; found "
            f"momentum={group['momentum']}, nesterov={group['nesterov']}."
        )
    raise UsageError(
        f"eco does not know a first moment of {kind} through which an error can be fed back: it works with "
        "Adam, AdamW and SGD with momentum. Use kahan, master or sr with this optimizer."
    )


def _root(v: torch.Tensor) -> torch.Tensor:
    """Compute correctly rounded square roots, as in the one-pass step; torch's on a CPU are not."""
    if v.device.type != "cpu":
        return v.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(v.detach().numpy())))  # of a 0-d array it is no array


def _like(v: torch.Tensor, x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=v.dtype, device=v.device)


def _denominator(group: dict[str, Any], moments: dict[str, Any], t: float, b2: float) -> torch.Tensor:
    """Return D, which Adam divides its first moment by; a new tensor."""
    v = moments["max_exp_avg_sq"] if group.get("amsgrad") else moments["exp_avg_sq"]
    return _root(local(v)).div_(_like(v, math.sqrt(1.0 - b2**t))).add_(_like(v, group["eps"]))


@torch.no_grad()
def step_of_moment(group: dict[str, Any], moments: dict[str, Any]) -> torch.Tensor | float:
    """Return lr / (c1 D), by which a step moves a weight for a first moment of one; lr without Adam's D."""
    lr = float(group["lr"])
    if "exp_avg" not in moments:
        return lr
    b1, b2 = (float(b) for b in group["betas"])
    t = float(moments["step"])
    d = _denominator(group, moments, t, b2)
    return torch.div(_like(d, lr / (1.0 - b1**t)), d)


@torch.no_grad()
def feed_back(
    error: torch.Tensor, group: dict[str, Any], moments: dict[str, Any], *, decay_exact: bool = False
) -> None:
    """Add the error to the first moment where it stays finite; do nothing at learning rate zero."""
    lr = float(group["lr"])
    m = moments.get("exp_avg", moments.get("momentum_buffer"))
    if lr == 0.0 or m is None:
        return
    m = local(m)
    decay = 1.0 - lr * float(group["weight_decay"]) if decay_exact else 1.0
    if "exp_avg" in moments:
        b1, b2 = (float(b) for b in group["betas"])
        t = float(moments["step"])
        d = _denominator(group, moments, t, b2)
        factor = (1.0 - b1**t) / lr * (1.0 - 1.0 / b1) * decay
        fed = m + d.mul_(error).mul_(_like(d, factor))
    else:
        factor = float(_like(m, 1.0 / lr * (1.0 - 1.0 / group["momentum"]) * decay))
        fed = m.add(error, alpha=factor)
    m.copy_(torch.where(torch.isfinite(fed), fed, m))
