"""Audits on ranks that are killed and resumed: on as many ranks, or on others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import rehearsals_ranks
import torch
from audit_ranks import FLOAT_SUMS
from safetensors.torch import load_file

import halfulp as hu
from halfulp.errors import UsageError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]
TABLES = ("grids", "tensors", "run", "rehearsals", "losses")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    places = [str(Path(hu.__file__).parent.parent), str(Path(__file__).parents[1])]
    told = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "rehearsals_ranks.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}, stdout=subprocess.PIPE,
        check=True, timeout=550,
    )  # fmt: skip
    for name, outcomes in json.loads(told.stdout).items():
        *killed, last = rehearsals_ranks.RUNS[name]
        assert outcomes == ["killed"] * len(killed) + ["done"], name
        assert last[2] is None
    return folder


def table(folder: Path, name: str) -> pl.DataFrame:
    found = hu.Trace.open(folder / "trace").scan(name).to_polars().sort(pl.all())
    # What is evaluated at the step where a trace ended is evaluated again, with the same losses.
    return found.unique(maintain_order=True) if name == "losses" else found


def shards(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    newest = max(p.name.partition(".")[0] for p in (folder / "trace" / "shards").iterdir())
    return {p.name: load_file(p) for p in (folder / "trace" / "shards").glob(f"{newest}.*")}


def assert_same_weights(folder: Path, other: Path) -> None:
    names = sorted(p.name for p in other.glob("*.safetensors"))
    assert len(names) == len(rehearsals_ranks.SPECS) * len(rehearsals_ranks.BOUNDS)
    assert all((folder / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_ranks_that_are_killed_and_resumed_equal_ones_that_are_not(runs: Path) -> None:
    """Tables, the codes of all shards, weights as if and forecasts, to the bit."""
    whole, killed = runs / "whole", runs / "killed"
    for name in TABLES:
        assert table(killed, name).equals(table(whole, name), null_equal=True), name
    mine, expected = shards(killed), shards(whole)
    assert sorted(expected) == ["000000011.0.safetensors", "000000011.1.safetensors"]
    assert mine.keys() == expected.keys()
    for file, held in expected.items():
        assert mine[file].keys() == held.keys()
        assert all(torch.equal(mine[file][name], t) for name, t in held.items())
    assert any(
        t.shape[-1] == 0 for t in expected["000000011.1.safetensors"].values()
    )  # the gain is the other's
    states = [hu.Trace.open(folder / "trace").state() for folder in (killed, whole)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(t, states[0][name]) for name, t in states[1].items())
    assert_same_weights(killed, whole)
    for spec in rehearsals_ranks.SPECS:
        a, b = (hu.Trace.open(f / "trace").forecast(spec) for f in (killed, whole))
        assert a.frozen().tolist() == b.frozen().tolist()
        assert a.never_moved().tolist() == b.never_moved().tolist()
        assert a.losses.to_polars().unique(maintain_order=True).equals(b.losses.to_polars())


@pytest.mark.parametrize("how", ["replicas", "whole"])
def test_resumed_ranks_are_what_one_process_gives(how: str, runs: Path) -> None:
    """Two ranks, and two replicas: every count, and all weights as if."""
    single, found = runs / "single", runs / how
    for name in TABLES:
        drop = [] if how == "replicas" else [c for c in table(single, name).columns if c in FLOAT_SUMS]
        assert table(found, name).drop(drop).equals(table(single, name).drop(drop), null_equal=True), name
    assert_same_weights(found, single)


def test_only_what_can_be_resumed_from_is_kept(runs: Path) -> None:
    for how in ("whole", "killed"):
        trace = runs / how / "trace"
        parts = len(list((trace / "parts").iterdir()))
        assert sorted(p.name for p in (trace / "state").iterdir()) == [
            f"{i:06d}.safetensors" for i in (parts - 2, parts - 1)
        ]
        kept = sorted(p.name for p in (trace / "shards").iterdir())
        assert kept == [f"{step:09d}.{rank}.safetensors" for step in (9, 11) for rank in (0, 1)]


def resumed(trace: Path, **options: object) -> hu.Audit:
    model = rehearsals_ranks.Model()
    return hu.Audit(
        torch.optim.AdamW(model.parameters(), lr=2e-3), ["bf16", "e5m2"], model=model, out=trace,
        rehearse=rehearsals_ranks.SPECS, expected_never_moved=True, resume=True, **options,
    )  # fmt: skip


def test_shards_that_are_not_there_are_missed(runs: Path, tmp_path: Path) -> None:
    """One part back, if only the newest are; then not at all, and nothing is touched."""
    trace = shutil.copytree(runs / "whole" / "trace", tmp_path / "trace")
    (trace / "shards" / "000000011.1.safetensors").unlink()
    audit = resumed(trace)
    audit.start()
    assert audit.pipeline.sink.skip_until == 9
    audit.stop()
    assert hu.Trace.open(trace).last_step == 11  # until the steps are recorded again
    with pytest.raises(UsageError, match="ends at step 9, but this run goes on after step 11"):
        resumed(trace, first_step=12).start()
    shards = shutil.copytree(trace / "shards", tmp_path / "shards")
    (trace / "shards" / "000000009.0.safetensors").unlink()
    with pytest.raises(UsageError, match="Every rank must see the same folder"):
        resumed(trace).start()
    assert hu.Trace.open(trace).last_step == 11
    shutil.rmtree(trace)  # now one that goes on where it ended: the part before it is not needed any more
    shutil.copytree(runs / "whole" / "trace", trace)
    audit = resumed(trace)
    audit.start()
    assert audit.pipeline.sink.skip_until == 11
    audit.stop()
    shutil.rmtree(trace / "shards")
    shutil.copytree(shards, trace / "shards")
    with pytest.raises(UsageError, match="Every rank must see the same folder"):
        resumed(trace).start()


def test_shards_of_another_trace_are_refused(runs: Path, tmp_path: Path) -> None:
    trace = shutil.copytree(runs / "whole" / "trace", tmp_path / "trace")
    name = "000000011.0.safetensors"
    shutil.copy(runs / "killed" / "trace" / "shards" / name, trace / "shards" / name)
    with pytest.raises(hu.HalfulpError, match="belongs to another trace"), resumed(trace) as audit:
        audit.evaluate(lambda: 0.0)


def test_another_number_of_ranks_is_refused(runs: Path, tmp_path: Path) -> None:
    trace = shutil.copytree(runs / "whole" / "trace", tmp_path / "trace")
    with pytest.raises(UsageError, match="Resume on as many ranks as before"), resumed(trace) as audit:
        audit.evaluate(lambda: 0.0)
