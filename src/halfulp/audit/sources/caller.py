"""Identify the caller of ``step()``: its framework, and its names for the optimizer, model and trainer.

The stack is inspected once, at the first audited step. The result goes into the manifest, so that a verdict
can print the line that fixes the user's own code. The code that prints these names validates them again
(:mod:`halfulp.verdicts.fix`).
"""

from __future__ import annotations

import inspect
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from halfulp.audit.sources.names import variables

FRAMEWORKS = {
    "trl": "trl",
    "torchtune": "torchtune",
    "torchtitan": "torchtitan",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
    "transformers.trainer": "transformers",
    "accelerate": "accelerate",
}
"""Prefixes of modules on the stack, and what the framework is called; the first that is there counts."""
THEIRS = tuple(f"{name}." for name in FRAMEWORKS)
OURS = ("halfulp.", "torch.")
DEEP = 200
INSTALLED = tuple(
    {
        str(Path(place).resolve())
        for place in (*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "platlib")))
        if place
    }
)
"""Folders whose code is not the user's own."""


def caller_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the manifest's entry for the caller of an optimizer; empty if it cannot be determined."""
    try:
        return _caller(optimizer)
    except Exception:  # objects of others that raise when they are looked at: the training is not harmed
        return {}


def _caller(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    frames = [f for f in _outward() if not _inside(_module(f), OURS)]
    selves = [s for f in frames if (s := variables(f).get("self")) is not None]
    there = {_module(f) for f in frames} | {k.__module__ for s in selves for k in type(s).__mro__}
    found = next((p for p in FRAMEWORKS if any(_inside(m, (f"{p}.",)) for m in there)), None)
    framework = "loop" if found is None else FRAMEWORKS[found]
    made: dict[str, Any] = {"framework": framework}
    if found is not None:
        version = getattr(sys.modules.get(found.partition(".")[0]), "__version__", None)
        made |= {"version": version} if isinstance(version, str) else {}
    if framework in ("transformers", "trl"):
        trainer = next(s for s in reversed(selves) if "Trainer" in {k.__name__ for k in type(s).__mro__})
        made |= {"class": type(trainer).__name__, "takes": _takes(type(trainer))}
        made["names"], made["whole"] = _names(frames, optimizer, trainer)
    else:
        made["names"], made["whole"] = _names(frames, optimizer, None)
    if framework == "lightning":
        models = [m for s in selves if isinstance(m := getattr(s, "lightning_module", s), torch.nn.Module)]
        made["whole"] = any(_owns(m, optimizer) == "whole" for m in models)
    return made


def _outward() -> Iterator[FrameType]:
    """Yield the frames from here outwards, up to the one in which halfulp runs a script."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEEP):
        if frame is None or _module(frame) == "halfulp.audit.script.runner":
            return
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _inside(module: str, prefixes: tuple[str, ...]) -> bool:
    """Return True if a module is one of these packages, named with a dot at the end, or inside."""
    return f"{module}.".startswith(prefixes)


def _takes(trainer: type) -> list[str]:
    """Return the arguments of a trainer that accept an optimizer."""
    for kind in trainer.__mro__:
        parameters = inspect.signature(kind).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return [a for a in ("optimizers", "optimizer_cls_and_kwargs") if a in parameters]
    return []


def _names(
    frames: list[FrameType], optimizer: torch.optim.Optimizer, trainer: object
) -> tuple[dict[str, str], bool]:
    """Find the user's own expressions for optimizer, model and trainer.

    They are taken from the outermost frame that has them, where they are made; and it is noted whether
    the model has no other trainable parameters.
    """
    made: dict[str, str] = {}
    whole = False
    for frame in reversed(frames):
        if _inside(_module(frame), THEIRS) or frame.f_code.co_filename.startswith(INSTALLED):
            continue
        models = {}
        for name, value in _variables(frame):
            if value is trainer and trainer is not None:
                made.setdefault("trainer", name)
            if isinstance(value, torch.optim.Optimizer):
                if optimizer in (value, vars(value).get("optimizer"), vars(value).get("_optimizer")):
                    made.setdefault("optimizer", name)
            elif isinstance(value, torch.nn.Module) and (owned := _owns(value, optimizer)):
                models[name] = owned == "whole"
        if models and "model" not in made:
            name = next((n for n in models if n.rpartition(".")[2] == "model"), next(iter(models)))
            made["model"], whole = name, models[name]
    return made, whole


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Variables of a frame, and what its ``self`` holds."""
    found = variables(frame)
    yield from ((n, v) for n, v in found.items() if n != "self" and n.isidentifier())
    held = getattr(found.get("self"), "__dict__", {})
    modules = held.get("_modules") if isinstance(held.get("_modules"), dict) else {}
    yield from ((f"self.{n}", v) for n, v in {**held, **(modules or {})}.items() if str(n).isidentifier())


def _owns(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return "whole" if an optimizer holds all trainable parameters of a model, "part" if some, or ""."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    theirs = {id(p): p.requires_grad for p in model.parameters()}
    if not mine or not mine <= set(theirs):
        return ""
    return "whole" if {i for i, trained in theirs.items() if trained} <= mine else "part"
