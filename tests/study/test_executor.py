"""The same cells leave the same records, wherever they run."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from study.samples import SMALL, invoke, run, study_file, tree

from halfulp import canonical
from halfulp.errors import UsageError
from halfulp.study.executor import Opening, default_workers, executor_kind, thread_variables
from halfulp.study.store import Store
from halfulp.study.validate import validate

MANY = '''
import os
from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study


def cells(config):
    return [Cell(name=f"cell-{i}", config={"i": i}) for i in range(config["cells"])]


def run(cell):
    print("noise on standard output")
    return {
        "value": cell.config["i"] / 7, "large": 1e20, "text": "\\u00e9\\u202e",
        "threads": [os.environ.get("OMP_NUM_THREADS"), os.environ.get("NUMBA_NUM_THREADS")],
    }


def value(records):
    return {name: record["value"] for name, record in records["only"].items()}


study = Study(
    name="many", question="q", units="u", not_claimed=(), threads=1, scales={"small": {"cells": 150}},
    stages=(Stage(name="only", kind="outcome", cells=cells, run=run),),
    estimands=(Estimand(name="value", what="v", compute=value),),
    gates=(Gate(name="g", estimand="value", scope="all", comparison=">=", threshold=0),),
    rules=(Rule(label="yes", passed=("g",)), Rule(label="no")),
)
'''  # fmt: skip


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker would be given, for cells that run in this process."""
    for name, value in thread_variables(1).items():
        monkeypatch.setenv(name, value)


def test_local_and_inline_leave_the_same_files(tmp_path: Path, environment: None) -> None:
    path = study_file(tmp_path, MANY)
    first = run(path, tmp_path / "inline")
    assert run(path, tmp_path / "local", executor="local", workers=2) == first
    assert tree(tmp_path / "local") == tree(tmp_path / "inline")
    assert validate(tmp_path / "local", expect=None).exit_code == 0
    record = Store(tmp_path / "local").record_file("only", "cell-5").read_bytes()
    assert canonical.loads(record, "r")["outcome"]["threads"] == ["1", "1"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra ray)")
def test_ray_leaves_the_same_files(
    tmp_path: Path, environment: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own, because Ray warns where this suite makes warnings errors."""
    import subprocess
    import sys

    path = study_file(tmp_path, MANY)
    run(path, tmp_path / "inline")
    command = [sys.executable, "-m", "halfulp", "study", "run", str(path), "--out", str(tmp_path / "ray")]
    clean = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS") and k != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--executor", "ray", "--workers", "2"],
        env=clean,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "ray") == tree(tmp_path / "inline")
    assert validate(tmp_path / "ray").exit_code == 0


def test_ray_that_is_missing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'halfulp\[ray\]'"):
        executor_kind("ray")(Opening(tmp_path, "", "", None, 1), None)
    with pytest.raises(UsageError, match="no executor 'slurm'"):
        executor_kind("slurm")


def test_workers_fit_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert default_workers(1) == cores
    assert default_workers(cores) == 1
    assert default_workers(10 * cores) == 1


def test_replay_compares_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that depends on when it runs is found out; one that does not is confirmed."""
    text = SMALL.replace('"said": said}', '"said": said, "pid": __import__("os").getpid()}')
    for name, content, code in (("same", SMALL, 0), ("other", text, 1)):
        path, out = study_file(tmp_path / name, content), tmp_path / name / "out"
        run(path, out)
        found, page, _ = invoke(
            capsys, "study", "validate", str(out), "--workers", "1", "--replay", "outcome/arm-1", "all"
        )
        assert found == code
        if code:
            assert "cell outcome/arm-1 gave another record: outcome.pid: was" in page
            assert "1 of 2 cells run again left the same record" in page
        else:
            assert "2 of 2 cells run again left the same record" in page
            assert "the other 2 cells were not run again" in page
        assert not (out / "work").exists()  # replaying leaves nothing behind
