"""One update of the paper's own models, 124 and 162 million weights, inside the engine: minutes, gigabytes.

The scale ``paper`` with updates, sequences and held-out batches cut to one, on the novels, for OpenWebText
need not be there. Prints time and memory.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from halfulp.study import engine, loading, open_closed
from halfulp.study.validate import validate

FILE = """
from dataclasses import replace

from halfulp.paper.arms import measures
from halfulp.paper.arms.arm import PROSE
from halfulp.paper.studies.{module} import RUNS
from halfulp.study import Gate, Rule, Study

whole = RUNS.scales["paper"]
recipe = replace(whole.recipe, updates=1, batch=1, micro=1, eval_batches=1)
(condition, *_) = RUNS.conditions
runs = replace(
    RUNS,
    scales={{"paper": replace(whole, recipe=recipe, corpus=PROSE, device="cpu")}},
    targets=RUNS.targets[:1],
    conditions={{condition: RUNS.conditions[condition]}},
    arms={{"rne": {{"policy": "rne"}}}},
    scopes=("core", "all-2d"),
    forecast_from=None,
)
study = Study(
    name="one-update",
    question="Does one update of the paper's model come to its record?",
    units="one training seed",
    not_claimed=("anything about training",),
    scales=runs.configs,
    stages=runs.stages,
    estimands=(
        runs.estimand("loss", "held-out loss, nats", measures.loss, arm="rne"),
        runs.estimand("frozen", "share of the core that the update left", measures.never_moved, arm="rne"),
        runs.estimand("rmse", "of the forecast", measures.forecast_rmse, scope="core"),
    ),
    gates=(Gate(name="finite", estimand="loss", scope="all", comparison="<=", threshold=12.0),),
    rules=(Rule(label="it does", passed=("finite",)), Rule(label="it does not")),
    scale_data=runs.data,
)
"""
SIZES = {"policy_3k": (124_354_560, 84_934_656), "neox_transfer": (162_201_600, 84_934_656)}


@pytest.mark.large
@pytest.mark.skipif("HALFULP_DATA" not in os.environ, reason="HALFULP_DATA is not set")
@pytest.mark.parametrize("module", SIZES)
def test_one_update(module: str, tmp_path: Path) -> None:
    (tmp_path / "one_update.py").write_text(FILE.format(module=module))
    began, out = time.monotonic(), tmp_path / "out"
    engine.run(loading.load(str(tmp_path / "one_update.py")), "paper", out, workers=1)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{module}: {time.monotonic() - began:.0f} s, a worker's peak {peak:.1f} GB")
    assert validate(out).problems == []
    opened = open_closed(out)
    assert opened.result is not None
    assert opened.result["label"] == "it does"
    (record,) = opened.records["outcome"].values()
    groups = record["coordinates"]
    assert (sum(groups.values()), groups["attention"] + groups["mlp"]) == SIZES[module]
