"""Check the arguments of an audit when it is created.

The manifest of a trace states its options, so a trace with invalid ones could be recorded for days and never
be opened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from halfulp.canonical import LARGEST
from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.trace import Memory

SEEDS = 10**98
"""Seeds are smaller, with either sign: a manifest takes that many digits."""


def grids_of(given: Any) -> list[Grid]:
    """Return one grid or several, that differ."""
    single = isinstance(given, str | Grid | torch.dtype)
    several = [given] if single else listed("grids", given, "a grid, such as 'bf16', or several")
    found = [named(g) for g in several]
    if not found:
        raise UsageError("an audit needs at least one grid, such as 'bf16'.")
    names = [g.name for g in found]
    if len(set(names)) != len(names):
        raise UsageError(f"grids must differ, but {sorted({n for n in names if names.count(n) > 1})} repeat.")
    return found


def optimizers_of(given: Any) -> list[torch.optim.Optimizer] | None:
    """Return one optimizer or several; None stands for all that step."""
    expected = "a torch optimizer, several, or None for all of the process"
    return None if given is None else _several("optimizers", given, _steps, expected)


def models_of(given: Any) -> list[torch.nn.Module]:
    """Return one module, several or none."""
    expected = "a torch.nn.Module, several, or None"
    return [] if given is None else _several("model", given, _is_module, expected)


def _steps(x: Any) -> bool:
    """Return True if hooks can be put around its steps; a wrapper may pass them on to its optimizer."""
    return isinstance(x, torch.optim.Optimizer) or (
        hasattr(x, "register_step_pre_hook") and hasattr(x, "param_groups")
    )


def _is_module(x: Any) -> bool:
    return isinstance(x, torch.nn.Module)


def _several(name: str, given: Any, fits: Callable[[Any], bool], expected: str) -> list[Any]:
    if fits(given):
        return [given]
    found = listed(name, given, expected)
    for x in (x for x in found if not fits(x)):
        raise UsageError(f"{name}= takes {expected}, not {type(given).__name__} of {type(x).__name__}.")
    return found


def listed(name: str, given: Any, expected: str) -> list[Any]:
    """Return the items of an iterable as a list."""
    try:
        return list(given)
    except TypeError:
        raise UsageError(f"{name}= takes {expected}, not {given!r:.200}.") from None


def listeners_of(given: Any) -> list[Callable[[dict[str, Any]], None]]:
    """Check that ``listeners=`` is a list of functions."""
    found = listed("listeners", given, "a list of functions")
    for x in (x for x in found if not callable(x)):
        raise UsageError(f"listeners= takes a list of functions, not of {x!r:.200}.")
    return found


def flag(name: str, given: Any) -> bool:
    """Check that an argument is a boolean."""
    if not isinstance(given, bool | np.bool_):
        raise UsageError(f"{name}= takes True or False, not {given!r}.")
    return bool(given)


def _whole(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def count(name: str, given: Any) -> int:
    """Check a number of steps, or of one."""
    if not _whole(given) or not 1 <= given <= LARGEST:
        raise UsageError(f"{name}= takes a whole number, at least 1 and at most {LARGEST}, not {given!r}.")
    return int(given)


def seed_of(given: Any) -> int:
    """Check that ``seed=`` is a whole number that a stream can take."""
    if not _whole(given):
        raise UsageError(f"seed= takes a whole number, not {given!r:.200}.")
    if abs(int(given)) >= SEEDS:
        raise UsageError("seed= takes a whole number of at most 98 digits; this one has more.")
    return int(given)


def share(given: Any) -> float | None:
    """Check a share of the tiles; None stands for all of them."""
    if given is None:
        return None
    if not is_number(given) or not 0 < given <= 1:
        raise UsageError(f"sample is a share of the tiles, above 0 and at most 1, not {given!r}.")
    return float(given)


def seconds(name: str, given: Any) -> float:
    """Check that an argument is a number of seconds from 0 on."""
    if not is_number(given) or not given >= 0:
        raise UsageError(f"{name}= takes a number of seconds from 0 on, not {given!r}.")
    return float(given)


def states_of(given: Any) -> bool | Literal["find"]:
    """Check that ``states=`` is True, False or ``"find"``."""
    if isinstance(given, str) and given != "find":
        raise UsageError(f"states= takes True, False or 'find', not {given!r}.")
    return "find" if isinstance(given, str) else flag("states", given)


def by_name(name: str, given: Any, expected: str) -> dict[str, Any]:
    """Return a dictionary, an empty one for None."""
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"{name}= takes {expected}, not {given!r:.200}.")
    return dict(given or {})


def called(name: str, given: Any) -> Any:
    """Check a function, or None."""
    if given is not None and not callable(given):
        raise UsageError(f"{name}= takes a function, not {given!r:.200}.")
    return given


def is_number(given: Any) -> bool:
    """Return True for a real number that is not a boolean."""
    return isinstance(given, Real) and not isinstance(given, bool | np.bool_)


def folder_of(given: Any) -> Path | Memory | None:
    """Return where a trace goes. The folder is absolute: a script may go to another one."""
    if given is not None and not isinstance(given, str | Path | Memory):
        raise UsageError(f"out= takes a folder, a halfulp.Memory or None, not {given!r:.200}.")
    if not isinstance(given, str | Path):
        return given
    try:
        os.lstat(given)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"out= cannot be {str(given)!r:.200}: {error}.") from None
    return Path(given).absolute()
