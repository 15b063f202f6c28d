"""Check the arguments of an audit when it is created.

The manifest of a trace states its options, so a trace with invalid ones could be recorded for days and never
be opened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp.canonical import LARGEST
from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.trace import Memory

Grids = str | Grid | torch.dtype | Iterable[str | Grid | torch.dtype]
"""One grid or several, by name or dtype or as they are."""
DIGITS = 98
"""Most digits of a seed, which a manifest takes."""


def check(name: str, value: Any, fits: bool, expected: str) -> None:
    """Refuse an argument that does not fit.

    Raises:
        UsageError: If it does not.
    """
    if not fits:
        raise UsageError(f"{name}= takes {expected}, not {value!r:.200}.")


def grids_of(value: Any) -> list[Grid]:
    """Return one grid or several, that differ."""
    single = isinstance(value, str | Grid | torch.dtype)
    several = [value] if single else listed("grids", value, "a grid, such as 'bf16', or several")
    grids = [named(g) for g in several]
    if not grids:
        raise UsageError("an audit needs at least one grid, such as 'bf16'.")
    names = [g.name for g in grids]
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise UsageError(f"grids must differ, but {repeated} repeat.")
    return grids


def optimizers_of(value: Any) -> list[torch.optim.Optimizer] | None:
    """Return one optimizer or several; None stands for all that step."""

    def steps(x: Any) -> bool:  # a wrapper may pass hooks on to its optimizer
        hooked = hasattr(x, "register_step_pre_hook") and hasattr(x, "param_groups")
        return hooked or isinstance(x, torch.optim.Optimizer)

    expected = "a torch optimizer, several, or None for all of the process"
    several = None if value is None else _several("optimizers", value, steps, expected)
    check("optimizers", value, several is None or bool(several), expected)
    return several


def models_of(value: Any) -> list[torch.nn.Module]:
    """Return one module, several or none."""

    def is_module(x: Any) -> bool:
        return isinstance(x, torch.nn.Module)

    return [] if value is None else _several("model", value, is_module, "a torch.nn.Module, several, or None")


def _several(name: str, value: Any, fits: Callable[[Any], bool], expected: str) -> list[Any]:
    if fits(value):
        return [value]
    several = listed(name, value, expected)
    for x in (x for x in several if not fits(x)):
        raise UsageError(f"{name}= takes {expected}, not {type(value).__name__} of {type(x).__name__}.")
    return several


def listed(name: str, value: Any, expected: str) -> list[Any]:
    """Return the items of an iterable as a list."""
    if isinstance(value, torch.nn.Module):  # whose text is long
        raise UsageError(f"{name}= takes {expected}, not a module ({type(value).__name__}).")
    check(name, value, hasattr(type(value), "__iter__"), expected)
    return list(value)


def listeners_of(value: Any) -> tuple[Callable[[dict[str, Any]], None], ...]:
    """Return the functions of an iterable."""
    functions = listed("listeners", value, "a list of functions")
    for x in functions:
        check("listeners", x, callable(x), "a list of functions, no list with others in it")
    return tuple(functions)


def flag(name: str, value: Any) -> bool:
    """Return a boolean."""
    check(name, value, isinstance(value, bool | np.bool_), "True or False")
    return bool(value)


def count(name: str, value: Any) -> int:
    """Return a number of steps, or of one."""
    fits = _whole(value) and 1 <= value <= LARGEST
    check(name, value, fits, f"a whole number, at least 1 and at most {LARGEST}")
    return int(value)


def seed_of(value: Any) -> int:
    """Return a whole number that a stream can take."""
    fits = _whole(value) and abs(int(value)) < 10**DIGITS
    check("seed", value, fits, f"a whole number of at most {DIGITS} digits")
    return int(value)


def share(name: str, value: Any) -> float | None:
    """Return a share, above 0; None stands for all."""
    fits = value is None or (is_number(value) and 0 < value <= 1)
    check(name, value, fits, "a share, above 0 and at most 1")
    return None if value is None else float(value)


def seconds(name: str, value: Any) -> float:
    """Return a number of seconds."""
    check(name, value, is_number(value) and value >= 0, "a number of seconds from 0 on")
    return float(value)


def by_name(name: str, value: Any, expected: str) -> dict[str, Any]:
    """Return a dictionary, an empty one for None."""
    check(name, value, value is None or isinstance(value, Mapping), expected)
    return dict(value or {})


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return True for a real number that is not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def folder_of(value: Any) -> Path | Memory | None:
    """Return where a trace goes. The folder is absolute: a script may go to another one."""
    fits = value is None or isinstance(value, str | Path | Memory)
    check("out", value, fits, "a folder, a halfulp.Memory or None")
    if not isinstance(value, str | Path):
        return value  # type: ignore[no-any-return]  # what is left
    try:
        os.lstat(value)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"out= cannot be {str(value)!r:.200}: {error}.") from None
    return Path(value).absolute()
