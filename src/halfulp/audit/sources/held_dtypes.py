"""Record the dtypes that an optimizer really holds: of parameters, gradients and states.

A run described as bfloat16 may keep its moments in float32, and one "with float32 optimizer" may not. The
dtypes are read after the first audited step, when the states exist.

Some optimizers keep in a state what 16-bit weights do not hold: masters (TransformerEngine's ``FusedAdam``),
the rest of a sum (torch-optimi, pytorch_optimizer), the bits that a cast drops (heavyball, FlashOptim). A
stored value that stays is no loss there. Such a state is wider than the weights and a cast of it gives them
in every bit, or it has a name that :data:`KEEPS` knows and a value for each weight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from halfulp.audit.meter.tensor import gradient_of
from halfulp.audit.ranks import rank
from halfulp.audit.sinks import manifest
from halfulp.audit.sources.caller import caller_of
from halfulp.audit.sources.names import writable
from halfulp.audit.sources.states import flat, narrow_scalar, role_name, wrapped
from halfulp.text import tell
from halfulp.verdicts import held as verdict_held
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.sharding import local

Sizes = dict[str, int]
"""Values by dtype."""
LONGEST = 200
"""Characters of a state's name in a manifest."""


KEEPS = re.compile(r"master|kahan_comp|param::ecc|error_bits")
"""Names of states that keep what a weight's dtype does not hold, of other people's optimizers."""


class OptimizerNotes:
    """Note for the manifest what the optimizers of a run are, and which dtypes they hold."""

    def __init__(self) -> None:
        self.announces = False
        """True to report on standard error, after the first step, what they hold."""
        self._seen: list[torch.optim.Optimizer] = []
        self._holds: dict[torch.optim.Optimizer, dict[str, Any]] = {}
        self._admits: dict[torch.optim.Optimizer, list[str]] = {}
        """The policies that would take each of them; to ask them all takes a while."""
        self._gradients: Sizes = {}
        self.caller: dict[str, Any] = {}
        """The caller that steps the first of them."""

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer."""
        if optimizer not in self._seen:
            self._seen.append(optimizer)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients before its first step, which may drop them."""
        if optimizer in self._seen and optimizer not in self._holds:
            self._gradients = gradients(optimizer)
            self.caller = self.caller or caller_of(optimizer)

    def after(self, optimizer: torch.optim.Optimizer) -> bool:
        """Look at what it holds once its first step is over; whether that is new."""
        if optimizer in self._holds or optimizer not in self._seen:
            return False
        holds = held(optimizer, self._gradients or gradients(optimizer))  # or a closure's
        holds["states"] = {_written(kind): sizes for kind, sizes in holds["states"].items()}
        self._holds[optimizer] = holds
        return True

    def described(self) -> list[dict[str, Any]]:
        """Return what a manifest says of them."""
        made = []
        for o in self._seen:
            if o not in self._admits:
                self._admits[o] = manifest.admitting(wrapped(o))
            holds = {"holds": self._holds[o]} if o in self._holds else {}
            made.append({**manifest.described(o), "admits": self._admits[o], **holds})
        return made

    def announce(self) -> None:
        """Say what they hold, once."""
        if self.announces and self._holds:
            self.announces = False
            if rank() == 0:
                tell(f"halfulp: {verdict_held.words_of(self._holds.values())}")


def _written(kind: str) -> str:
    """Return what an optimizer calls a state, as a manifest takes it: valid text, and not too long."""
    return writable(kind) if len(kind) <= LONGEST else role_name(kind)


def gradients(optimizer: torch.optim.Optimizer) -> Sizes:
    """Return the sizes of the gradients before a step, which may drop them."""
    return _sizes(gradient_of(p) for group in optimizer.param_groups for p in group["params"])


def held(optimizer: torch.optim.Optimizer, gradients: Sizes) -> dict[str, Any]:
    """Count values by dtype: parameters, gradients, and states under the optimizer's names for them.

    For parameters that a write-back stores, also say the grid, the policy and where they are.
    """
    slots = optimizer.slots if isinstance(optimizer, WriteBack) else []
    inner = wrapped(optimizer)
    params = [p for group in inner.param_groups for p in group["params"]]
    written: Counter[str] = Counter()
    for slot in slots:
        where = "packed" if slot.storage == "packed" else f"in {str(slot.p.dtype).removeprefix('torch.')}"
        how = f"{slot.grid.name} written by {slot.policy.spec.partition('(')[0]}, {where}"
        written[how] += slot.shape.numel()
    stepped = {slot.stepped for slot in slots}
    states: dict[str, list[torch.Tensor]] = {}
    for p in params:
        for kind, state in flat(inner.state.get(p) or {}):
            for x in state if isinstance(state, list | tuple) else (state,):
                if isinstance(x, torch.Tensor) and (x.numel() > 1 or narrow_scalar(x)):
                    states.setdefault(str(kind), []).append(x)
    keeps = [] if slots else keepers(inner)
    return {
        "parameters": {**written, **_sizes(p for p in params if p not in stepped)},
        "gradients": gradients,
        "states": {kind: _sizes(tensors) for kind, tensors in states.items()},
        **({"keeps": keeps} if keeps else {}),
    }


def keepers(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the states that keep what 16-bit weights do not hold; none unless every such weight has one."""
    found: dict[str, None] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(p)
        if not state or not p.is_floating_point() or p.element_size() != 2:
            continue
        own = [str(k) for k, x in flat(state) if isinstance(x, torch.Tensor) and _keeps(str(k), x, p)]
        if not own:
            return []
        found.update(dict.fromkeys(own))
    return list(found)


def _keeps(kind: str, x: torch.Tensor, p: torch.Tensor) -> bool:
    """Return True if a state keeps what its parameter does not hold."""
    if x.numel() != p.numel():
        return False
    if KEEPS.search(kind):
        return True
    if not x.is_floating_point() or x.element_size() <= p.element_size() or x.shape != p.shape:
        return False
    here = local(p.detach())  # of a shard only what is here: other ranks need not be asking
    return bool(here.any()) and torch.equal(local(x.detach()).to(p.dtype), here)


def _sizes(tensors: Iterable[torch.Tensor | None]) -> Sizes:
    found: Counter[str] = Counter()
    for x in tensors:
        if x is not None and not is_lazy(x) and x.numel():
            stored = _stored(x) if hasattr(x, "__tensor_flatten__") else x
            found[str(stored.dtype).removeprefix("torch.")] += x.numel()
    return dict(sorted(found.items()))


def _stored(x: Any) -> Any:
    """Return what a wrapper of tensors really holds: states of 8 or 4 bits call themselves float32."""
    inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    inner = [y for y in inner if isinstance(y, torch.Tensor)]
    return max(inner, key=lambda y: y.numel()) if inner else x
