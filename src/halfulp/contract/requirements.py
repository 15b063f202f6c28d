"""Define the terms of a contract: plain data, validated when created."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from halfulp import files
from halfulp.documents import check_keys, parsed
from halfulp.errors import CorruptionError, UsageError
from halfulp.numbers import spellings
from halfulp.text import meant, several

MOST_BYTES = 1 << 20
"""The largest size of a file with terms."""
FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms that a contract must hold.

    Attributes:
        weights: The least precise dtype in which updates may be computed, such as ``"float32"``.
        states: The least precise dtype of moments, step counters and other floating-point states.
        masters: ``True``: no parameter narrower than float32 is updated without a float32 master. A string:
            every such parameter has a float32 state of that name, equal to the weight when rounded.
        arrives: The share of the proposed change that must be written at a checked step: 0.99 or "99%".
        moving: Patterns such as ``"*norm*"`` of parameters that must not be stuck at their start.
        every: Steps between two checks.
        patience: Steps after which a parameter of ``moving`` that has not changed is stuck.

    >>> Terms(weights="float32", arrives=0.99).every
    100
    """

    weights: str | None = None
    states: str | None = None
    masters: bool | str = False
    arrives: float | None = None
    moving: tuple[str, ...] = ()
    every: int = 100
    patience: int = 100

    def __post_init__(self) -> None:
        """Check every term, and bring it into its one form."""
        checked: dict[str, Any] = {
            "weights": _float_dtype("weights", self.weights),
            "states": _float_dtype("states", self.states),
            "arrives": _share(self.arrives),
            "moving": several(self.moving),
        }
        masters: Any = self.masters  # whatever a file or a caller gave
        if not isinstance(masters, bool | str) or masters == "":
            raise UsageError(f"masters must be True, False or the name of a state, not {masters!r}.")
        if checked["moving"] is None:
            raise UsageError(f"moving must be patterns of names, such as '*norm*', not {self.moving!r}.")
        for name in ("every", "patience"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise UsageError(f"{name} must be a whole number of steps from 1 on, not {given!r}.")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not (self.weights or self.states or self.masters or self.arrives or self.moving):
            raise UsageError("a contract needs terms: weights=, states=, masters=, arrives= or moving=.")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Create terms from a mapping, such as one read from a file.

        Args:
            given: Values by name of a term.

        Raises:
            UsageError: If a key is not a term or a value is not valid.
        """
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            missing = ", ".join(map(repr, unknown))
            near = meant(unknown[0], known)
            raise UsageError(f"a contract has no term {missing}.{near} Its terms are {', '.join(known)}.")
        return cls(**given)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read terms from a TOML file, or from a JSON file if its name ends in ``.json``.

        Args:
            path: The file.

        Raises:
            UsageError: If there is no such file, it cannot be parsed, or its keys and values are not terms.
        """
        try:
            content = files.read(path, MOST_BYTES, follow=True)
            if path.suffix == ".json":
                given = parsed(content, path, "a contract")
                check_keys(content, path)
            else:
                given = tomllib.loads(content.decode())
        except (ValueError, RecursionError, CorruptionError) as error:
            raise UsageError(
                f"{path} cannot be read as a contract: {str(error).rstrip('.')}. Write TOML, such as "
                "arrives = 0.99, or a JSON object."
            ) from None
        try:
            return cls.of(given)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None


def _float_dtype(term: str, given: Any) -> str | None:
    """Return the name of a float dtype; None where there is no such term."""
    name = spellings.grid_name(str(given)) if isinstance(given, str | torch.dtype) else given
    if name is not None and not (isinstance(name, str) and name in FLOATS):
        raise UsageError(f"{term} must be one of {', '.join(FLOATS)}, not {name!r}.")
    return name


def _share(given: Any) -> float | None:
    """Return a share, which may be written as a percentage; None where there is no such term."""
    share: float | None = given
    if isinstance(given, str) and given.strip().endswith("%"):
        with suppress(ValueError):
            share = float(given.strip()[:-1]) / 100
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if share is not None and not (number and 0 < share <= 1):
        raise UsageError(
            f"arrives must be a share above 0 and up to 1, such as 0.99 or '99%', not {share!r}."
        )
    return share
