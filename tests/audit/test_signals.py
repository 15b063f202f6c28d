"""Signals to an audited script, and its processes."""

from __future__ import annotations

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
from audit_command import TRAIN, environment

import halfulp as hu

# ---- endings ---------------------------------------------------------------------------------------------

WAIT = """
    print("stepped", flush=True)
    import time
    while True:
        time.sleep(0.1)
"""


def started(folder: Path, text: str) -> warm.Process:
    (folder / "train.py").write_text(textwrap.dedent(text))
    return warm.Process("audit", "--grids", "bf16", "train.py", folder=folder)


def ended(process: warm.Process, number: int) -> str:
    """Send a signal when the script has stepped; what is on stderr in the end."""
    try:
        while "stepped" not in (line := process.stdout.readline()):
            assert line, process.communicate()[1]
        process.send_signal(number)
        return process.communicate(timeout=300)[1]
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_trace_and_a_verdict(number: int, tmp_path: Path) -> None:
    """Long before a part is due; the exit status is that of the signal."""
    process = started(tmp_path, TRAIN + WAIT)
    said = ended(process, number)
    assert process.returncode == -number, said
    assert hu.Trace.open(tmp_path / "runs" / "train").last_step == 8
    assert "the trace keeps what was recorded" in said
    assert "8 steps audited. " in said
    assert "The trace is in runs/train." in said
    assert "Traceback" not in said


def test_a_signal_to_a_whole_job_leaves_a_trace_and_a_verdict(tmp_path: Path) -> None:
    """A cluster signals every process: workers of a DataLoader die, about which torch would raise."""
    loader = """
    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 10**6
        def __getitem__(self, i):
            if i > 20:
                import time
                time.sleep(0.05)
            return torch.ones(8)
    for i, x in enumerate(torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if i == 5:
            print("stepped", flush=True)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN + loader))
    process = subprocess.Popen(
        [sys.executable, "-m", "halfulp", "audit", "--grids", "bf16", "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=environment(OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert process.stdout is not None
    while "stepped" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == -signal.SIGTERM, said
    assert "steps audited" in said
    assert "The trace is in runs/train." in said
    assert hu.Trace.open(tmp_path / "runs" / "train").last_step >= 13


def test_a_signal_before_the_first_step_leaves_nothing(tmp_path: Path) -> None:
    process = started(tmp_path, WAIT)
    ended(process, signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM
    assert not (tmp_path / "runs" / "train").exists()


def test_a_handler_of_the_scripts_own_stays(tmp_path: Path) -> None:
    handler = """
    import signal
    def stop(number, frame):
        print("asked to stop", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, stop)
    """
    process = started(tmp_path, TRAIN + handler + WAIT)
    said = ended(process, signal.SIGTERM)
    assert process.returncode == 7
    assert "8 steps audited" in said
    assert hu.Trace.open(tmp_path / "runs" / "train").last_step == 8


def test_a_signal_waits_until_the_audit_has_recorded_its_step(tmp_path: Path) -> None:
    """Sent from a listener, in the middle of the audit's own work: the step is recorded, and the last."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done: list[int] = []

    def listen(summary: dict[str, Any]) -> None:
        if summary["step"] == 2:
            audit.when_idle(lambda: done.append(audit.step))
            assert not done

    with hu.Audit(optimizer, ["bf16"], model=model, listeners=[listen]) as audit:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert done == [2]


def test_the_script_is_main_until_the_interpreter_ends(tmp_path: Path) -> None:
    """Exit handlers find their own module, and pickles their classes."""
    late = """
    import atexit, pickle
    class Mine: pass
    def at_the_end():
        assert sys.modules["__main__"].Mine is Mine
        assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
        print("found", flush=True)
    atexit.register(at_the_end)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN + late))
    command = [sys.executable, "-m", "halfulp", "audit", "--grids", "bf16", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout.endswith("found\n")) == (0, True), done.stderr
    process = started(tmp_path, f"{TRAIN}{late}\n    raise KeyboardInterrupt\n")
    out, err = process.communicate()
    assert (process.returncode, out.endswith("found\n")) == (-signal.SIGINT, True), err


# ---- processes -------------------------------------------------------------------------------------------


def test_a_fork_does_not_write(tmp_path: Path) -> None:
    """A child that trains with the hooks it inherited leaves its parent's trace alone."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent(TRAIN)
        + textwrap.dedent("""
        import os, warnings
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            for _ in range(520):  # more than a part
                optimizer.step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        optimizer.step()
        """)
    )
    done = warm.run("audit", "--grids", "bf16", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert hu.Trace.open(tmp_path / "runs" / "train").steps.tolist() == list(range(1, 10))


def test_two_ranks_of_a_launcher_leave_one_trace(tmp_path: Path) -> None:
    """``torchrun --no-python halfulp audit train.py``: ranks are known before there is a process group."""
    text = TRAIN.replace(
        "    optimizer = ",
        """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = """.lstrip("\n"),
    )
    end = "\ndist.destroy_process_group()\nimport time\ntime.sleep(0.3)\n"  # or torch's gloo may abort it
    (tmp_path / "train.py").write_text(textwrap.dedent(text) + end)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = [*launcher, "-m", "halfulp", "audit", "--grids", "bf16", "--out", "trace", "train.py"]
    place = environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=place)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("8 steps audited") == 1
    trace = hu.Trace.open(tmp_path / "trace")
    assert trace.last_step == 8
    assert trace.tensors[0]["name"] == "0.weight"
