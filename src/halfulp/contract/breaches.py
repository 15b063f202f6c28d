"""Find out what an optimizer holds: the dtype, states and master of each parameter that it updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from halfulp.audit.sources.names import name_parameters
from halfulp.contract.requirements import Terms
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.sharding import local
from halfulp.writeback.slot import Slot

FIX = "hu.AdamW(model.named_parameters(), lr=...) or hu.WriteBack(optimizer, 'bf16', model=model)"


@dataclass(frozen=True)
class Breach:
    """One term that does not hold."""

    term: str
    """Its name, such as ``"weights"``."""
    where: str
    """The parameter or state."""
    found: str
    """The actual state, in words."""
    fix: str


@dataclass(frozen=True)
class Trained:
    """One parameter of an optimizer."""

    name: str
    p: torch.Tensor
    slot: Slot | None
    state: Mapping[str, Any]

    @property
    def updated_in(self) -> torch.dtype:
        """The dtype in which its update is computed: a write-back gives the optimizer float32."""
        return self.p.dtype if self.slot is None else torch.promote_types(self.p.dtype, torch.float32)

    @property
    def narrow(self) -> bool:
        """True if the stored values have fewer digits than float32."""
        return self.slot is not None or _digits(self.p.dtype) < _digits(torch.float32)

    @property
    def sparse(self) -> bool:
        """True if its gradient is sparse."""
        return self.p.grad is not None and local(self.p.grad).layout != torch.strided

    @property
    def keeps(self) -> str:
        """The place where a write-back keeps updates that it does not write: ``carry``, ``master``, ..."""
        kernel = None if self.slot is None else self.slot.policy.kernel
        return "nothing" if kernel is None or kernel.partial else kernel.keeps


def parameters(optimizer: torch.optim.Optimizer, models: list[torch.nn.Module]) -> list[Trained]:
    """List the trained parameters of an optimizer and the states that it keeps for each."""
    managed = optimizer.slots if isinstance(optimizer, WriteBack) else []
    slots: dict[torch.Tensor, Slot] = {slot.p: slot for slot in managed}
    names = name_parameters(optimizer, models, search=not models)
    trained = []
    for p, naming in names.items():
        if p.is_floating_point() and (p.requires_grad or p.grad is not None):
            slot = slots.get(p)
            kept = optimizer.state.get(p if slot is None else slot.stepped, {})
            trained.append(Trained(naming.name, p, slot, dict(_flat(kept))))
    return trained


def breaches(trained: list[Trained], terms: Terms) -> Iterator[Breach]:
    """Find breaches of dtypes and masters. States exist after the first step, or once they are loaded."""
    for h in trained:
        if not _enough(h.updated_in, terms.weights):
            yield Breach("weights", h.name, f"updated in {_name(h.updated_in)}", f"{FIX}, or float32 weights")
        if terms.masters is True and h.narrow and h.keeps not in ("master", "remainder"):
            kind = _name(h.p.dtype) if h.slot is None else f"{h.slot.grid.name} by {h.slot.policy.name}"
            fix = "hu.WriteBack(optimizer, 'bf16', 'master', model=model), or float32 weights"
            yield Breach("masters", h.name, f"stored as {kind}, with no float32 master", fix)
        if isinstance(terms.masters, str) and h.narrow and h.state:
            yield from _master(h, terms.masters)
        for kind, x in h.state.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point() and not _enough(x.dtype, terms.states):
                limit = f": a counter stops at {_stops(x.dtype)}" if x.numel() == 1 else ""
                fix = f"keep {kind} in {terms.states}"
                yield Breach("states", f"{kind} of {h.name}", f"in {_name(x.dtype)}{limit}", fix)


def copy_breaches(also: Mapping[str, torch.nn.Module], terms: Terms) -> Iterator[Breach]:
    """Find averages and other copies that are kept in a dtype less precise than ``states``."""
    for label, module in also.items():
        for name, x in module.state_dict().items():
            if isinstance(x, torch.Tensor) and x.is_floating_point() and not _enough(x.dtype, terms.states):
                fix = f"keep the copy in {terms.states}: an average in 16 bits stops following"
                yield Breach("states", f"{label}.{name}", f"kept in {_name(x.dtype)}", fix)


def _master(h: Trained, name: str) -> Iterator[Breach]:
    """Check a master that an optimizer keeps in its state under a name of its own."""
    master = h.state.get(name)
    if not isinstance(master, torch.Tensor):
        fix = "a resume must load it, or begin it anew from the weights"
        yield Breach("masters", h.name, f"no state {name!r}: the master is missing", fix)
    elif not _enough(master.dtype, "float32"):
        yield Breach("masters", h.name, f"the master {name!r} is {_name(master.dtype)}", "keep it in float32")
    elif master.shape != h.p.shape or not torch.equal(local(master).to(h.p.dtype), local(h.p.detach())):
        fix = "load weights and masters from one checkpoint, or begin the masters anew from the weights"
        yield Breach("masters", h.name, f"the master {name!r} is not the weight when rounded", fix)


def _flat(state: Any) -> Iterator[tuple[str, Any]]:
    for kind, x in state.items() if isinstance(state, Mapping) else ():
        if isinstance(x, Mapping):
            yield from _flat(x)
        else:
            yield str(kind), x


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


def _enough(dtype: torch.dtype, least: str | None) -> bool:
    """Return True if a dtype has the digits and the range of the required one, if there is one."""
    if least is None:
        return True
    mine, theirs = torch.finfo(dtype), torch.finfo(getattr(torch, least))
    return mine.eps <= theirs.eps and mine.max >= theirs.max


def _stops(dtype: torch.dtype) -> int:
    """Return the number at which counting by one stops: there, 1 is half the gap and the tie is even."""
    return round(2 / torch.finfo(dtype).eps)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
