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


def check(name: str, given: Any, fits: bool, expected: str) -> None:
    """Refuse an argument that does not fit.

    Raises:
        UsageError: If it does not.
    """
    if not fits:
        raise UsageError(f"{name}= takes {expected}, not {given!r:.200}.")


def grids_of(given: Any) -> list[Grid]:
    """Return one grid or several, that differ."""
    single = isinstance(given, str | Grid | torch.dtype)
    several = [given] if single else listed("grids", given, "a grid, such as 'bf16', or several")
    grids = [named(g) for g in several]
    if not grids:
        raise UsageError("an audit needs at least one grid, such as 'bf16'.")
    names = [g.name for g in grids]
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise UsageError(f"grids must differ, but {repeated} repeat.")
    return grids


def optimizers_of(given: Any) -> list[torch.optim.Optimizer] | None:
    """Return one optimizer or several; None stands for all that step."""

    def steps(x: Any) -> bool:  # a wrapper may pass hooks on to its optimizer
        hooked = hasattr(x, "register_step_pre_hook") and hasattr(x, "param_groups")
        return hooked or isinstance(x, torch.optim.Optimizer)

    expected = "a torch optimizer, several, or None for all of the process"
    several = None if given is None else _several("optimizers", given, steps, expected)
    check("optimizers", given, several is None or bool(several), expected)
    return several


def models_of(given: Any) -> list[torch.nn.Module]:
    """Return one module, several or none."""

    def is_module(x: Any) -> bool:
        return isinstance(x, torch.nn.Module)

    return [] if given is None else _several("model", given, is_module, "a torch.nn.Module, several, or None")


def _several(name: str, given: Any, fits: Callable[[Any], bool], expected: str) -> list[Any]:
    if fits(given):
        return [given]
    several = listed(name, given, expected)
    for x in (x for x in several if not fits(x)):
        raise UsageError(f"{name}= takes {expected}, not {type(given).__name__} of {type(x).__name__}.")
    return several


def listed(name: str, given: Any, expected: str) -> list[Any]:
    """Return the items of an iterable as a list."""
    if isinstance(given, torch.nn.Module):  # whose text is long
        raise UsageError(f"{name}= takes {expected}, not a module ({type(given).__name__}).")
    check(name, given, hasattr(type(given), "__iter__"), expected)
    return list(given)


def listeners_of(given: Any) -> tuple[Callable[[dict[str, Any]], None], ...]:
    """Return the functions of an iterable."""
    functions = listed("listeners", given, "a list of functions")
    for x in functions:
        check("listeners", x, callable(x), "a list of functions, no list with others in it")
    return tuple(functions)


def flag(name: str, given: Any) -> bool:
    """Return a boolean."""
    check(name, given, isinstance(given, bool | np.bool_), "True or False")
    return bool(given)


def count(name: str, given: Any) -> int:
    """Return a number of steps, or of one."""
    fits = _whole(given) and 1 <= given <= LARGEST
    check(name, given, fits, f"a whole number, at least 1 and at most {LARGEST}")
    return int(given)


def seed_of(given: Any) -> int:
    """Return a whole number that a stream can take."""
    fits = _whole(given) and abs(int(given)) < 10**DIGITS
    check("seed", given, fits, f"a whole number of at most {DIGITS} digits")
    return int(given)


def share(name: str, given: Any) -> float | None:
    """Return a share, above 0; None stands for all."""
    fits = given is None or (is_number(given) and 0 < given <= 1)
    check(name, given, fits, "a share, above 0 and at most 1")
    return None if given is None else float(given)


def seconds(name: str, given: Any) -> float:
    """Return a number of seconds."""
    check(name, given, is_number(given) and given >= 0, "a number of seconds from 0 on")
    return float(given)


def by_name(name: str, given: Any, expected: str) -> dict[str, Any]:
    """Return a dictionary, an empty one for None."""
    check(name, given, given is None or isinstance(given, Mapping), expected)
    return dict(given or {})


def _whole(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def is_number(given: Any) -> bool:
    """Return True for a real number that is not a boolean."""
    return isinstance(given, Real) and not isinstance(given, bool | np.bool_)


def folder_of(given: Any) -> Path | Memory | None:
    """Return where a trace goes. The folder is absolute: a script may go to another one."""
    fits = given is None or isinstance(given, str | Path | Memory)
    check("out", given, fits, "a folder, a halfulp.Memory or None")
    if not isinstance(given, str | Path):
        return given  # type: ignore[no-any-return]  # what is left
    try:
        os.lstat(given)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"out= cannot be {str(given)!r:.200}: {error}.") from None
    return Path(given).absolute()
