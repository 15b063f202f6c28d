"""Record the dtypes that an optimizer really holds: of parameters, gradients and states.

A run described as bfloat16 may keep its moments in float32, and one "with float32 optimizer" may not. The
dtypes are read after the first audited step, when the states exist.

Some optimizers keep in a state what 16-bit weights do not hold: masters (TransformerEngine's ``FusedAdam``),
the rest of a sum (torch-optimi, pytorch_optimizer), the bits that a cast drops (heavyball, FlashOptim). A
stored value that stays is no loss there. Such a state has a name that :data:`KEEPS` knows and a value for
each weight; or it is wider than the weights, a cast of it gives them in every bit, and it changed where the
stored weight did not. An average of the weights or a copy of their start fails one of these sooner or later,
so :class:`Keepers` looks again at later steps.
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
from halfulp.numbers.containers import SHORT
from halfulp.text import tell
from halfulp.verdicts import held as verdict_held
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.sharding import local
from halfulp.writeback.slot import Slot

States = list[tuple[str, torch.Tensor]]
Sizes = dict[str, int]
"""Values by dtype."""
LONGEST = 200
"""Characters of a state's name in a manifest."""
NAMED = 8
"""Optimizers whose names are looked for."""
SAMPLED = 2**16
"""Values of each tensor at which it is seen whether a state moved where the weight did not."""


KEEPS = re.compile(r"master|kahan_comp|param::ecc|error_bits")
"""Names of states that keep what a weight's dtype does not hold, of other people's optimizers."""


class OptimizerNotes:
    """Note for the manifest what the optimizers of a run are, and which dtypes they hold."""

    def __init__(self) -> None:
        self.announces = False
        """True to report on standard error, after the first step, what they hold."""
        self._seen: list[torch.optim.Optimizer] = []
        self._holds: dict[torch.optim.Optimizer, dict[str, Any]] = {}
        self._keepers: dict[torch.optim.Optimizer, Keepers] = {}
        self._admits: dict[torch.optim.Optimizer, list[str]] = {}
        """The policies that would take each of them; to ask them all takes a while."""
        self._gradients: Sizes = {}
        self._names: dict[torch.optim.Optimizer, dict[str, str]] = {}
        """What the user calls the first few of them, and their models."""
        self.caller: dict[str, Any] = {}
        """The caller that steps the first of them."""

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer."""
        if optimizer not in self._seen:
            self._seen.append(optimizer)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients before its first step, which may drop them, and at what may be masters."""
        if optimizer not in self._seen:
            return
        if optimizer not in self._holds:
            self._gradients = gradients(optimizer)
            if len(self._names) < NAMED:
                caller = caller_of(optimizer)
                self.caller, self._names[optimizer] = self.caller or caller, caller.get("names", {})
            if not isinstance(optimizer, WriteBack):
                self._keepers[optimizer] = Keepers(optimizer)
        if optimizer in self._keepers and self._keepers[optimizer].open:
            self._keepers[optimizer].before()

    def after(self, optimizer: torch.optim.Optimizer) -> bool:
        """Look at what it holds after its first step, and which states are masters; whether that is new."""
        if optimizer not in self._seen:
            return False
        known, keepers = self._holds.get(optimizer), self._keepers.get(optimizer)
        if known is None:
            known = counts_by_dtype(optimizer, self._gradients or gradients(optimizer))  # or a closure's
            known["states"] = {_written(kind): sizes for kind, sizes in known["states"].items()}
        elif keepers is None:
            return False
        holds = known
        if keepers is not None:
            keeps = keepers.after()
            holds = {key: value for key, value in known.items() if key != "keeps"}
            holds |= {"keeps": keeps} if keeps else {}
            if not keeps and not keepers.open:
                del self._keepers[optimizer]
        new = self._holds.get(optimizer) != holds
        self._holds[optimizer] = holds
        return new

    def described(self) -> list[dict[str, Any]]:
        """Return what a manifest says of them."""
        entries = []
        for o in self._seen:
            if o not in self._admits:
                self._admits[o] = manifest.admitting(wrapped(o))
            holds = {"holds": self._holds[o]} if o in self._holds else {}
            names = {"names": self._names[o]} if self._names.get(o) else {}
            entries.append({**manifest.described(o), "admits": self._admits[o], **names, **holds})
        return entries

    def announce(self) -> None:
        """Say what they hold, once."""
        if self.announces and self._holds:
            self.announces = False
            if rank() == 0:
                tell(f"halfulp: {verdict_held.words_of(self._holds.values())}")


def written_to(slot: Slot) -> str:
    """Return the grid of a write-back, by a name that no dtype has: that is for what torch itself rounds."""
    return SHORT.get(slot.grid.name, slot.grid.name)


def _written(kind: str) -> str:
    """Return what an optimizer calls a state, as a manifest takes it: valid text, and not too long."""
    return writable(kind) if len(kind) <= LONGEST else role_name(kind)


def gradients(optimizer: torch.optim.Optimizer) -> Sizes:
    """Return the sizes of the gradients before a step, which may drop them."""
    return _sizes(gradient_of(p) for group in optimizer.param_groups for p in group["params"])


def counts_by_dtype(optimizer: torch.optim.Optimizer, gradients: Sizes) -> dict[str, Any]:
    """Count values by dtype: parameters, gradients, and states under the optimizer's names for them.

    For parameters that a write-back stores, also say the grid, the policy and where they are; those that are
    frozen it takes up when they are not.
    """
    slots = optimizer.slots if isinstance(optimizer, WriteBack) else []
    inner = wrapped(optimizer)
    params = [p for group in inner.param_groups for p in group["params"]]
    written: Counter[str] = Counter()
    for slot in slots:
        where = "packed" if slot.storage == "packed" else f"in {str(slot.p.dtype).removeprefix('torch.')}"
        how = f"{written_to(slot)} written by {slot.policy.spec.partition('(')[0]}, {where}"
        written[how] += slot.shape.numel()
    stepped = {slot.stepped for slot in slots}
    states: dict[str, list[torch.Tensor]] = {}
    for p in params:
        for kind, state in flat(inner.state.get(p) or {}):
            for x in state if isinstance(state, list | tuple) else (state,):
                if isinstance(x, torch.Tensor) and (x.numel() > 1 or narrow_scalar(x)):
                    states.setdefault(str(kind), []).append(x)
    rest = [p for p in params if p not in stepped]
    frozen = _sizes(p for p in rest if slots and not p.requires_grad)
    return {
        "parameters": {
            **written,
            **_sizes(p for p in rest if not slots or p.requires_grad),
            **{f"frozen in {dtype}": n for dtype, n in frozen.items()},
        },
        "gradients": gradients,
        "states": {kind: _sizes(tensors) for kind, tensors in states.items()},
    }


class Keepers:
    """Find the states of an optimizer that keep what its 16-bit weights do not hold.

    States are looked at after every step until it is known what they are; masters again at steps 4, 8, 16...

    Args:
        optimizer: The optimizer, without what wraps it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._steps = 0
        self.open = True
        """True while there is a state of which it is not known what it is."""
        self._kept: list[str] = []
        self._moved: set[str] = set()
        """States that changed where the stored weight did not."""
        self._others: set[str] = set()
        """States whose cast was not the weights."""
        self._before: dict[torch.Tensor, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}

    def before(self) -> None:
        """Copy a sample of the weights and of the states that may be masters, before a step."""
        self._before = {}
        for p in _narrow(self.optimizer):
            tensors = _tensors(self.optimizer, p) if self.optimizer.state else []
            wide = self._wide(p, tensors) if tensors else []
            if (wide or not self._steps) and not hasattr(here := local(p.detach()), "__tensor_flatten__"):
                self._before[p] = _sample(here, here.device), {k: _sample(x, here.device) for k, x in wide}

    def after(self) -> list[str]:
        """Return the states that keep the rest; none unless every 16-bit weight with a state has one."""
        self._steps += 1
        if not self.open and (not self._kept or self._steps & (self._steps - 1)):
            return self._kept
        per_weight: list[list[str]] = []
        for p in _narrow(self.optimizer):
            if tensors := _tensors(self.optimizer, p):
                named = [k for k, x in tensors if x.numel() == p.numel() and KEEPS.search(k)]
                wide = self._wide(p, tensors)
                per_weight.append([*named, *self._casts(p, wide)] if wide else named)
        alike = {k for kinds in per_weight for k in kinds} - self._others
        known = {k for k in alike if k in self._moved or KEEPS.search(k)}
        own = [[k for k in kinds if k in known] for kinds in per_weight] if known else []
        self._kept = list(dict.fromkeys(k for kinds in own for k in kinds)) if all(own) else []
        self.open = alike != known or (bool(known) and not self._kept)
        return self._kept

    def _wide(self, p: torch.Tensor, tensors: States) -> States:
        """Return the states that may be masters of a weight."""
        return [
            (k, local(x.detach()))  # of a shard only what is here: other ranks may not be asking
            for k, x in tensors
            if k not in self._others and not KEEPS.search(k) and x.shape == p.shape
            if x.dtype in (torch.float32, torch.float64) and x.layout == torch.strided
            if not hasattr(local(x), "__tensor_flatten__")  # codes that call themselves float32
        ]

    def _casts(self, p: torch.Tensor, wide: States) -> list[str]:
        """Return the states of a weight whose cast it is, and note which of them moved where it did not."""
        here = local(p.detach())
        if not here.any():
            return []
        same = []
        for kind, x in wide:
            if not torch.equal(x.to(here.device, p.dtype), here):
                self._others.add(kind)
                continue
            same.append(kind)
            if p in self._before and kind not in self._moved:
                weight, states = self._before[p]
                began = states.get(kind, weight.to(x.dtype))  # made in this step, of the weight
                if bool(((_sample(x, here.device) != began) & (_sample(here, here.device) == weight)).any()):
                    self._moved.add(kind)
        return same


def _narrow(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the 16-bit weights of an optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        p
        for p in params
        if p.dtype in (torch.bfloat16, torch.float16) and not is_lazy(p)
        if p.layout == torch.strided and p.device.type != "meta"
    ]


def _tensors(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> States:
    """Return the tensors among the states of a weight, by name."""
    state = optimizer.state.get(p)
    return [(str(k), x) for k, x in flat(state) if isinstance(x, torch.Tensor)] if state else []


def _sample(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy evenly spaced values of a tensor to where its weight is."""
    values = x.reshape(-1)
    return values[:: max(1, -(-values.numel() // SAMPLED))].to(device, copy=True)


def _sizes(tensors: Iterable[torch.Tensor | None]) -> Sizes:
    numels: Counter[str] = Counter()
    for x in tensors:
        if x is not None and not is_lazy(x) and x.numel():
            stored = _stored(x) if hasattr(x, "__tensor_flatten__") else x
            numels[str(stored.dtype).removeprefix("torch.")] += x.numel()
    return dict(sorted(numels.items()))


def _stored(x: Any) -> Any:
    """Return what a wrapper of tensors really holds: states of 8 or 4 bits call themselves float32."""
    inner = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    inner = [y for y in inner if isinstance(y, torch.Tensor)]
    return max(inner, key=lambda y: y.numel()) if inner else x
