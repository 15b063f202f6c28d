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
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

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
    frames = _stack()
    selves = [f.variables["self"] for f in frames if f.variables.get("self") is not None]
    modules = {f.module for f in frames} | {k.__module__ for s in selves for k in type(s).__mro__}
    theirs = [f"{m}." for m in sorted(modules) if _inside(m, THEIRS)]
    package = next((p for p in FRAMEWORKS if [m for m in theirs if m.startswith(f"{p}.")]), None)
    entry: dict[str, Any] = {"framework": "loop" if package is None else FRAMEWORKS[package]}
    if package is not None:
        version = getattr(sys.modules.get(package.partition(".")[0]), "__version__", None)
        entry |= {"version": version} if isinstance(version, str) else {}
    trainer = None
    if entry["framework"] in ("transformers", "trl"):
        trainer = next(s for s in reversed(selves) if "Trainer" in {k.__name__ for k in type(s).__mro__})
        entry |= {"class": type(trainer).__name__, "takes": _takes(type(trainer))}
    entry["names"], entry["whole"] = _names(frames, optimizer, trainer)
    if entry["framework"] == "lightning":
        models = [m for s in selves if isinstance(m := getattr(s, "lightning_module", s), torch.nn.Module)]
        entry["whole"] = any(_owns(m, optimizer) == "whole" for m in models)
    return entry


class _Frame(NamedTuple):
    """One function on the stack: its module, its file, and its variables."""

    module: str
    file: str
    variables: dict[str, Any]

    def named(self) -> list[tuple[str, Any]]:
        """Return the variables, and what ``self`` holds."""
        mine = getattr(self.variables.get("self"), "__dict__", {})
        modules = mine.get("_modules")
        inner = {**mine, **(modules if isinstance(modules, dict) else {})}
        local = [(n, v) for n, v in self.variables.items() if n != "self" and n.isidentifier()]
        return local + [(f"self.{n}", v) for n, v in inner.items() if str(n).isidentifier()]


def _stack() -> list[_Frame]:
    """Return the frames of others from here outwards, up to the one in which halfulp runs a script."""
    frames: list[_Frame] = []
    frame: FrameType | None = sys._getframe(1)
    for _ in range(DEEP):
        module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        if frame is None or module == "halfulp.audit.script.runner":
            break
        if not _inside(module, OURS):
            frames.append(_Frame(module, frame.f_code.co_filename, variables(frame)))
        frame = frame.f_back
    return frames


def _inside(module: str, packages: tuple[str, ...]) -> bool:
    """Return True if a module is, or is in, one of these packages, which are named with a dot at the end."""
    return f"{module}.".startswith(packages)


def _takes(trainer: type) -> list[str]:
    """Return the arguments of a trainer that accept an optimizer."""
    for kind in trainer.__mro__:
        parameters = inspect.signature(kind).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return [a for a in ("optimizers", "optimizer_cls_and_kwargs") if a in parameters]
    return []


def _names(
    frames: list[_Frame], optimizer: torch.optim.Optimizer, trainer: object
) -> tuple[dict[str, str], bool]:
    """Find the user's own expressions for optimizer, model and trainer.

    They are taken from the outermost frame that has them, where they are made. The second result is True if
    the model has no other trainable parameters.
    """
    names: dict[str, str] = {}
    whole = False
    for frame in reversed(frames):
        if _inside(frame.module, THEIRS) or frame.file.startswith(INSTALLED):
            continue
        models = {}
        for name, value in frame.named():
            if value is trainer and trainer is not None:
                names.setdefault("trainer", name)
            if isinstance(value, torch.optim.Optimizer):
                if optimizer in (value, vars(value).get("optimizer"), vars(value).get("_optimizer")):
                    names.setdefault("optimizer", name)
            elif isinstance(value, torch.nn.Module) and (owned := _owns(value, optimizer)):
                models[name] = owned == "whole"
        if models and "model" not in names:
            name = next((n for n in models if n.rpartition(".")[2] == "model"), next(iter(models)))
            names["model"], whole = name, models[name]
    return names, whole


def _owns(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return "whole" if an optimizer holds all trainable parameters of a model, "part" if some, or ""."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    theirs = {id(p): p.requires_grad for p in model.parameters()}
    if not mine or not mine <= set(theirs):
        return ""
    return "whole" if {i for i, trained in theirs.items() if trained} <= mine else "part"
