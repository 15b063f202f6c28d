"""Error feedback through an optimizer's first moment (ECO, arXiv 2601.22101).

The stored value is q' = Q(z), the error e = z - q'. Instead of keeping e, it is written into the
first moment m so that the next step brings it back. For Adam and AdamW, with c1 = 1 - b1**t and
D = sqrt(v / (1 - b2**t)) + eps, a step is -(lr / c1) m / D, and

    m <- m + (c1 / lr) (1 - 1 / b1) D e

For SGD with momentum b a step is -lr m, so that D = c1 = 1. A coordinate that stays frozen
without decay ends with m / b1: its momentum grows until it crosses half a gap.

Not every optimizer has such a moment. Lion's step is a sign, so a moment of any size brings back
the same; Adagrad and RMSprop without momentum have none; Nesterov's look-ahead needs another factor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.writeback.sharding import local


def check_moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Refuse an optimizer through which no error can be fed back."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        if float(group["betas"][0]) <= 0:
            raise UsageError(
                f"eco feeds errors back through {kind}'s first moment, which betas[0] = 0 removes."
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
    """Square roots, correctly rounded as in the one-pass step: torch's own on a CPU are not."""
    if v.device.type != "cpu":
        return v.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(v.detach().numpy())))  # of a 0-d array it is no array


def _like(v: torch.Tensor, x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=v.dtype, device=v.device)


@torch.no_grad()
def feed_back(
    error: torch.Tensor, group: dict[str, Any], moments: dict[str, Any], *, decay_exact: bool = False
) -> None:
    """Add the error to the first moment; a step at rate zero has nothing to bring back and no effect."""
    lr = float(group["lr"])
    if lr == 0.0:
        return
    decay = 1.0 - lr * float(group["weight_decay"]) if decay_exact else 1.0
    if "exp_avg" in moments:
        b1, b2 = (float(b) for b in group["betas"])
        t = float(moments["step"])
        v = moments["max_exp_avg_sq"] if group.get("amsgrad") else moments["exp_avg_sq"]
        d = _root(local(v)).div_(_like(v, math.sqrt(1.0 - b2**t))).add_(_like(v, group["eps"]))
        factor = (1.0 - b1**t) / lr * (1.0 - 1.0 / b1) * decay
        local(moments["exp_avg"]).add_(d.mul_(error).mul_(_like(v, factor)))
    elif moments.get("momentum_buffer") is not None:
        b = group["momentum"]
        local(moments["momentum_buffer"]).add_(error, alpha=1.0 / lr * (1.0 - 1.0 / b) * decay)
