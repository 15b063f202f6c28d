"""One update of the paper's models, native and of three-bit integers, in the engine: minutes, gigabytes.

The scale ``paper`` with updates, sequences and held-out batches cut to one, on the novels. Prints time and
memory.
"""

from __future__ import annotations

import os
import resource
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
from halfulp.paper.arms.corpus import files_of
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
