"""One trace of several ranks under DDP and FSDP2, beside that of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import audit_ranks
import numpy as np
import polars as pl
import pytest
import torch
from audit_reference import (
    assert_same_tables,
    tables,
)
from safetensors.torch import load_file

import halfulp as hu


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one process, on two with DDP and on two with FSDP2, all at once."""
    folder = tmp_path_factory.mktemp("ranks")
    program = Path(__file__).parents[1] / "audit_ranks.py"
    started = []
    for mode, world in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        (folder / f"of-{mode}").mkdir()
        for rank in range(world):
            command = [sys.executable, program, mode, folder / f"of-{mode}", str(rank), str(world)]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment())
            )
    try:
        said = [p.communicate(timeout=240)[0].decode() for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0] * 5, "\n".join(said)
    return folder


def environment() -> dict[str, str]:
    """The environment of a process that must find halfulp and the helpers of these tests."""
    places = [str(Path(hu.__file__).parent.parent), str(Path(__file__).parents[1])]
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*places, *([given] if given else [])])}


@pytest.mark.parametrize("kind", ["", "-moving", "-sampled"])
def test_ddp_leaves_one_trace_equal_to_that_of_one_process(ranks: Path, kind: str) -> None:
    single = hu.Trace.open(ranks / "of-single" / f"single{kind}")
    found = hu.Trace.open(ranks / "of-ddp" / f"ddp{kind}")
    assert_same_tables(found, single)
    assert found.tensors == single.tensors
    assert sorted(p.name for p in (ranks / "of-ddp").iterdir() if p.is_dir()) == [
        "ddp", "ddp-moving", "ddp-sampled",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["", "-moving"])
def test_fsdp_leaves_one_trace_equal_to_that_of_one_process(ranks: Path, kind: str) -> None:
    """Every count; sums of squares and probabilities are added in another order.

    Adding n non-negative numbers in any order errs by a factor of at most 1 + (n - 1) 2**-53. What arrives is
    added four times in float32 before.
    """
    single = hu.Trace.open(ranks / "of-single" / f"single{kind}")
    found = hu.Trace.open(ranks / "of-fsdp" / f"fsdp{kind}")
    assert found.tensors == single.tensors
    largest = max(t["numel"] for t in single.tensors)
    for (name, a), (_, b) in zip(tables(found), tables(single), strict=True):
        assert a.columns == b.columns
        for column in a.columns:
            if column in audit_ranks.SQUARES:
                np.testing.assert_allclose(a[column], b[column], rtol=2 * largest * 2.0**-53, atol=0)
            elif column in audit_ranks.ARRIVED:
                np.testing.assert_allclose(a[column], b[column], rtol=2 * 5 * 2.0**-24, atol=0)
            else:
                assert a[column].equals(b[column], null_equal=True), (name, column)
    if not kind:
        assert found.table().to_polars()["frozen_decay"].null_count() == 0


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_roles_on_ranks_are_those_of_one_process(ranks: Path, mode: str) -> None:
    """Moments and an EMA, shards of them included: every count, except at the last step of sharded copies."""
    single, found = (hu.Trace.open(ranks / f"of-{m}" / f"{m}-moving").roles for m in ("single", mode))
    assert found.keys() == single.keys() == {"ema", "exp_avg", "exp_avg_sq"}
    for role, trace in found.items():
        last = audit_ranks.STEPS - (role == "ema" and mode == "fsdp")
        assert trace.tensors == single[role].tensors
        assert trace.steps.tolist() == list(range(1 if role == "ema" else 2, last + 1))
        counts = ["step", "tensor", "frozen", "endpoint", "zero_code", "never_moved"]
        a, b = (
            t.table().to_polars().select(counts).filter(pl.col("step") <= last) for t in (trace, single[role])
        )
        assert a.equals(b), role
        assert 0 < trace.frozen("bf16")[-1] < 1


def test_a_sample_of_shards_counts_what_it_says(ranks: Path) -> None:
    """Half of the tiles of every shard: of fc2, 900 coordinates a rank, the whole tile or the short one."""
    found = hu.Trace.open(ranks / "of-fsdp" / "fsdp-sampled")
    recorded = {t["name"]: t["recorded"] for t in found.tensors}
    sizes = {t["name"]: t["numel"] for t in found.tensors}
    assert recorded["gain"] == sizes["gain"] == 1  # on one rank only
    assert recorded["fc2.weight"] in (2 * 768, 2 * (900 - 768))
    assert (found.table().to_polars()["frozen"] <= found.table().to_polars()["numel"]).all()


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_rehearsals_on_ranks_are_those_of_one_process(ranks: Path, mode: str) -> None:
    """Counts and weights to the bit, of shards too; the loss, as far as a sum of shards is the same."""
    single, found = (hu.Trace.open(ranks / f"of-{m}" / m) for m in ("single", mode))
    assert found.scan("rehearsals").to_polars().equals(single.scan("rehearsals").to_polars())
    assert found.scan("rehearsals").to_polars()["frozen"].sum() > 0
    for spec in audit_ranks.REHEARSED:
        name = f"{spec.replace('/', '-')}.safetensors"
        one, other = (load_file(ranks / f"of-{m}" / name) for m in ("single", mode))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        a, b = (t.forecast(spec).losses.to_polars() for t in (single, found))
        assert a.drop("loss", "real").equals(b.drop("loss", "real"))
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6, atol=0)
        assert a["loss"].n_unique() > 1


def test_shards_refuse_what_they_cannot_do(ranks: Path) -> None:
    for rank in (0, 1):
        said = (ranks / "of-fsdp" / f"refused.{rank}").read_text().splitlines()
        assert len(said) == 3
        assert "grid int8 takes its scale from the whole tensor" in said[0]
        assert "grid nvfp4 takes its scale from the whole tensor" in said[1]
        assert "scores= is for whole tensors" in said[2]
