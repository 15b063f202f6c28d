"""How an audited script ends: by itself, by an error, or by a signal.

A cluster ends a job with SIGTERM, a terminal that is closed with SIGHUP. Their default is to die at once,
with the open part of the trace; so, if the script did not ask for the signal itself, the part is written and
the verdict said first, and then the process ends by the same signal, so that whoever sent it sees what it
expects. ``os._exit`` runs no exit handler, and ``os.execv`` puts another program in the place of this one:
they are made to do the same first. Threads that outlive the script are waited for, as Python does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, NoReturn

from halfulp.audit.recorder import Audit
from halfulp.text import tell

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
REPLACING = ("execv", "execve")
"""What the others (``os.execlp`` ...) call."""


class Termination:
    """While it is entered, SIGTERM, SIGHUP, ``os._exit`` and ``os.execv`` first end an audit and then the
    process; SIGINT waits for its writing.

    Only in the main thread, and only where nobody else handles the signals. A handler that the script
    installs takes the place of this one, and stays.
    """

    def __init__(self, audit: Audit, farewell: Callable[[], None]) -> None:
        self.audit, self.farewell = audit, farewell
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._ending = False
        self._exit = os._exit
        self._replace = {name: getattr(os, name) for name in REPLACING if hasattr(os, name)}
        self._mine = dict.fromkeys(ENDING, self._asked) | {signal.SIGINT: self._interrupted}

    def __enter__(self) -> None:
        usual = dict.fromkeys(ENDING, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
        os._exit = self._left  # type: ignore[assignment]  # a function in the place of one
        for name, replace in self._replace.items():
            setattr(os, name, self._replaced(replace))
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._mine.items():
                if signal.getsignal(number) == usual[number]:
                    self._before[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        os._exit = self._exit
        for name, replace in self._replace.items():
            setattr(os, name, replace)
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

    def _left(self, code: int) -> NoReturn:
        if os.getpid() == self._process and not self._ending:  # not a worker, which ends like this
            self._ending = True
            try:
                self._take_leave()
            finally:
                self._exit(code)
        self._exit(code)

    def _replaced(self, replace: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(replace)
        def replaced(path: Any, *args: Any, **kwargs: Any) -> NoReturn:
            # os.execvp tries one folder after the other, and a script may try one program after the other.
            works = isinstance(path, int) or os.access(path, os.X_OK)
            if os.getpid() != self._process or self._ending or not works:
                replace(path, *args, **kwargs)
            self._ending = True
            try:
                self._take_leave()
            finally:
                self._ending = False  # if the program cannot be run, the script goes on
                replace(path, *args, **kwargs)

        return replaced

    def _end(self, number: int) -> None:
        try:
            # What the signal interrupted may hold a lock on a stream: then less is said.
            with contextlib.suppress(RuntimeError):
                tell("\nhalfulp: terminated; the trace keeps what was recorded.")
            self._take_leave()
        finally:
            end_by(number)

    def _take_leave(self) -> None:
        self.audit.stop()
        self.audit.discard_if_empty()
        with contextlib.suppress(RuntimeError):
            self.farewell()


def wait_for_threads(known: Collection[threading.Thread]) -> None:
    """Where a script leaves threads that Python would wait for before it ends, wait as Python does, so that
    their steps are seen; ``known``: those that were there before. An interrupt ends the waiting alone."""
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
