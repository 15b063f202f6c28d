"""Name the tensors that an optimizer holds.

Names come, in this order, from the model that was given; from the optimizer itself
(``AdamW(model.named_parameters())``); from a module found in the frames that called ``step``, for scripts
that know nothing of halfulp; and finally from the position in the optimizer, ``0.3``.

An optimizer may hold masters: tensors that are in no module, whose values the model has in a narrower dtype.
They get the names of the model's own tensors.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import torch

from halfulp.text import unique, unwrapped_name
from halfulp.writeback.choosing import oddity
from halfulp.writeback.sharding import is_sharded
from halfulp.writeback.storage.native_weight import NativeCodes
from halfulp.writeback.storage.packed import Codes


@dataclass(frozen=True)
class Naming:
    """The name of one tensor of an optimizer, and what else is known of it."""

    name: str
    module: torch.nn.Module | None = None
    copy: torch.dtype | None = None
    """The narrower dtype in which the model itself holds these weights."""
    shown: torch.Tensor | None = None
    """The model's tensor that holds them."""
    stored: str | None = None
    """The grid that the values are stored on, if not that of the dtype."""
    codes: Codes | NativeCodes | None = None
    """The codes that hold the values, if the tensor is an empty shell."""


T = TypeVar("T")
Named = dict[torch.Tensor, tuple[str, torch.nn.Module]]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside what holds it for parallel training."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        model = model.module
    return model


def model_names(model: torch.nn.Module) -> Named:
    """Return every parameter's first name and the module that owns it; wrappers leave no mark on names."""
    model = unwrapped(model)
    named: Named = {}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            clean = unwrapped_name(f"{prefix}.{name}" if prefix else name)
            named.setdefault(p, (clean, module))
    return named


def modules_in_frames() -> list[tuple[str, torch.nn.Module]]:
    """Modules among the variables of the calling frames and inside their objects, and how they are called."""
    return in_frames(torch.nn.Module)


def in_frames(kind: type[T], depth: int = 100) -> list[tuple[str, T]]:
    """Return what is of a kind among the variables of the calling frames and inside their objects."""
    seen: dict[int, tuple[str, T]] = {}
    frame: FrameType | None = sys._getframe(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at a stranger's deprecated object is no use of it
        while frame is not None and depth > 0:
            for name, value in [*variables(frame).items(), *frame.f_globals.items()]:
                for label, x in _of_kind(kind, name, value):
                    seen.setdefault(id(x), (label, x))
            frame, depth = frame.f_back, depth - 1
    return list(seen.values())


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame without keeping them alive there.

    Up to Python 3.12, ``f_locals`` of a function's frame is a dictionary that the frame holds on to, so what
    the function deletes later would stay alive. The variables are therefore taken out of it again, unless the
    function itself (``locals()``) or a debugger uses it. From 3.13 on it is a view, and left alone.
    """
    shared = frame.f_locals
    copy, code = dict(shared), frame.f_code
    ours = type(shared) is dict and bool(code.co_flags & inspect.CO_OPTIMIZED)
    if ours and frame.f_trace is None and sys.getrefcount(shared) <= 3:  # the frame's, this one's, the call's
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            shared.pop(name, None)
    return copy


def models_around(params: Iterable[torch.Tensor | None]) -> list[torch.nn.Module]:
    """Return the smallest module in the calling frames that holds all of these parameters, if any."""
    wanted = {p for p in params if p is not None}
    sizes = [(m, set(m.parameters())) for m in dict.fromkeys(m for _, m in modules_in_frames())]
    holding = [(m, len(parameters)) for m, parameters in sizes if wanted and wanted <= parameters]
    if not holding:
        return []
    return [unwrapped(min(holding, key=lambda pair: pair[1])[0])]


def _of_kind(kind: type[T], name: str, value: Any) -> list[tuple[str, T]]:
    """List the objects of a type that a variable is or holds; empty if inspection fails (a dead proxy)."""
    try:
        objects = [(name, value), *_inside(name, value)]
        return [(label, x) for label, x in objects if isinstance(x, kind)]
    except Exception:
        return []


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """Look one level into lists, tuples, dictionaries and plain objects (a trainer's ``self.model``)."""
    if isinstance(value, list | tuple) and len(value) <= 64:
        return [(f"{name}[{i}]", x) for i, x in enumerate(value)]
    if isinstance(value, dict) and len(value) <= 64:
        return [(str(key), x) for key, x in value.items()]
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and len(inner) <= 256 and not isinstance(value, type | torch.nn.Module):
        return [(str(key), x) for key, x in inner.items()]
    return []


def held_copies(masters: Iterable[torch.Tensor], candidates: Named) -> dict[torch.Tensor, torch.Tensor]:
    """Return the model's own tensor for each master: same shape, and equal to a cast to a narrower dtype.

    Among equal tensors the first free one is chosen, because both sides list their tensors in the same order.
    """
    free = [q for q in candidates if _plain(q)]
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for p in masters:
        for i, q in enumerate(free):
            alike = q.shape == p.shape and q.device == p.device and q.element_size() < p.element_size()
            if alike and torch.equal(p.detach().to(q.dtype), q.detach()):
                copies[p] = free.pop(i)
                break
    return copies


def _plain(x: torch.Tensor) -> bool:
    """Return True if a tensor can be compared with others."""
    return oddity(x) is None and x.is_floating_point() and not is_sharded(x)


def name_parameters(
    optimizer: torch.optim.Optimizer,
    models: list[torch.nn.Module],
    *,
    search: bool = False,
    known: Mapping[torch.Tensor, str] | None = None,
) -> dict[torch.Tensor, Naming]:
    """Return the names and owning modules of an optimizer's parameters; known parameters keep their names.

    Names are unique. If a second model has the same names, all of them are prefixed with the variable that
    holds it, where that is known.
    """
    known = known or {}
    params = [p for g in optimizer.param_groups for p in g["params"]]
    given: Named = {}
    for model in models:
        given = {**model_names(model), **given}
    around, labels = _named_around(params) if search and any(p not in given for p in params) else ({}, {})
    named = {**around, **given}
    masters, stepped = [p for p in params if p not in named and _plain(p)], set(params)
    copies = held_copies(masters, {q: at for q, at in named.items() if q not in stepped}) if masters else {}
    labels.update({p: labels[q] for p, q in copies.items() if q in labels})
    namings: dict[torch.Tensor, Naming] = {}
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names", [])
        for j, p in enumerate(group["params"]):
            copy = copies.get(p)
            name, module = named.get(p if copy is None else copy) or (f"{i}.{j}", None)
            if p not in given and j < len(own):
                name = own[j]
            namings[p] = Naming(writable(name), module, None if copy is None else copy.dtype, copy)
    used = set(known.values())
    twice = any(naming.name in used for p, naming in namings.items() if p not in known)
    for p, naming in namings.items():
        label = f"{labels[p]}." if twice and p in labels else ""
        name = known[p] if p in known else unique(label + naming.name, used)
        used.add(name)
        namings[p] = replace(naming, name=name)
    return namings


def _named_around(params: Sequence[torch.Tensor]) -> tuple[Named, dict[torch.Tensor, str]]:
    """Return what models in the calling frames name, and the variables that hold these models.

    A tensor goes by the model that has the most of the parameters, and of such models by the smallest.
    """
    named: Named = {}
    labels: dict[torch.Tensor, str] = {}
    models = [(label, model_names(m)) for label, m in modules_in_frames()]
    for label, names in sorted(models, key=lambda m: (-sum(p in m[1] for p in params), len(m[1]))):
        labels = {**dict.fromkeys(names, label), **labels}
        named = {**names, **named}
    return named, labels


def given_names(
    named: Mapping[str, torch.Tensor],
    modules: Mapping[torch.Tensor, torch.nn.Module],
    known: Mapping[torch.Tensor, str],
) -> dict[torch.Tensor, Naming]:
    """Name tensors as they are called; what is known already keeps its name, and names are unique."""
    used, namings = set(known.values()), {}
    for name, x in named.items():
        chosen = known[x] if x in known else unique(writable(name), used)
        used.add(chosen)
        namings[x] = Naming(chosen, modules.get(x))
    return namings


def writable(name: str) -> str:
    """Return a name as valid text, which is all that tables hold."""
    return name.encode("utf-8", "backslashreplace").decode()
