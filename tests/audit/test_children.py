"""Processes that somebody else starts are audited, and do what they did without."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import halfulp as hu
from halfulp.audit.script.children import launch
from halfulp.cli import app

WORKERS = """
import importlib.util
assert importlib.util.find_spec("torch")  # many libraries ask first whether it is there
import multiprocessing, sys, torch

def work(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8).bfloat16()).square().mean().backward()
        optimizer.step()
    print(model.weight.detach().double().sum().item(), flush=True)

if __name__ == "__main__":
    for how in ("spawn", "fork"):
        worker = multiprocessing.get_context(how).Process(target=work, args=(1,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    work(2)
    sys.exit(7)
"""
RANKS = """
import time, torch, torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16).bfloat16())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 16).bfloat16() * (1 + dist.get_rank())).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
time.sleep(0.3)  # torch's gloo may abort a process that ends right after a reduction, audited or not
"""


def run(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    here = Path(sys.executable).parent
    place = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(command, cwd=folder, env=place, capture_output=True, text=True, timeout=240)


def alone(seed: int) -> str:
    """What a worker prints when nobody looks."""
    out, found = io.StringIO(), {"__name__": "worker"}
    exec(compile(WORKERS, "workers.py", "exec"), found)  # noqa: S102  # the lines above
    with torch.random.fork_rng(), contextlib.redirect_stdout(out):
        found["work"](seed)  # type: ignore[operator]  # a function
    return out.getvalue().strip()


def test_workers_of_a_command(tmp_path: Path) -> None:
    """Spawned, forked, and itself: three traces, the same output, the command's own exit code, and the
    ``sitecustomize`` that was there before."""
    (tmp_path / "workers.py").write_text(WORKERS)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.was_here = True\n")
    expected = [alone(1), alone(1), alone(2)]
    done = run(
        tmp_path, "halfulp", "audit", "--grids", "bf16", "--out", "runs/w", "--run", "sh", "-c",
        "python -c 'print(was_here)' && exec python workers.py", PYTHONPATH=str(site),
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == ["True", *expected]
    traces = [hu.Trace.open(p) for p in sorted((tmp_path / "runs").iterdir())]
    assert [t.path.name for t in traces] == ["w", "w-2", "w-3"]
    for trace in traces:
        assert trace.steps.tolist() == [1, 2, 3]
        assert [t["name"] for t in trace.tensors] == ["weight", "bias"]
        assert trace.frozen("bf16").min() > 0.9
    assert done.stderr.count("This run LOST") == 3


def test_ranks_of_a_launcher(tmp_path: Path) -> None:
    """One trace, by the first rank, named after the script; every line of the answer once."""
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = ("torchrun", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, "halfulp", "audit", "--grids", "bf16", "--run", *torchrun, "ranks.py")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in sorted((tmp_path / "runs").iterdir())] == ["ranks"]
    assert hu.Trace.open(tmp_path / "runs" / "ranks").steps.tolist() == [1, 2, 3, 4]
    assert "Page   halfulp report runs/ranks\n" in done.stderr
    assert done.stderr.count("4 steps audited. The trace is in runs/ranks.") == 1
    assert done.stderr.count("The optimizer holds") == 1


def test_a_folder_that_goes_in_mid_run(tmp_path: Path) -> None:
    """There is no verdict, which is said, and the command ends as it would."""
    goes = WORKERS.replace("optimizer.step()", "optimizer.step(); shutil.rmtree('w', ignore_errors=True)")
    (tmp_path / "workers.py").write_text("import shutil\n" + goes)
    audit = ("halfulp", "audit", "--grids", "bf16", "--out", "w", "--run", sys.executable, "-c")
    done = run(tmp_path, *audit, "import workers; workers.work(1)")
    assert done.stdout.strip() == alone(1)
    assert "there is no verdict: " in done.stderr
    assert "This run LOST" not in done.stderr
    assert "steps audited" not in done.stderr


def test_what_cannot_be_audited_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for args, said in (
        (["--run", sys.executable, "-c", "print(1)"], "stepped an optimizer"),
        (["--run", "no-such-command-anywhere"], "cannot run"),
        (["--resume", "--run", "true"], "--resume: for one script"),
        (["--first-step", "5", "--run", "true"], "--first-step: for one script"),
        (["--first-step", "0", "--run", "true"], "--first-step: for one script"),
        (["--stop", "--alert", "95%:20", "--run", "true"], "--alert, --stop: for one script"),
        (["--calibration", "known.json", "--run", "true"], "--calibration: for one script"),
        (["--grids", "bf17", "--run", "true"], "unknown grid"),
    ):
        found = CliRunner().invoke(app, ["audit", *args]).exception
        assert isinstance(found, hu.UsageError)
        assert said in str(found)
    assert not (tmp_path / "runs").exists()


def test_a_folder_whose_name_is_a_pattern(tmp_path: Path) -> None:
    """What was made there is found there."""
    made = "import sys, pathlib; pathlib.Path(sys.argv[1]).mkdir()"
    assert launch([sys.executable, "-c", made, str(tmp_path / "w[1]")], {}, tmp_path / "w[1]") == 0
