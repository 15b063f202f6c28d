"""States that accumulate beside the weights: moments of optimizers, and copies that a script keeps (an EMA).

A module that is found is a copy if it, or a part of it, has a tensor for each of the optimizer's, none of
those, and no gradient, which networks that are trained have. A list of tensors is one if they have the
weights' values: gradients have their shapes as well, and averages begin as copies.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from halfulp.audit.sources.names import in_frames, modules_in_frames
from halfulp.errors import UsageError
from halfulp.kernels.auditing import PLAIN
from halfulp.numbers.containers import CONTAINERS
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.sharding import is_sharded

Copies = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[torch.Tensor]
GRADIENTS = "grad"
"""The role of gradients that accumulate, which no other may have."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def checked(also: Mapping[str, Copies]) -> dict[str, Copies]:
    """Return the copies by name, if they can be followed."""
    for name, copies in also.items():
        if name == GRADIENTS:
            raise UsageError(
                f"also= cannot name a copy {name!r}, the name of accumulated gradients: choose another."
            )
        if _NAME.fullmatch(str(name)) is None:
            raise UsageError(f"also= names copies by short words, such as 'ema', not {name!r}.")
        if not isinstance(copies, torch.nn.Module | Mapping | Iterable):
            raise UsageError(f"also={{{name!r}: ...}} takes a module or tensors, not {copies!r:.200}.")
        if not tensors_of(copies):
            raise UsageError(f"also={{{name!r}: ...}} has no tensor of floating-point values to follow.")
    return dict(also)


def role_name(kind: str) -> str:
    """Return what an optimizer calls a state, as the name of a folder: different for different ones.

    >>> role_name("exp_avg"), role_name("../../a b")
    ('exp_avg', 'a-b-cd36d98f')
    """
    if _NAME.fullmatch(kind) and kind != GRADIENTS:
        return kind
    safe = re.sub("[^A-Za-z0-9_]+", "-", kind).strip("-")[:40]
    return f"{safe or 'state'}-{hashlib.sha256(kind.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def tensors_of(copies: Copies) -> dict[str, torch.Tensor]:
    """Return the float tensors of a module, a mapping or a list, by name."""
    if isinstance(copies, torch.nn.Module):
        named: Iterable[tuple[str, Any]] = copies.named_parameters()
    elif isinstance(copies, Mapping):
        named = copies.items()
    else:
        named = ((str(i), x) for i, x in enumerate(copies))
    return {str(name): x for name, x in named if followed(x)}


def followed(x: Any) -> bool:
    """Return True if a tensor holds values that can be compared."""
    known = type(x) in PLAIN or is_sharded(x)
    plain = known and x.layout == torch.strided and x.is_leaf
    return plain and str(x.dtype).removeprefix("torch.") in CONTAINERS and x.numel() > 1


def narrow_scalar(x: Any) -> bool:
    """Return True if a state is one number in 16 bits: a counter there stops at the last whole number."""
    return type(x) in PLAIN and x.numel() == 1 and x.dtype in (torch.bfloat16, torch.float16)


class Listed(Mapping[str, torch.Tensor]):
    """Tensors of a list, as it is at the time, under the names of the weights that they are copies of."""

    def __init__(self, tensors: Sequence[torch.Tensor], places: Mapping[str, int]) -> None:
        self.tensors, self.places = tensors, places

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[self.places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def found_copies(weights: Mapping[torch.Tensor, str], not_these: Iterable[torch.Tensor]) -> dict[str, Copies]:
    """Find copies of weights among the variables of the frames that called a step, by variable name.

    Shards are left out: all ranks would have to find the same.
    """
    mine = {p for p in weights if p.numel() > 1}
    taken = {*weights, *not_these}
    candidates: list[tuple[str, Copies]] = []
    for label, module in modules_in_frames():
        candidates += _apart(label, module, mine)
    for kind in (list, tuple):
        listed = ((label, candidate, _places(candidate, weights)) for label, candidate in in_frames(kind))
        candidates += [(label, Listed(candidate, places)) for label, candidate, places in listed if places]
    copies: dict[str, Copies] = {}
    for label, candidate in candidates:
        tensors = set(tensors_of(candidate).values())
        trained = any(x.grad is not None or is_sharded(x) for x in tensors)
        if role_name(label) == label and label not in copies and not trained and taken.isdisjoint(tensors):
            copies[label] = candidate
            taken |= tensors
    return copies


def _apart(
    label: str, module: torch.nn.Module, mine: set[torch.Tensor]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules, this one or inside it, that have a tensor for each weight but share none."""
    tensors = tensors_of(module).values()
    others = [x for x in tensors if x not in mine]
    if not mine or Counter(x.shape for x in mine) - Counter(x.shape for x in others):
        return
    if len(others) == len(tensors):
        yield label, module
        return
    for name, child in module.named_children():
        yield from _apart(name, child, mine)


def _places(tensors: Sequence[Any], weights: Mapping[torch.Tensor, str]) -> dict[str, int]:
    """Return where a list has each of the weights, by its values; nothing if it has not exactly those."""
    if len(tensors) != len(weights) or not all(type(x) in PLAIN for x in tensors):
        return {}
    if Counter(x.shape for x in tensors) != Counter(p.shape for p in weights):
        return {}
    free, places = dict(enumerate(tensors)), {}
    for p, name in weights.items():
        at = next((i for i, x in free.items() if x.shape == p.shape and _equal(x, p)), None)
        if at is None:
            return {}
        places[name] = at
        del free[at]
    return places


def _equal(x: torch.Tensor, p: torch.Tensor) -> bool:
    narrow = min(x.dtype, p.dtype, key=lambda dtype: dtype.itemsize)
    return x.device == p.device and torch.equal(x.detach().to(narrow), p.detach().to(narrow))


# ---- moments -----------------------------------------------------------------------------------------------


def flat(state: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """List one parameter's state by kind; some optimizers nest it one level deeper (heavyball)."""
    listed: list[tuple[Any, Any]] = []
    for kind, x in state.items():
        listed += flat(x) if isinstance(x, Mapping) else [(kind, x)]
    return listed


def state_tensors(states: Iterable[Any]) -> list[torch.Tensor]:
    """List the tensors in the states of parameters, in one go: it is done twice a step."""
    values = [x for state in states if isinstance(state, dict) for x in state.values()]
    if nested := [x for x in values if isinstance(x, dict)]:  # one level deeper (heavyball)
        values = [x for x in values if not isinstance(x, dict)] + state_tensors(nested)
    return [x for x in values if isinstance(x, torch.Tensor)]


def wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that keeps the state."""
    return optimizer.optimizer if isinstance(optimizer, WriteBack) else optimizer


def groups_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the parameter group of every tensor that an optimizer steps."""
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def moments_of(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the float tensors of an optimizer's state that belong to a weight or to several stacked weights.

    They are listed by kind, then by the weight's name. A float tensor of another shape beside codes holds
    their scales and is not a moment. Single numbers are followed if they are held in 16 bits, such as a
    ``step`` that counts to 256.
    """
    inner = wrapped(optimizer)
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for group in inner.param_groups:
        for p in (p for p in group["params"] if p in names):
            state = dict(flat(inner.state.get(p, {})))
            tensors = [x for x in state.values() if isinstance(x, torch.Tensor) and x.numel() > 1]
            coded = not all(x.is_floating_point() for x in tensors)
            for kind, x in state.items():
                if narrow_scalar(x) and p.numel() > 1:
                    moments.setdefault(role_name(str(kind)), {})[names[p]] = x
                if not followed(x) or (coded and x.shape != p.shape):
                    continue
                more = 0 if x.numel() == p.numel() else _stacked(x.shape, p.shape)
                if more is not None and more < len(group["params"]):
                    name = f"{names[p]} and {more} more" if more else names[p]
                    moments.setdefault(role_name(str(kind)), {})[name] = x
    return moments


def _stacked(shape: torch.Size, weight: torch.Size) -> int | None:
    """Return the number of further weights that a state covers: 0, or the number stacked in front.

    The state is as large as the weights or has some of their dimensions, as factored moments do; otherwise
    the result is None.
    """
    if len(shape) > len(weight):
        return shape[0] - 1 if _stacked(shape[1:], weight) == 0 else None
    dimensions = iter(weight)
    return 0 if all(n == 1 or n in dimensions for n in shape) else None


def grid_of(tensors: Iterable[torch.Tensor]) -> str:
    """Choose the grid that states of this kind are measured on."""
    return "fp16" if all(x.dtype == torch.float16 for x in tensors) else "bf16"


def stopped(x: torch.Tensor) -> bool:
    """Return True if a 16-bit counter can no longer increase: x + 1 is x."""
    return narrow_scalar(x) and bool(torch.isfinite(x) & (x + 1 == x))
