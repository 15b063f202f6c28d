"""Decide which calls of ``step()`` are steps of the run.

torch calls a hook before and one after every ``step()``. Not every pair is a step of the run: an optimizer
may call another one inside (the outer step counts), a step may raise, a fused optimizer is called for a
step that ``GradScaler`` skips, and a forked process inherits the hooks of its parent. Threads may step
concurrently: their hooks wait for each other, the steps do not, and listeners are notified.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from halfulp.errors import HalfulpError

Hook = Callable[[torch.optim.Optimizer], None]


class _Open(NamedTuple):
    """A call of ``step()`` that has begun."""

    optimizer: torch.optim.Optimizer
    frame: FrameType
    thread: int


class StepHooks:
    """Calls ``before`` and ``after`` around every step of some optimizers, or of all in this process.

    After a ``before`` there may be no ``after``, if the step raised or was skipped. ``together`` is called
    before a step that begins while one of another thread is open.
    """

    def __init__(self, before: Hook, after: Hook, together: Callable[[], None] | None = None) -> None:
        self.before, self.after, self.together = before, after, together
        self._handles: list[Any] = []
        self._lock = threading.RLock()  # held in hooks, never from one to the next: a step may raise
        self._busy: int | None = None
        """The thread that is in a hook."""
        self._detached = False
        self._waiting: Callable[[], None] | None = None
        self._inside: list[_Open] = []
        self._process = os.getpid()
        self._forgotten: Callable[[], None] | None = None
        self._raised: weakref.ref[HalfulpError] | None = None

    def raised(self, error: BaseException) -> bool:
        """Return True if an error raised by a step came from one of these hooks, not from the step itself."""
        return self._raised is not None and self._raised() is error

    def _call(
        self, hook: Hook, optimizer: torch.optim.Optimizer, first: Callable[[], None] | None = None
    ) -> None:
        outer, self._busy = self._busy, threading.get_ident()
        try:
            if first is not None:
                first()
            hook(optimizer)
        except HalfulpError as error:
            self._raised = weakref.ref(error)  # a strong reference would keep its frames alive
            raise
        finally:
            self._idle_again(outer)

    @property
    def attached(self) -> bool:
        """True if they were attached, now or before."""
        return bool(self._handles) or self._detached

    def attach(self, optimizers: Sequence[torch.optim.Optimizer] | None) -> None:
        """Hook the given optimizers, or every optimizer of the process."""
        # A compiled step must run the hooks as they are, not look into them.
        enter, leave = (torch.compiler.disable(h) for h in (self.enter, self.leave))  # type: ignore[no-untyped-call]  # torch's
        self._process = os.getpid()
        if optimizers is None:
            self._handles = [
                register_optimizer_step_pre_hook(enter),
                register_optimizer_step_post_hook(leave),
            ]
        for o in optimizers or ():
            self._handles += [o.register_step_pre_hook(enter), o.register_step_post_hook(leave)]

    def at_exit(self, stop: Callable[[], None]) -> None:
        """Call a method when the process ends, if the hooks are still there and its object is."""
        method, process = weakref.WeakMethod(stop), self._process

        def forgotten() -> None:  # holds nothing: an audit that is dropped lets go of its folder
            call = method()
            if call is not None and os.getpid() == process:
                call()

        self._forgotten = forgotten
        atexit.register(forgotten)

    @property
    def forked(self) -> bool:
        """True if this process is a fork of the one in which they were attached."""
        return os.getpid() != self._process

    def detach(self) -> None:
        """Remove every hook; steps that are under way are not reported."""
        if self._forgotten is not None:
            atexit.unregister(self._forgotten)
            self._forgotten = None
        for handle in self._handles:
            handle.remove()
        self._handles, self._inside, self._detached = [], [], True

    def when_idle(self, action: Callable[[], None]) -> None:
        """Do something now, or, from a signal handler that interrupted a hook, when the hook is over."""
        if self._busy == threading.get_ident():
            self._waiting = action
        else:
            action()

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Run a block that no action waiting for :meth:`when_idle` and no other thread may interrupt."""
        with self._lock:
            outer, self._busy = self._busy, threading.get_ident()
            try:
                yield
            finally:
                self._idle_again(outer)

    def _idle_again(self, outer: int | None) -> None:
        self._busy = outer
        if outer is None and self._waiting is not None:
            action, self._waiting = self._waiting, None
            action()

    def enter(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Run before ``optimizer.step()``: note the step and call the listener."""
        if self.forked:  # which may have a lock that nobody will release
            return
        here, frame = threading.get_ident(), _step_frame()
        found_busy = self._busy not in (None, here)
        with self._lock:
            if self._detached:
                return
            if self._inside:  # a step that raised never came to its second hook
                self._inside = [step for step in self._inside if _running(step)]
            nested = any(step.thread == here for step in self._inside)
            together = found_busy or bool(self._inside)
            self._inside.append(_Open(optimizer, frame, here))
            if not nested:  # the outer step counts
                self._call(self.before, optimizer, self.together if together else None)

    def leave(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Run after ``optimizer.step()``: close the step that ``enter`` opened."""
        if self.forked:
            return
        here = threading.get_ident()
        with self._lock:
            mine = [step for step in self._inside if step.thread == here]
            places = [i for i, step in enumerate(mine) if step.optimizer is optimizer]
            if not places:
                return
            others = [step for step in self._inside if step.thread != here]
            self._inside = [*others, *mine[: places[-1]]]
            if not places[-1] and not _skipped(optimizer):
                self._call(self.after, optimizer)


def _skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a fused optimizer was told by ``GradScaler`` to leave the weights alone."""
    infinite = getattr(optimizer, "found_inf", None)
    return isinstance(infinite, torch.Tensor) and bool(infinite)


def _step_frame() -> FrameType:
    """Return the frame of the ``step()`` that called a hook."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != "torch.optim.optimizer":
        frame = frame.f_back  # torch.compiler.disable puts frames between
    return frame


def _running(step: _Open) -> bool:
    """Return True if a step is still on the stack of its thread, if there is such a thread."""
    at = sys._current_frames().get(step.thread)
    while at is not None and at is not step.frame:
        at = at.f_back
    return at is not None
