"""What to call the tensors that an optimizer holds.

In order: the names in the model that was given; the names that the optimizer itself was given
(``AdamW(model.named_parameters())``); the names in a module found in the frames that called ``step``, for
scripts that know nothing of halfulp; at last the place in the optimizer, ``0.3``.
"""

from __future__ import annotations

import sys
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


def modules_in_frames(depth: int = 100) -> list[torch.nn.Module]:
    """Modules among the local and global variables of the calling frames, and inside their objects."""
    seen: dict[int, torch.nn.Module] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and depth > 0:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            for module in _modules(value):
                seen.setdefault(id(module), module)
        frame, depth = frame.f_back, depth - 1
    return list(seen.values())


def _modules(value: Any) -> list[torch.nn.Module]:
    """The modules that a stranger's variable is or holds; none where looking fails, as at a dead proxy."""
    try:
        return [x for x in (value, *_inside(value)) if isinstance(x, torch.nn.Module)]
    except Exception:
        return []


def _inside(value: Any) -> list[Any]:
    """One level into lists, tuples, dictionaries and plain objects (a trainer's ``self.model``)."""
    if isinstance(value, list | tuple) and len(value) <= 64:
        return list(value)
    if isinstance(value, dict) and len(value) <= 64:
        return list(value.values())
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and len(inner) <= 256 and not isinstance(value, type | torch.nn.Module):
        return list(inner.values())
    return []


def name_parameters(
    optimizer: torch.optim.Optimizer, models: list[torch.nn.Module], *, search: bool = False
) -> dict[torch.Tensor, tuple[str, torch.nn.Module | None]]:
    """Names (unique) and owning modules of an optimizer's parameters."""
    params = [p for g in optimizer.param_groups for p in g["params"]]
    given: Named = {}
    for model in models:
        given = {**model_names(model), **given}
    around: Named = {}
    if search and any(p not in given for p in params):
        candidates = [model_names(m) for m in modules_in_frames()]
        candidates.sort(key=lambda c: (-sum(p in c for p in params), len(c)))
        for candidate in candidates:
            around = {**candidate, **around}
    out: dict[torch.Tensor, tuple[str, torch.nn.Module | None]] = {}
    used: set[str] = set()
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names", [])
        for j, p in enumerate(group["params"]):
            name, module = given.get(p) or around.get(p) or (f"{i}.{j}", None)
            if p not in given and j < len(own):
                name = own[j]
            unique, n = name, 2
            while unique in used:
                unique, n = f"{name}#{n}", n + 1
            used.add(unique)
            out[p] = (unique, module)
    return out
