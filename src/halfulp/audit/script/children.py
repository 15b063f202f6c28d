"""Audit every Python process under a command: launchers, shell scripts, trainers that start workers.

:func:`launch` starts the command with an environment in which each interpreter waits for the first step of an
optimizer (``start/sitecustomize.py``) and then begins an audit of its own here. Ranks of a launcher
(``RANK`` is set) write one trace together; other processes get folders of their own: ``NAME``, ``NAME-2``.
A process in which the audit cannot begin goes on without it, and says so.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from halfulp.audit.ranks import rank
from halfulp.audit.script.endings import Termination
from halfulp.audit.script.runner import Losses
from halfulp.audit.session import Audit
from halfulp.errors import HalfulpError, UsageError
from halfulp.text import plain, tell
from halfulp.trace import Trace
from halfulp.verdicts.answer import verdict, whence

VARIABLE = "HALFULP_AUDIT"
START = Path(__file__).parent / "start"


class Child:
    """The audit of this process, from its first step to its end."""

    def __init__(self, options: dict[str, Any], folder: Path, given: Path) -> None:
        self.process = os.getpid()
        self.given = given.with_name(folder.name)
        """The folder as the command named it, which is shorter to read than where it is."""
        self.audit = Audit(None, exists="raise", out=folder, **options)
        self.audit.announce()
        self.hooks = self.audit.start_unhooked()
        self._losses, self._signals = Losses(self.audit), Termination(self.audit, self.say)
        self._losses.__enter__()
        self._signals.__enter__()
        self._ended = False
        atexit.register(self.end)
        if (workers := sys.modules.get("multiprocessing.util")) is not None:  # they leave without atexit
            workers.Finalize(None, self.end, exitpriority=0)

    def end(self) -> None:
        """Make the trace durable and say what it shows; once, in the process that began it."""
        if self._ended or os.getpid() != self.process:
            return
        self._ended = True
        self._signals.__exit__()
        self._losses.__exit__()
        with contextlib.suppress(HalfulpError):
            self.audit.stop()
        if not self.audit.discard_if_empty():
            self.say()

    def say(self) -> None:
        """Print the verdict on this process's standard error."""
        place = self.audit.out
        if self.audit.lost:
            tell(plain(f"halfulp: there is no verdict: {self.given} no longer holds the trace of this run."))
            return
        if not self.audit.writes or place is None or not (place / "manifest.json").exists():
            return
        trace = Trace.open(place)
        page = f"halfulp report {shlex.quote(str(self.given))}"
        answer = verdict(trace, self.audit.trouble, page=page)
        lines = [f"---- halfulp, process {self.process} ----", *answer.lines, "", whence(trace, self.given)]
        tell(*(plain(line) for line in lines))


_child: Child | None = None
_refused = -1
"""The process in which an audit could not begin."""
_beginning = threading.Lock()


def _begin_anew() -> None:
    """Replace the lock in a fork, where no thread may be left to release it."""
    global _beginning
    _beginning = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def enter(optimizer: torch.optim.Optimizer) -> None:
    """Before a step of any optimizer in this process."""
    global _child, _refused
    here = os.getpid()
    with _beginning:  # by one thread
        if here == _refused:
            return
        if _child is None or _child.process != here:  # the first step, or a fork of a process that had begun
            try:
                _child = _begin()
            except (HalfulpError, OSError) as error:
                _child, _refused = None, here
                tell(f"halfulp: process {here} is not audited: {plain(str(error))}")
                return
        child = _child
    child.hooks.enter(optimizer)


def leave(optimizer: torch.optim.Optimizer) -> None:
    """After it."""
    if _child is not None and _child.process == os.getpid():
        _child.hooks.leave(optimizer)


def _begin() -> Child:
    settings = json.loads(os.environ[VARIABLE])
    folder, given = Path(settings["folder"]), Path(settings["given"])
    if settings["scores"] is not None:
        settings["scores"] = tuple(settings["scores"])
    options = {k: v for k, v in settings.items() if k not in ("folder", "given")}
    if "RANK" not in os.environ and rank() == 0:
        folder = _claimed(folder)
    options["describe"] = {"script": Path(sys.argv[0]).name or "-", "arguments": sys.argv[1:]}
    return Child(options, folder, given)


def _claimed(folder: Path) -> Path:
    """Claim and return the first free one of NAME, NAME-2 ..., so that no other process gets it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        place = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            place.mkdir()
        except FileExistsError:
            number += 1
        else:
            return place


def launch(command: Sequence[str], options: dict[str, Any], folder: Path) -> int:
    """Run a command and audit the Python processes under it; its exit code, negative for a signal."""
    names = f"{glob.escape(folder.name)}*"
    before = set(folder.parent.glob(names)) if folder.parent.is_dir() else set()
    path = os.environ.get("PYTHONPATH", "")
    settings = json.dumps({**options, "folder": str(folder.absolute()), "given": str(folder)})
    added = {VARIABLE: settings, "PYTHONPATH": f"{START}{os.pathsep}{path}" if path else str(START)}
    try:
        process = subprocess.Popen(list(command), env={**os.environ, **added})
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error.strerror}.") from None
    with _passed_on(process):
        code = process.wait()
    traces = sorted(set(folder.parent.glob(names)) - before) if folder.parent.is_dir() else []
    if not traces and code == 0:
        raise UsageError(
            f"no Python process under {command[0]} stepped an optimizer, so there was nothing to audit. One "
            "that ignores PYTHONPATH (python -I, -E or -S) cannot be seen: put `halfulp audit` in its place."
        )
    return code


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Any:
    """While it is entered, SIGTERM goes to the command, and an interrupt, which it gets by itself, waits."""

    def give(number: int, _: object) -> None:
        process.send_signal(number)

    handlers: dict[int, Callable[[int, Any], None]] = {
        signal.SIGTERM: give, signal.SIGINT: lambda number, frame: None
    }  # fmt: skip
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
