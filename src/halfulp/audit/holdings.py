"""Which dtypes an optimizer really holds: parameters, gradients, and every state that is as large as them.

A run that is said to be in bfloat16 may keep its moments in float32, and one "with float32 optimizer" may
not. It is looked up when the first step that is audited is over, for then the states are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from halfulp.text import shown
from halfulp.trace import Recorded
from halfulp.writeback.optimizer import WriteBack

Sizes = dict[str, int]
"""Values by dtype."""
MOST = 6
"""Kinds of states that are named."""


def gradients(optimizer: torch.optim.Optimizer) -> Sizes:
    """Of the gradients that there are before a step, which may drop them."""
    return _sizes(p.grad for group in optimizer.param_groups for p in group["params"])


def held(optimizer: torch.optim.Optimizer, gradients: Sizes) -> dict[str, Any]:
    """Values by dtype: parameters, gradients, and states by the names that the optimizer has for them."""
    inner = optimizer.optimizer if isinstance(optimizer, WriteBack) else optimizer
    params = [p for group in inner.param_groups for p in group["params"]]
    states: dict[str, list[torch.Tensor]] = {}
    for p in params:
        for kind, held in flat(inner.state.get(p) or {}):
            for x in held if isinstance(held, list | tuple) else (held,):
                if isinstance(x, torch.Tensor) and x.numel() > 1:
                    states.setdefault(str(kind), []).append(x)
    found = {kind: _sizes(tensors) for kind, tensors in states.items()}
    return {"parameters": _sizes(params), "gradients": gradients, "states": found}


def flat(state: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """One parameter's state by kind; some optimizers keep it a level deeper (heavyball)."""
    for kind, x in state.items():
        if isinstance(x, Mapping):
            yield from flat(x)
        else:
            yield kind, x


def coded_words(trace: Recorded) -> str | None:
    """States in 8 bits or less, which nobody can follow; None where there are none or nobody asked."""
    if not _part(trace.manifest["options"], "roles").get("states"):
        return None
    found: dict[str, list[str]] = {}
    for optimizer in trace.manifest.get("optimizers", ()):
        for kind, sizes in _part(_part(optimizer, "holds"), "states").items():
            for name in sizes if isinstance(sizes, Mapping) else ():
                dtype = getattr(torch, str(name), None)
                kinds = found.setdefault(str(name), [])
                if isinstance(dtype, torch.dtype) and dtype.itemsize == 1 and kind not in kinds:
                    kinds.append(shown(str(kind), 40))
    parts = [f"{', '.join(kinds[:MOST])} in {name}" for name, kinds in found.items() if kinds]
    return f"Not followed: {'; '.join(parts)}. They are codes with scales, and no values." if parts else None


def words(trace: Recorded) -> str | None:
    """What the optimizers hold, in a line; None where it was not looked up."""
    return words_of([o.get("holds") for o in trace.manifest.get("optimizers", ())])


def words_of(holds: Iterable[Any]) -> str | None:
    """The same of what was found of each."""
    told = [h for h in holds if isinstance(h, Mapping)]
    if not told:
        return None
    parts = [_words(name, [_part(t, name) for t in told]) for name in ("parameters", "gradients")]
    states: dict[str, list[Mapping[str, Any]]] = {}
    for t in told:
        for kind, sizes in _part(t, "states").items():
            if isinstance(sizes, Mapping):
                states.setdefault(str(kind), []).append(sizes)
    alike: dict[str, list[str]] = {}
    for kind, sizes in states.items():
        alike.setdefault(_words("", sizes).strip(), []).append(shown(kind, 40))
    for dtypes, kinds in alike.items():
        more = f" and {len(kinds) - MOST} more" if len(kinds) > MOST else ""
        parts.append(f"{', '.join(kinds[:MOST])}{more} {dtypes}")
    if not states:
        parts.append("no states")
    return f"The optimizer holds: {'; '.join(parts)}."


def _part(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = told.get(name)
    return found if isinstance(found, Mapping) else {}


def _words(name: str, sizes: Iterable[Mapping[str, Any]]) -> str:
    total: Counter[str] = Counter()
    for each in sizes:
        total.update({shown(str(k), 40): int(v) for k, v in each.items() if isinstance(v, int)})
    everything = sum(total.values())
    if not everything:
        return f"{name} none"
    if len(total) == 1:
        return f"{name} {next(iter(total))}"
    return f"{name} " + ", ".join(f"{k} ({n / everything:.0%})" for k, n in total.most_common())


def _sizes(tensors: Iterable[torch.Tensor | None]) -> Sizes:
    found: Counter[str] = Counter()
    for x in tensors:
        if x is not None and not is_lazy(x) and x.numel():
            found[str(_inside(x).dtype).removeprefix("torch.")] += x.numel()
    return dict(sorted(found.items()))


def _inside(x: torch.Tensor) -> torch.Tensor:
    """What a wrapper of tensors really holds: states of 8 or 4 bits call themselves float32."""
    flatten = getattr(x, "__tensor_flatten__", None)
    inner = [getattr(x, name) for name in flatten()[0]] if flatten is not None else []
    inner = [y for y in inner if isinstance(y, torch.Tensor)]
    return max(inner, key=lambda y: y.numel()) if inner else x
