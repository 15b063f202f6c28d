"""GPUs, as far as that goes without one: who gets which, what is asked of Ray, what a seal says."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from study.samples import run, study_file

from halfulp import canonical
from halfulp.study import executor, loading, provenance, worker
from halfulp.study.declaration import SEAL, Protocol, check
from halfulp.study.executor import Local, Opening, Ray, default_workers
from halfulp.study.store import Store

SEES = """
import os, pathlib, time
from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study


def cells(config):
    arm = [{"device": config["device"], "beside": config["beside"]}]
    return [Cell(name=f"cell-{i}", config={"arm": arm}) for i in range(2)]


def run(cell):
    for arm in cell.config["arm"]:  # waits for the other, so that one worker cannot run both
        for name in filter(None, [arm["beside"]]):
            (pathlib.Path(name) / cell.name).touch()
            while len(list(pathlib.Path(name).iterdir())) < 2:
                time.sleep(0.01)
    return {"sees": os.environ.get("CUDA_VISIBLE_DEVICES"), "one": 1}


def one(records):
    return {name: record["one"] for name, record in records["only"].items()}


study = Study(
    name="sees", question="q", units="u", not_claimed=(),
    scales={"small": {"device": "auto", "beside": BESIDE}, "smoke": {"device": "cpu", "beside": None}},
    stages=(Stage(name="only", kind="outcome", cells=cells, run=run),),
    estimands=(Estimand(name="one", what="v", compute=one),),
    gates=(Gate(name="g", estimand="one", scope="all", comparison=">=", threshold=0),),
    rules=(Rule(label="yes", passed=("g",)), Rule(label="no")),
)
"""


def sees(folder: Path) -> Path:
    (folder / "beside").mkdir()
    return study_file(folder, f"BESIDE = {str(folder / 'beside')!r}\n{SEES}")


def opening(out: Path, *, on_gpu: bool) -> Opening:
    return Opening(out, "", "", None, 1, on_gpu=on_gpu)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as the executors can tell."""
    monkeypatch.setattr(executor, "gpu_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_protocol_knows_whether_a_cell_names_a_gpu(tmp_path: Path) -> None:
    study = loading.load(str(sees(tmp_path))).study
    assert Protocol.of(study, "small").on_gpu
    assert not Protocol.of(study, "smoke").on_gpu


def test_one_worker_a_gpu_and_each_its_own(tmp_path: Path, two: None) -> None:
    assert Local(opening(tmp_path, on_gpu=True)).capacity == 2
    assert Local(opening(tmp_path, on_gpu=True), 3).capacity == 3
    assert Local(opening(tmp_path, on_gpu=False)).capacity == default_workers(1)
    run(sees(tmp_path), tmp_path / "out", executor="local", scale="small")
    seen = set()
    for i in range(2):
        record = Store(tmp_path / "out").record_file("only", f"cell-{i}").read_bytes()
        seen.add(canonical.loads(record, "r")["outcome"]["sees"])
    assert seen == {"0", "1"}


def test_a_cell_that_names_none_sees_what_there_is(tmp_path: Path, two: None) -> None:
    run(sees(tmp_path), tmp_path / "out", executor="local", scale="smoke")
    record = Store(tmp_path / "out").record_file("only", "cell-0").read_bytes()
    assert canonical.loads(record, "r")["outcome"]["sees"] is None


def test_gpus_that_were_given_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert [executor._only(i) for i in (0, 1)] == [{"CUDA_VISIBLE_DEVICES": n} for n in ("3", "5")]
    assert executor._only(None) == {}


@pytest.mark.parametrize(("workers", "gpus", "share"), [(None, 2, 1.0), (4, 2, 0.5), (None, 0, 0.0)])
def test_ray_tasks_ask_for_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int | None, gpus: int, share: float
) -> None:
    """A cluster that declares GPUs: one a task, or a share of one where more workers are asked for."""
    asked: dict[str, Any] = {}

    def remote(**how: Any) -> Any:
        asked.update(how)
        return lambda function: function

    ray = SimpleNamespace(
        is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 8.0, "GPU": float(gpus)}, remote=remote
    )
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: ray if name == "ray" else real(name))
    made = Ray(opening(tmp_path, on_gpu=True), workers)
    assert asked["num_gpus"] == share
    assert made.capacity == (workers or gpus or 8)
    assert asked["runtime_env"]["env_vars"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_seal_says_which_gpus_and_how_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    here = provenance.environment()
    if not torch.cuda.device_count():
        assert "gpus" not in here
    monkeypatch.setattr(provenance, "_gpus", lambda: ["a GPU; driver 1", "a GPU; driver 1"])
    there = provenance.environment()
    assert there["gpus"] == ["a GPU; driver 1"] * 2
    assert (there["gpu_settings"]["tf32"], there["gpu_settings"]["deterministic"]) == ("off", "on")
    check(there, SEAL["environment"], "environment")


def test_tf32_is_set_and_not_hoped_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as flags go: a worker that has a GPU turns TF32 off and asks for deterministic algorithms."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.backends.cuda.matmul.allow_tf32
    asked: list[Any] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, warn_only: asked.append(on))
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        worker.settle_gpus()
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert asked == [True]
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8") == ":4096:8"
