"""Updates of the paper's models in the engine: native, of three-bit integers, GPT-2 124M. Minutes, gigabytes.

The scale ``paper`` with updates, sequences and held-out batches cut to one or two, on the novels. Prints time
and memory.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfulp.study import engine, loading, open_closed
from halfulp.study.validate import validate

HEAD = """
from dataclasses import replace

from halfulp.paper.arms.arm import PROSE
from halfulp.study import Estimand, Gate, Rule, Study


def cut(arm):
    recipe = replace(arm.recipe, updates=1, eval_every=1, batch=1, micro=1, eval_batches=1)
    return replace(arm, recipe=recipe, corpus=PROSE, device="cpu")


def one_update(runs, estimands, gates):
    return Study(
        name="one-update", question="Does one update of the paper's model come to its record?",
        units="one training seed", not_claimed=("anything about training",), estimands=estimands, gates=gates,
        rules=(Rule(label="it does", passed=tuple(g.name for g in gates)), Rule(label="it does not")), **runs,
    )
"""
NATIVE = """
from halfulp.paper.arms import measures, native_measures
from halfulp.paper.studies.native_coupled_sr import RUNS

runs = replace(
    RUNS, scales={"paper": cut(RUNS.scales["paper"])}, targets=RUNS.targets[:1], arms={"sr": RUNS.arms["sr"]}
)
study = one_update(
    {"scales": runs.configs, "stages": runs.stages, "scale_data": runs.data},
    (
        runs.estimand("loss", "held-out loss, nats", measures.loss, arm="sr"),
        runs.estimand("dispatched", "1 where native", native_measures.dispatched, arms=["sr"]),
    ),
    (Gate.of("finite", "loss <= 12"), Gate.of("dispatch", "dispatched == 1")),
)
"""
DQT = """
from halfulp.paper.arms import direct
from halfulp.paper.tokens import files_of
from halfulp.paper.studies import dqt_int3
from halfulp.study import Cell, Stage

arm = cut(dqt_int3.ARMS["paper"])


def checkpoints(config):
    cells = ({"arm": config["arm"], "cell": dqt_int3.CELL, "update": u} for u in (0, 1))
    return [Cell(name=f"evaluation-{c['update']}", config=c) for c in cells]


study = one_update(
    {
        "scales": {"paper": {"arm": arm.to_json()}}, "scale_data": {"paper": files_of(arm.corpus)},
        "stages": (
            Stage(name="train", kind="outcome", cells=dqt_int3.cells, run=direct.train),
            Stage(name="replay", kind="outcome", cells=checkpoints, run=direct.replay, reads=("train",)),
        ),
    },
    tuple(e for e in dqt_int3.STUDY.estimands if e.name in ("agrees", "distinct")),
    (Gate.of("agrees", "agrees == 1"), Gate.of("three-bits", "distinct <= 8")),
)
"""


MATCHED = """
from halfulp.paper.arms import measures
from halfulp.paper.studies.matched_10k import RUNS


def two_updates(arm):
    return replace(arm, recipe=replace(arm.recipe, updates=2, eval_every=2), save_every=1)


runs = replace(
    RUNS, scales={"paper": two_updates(cut(RUNS.scales["paper"]))}, targets=RUNS.targets[:1],
    conditions={"e5m2": {"grid": "e5m2"}}, arms={"rne": RUNS.arms["rne"]}, scopes=("core",),
)
study = one_update(
    {"scales": runs.configs, "stages": runs.stages, "scale_data": runs.data},
    (
        runs.estimand("gap", "final loss above raw fp32, nats", measures.gap, arm="rne"),
        runs.estimand("matched", "1 where the arms began as declared", measures.matched),
    ),
    (Gate.of("finite", "gap <= 12"), Gate.of("matched", "matched == 1")),
)
"""


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.skipif("HALFULP_DATA" not in os.environ, reason="HALFULP_DATA is not set")
@pytest.mark.parametrize("text", [NATIVE, DQT], ids=["native-coupled-sr", "dqt-int3"])
def test_one_update(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one_update.py").write_text(HEAD + text)
    began, out = time.monotonic(), tmp_path / "out"
    engine.run(loading.load(str(tmp_path / "one_update.py")), "paper", out, executor="local", workers=1)
    seconds = time.monotonic() - began
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    assert validate(out).label == "it does"
    closed = open_closed(out)
    if text is NATIVE:
        run = closed.records["outcome"]["target-137035"]
        assert sum(run["coordinates"].values()) == 162_201_600
        assert run["dispatch"][0]["calls"] == {"e4m3 x e4m3": 49, "e5m2 x e4m3": 98}
    else:
        assert closed.records["train"]["seed-42"]["parameters"] == 134_105_856
    with capsys.disabled():
        print(f"\n{seconds:.0f} seconds, at most {most:.1f} GB in a process")


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.skipif("HALFULP_DATA" not in os.environ, reason="HALFULP_DATA is not set")
def test_two_updates_of_gpt2_killed_between_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`matched-10k` at 124 million weights goes on, to the same records, from where it was killed."""
    file, began = tmp_path / "one_update.py", time.monotonic()
    file.write_text(HEAD + MATCHED)
    command = [sys.executable, "-m", "halfulp", "study", "run", str(file), "--yes", "--workers", "1", "--out"]
    out, whole = tmp_path / "killed", tmp_path / "whole"
    first = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, start_new_session=True)
    while first.poll() is None and not any((out / "work" / "checkpoints").glob("*/*")):
        time.sleep(0.05)
    assert first.poll() is None, "it ended before its first checkpoint"
    os.killpg(first.pid, signal.SIGKILL)  # its worker sees the pipe close
    first.wait()
    for folder in (out, whole):
        subprocess.run([*command, str(folder)], check=True, stdout=subprocess.DEVNULL)
    assert validate(out).label == "it does"
    assert open_closed(out).records["outcome"]["e5m2-1337"]["coordinates"]["embedding"] == 39_419_904
    for path in sorted((whole / "records").rglob("*.json")):
        assert path.read_bytes() == (out / path.relative_to(whole)).read_bytes(), path.name
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    with capsys.disabled():
        print(f"\n{time.monotonic() - began:.0f} seconds, at most {most:.1f} GB in a process")
