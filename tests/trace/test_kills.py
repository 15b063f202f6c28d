"""What a kill can cost a trace: the steps of the part that was open."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from audit_kill import PART, STEPS
from audit_reference import assert_same_tables, made, tables, train

import halfulp as hu
from halfulp.trace import TABLES, TraceWriter
from halfulp.trace.resuming import RANKS, STEP


class Runs:
    """Runs of ``audit_kill.py``, killed on request."""

    def __init__(self) -> None:
        places = [str(Path(hu.__file__).parent.parent), str(Path(__file__).parents[1])]
        place = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        command = [sys.executable, str(Path(__file__).parents[1] / "audit_kill.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=place
        )

    def run(self, folder: Path, seconds: float = 200.0) -> tuple[str, int]:
        """Run, or go on, and be killed after some seconds; the outcome and the last step that was over."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{folder} {seconds}\n")
        self.process.stdin.flush()
        outcome, step = self.process.stdout.readline().split()
        return outcome, int(step)


@pytest.fixture
def runs() -> Iterator[Runs]:
    found = Runs()
    yield found
    found.process.stdin.close()  # type: ignore[union-attr]
    found.process.stdout.close()  # type: ignore[union-attr]
    found.process.kill()
    found.process.wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_kills(runs: Runs, tmp_path: Path) -> None:
    """After each, the trace opens; gone on with until it is complete, it is that of a run without kills.

    What is lost at most: the steps since the last part, which are no more than ``part_steps``, and of course
    the one that was under way. What is in the trace is the same as in the run without kills.
    """
    runs.run(tmp_path / "first")
    start = time.monotonic()
    assert runs.run(tmp_path / "whole") == ("done", STEPS)
    usual = time.monotonic() - start
    whole = hu.Trace.open(tmp_path / "whole")
    expected = dict(tables(whole))
    delays = random.Random(0)
    kills, complete, begun = 0, 0, 0
    while kills < 50:
        folder = tmp_path / f"killed{complete}"
        outcome, reached = runs.run(folder, delays.uniform(0.0, 0.4) * usual)
        assert outcome in ("killed", "done")
        kills += outcome == "killed"
        if not (folder / "manifest.json").exists():
            assert reached == 0  # killed before there was anything to say
            continue
        begun += 1
        trace = hu.Trace.open(folder)
        assert trace.last_step % PART == 0
        assert trace.last_step >= reached - PART
        if trace.parts:
            for name, frame in tables(trace):
                sofar = expected[name].filter(pl.col("step") <= trace.last_step)
                assert frame.equals(sofar, null_equal=True), name
        if outcome == "done":
            complete += 1
            assert_same_tables(trace, whole)
            assert_same_scores(trace, whole)
    assert begun >= 25  # most kills hit a run that was recording
    while runs.run(folder)[0] != "done":
        pass
    assert_same_tables(hu.Trace.open(folder), whole)
    assert_same_scores(hu.Trace.open(folder), whole)


def assert_same_scores(one: hu.Trace, other: hu.Trace) -> None:
    a, b = one.scores(), other.scores()
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[n], b[n]) for n in a)


def test_a_part_that_is_to_be_recorded_again_is_no_empty_trace(tmp_path: Path) -> None:
    """The first part is there, but not the shards of all ranks: who resumes and records nothing leaves it."""
    net = made("gpt")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with hu.Audit(optimizer, ["bf16"], model=net, out=tmp_path / "whole") as audit:
        train(net, optimizer, 2, audit=audit)
    whole = hu.Trace.open(tmp_path / "whole")
    frames = {name: whole.scan(name) for name in TABLES}
    state = {STEP: torch.tensor(2), RANKS: torch.tensor([1])}
    folder = tmp_path / "trace"
    writer = TraceWriter(folder, whole.manifest)
    writer.commit(frames, state, last_step=2)
    writer.close()
    resumed = TraceWriter(folder, whole.manifest, resume=True)
    assert resumed.count == 0
    assert not resumed.discard_if_empty()
    resumed.close()
    assert hu.Trace.open(folder).steps.tolist() == [1, 2]


def test_what_a_kill_at_once_leaves_can_be_gone_on_with(tmp_path: Path) -> None:
    """Before the manifest is there, and while the first part is written."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    folder = tmp_path / "trace"
    (folder / "parts" / ".000000.123").mkdir(parents=True)
    (folder / "parts" / ".000000.123" / "grids.parquet").write_text("half")
    (folder / ".manifest.json.123").write_text("{")
    with hu.Audit(optimizer, ["bf16"], out=folder, resume=True):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        optimizer.step()
    assert hu.Trace.open(folder).steps.tolist() == [1]
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "parts", "state"]
    assert [p.name for p in (folder / "parts").iterdir()] == ["000000"]
