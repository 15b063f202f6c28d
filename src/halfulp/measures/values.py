"""Numbers that may be missing (None), and values by what they belong to.

Where a run diverged, or a smaller scale leaves cells out, there is no number; what is computed of none is
none, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import TypeVar

Found = float | None
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def finite(x: float) -> Found:
    """A number, if it is one: neither infinite nor NaN."""
    return float(x) if math.isfinite(x) else None


def known(values: Iterable[Found]) -> list[float]:
    """Those that are there."""
    return [v for v in values if v is not None]


def less(a: Found, b: Found) -> Found:
    """One less another.

    >>> less(3.0, 1.0), less(3.0, None)
    (2.0, None)
    """
    return None if a is None or b is None else a - b


def quotient(a: Found, b: Found) -> Found:
    """One over another, which is not zero.

    >>> quotient(3.0, 2.0), quotient(3.0, 0)
    (1.5, None)
    """
    return None if a is None or not b else a / b


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of every key, in their order.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
