"""What to call the tensors that an optimizer holds.

In order: the names in the model that was given; the names that the optimizer itself was given
(``AdamW(model.named_parameters())``); the names in a module found in the frames that called ``step``, for scripts
that know nothing of halfulp; at last the place in the optimizer, ``0.3``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def model_names(model: torch.nn.Module) -> dict[torch.Tensor, tuple[str, torch.nn.Module]]:
    """Every parameter's first name and the module that owns it."""
    found: dict[torch.Tensor, tuple[str, torch.nn.Module]] = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            clean = f"{prefix}.{name}" if prefix else name
            for wrapper in ("_orig_mod.", "module.", "_fsdp_wrapped_module."):
                clean = clean.removeprefix(wrapper)
            found.setdefault(p, (clean, module))
    return found


def modules_in_frames(depth: int = 40) -> list[torch.nn.Module]:
    """Modules among the local and global variables of the calling frames, and inside their objects."""
    seen: dict[int, torch.nn.Module] = {}
    frame: Any = sys._getframe(1)
    while frame is not None and depth > 0:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            for candidate in (value, *_inside(value)):
                if isinstance(candidate, torch.nn.Module):
                    seen.setdefault(id(candidate), candidate)
        frame, depth = frame.f_back, depth - 1
    return list(seen.values())


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
    known: dict[torch.Tensor, tuple[str, torch.nn.Module]] = {}
    for model in models:
        known = {**model_names(model), **known}
    if search and any(p not in known for p in params):
        candidates = [model_names(m) for m in modules_in_frames()]
        candidates.sort(key=lambda c: (-sum(p in c for p in params), len(c)))
        for candidate in candidates:
            known = {**candidate, **known}
    out: dict[torch.Tensor, tuple[str, torch.nn.Module | None]] = {}
    used: set[str] = set()
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names", [])
        for j, p in enumerate(group["params"]):
            name, module = known.get(p, (own[j] if own else f"{i}.{j}", None))
            unique, n = name, 2
            while unique in used:
                unique, n = f"{name}#{n}", n + 1
            used.add(unique)
            out[p] = (unique, module)
    return out
