"""How an audited script ends, and that nobody has to be there to hear of it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from audit_command import TRAIN, environment, script

import halfulp as hu
from halfulp import files, text

AUDIT = ["audit", "--grids", "bf16", "--out", "run"]
HERE = Path()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Full:
    """A disk, or a stream, that takes nothing."""

    def write(self, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    flush = write


def test_what_cannot_be_said_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (Full(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        text.tell("a line")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--live"]], ids=["plain", "live"])
def test_a_training_does_not_need_its_stderr(options: list[str]) -> None:
    """A log on a full disk, and a pipe that nobody reads: the script trains as it does alone."""
    path = script(TRAIN)
    alone = subprocess.run([sys.executable, path], capture_output=True, check=True).stdout
    done = warm.run(*AUDIT, *options, path, folder=HERE, stderr=Path("/dev/full"))
    assert (done.returncode, done.stdout.encode()) == (0, alone)
    assert hu.Trace.open("run").last_step == 8
    os.mkfifo("closed")
    reader = os.open("closed", os.O_RDONLY | os.O_NONBLOCK)
    process = warm.Process(*AUDIT[:-1], "again", *options, path, folder=HERE, stderr=Path("closed"))
    os.close(reader)
    assert (process.communicate()[0].encode(), process.returncode) == (alone, 0)
    assert hu.Trace.open("again").last_step == 8


def test_a_disk_that_is_full_for_trace_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit steps aside also where it cannot say so."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with hu.Audit(optimizer, ["bf16"], model=model, out="run", part_steps=1) as audit:
        for step in range(4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            if step == 1:
                monkeypatch.setattr(audit.pipeline.sink.writer, "commit", Full().write)
                monkeypatch.setattr(sys, "stderr", Full())
    assert audit.trouble is not None
    assert "could not be written" in audit.trouble


@pytest.mark.parametrize(
    ("ending", "trained"), [("sys.exit(7)", True), ("raise ValueError('no')", True), ("sys.exit(0)", False)]
)
def test_a_fork_that_ends_says_nothing_of_the_audit(ending: str, trained: bool) -> None:
    """The verdict is its parent's; so is the trace, also one that has no part yet."""
    before, after = ("pass", TRAIN) if not trained else (TRAIN, "")
    path = script(
        "import os, sys\n"
        + textwrap.dedent(f"""
    {before}
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        {ending}
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    {after}
    """)
    )
    code = 7 if "7" in ending else 1 if "raise" in ending else 0
    done = warm.run(*AUDIT, path, folder=HERE)
    assert done.returncode == 0, done.stderr
    assert f"child {code}\n" in done.stdout
    assert done.stderr.count("halfulp: the script failed") == 0
    assert done.stderr.count("nothing to audit") == 0
    assert done.stderr.count("8 steps audited") == 1
    assert hu.Trace.open("run").last_step == 8


def test_an_audit_of_a_parent_is_not_stopped_by_a_fork() -> None:
    """Which leaves its block as well."""
    path = script("""
    import os, sys
    import torch
    import halfulp as hu

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hu.Audit(optimizer, ["bf16"], out="run") as audit:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        child = os.fork()
    if child == 0:
        sys.exit(5 if audit.writes else 0)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    """)
    subprocess.run([sys.executable, path], env=environment(), check=True)
    assert hu.Trace.open("run").last_step == 1


THREAD = """
    import os, signal, sys, threading, time
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps=8):
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        print("trained", flush=True)
"""


@pytest.mark.parametrize(
    ("starts", "code"),
    [
        ("threading.Thread(target=train).start()", 0),
        ("threading.Thread(target=train).start(); sys.exit(3)", 3),
        ("from concurrent.futures import ThreadPoolExecutor as P; pool = P(2); pool.submit(train)", 0),
    ],
    ids=["plain", "exit", "pool"],
)
def test_threads_that_outlive_the_script(starts: str, code: int) -> None:
    """Python waits for them before it ends, and so does the audit."""
    path = script(f"{THREAD}\n    {starts}\n")
    done = warm.run(*AUDIT, path, folder=HERE)
    assert done.returncode == code, done.stderr
    assert done.stdout == "trained\n"
    assert "8 steps audited" in done.stderr
    assert hu.Trace.open("run").last_step == 8


def test_threads_for_which_python_does_not_wait() -> None:
    sleeps = "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    path = script(f"{THREAD}\n    train()\n    {sleeps}\n")
    done = warm.run(*AUDIT, path, folder=HERE)
    assert done.returncode == 0, done.stderr
    assert "8 steps audited" in done.stderr


def test_an_interrupt_while_threads_are_waited_for() -> None:
    """It ends the waiting, and the exit code stays that of the script, as in Python alone."""
    path = script(f"""{THREAD}
    def work():
        train()
        in_shutdown = lambda: "_shutdown" in [f.f_code.co_name for f in stack(sys._current_frames()[main])]
        while not in_shutdown():
            time.sleep(0.01)
        print("waits", flush=True)
        threading.Event().wait()

    def stack(frame):
        while frame is not None:
            yield frame
            frame = frame.f_back

    main = threading.main_thread().ident
    threading.Thread(target=work).start()
    """)
    codes = []
    for audited in (False, True):
        process: Any = warm.Process(*AUDIT, path, folder=HERE) if audited else subprocess.Popen(
            [sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        while "waits" not in process.stdout.readline():
            assert process.returncode is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
        codes.append(process.returncode)
    assert codes[1] == codes[0], said
    assert "8 steps audited" in said
    assert hu.Trace.open("run").last_step == 8


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_terminal_that_is_closed() -> None:
    path = script(f"{TRAIN}\n    print('trained', flush=True)\n    import time\n    time.sleep(60)\n")
    process = warm.Process(*AUDIT, path, folder=HERE)
    while "trained" not in process.stdout.readline():
        assert process.returncode is None
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGHUP, said
    assert "8 steps audited" in said
    assert hu.Trace.open("run").last_step == 8


@pytest.mark.parametrize("code", [-1, 257])
def test_exit_codes_are_those_of_python(code: int) -> None:
    """A negative one is no signal."""
    path = script(TRAIN + f"\nimport sys\nsys.exit({code})\n")
    alone = subprocess.run([sys.executable, path], capture_output=True, check=False).returncode
    done = warm.run(*AUDIT, path, folder=HERE)
    assert done.returncode == alone


def test_what_a_signals_handler_raises_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """TimeoutError is an OSError, and no fault of the disk: it passes through whatever is being written."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def late(operation: str, path: Path) -> None:
        if operation == "rename" and "parts" in str(path):
            raise TimeoutError("time is up")

    with hu.Audit(optimizer, ["bf16"], model=model, out="run", part_steps=2) as audit:
        for step in range(6):
            monkeypatch.setattr(files, "hook", late if step == 4 else lambda *_: None)
            model(torch.ones(1, 4)).sum().backward()
            if step == 4:
                with pytest.raises(TimeoutError, match="time is up"):
                    optimizer.step()
            else:
                optimizer.step()
    assert audit.trouble is None
