"""Compute with numbers that may be missing (None), and group values by key.

There is no number if a run diverged, or a smaller scale leaves cells out. Whatever is computed from a missing
number is missing too, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TypeVar

MaybeFloat = float | None
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def finite(x: float) -> MaybeFloat:
    """Return a number, or None if it is infinite or NaN."""
    return float(x) if math.isfinite(x) else None


def known(values: Iterable[MaybeFloat]) -> list[float]:
    """Return the numbers that are not missing."""
    return [v for v in values if v is not None]


def less(a: MaybeFloat, b: MaybeFloat) -> MaybeFloat:
    """Return the difference of two numbers; None if one is missing.

    >>> less(3.0, 1.0), less(3.0, None)
    (2.0, None)
    """
    return None if a is None or b is None else a - b


def quotient(a: MaybeFloat, b: MaybeFloat) -> MaybeFloat:
    """Return the ratio of two numbers; None if one is missing or the divisor is zero.

    >>> quotient(3.0, 2.0), quotient(3.0, 0)
    (1.5, None)
    """
    return None if a is None or not b else a / b


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of every key, in their order.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
