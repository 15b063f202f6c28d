"""Ctrl-C (or SIGTERM, as a cluster sends it), twice: the first asks, the second ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from halfulp.errors import HalfulpError


class Interrupted(HalfulpError):  # noqa: N818  # not an error of anybody's
    """The user, or a cluster, stopped a run; the exit code is what a shell makes of the signal."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class Interrupts:
    """Counts interruptions (SIGINT, SIGTERM) instead of raising in the middle of a write."""

    def __init__(self) -> None:
        self.count = 0
        self.number: int = signal.SIGINT  # the signal that came last
        self.told = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = number
