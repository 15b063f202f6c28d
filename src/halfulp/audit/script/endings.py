"""Handle the end of an audited script: a normal exit, an error or a signal.

A cluster ends a job with SIGTERM, and closing a terminal sends SIGHUP. By default both kill the process at
once, and the open part of the trace is lost. Unless the script handles the signal itself, the part is
therefore written and the verdict printed first; the process then ends by the same signal, as its sender
expects. A script that ends by ``os._exit`` or ``os.execv`` loses the open part and gets no verdict.
Threads that outlive the script are waited for, as in Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from halfulp.audit.session import Audit
from halfulp.text import tell

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Termination:
    """End an audit before the process on SIGTERM and SIGHUP; let SIGINT wait for its writing.

    Only in the main thread, and only where nobody else handles the signals. A handler that the script
    installs takes the place of this one, and stays.
    """

    def __init__(self, audit: Audit, farewell: Callable[[], None]) -> None:
        self.audit, self.farewell = audit, farewell
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._ending = False
        self._mine = dict.fromkeys(ENDING, self._asked) | {signal.SIGINT: self._interrupted}

    def __enter__(self) -> None:
        usual = dict.fromkeys(ENDING, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._mine.items():
                if signal.getsignal(number) == usual[number]:
                    self._before[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._mine[signal.Signals(number)]:
                signal.signal(number, before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self.audit.when_idle(lambda: signal.default_int_handler(number, frame))

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that inherited the handler
            end_by(number)
        if self._ending:
            return
        self._ending = True
        if hasattr(signal, "SIGCHLD"):  # workers that got the signal, too, must not raise in the midst of it
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.audit.when_idle(lambda: self._end(number))

    def _end(self, number: int) -> None:
        try:
            # What the signal interrupted may hold a lock on a stream: then less is said.
            with contextlib.suppress(RuntimeError):
                tell("\nhalfulp: terminated; the trace keeps what was recorded.")
            self.audit.stop()
            self.audit.discard_if_empty()
            with contextlib.suppress(RuntimeError):
                self.farewell()
        finally:
            end_by(number)


def wait_for_threads(known: Collection[threading.Thread]) -> None:
    """Wait, as Python does at exit, for threads that a script leaves running, so that their steps are seen.

    Threads in ``known`` existed before the script. An interrupt ends only the wait.
    """
    left = [t for t in threading.enumerate() if t not in known and not t.daemon]
    ours = all(t.name.startswith("halfulp") for t in left)  # of kernels, where torch has no team
    if ours or threading.current_thread() is not threading.main_thread():
        return
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls; only the first counts
    except KeyboardInterrupt:
        tell("halfulp: interrupted while threads were waited for; the trace keeps what was recorded.")
    except Exception:
        traceback.print_exc()  # and Python goes on to end


def end_by(number: int) -> None:
    """End this process by a signal, so that its exit status is that of the signal."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
