"""Call a function inside several context managers.

The ``with`` statement stands here, and not where it is used, for the sake of interrupts: an interrupt between
two lines of the caller finds every context either entered for the whole call or left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

T = TypeVar("T")


def within(contexts: Iterable[AbstractContextManager[Any]], call: Callable[[], T]) -> T:
    """Call with contexts entered, one inside the other."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return call()
