"""What to call the tensors that an optimizer holds.

In order: the names in the model that was given; the names that the optimizer itself was given
(``AdamW(model.named_parameters())``); the names in a module found in the frames that called ``step``, for
scripts that know nothing of halfulp; at last the place in the optimizer, ``0.3``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

Named = dict[torch.Tensor, tuple[str, torch.nn.Module]]
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile and others put into the names of the modules that they wrap."""


def model_names(model: torch.nn.Module) -> Named:
    """Every parameter's first name and the module that owns it; wrappers leave no mark on names."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        model = model.module
    found: Named = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            clean = f"{prefix}.{name}" if prefix else name
            for wrapper in WRAPPERS:
                clean = clean.replace(wrapper, "")
            found.setdefault(p, (clean, module))
    return found


def modules_in_frames(depth: int = 100) -> list[tuple[str, torch.nn.Module]]:
    """Modules among the variables of the calling frames and inside their objects, and how they are called."""
    seen: dict[int, tuple[str, torch.nn.Module]] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and depth > 0:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            for label, module in _modules(name, value):
                seen.setdefault(id(module), (label, module))
        frame, depth = frame.f_back, depth - 1
    return list(seen.values())


def _modules(name: str, value: Any) -> list[tuple[str, torch.nn.Module]]:
    """The modules that a stranger's variable is or holds; none where looking fails, as at a dead proxy."""
    try:
        found = [(name, value), *_inside(name, value)]
        return [(label, x) for label, x in found if isinstance(x, torch.nn.Module)]
    except Exception:
        return []


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """One level into lists, tuples, dictionaries and plain objects (a trainer's ``self.model``)."""
    if isinstance(value, list | tuple) and len(value) <= 64:
        return [(f"{name}[{i}]", x) for i, x in enumerate(value)]
    if isinstance(value, dict) and len(value) <= 64:
        return [(str(key), x) for key, x in value.items()]
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and len(inner) <= 256 and not isinstance(value, type | torch.nn.Module):
        return [(str(key), x) for key, x in inner.items()]
    return []


def name_parameters(
    optimizer: torch.optim.Optimizer,
    models: list[torch.nn.Module],
    *,
    search: bool = False,
    known: Mapping[torch.Tensor, str] | None = None,
) -> dict[torch.Tensor, tuple[str, torch.nn.Module | None]]:
    """Names and owning modules of an optimizer's parameters; what is known already keeps its name.

    Names are unique. If a second model has the same ones, all of its names begin with the variable that holds
    it, where that is known.
    """
    known = known or {}
    params = [p for g in optimizer.param_groups for p in g["params"]]
    given: Named = {}
    for model in models:
        given = {**model_names(model), **given}
    around: Named = {}
    labels: dict[torch.Tensor, str] = {}
    if search and any(p not in given for p in params):
        candidates = [(label, model_names(m)) for label, m in modules_in_frames()]
        candidates.sort(key=lambda c: (-sum(p in c[1] for p in params), len(c[1])))
        for label, candidate in candidates:
            labels = {**dict.fromkeys(candidate, label), **labels}
            around = {**candidate, **around}
    found: dict[torch.Tensor, tuple[str, torch.nn.Module | None]] = {}
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names", [])
        for j, p in enumerate(group["params"]):
            name, module = given.get(p) or around.get(p) or (f"{i}.{j}", None)
            if p not in given and j < len(own):
                name = own[j]
            found[p] = (
                name.encode("utf-8", "backslashreplace").decode(),
                module,
            )  # tables hold valid text only
    used = set(known.values())
    twice = any(name in used for p, (name, _) in found.items() if p not in known)
    for p, (name, module) in found.items():
        label = f"{labels[p]}." if twice and p in labels else ""
        unique, n = known.get(p, label + name), 2
        while unique in used and p not in known:
            unique, n = f"{label}{name}#{n}", n + 1
        used.add(unique)
        found[p] = (unique, module)
    return found
