"""Which calls of ``step()`` are steps.

torch calls a hook before and one after every ``step()``. Not every pair is a step of the run: an optimizer
may call another one inside (the outer step is the step), a step may raise, a fused optimizer is called for a
step that ``GradScaler`` skips, a forked process inherits the hooks of its parent.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

Hook = Callable[[torch.optim.Optimizer], None]


class StepHooks:
    """Calls ``before`` and ``after`` around every step of some optimizers, or of all in this process.

    After a ``before`` there may be no ``after``, if the step raised or was skipped.
    """

    def __init__(self, before: Hook, after: Hook) -> None:
        self.before, self.after = before, after
        self._handles: list[Any] = []
        self._busy = False
        self._waiting: Callable[[], None] | None = None
        self._inside: list[tuple[torch.optim.Optimizer, FrameType]] = []
        self._process = os.getpid()
        self._forgotten: Callable[[], None] | None = None

    def attach(self, optimizers: Sequence[torch.optim.Optimizer] | None) -> None:
        # A compiled step must run the hooks as they are, not look into them.
        enter, leave = (torch.compiler.disable(h) for h in (self._enter, self._leave))  # type: ignore[no-untyped-call]  # torch's
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
            found = method()
            if found is not None and os.getpid() == process:
                found()

        self._forgotten = forgotten
        atexit.register(forgotten)

    def detach(self) -> None:
        if self._forgotten is not None:
            atexit.unregister(self._forgotten)
            self._forgotten = None
        for handle in self._handles:
            handle.remove()
        self._handles, self._inside = [], []

    def when_idle(self, action: Callable[[], None]) -> None:
        """Do something now, or, from a signal handler that interrupted a hook, when the hook is over."""
        if self._busy:
            self._waiting = action
        else:
            action()

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """What must not be cut in two by something that waits for :meth:`when_idle`."""
        outer, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = outer
            if not outer and self._waiting is not None:
                action, self._waiting = self._waiting, None
                action()

    def _enter(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if os.getpid() != self._process:
            return
        # A step that raised never came to its second hook.
        self._inside = [(o, frame) for o, frame in self._inside if _running(frame)]
        self._inside.append((optimizer, _step_frame()))
        if len(self._inside) == 1:
            with self.uninterrupted():
                self.before(optimizer)

    def _leave(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        places = [i for i, (o, _) in enumerate(self._inside) if o is optimizer]
        if not places:
            return
        del self._inside[places[-1] :]
        if not self._inside and not _skipped(optimizer):
            with self.uninterrupted():
                self.after(optimizer)


def _skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimizer was told by ``GradScaler`` to leave the weights alone."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found)


def _step_frame() -> FrameType:
    """The frame of the ``step()`` that called a hook."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") != "torch.optim.optimizer":
        frame = frame.f_back  # torch.compiler.disable puts frames between
    return frame


def _running(frame: FrameType) -> bool:
    at: FrameType | None = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None
