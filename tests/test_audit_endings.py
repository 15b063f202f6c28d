"""How an audited script ends, and that nobody has to be there to hear of it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_audit_script import TRAIN, environment, script

import halfulp as hu
from halfulp import files, text
from halfulp.audit.findings import onset_words
from halfulp.measures.crossings import crossing

AUDIT = [sys.executable, "-m", "halfulp", "audit", "--grids", "bf16", "--out", "run"]


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
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*AUDIT, *options, path], stdout=subprocess.PIPE, stderr=full, env=environment(), check=False
        )
    assert (done.returncode, done.stdout) == (0, alone)
    assert hu.Trace.open("run").last_step == 8
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*AUDIT[:-1], "again", *options, path],
        stdout=subprocess.PIPE,
        stderr=write,
        env=environment(),
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stdout) == (0, alone)
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
                monkeypatch.setattr(audit._writer, "commit", Full().write)
                monkeypatch.setattr(sys, "stderr", Full())
    assert audit.trouble is not None
    assert "could not be written" in audit.trouble


@pytest.mark.parametrize("code", [0, 3])
def test_a_script_that_leaves_without_exit_handlers(code: int) -> None:
    path = script(f"{TRAIN}\n    import os\n    sys.stdout.flush()\n    os._exit({code})\n")
    done = subprocess.run([*AUDIT, path], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == code
    assert "8 steps audited" in done.stderr
    assert hu.Trace.open("run").last_step == 8


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_a_terminal_that_is_closed() -> None:
    path = script(f"{TRAIN}\n    print('trained', flush=True)\n    import time\n    time.sleep(60)\n")
    process = subprocess.Popen(
        [*AUDIT, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup's children ignore it
    )  # fmt: skip
    assert process.stdout is not None
    while "trained" not in process.stdout.readline():
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGHUP, said
    assert "8 steps audited" in said
    assert hu.Trace.open("run").last_step == 8


@pytest.mark.parametrize(
    ("f", "words"),
    [
        ([0.1, 0.2, 0.3], "never a majority"),
        ([0.1, 0.6, 0.7], "majority from step 2 to the end of the record"),
        ([0.1, 0.6, 0.4, 0.7], "majority from step 2, from step 4 to the end of the record"),
        ([0.1, 0.6, 0.4], "majority from step 2, less at the end"),
        ([0.9, 0.9, 0.9], "from the first step on"),
        ([0.9, 0.1, 0.9], "a majority at the first step, from step 3 to the end of the record"),
        ([0.9, 0.1, 0.1], "a majority at the first step, less at the end"),
    ],
)
def test_onsets_in_words(f: list[float], words: str) -> None:
    assert onset_words(crossing(f)) == words


@pytest.mark.parametrize("code", [-1, -9, 256, 255, True])
def test_exit_codes_are_those_of_python(code: int) -> None:
    """A negative one is no signal."""
    path = script(TRAIN + f"\nimport sys\nsys.exit({code})\n")
    alone = subprocess.run([sys.executable, path], capture_output=True, check=False).returncode
    done = subprocess.run([*AUDIT, path], capture_output=True, env=environment(), check=False)
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
