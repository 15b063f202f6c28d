"""Measure the share of one step's proposed update that is written.

A ``WriteBack`` counts it itself; where its policy keeps what is not written (a carry, a master), all arrives.
A plain torch optimizer that updates 16-bit weights rounds inside its own arithmetic, which hides the proposed
update. So the same rule is stepped once more in float32, with the same gradients and states, on up to 65,536
evenly spaced coordinates of each such tensor. These rules work coordinate by coordinate, so the sample is
exact. Tensors with sparse gradients are left out, and named by the contract.

The share is ``<written, proposed> / |proposed|**2`` over all tensors. Stochastic rounding writes everything
in the mean, and one step is a sample of that: its standard error is given beside the share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from halfulp.contract.breaches import Trained
from halfulp.errors import UsageError
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.sharding import local

MOST = 2**16
"""Coordinates of each tensor that are sampled."""
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD,
)  # fmt: skip
PLAIN = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
"""Options of a group that choose an implementation and do not change the step."""


@dataclass(frozen=True)
class Arrival:
    """The share that one step wrote, its standard error, and the tensor with the smallest share."""

    share: float
    error: float
    least: str
    least_share: float

    def below(self, share: float) -> bool:
        """Return True if it is below a share by more than four standard errors."""
        return self.share + 4 * self.error < share


@dataclass(frozen=True)
class _Sums:
    """Sums over one step of one tensor; ``drawn`` counts the random draws, 0 without random rounding."""

    name: str
    written_proposed: float
    proposed_sq: float
    written_sq: float
    drawn: int = 0

    @property
    def variance(self) -> float:
        """Variance, by chance, of the product of the written and the proposed update."""
        missed = self.proposed_sq - 2 * self.written_proposed + self.written_sq
        return max(missed, 0) * self.proposed_sq / self.drawn if self.drawn else 0.0


class Shadow:
    """The float32 step that a plain optimizer would make of a sample of its 16-bit weights."""

    def __init__(self, optimizer: torch.optim.Optimizer, trained: list[Trained]) -> None:
        narrow = [h for h in trained if h.slot is None and h.narrow and h.p.grad is not None]
        self.left_out = {h.name for h in narrow if h.sparse}
        """The tensors that cannot be sampled, because their gradients are sparse."""
        narrow = [h for h in narrow if not h.sparse]
        refuse_unknown(optimizer, narrow)
        groups = {p: g for g in optimizer.param_groups for p in g["params"]}
        self._began = [(h, _sample(h.p), _stepped(optimizer, groups[h.p], h)) for h in narrow]

    def sums(self) -> list[_Sums]:
        """Compare with what the real step has written since."""
        sums = []
        for h, before, proposed in self._began:
            now = _sample(h.p)
            d, w = (proposed - before).double(), (now - before).double()
            sums.append(_Sums(h.name, float(d @ w), float(d @ d), float(w @ w)))
        return sums


def refuse_unknown(optimizer: torch.optim.Optimizer, narrow: list[Trained]) -> None:
    """Refuse an optimizer whose rule cannot be stepped on a sample."""
    if narrow and type(optimizer) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UsageError(
            f"arrives= cannot be measured for {type(optimizer).__name__} on {narrow[0].p.dtype} weights such "
            f"as {narrow[0].name!r}: it is for WriteBack, for float32 weights, and for torch's {known}. Use "
            "weights= or moving= instead."
        )


def arrival(optimizer: torch.optim.Optimizer, slots: list[Trained], shadow: Shadow | None) -> Arrival | None:
    """Measure the last step; None if nothing was proposed or nothing can be lost."""
    sums = [] if shadow is None else shadow.sums()
    if isinstance(optimizer, WriteBack):
        exposed = {h.slot.name: h.slot.policy for h in slots if h.slot is not None and h.keeps == "nothing"}
        for r in (r for r in optimizer.events.rows if r.name in exposed):
            drawn = r.numel if exposed[r.name].stochastic else 0
            sums.append(_Sums(r.name, r.arrived, r.proposal_sq, r.written_sq, drawn))
    sums = [s for s in sums if s.proposed_sq > 0]
    proposed = math.fsum(s.proposed_sq for s in sums)
    if not proposed:
        return None
    written = math.fsum(s.written_proposed for s in sums)
    error = math.sqrt(math.fsum(s.variance for s in sums)) / proposed
    least = min(sums, key=lambda s: s.written_proposed / s.proposed_sq)
    return Arrival(written / proposed, error, least.name, least.written_proposed / least.proposed_sq)


def _sample(x: torch.Tensor) -> torch.Tensor:
    flat = local(x.detach()).reshape(-1)
    return flat[:: max(1, -(-flat.numel() // MOST))].to(torch.float32, copy=True)


def _stepped(optimizer: torch.optim.Optimizer, group: dict[str, Any], h: Trained) -> torch.Tensor:
    """Step the sample of one tensor in float32, past all hooks."""
    weight = torch.nn.Parameter(_sample(h.p))
    assert h.p.grad is not None
    weight.grad = _sample(h.p.grad)
    options = {k: v for k, v in group.items() if k not in ("params", "param_names", "initial_lr")}
    options.update({k: v for k, v in PLAIN.items() if k in options})
    kind: Any = type(optimizer)
    shadow = kind([{**options, "params": [weight]}])
    if h.state:
        shadow.state[weight] = {
            kind: _sample(x) if isinstance(x, torch.Tensor) and x.shape == h.p.shape else _plain(x)
            for kind, x in h.state.items()
        }
    kind.step.__wrapped__(shadow)  # the method inside torch's own wrapper, which calls global hooks
    return weight.detach()


def _plain(x: Any) -> Any:
    """Copy a counter; in float32, in which it goes on counting."""
    return x.detach().to("cpu", torch.float32, copy=True) if isinstance(x, torch.Tensor) else x
