"""Keep old names working for one version, each with a warning that names the new one.

Names of `halfulp` that moved into a room are in `NAMES`, modules that moved in `MODULES`; arguments that
moved into a group are taken by `grouped_arguments`. Delete an entry one version after it was added here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar

from halfulp.errors import UsageError
from halfulp.text import meant

P = ParamSpec("P")
R = TypeVar("R")

NAMES = {
    "Alert": "halfulp.audit",
    "Change": "halfulp.checkpoints",
    "Check": "halfulp.checkpoints",
    "Dispatch": "halfulp.writeback",
    "ECO": "halfulp.writeback",
    "Kahan": "halfulp.writeback",
    "Master": "halfulp.writeback",
    "TamperingError": "halfulp.errors",
    "VersionError": "halfulp.errors",
    "float_grid": "halfulp.numbers",
    "integer_grid": "halfulp.numbers",
    "margin": "halfulp.measures",
    "phase": "halfulp.measures",
    "rho": "halfulp.measures",
    "symmetric_frozen": "halfulp.measures",
}
"""Current packages of names that `halfulp` used to export, by name."""
MODULES = {
    "halfulp.elements": "halfulp.numbers.elements",
    "halfulp.events": "halfulp.measures.events",
    "halfulp.grids": "halfulp.numbers.grids",
    "halfulp.masks": "halfulp.allocation.masks",
    "halfulp.spellings": "halfulp.numbers.spellings",
    "halfulp.stored": "halfulp.checkpoints",
    "halfulp.streams": "halfulp.numbers.streams",
    "halfulp.study.command_line": "halfulp.cli.study_command",
}
"""Current paths of moved modules and packages, by former path."""

CALIBRATION = (
    "Calibration by pairs of runs has ended: a pilot makes its own pair, on a part of every batch, and its "
    "forecast has an interval. See halfulp pilot --help."
)
"""What `halfulp calibrate` and `--calibration` say for one version."""
BY_GROUP = (
    "Events.by_group has ended: sum frozen and numel of the opt.events.rows of a group, and divide the two."
)
"""What `Events.by_group` says for one version."""

ENDED = {
    "replay": "halfulp.replay has ended, and with it Audit(keep=True), which it needed: audit the run again "
    "with the other grids.",
    "keep": "Audit(keep=True) has ended, and with it halfulp.replay, which read the kept weights: audit the "
    "run again with the other grids.",
}
"""What to do instead of functions and options that are gone, by name, for one version."""


def warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that ``old`` is called ``new`` now."""
    text = f"{old} is now {new}; the old name goes with the next version of halfulp."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def moved(name: str) -> Any:
    """Return what ``halfulp.<name>`` was, with a warning.

    Raises:
        AttributeError: If there never was such a name.
    """
    if name in NAMES:
        room = NAMES[name]
        warn(f"halfulp.{name}", f"{room}.{name}", stacklevel=4)
        return getattr(importlib.import_module(room), name)
    if (path := f"halfulp.{name}") in MODULES:
        warn(path, MODULES[path], stacklevel=4)
        return importlib.import_module(MODULES[path])
    if name in ENDED:
        return _ended(name)
    raise AttributeError(f"module 'halfulp' has no attribute {name!r}")


def _ended(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises and says what to do instead: importing it by name still works."""

    def ended(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(ENDED[name])

    return ended


def grouped_arguments(
    group: str, kind: type[Any], names: Sequence[str]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Take keyword arguments that a group holds now, with a warning; unknown ones are a UsageError.

    Args:
        group: The argument that takes the group.
        kind: The group's dataclass.
        names: Those of its fields that were arguments.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Rates:
    ...     lr: float = 0.1
    >>> @grouped_arguments("rates", Rates, ["lr"])
    ... def step(*, rates: Rates) -> float:
    ...     return rates.lr
    >>> step(rates=Rates(lr=0.5))
    0.5
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        taken = inspect.signature(function).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())

        @functools.wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            old = {name: given.pop(name) for name in names if name in given}
            called = function.__qualname__.removesuffix(".__init__")
            if old and group in given:
                raise TypeError(f"{called}() got {group} and {', '.join(old)}, which belong inside it.")
            if old:
                text = ", ".join(f"{name}=..." for name in old)
                warn(f"{called}({text})", f"{called}({group}={kind.__name__}({text}))")
                given[group] = kind(**old)
            for name in [] if anything else [name for name in given if name not in taken]:
                raise UsageError(f"{called} has no option {name!r}.{meant(name, taken)}")
            return function(*args, **given)

        return call

    return decorate


def new_path(name: str) -> str:
    """Return the path that a module has now.

    >>> new_path("halfulp.stored.sync"), new_path("halfulp.trace")
    ('halfulp.checkpoints.sync', 'halfulp.trace')
    """
    for old, new in MODULES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find modules by their old paths: what is imported is the module itself, not a second copy."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if new_path(name) == name else importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let the import system make a module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        new = new_path(module.__name__)
        warn(module.__name__, new)
        sys.modules[module.__name__] = importlib.import_module(new)


def install() -> None:
    """Let old paths of modules be imported; called once, by the package itself."""
    sys.meta_path.insert(0, _Moved())
