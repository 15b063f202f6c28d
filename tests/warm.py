"""Processes of ``halfulp`` that begin with torch imported: forks of one that waits.

For tests of how scripts end, by the dozen. What such a process does from ``main()`` to its exit is what an
interpreter of its own does: it waits for threads, then calls exit handlers, then flushes.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TextIO

PRELOADED = [
    "torch", "torch._dynamo",  # the latter comes with the first optimizer, and takes as long
    "halfulp.audit.script.runner", "halfulp.cli.audit_command", "halfulp.verdicts.answer",
    "halfulp.pilots.child",
]  # fmt: skip


class Process:
    """``python -m halfulp`` in a folder, as ``subprocess.Popen`` would have it, with text on its streams."""

    def __init__(self, *args: str | Path, folder: Path, stderr: Path | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        places = Path(os.path.realpath(folder)) / f".streams-{os.urandom(4).hex()}"
        places.mkdir()
        os.mkfifo(places / "out")
        self._err = stderr or places / "err"
        streams = (str(places / "out"), str(self._err))
        self.args = [str(arg) for arg in args]
        self._process = context.Process(target=_become, args=(self.args, str(folder), streams))
        self._process.start()
        self.stdout: TextIO = (places / "out").open()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """The rest of its output, and all of its errors, when it has ended."""
        with self.stdout:
            out = self.stdout.read()
        self._process.join(timeout)
        assert self.returncode is not None, f"{self.args} goes on"
        return out, self._err.read_text() if self._err.is_file() else ""

    def kill(self) -> None:
        self._process.kill()


def run(*args: str | Path, folder: Path, stderr: Path | None = None) -> subprocess.CompletedProcess[str]:
    process = Process(*args, folder=folder, stderr=stderr)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)


def as_subprocess(
    command: list[str],
    *,
    stdout: IO[bytes] | int | None = None,
    stderr: int | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What ``subprocess.run`` does of ``python -m MODULE ARGUMENT...``, in a fork that has torch imported.

    Standard output goes into an open file or is dropped, and standard errors go with it."""
    assert command[:2] == [sys.executable, "-m"]
    assert not check
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    place = getattr(stdout, "name", os.devnull)
    process = context.Process(target=_module, args=(command[2], command[3:], os.getcwd(), place))
    process.start()
    process.join(240)
    assert process.exitcode is not None, f"{command} goes on"
    return subprocess.CompletedProcess(command, process.exitcode)


def _module(name: str, args: list[str], folder: str, said: str) -> None:
    for number in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(folder)
    sys.argv = [name, *args]
    sys.path.insert(0, folder)
    code: object = 0
    try:
        importlib.import_module(name).main()
    except SystemExit as stop:
        code = stop.code
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def _become(args: list[str], folder: str, streams: tuple[str, str]) -> None:
    from halfulp.cli import main

    for place, number in zip(streams[::-1], (2, 1), strict=True):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    signal.signal(signal.SIGINT, signal.default_int_handler)  # of a shell's background jobs it is ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.argv = ["halfulp", *args]
    sys.path.insert(0, folder)
    code: object = 0
    interrupted = False
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    except KeyboardInterrupt:
        interrupted = True
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))
