"""Runs that are killed where a test says, and several processes that are one: whatever starts processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import halfulp as hu
from halfulp import files

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def killed(run: Callable[[Callable[[str], None]], object], number: int, kind: str = "disk") -> bool:
    """Run in a fork that kills itself, by SIGKILL, before its n-th event of a kind; whether it came so far.

    Operations on the disk are events by themselves; a run is given a function that says of others.
    """
    child = os.fork()
    if child == 0:
        left = number

        def event(what: str) -> None:
            nonlocal left
            left -= what == kind
            if what == kind and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        files.hook = lambda operation, where: event("disk")
        try:
            run(event)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the run failed"
    return False


def launch(script: str, world: int, folder: Path) -> None:
    """A script of the tests as so many ranks, given its rank, how many there are, and a folder."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(Path(hu.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            [sys.executable, str(here / script), str(rank), str(world), str(folder)],
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": str(rank)} | LOOPBACK,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [p.returncode for p in started] == [0] * world, "\n".join(said)
