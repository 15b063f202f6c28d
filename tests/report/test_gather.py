"""One pass over a trace says what the trace says."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from audit_reference import made, train
from report_traces import inventory, synthetic

import halfulp as hu
from halfulp.measures.groups import CORE
from halfulp.report.charts import binned, packed
from halfulp.report.gather import BINS, GROUPS, bins, gather
from halfulp.verdicts.findings import findings


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> hu.Trace:
    """A real one: tied, unused and one-dimensional tensors, four parts."""
    folder = tmp_path_factory.mktemp("recorded") / "trace"
    model = made("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"model": model, "out": folder, "part_steps": 3, "expected_never_moved": True}
    with hu.Audit(optimizer, ["bf16", "e5m2", "int8/row"], **options) as audit:
        train(model, optimizer, 11, audit=audit)
    return hu.Trace.open(folder)


def test_curves_equal_those_of_the_trace(recorded: hu.Trace) -> None:
    """Bit for bit, for every grid, scope and column."""
    g = gather(recorded)
    assert g.scopes[:3] == ["all", "all-2d", "core"]
    assert set(CORE) < set(g.scopes)
    for scope in g.scopes:
        assert np.array_equal(g.steps, recorded.steps_of(scope))
        for grid in recorded.grids:
            for column in ("frozen", "never_moved", "expected"):
                assert np.array_equal(g.share(column, grid, scope), recorded.series(column, grid, scope))
            assert np.array_equal(g.lost_share(grid, scope), recorded.frozen(grid, scope))
            assert g.majority(grid, scope) == recorded.majority(grid, scope)
            assert g.never_moved(grid, scope) == recorded.never_moved(grid, scope)[-1]


def test_findings_equal_those_of_the_verdict(recorded: hu.Trace) -> None:
    assert gather(recorded).findings() == findings(recorded)


def test_findings_of_a_run_that_a_write_back_has_in_part(tmp_path: Path) -> None:
    """They are about the weights that lose updates."""
    model = made("gpt").bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    opt = hu.WriteBack(optimizer, "bf16", "sr", model=model, params=lambda name, p: p.dim() > 1)
    with hu.Audit(opt, ["bf16", "e5m2"], model=model, out=tmp_path / "run") as audit:
        train(model, opt, 3, audit=audit)
    trace = hu.Trace.open(tmp_path / "run")
    found = gather(trace).findings()
    assert found == findings(trace)
    assert found[0].of < 0.5


def test_shares_of_tensors_equal_those_of_the_trace(recorded: hu.Trace) -> None:
    g = gather(recorded)
    for grid in recorded.grids:
        shares = recorded.lost_by_tensor(grid)
        expected = [shares.get(t["id"], np.nan) for t in recorded.tensors]
        assert np.array_equal(g.tensor_share(grid), expected, equal_nan=True)


def test_a_tensor_that_joins_late(tmp_path: Path) -> None:
    """Before it is there, its scope has no value; shares are of those that are."""
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD([{"params": first.parameters()}, {"params": second.parameters()}], lr=1e-3)
    rule = {id(p): "early" for p in first.parameters()} | {id(p): "late" for p in second.parameters()}
    options = {"groups": lambda name, p: rule[id(p)], "model": torch.nn.ModuleList([first, second])}
    with hu.Audit(optimizer, "bf16", out=tmp_path / "run", **options):
        for step in range(6):
            optimizer.zero_grad(set_to_none=True)
            x = first(torch.ones(1, 4))
            (second(x) if step >= 3 else x).sum().backward()
            optimizer.step()
    trace = hu.Trace.open(tmp_path / "run")
    g = gather(trace)
    late = g.lost_share("bf16", "late")
    assert np.isnan(late[:3]).all()
    assert np.array_equal(late[3:], trace.frozen("bf16", "late"))
    assert np.array_equal(g.lost_share("bf16"), trace.frozen("bf16"))
    assert np.array_equal(g.share("frozen", "bf16"), trace.frozen("bf16", of="weights"))
    assert g.findings() == findings(trace)


@pytest.mark.parametrize("n", [1, 2, BINS, BINS + 1, 5000, 10_000, 1_000_000])
def test_bins_cover_everything_once(n: int) -> None:
    starts = bins(n, BINS)
    assert starts[0] == 0
    assert (np.diff(starts) > 0).all()
    assert starts[-1] < n
    assert len(starts) <= 1.1 * BINS
    if n > 4 * BINS:
        assert list(starts[:10]) == list(range(10))  # the start is not blurred


def test_binned_values_ignore_what_is_missing() -> None:
    values = np.array([0.1, np.nan, 0.3, np.nan, np.nan, 0.5])
    mean, low, high = binned(values, np.array([0, 3, 5]))
    assert np.array_equal(mean, [0.2, np.nan, 0.5], equal_nan=True)
    assert np.array_equal(low, [0.1, np.nan, 0.5], equal_nan=True)
    assert np.array_equal(high, [0.3, np.nan, 0.5], equal_nan=True)


def test_packing_loses_less_than_a_screen_shows() -> None:
    """Half a step of 16 bits: 1 / (2 * 65534) < 1e-5, where the page prints thousandths."""
    shares = np.random.default_rng(0).random(1000)
    codes = np.frombuffer(base64.b64decode(packed(shares)), dtype="<u2")
    assert np.abs(codes / 65534 - shares).max() <= 0.5 / 65534 * (
        1 + 1e-9
    )  # and the rounding of the division


def test_many_groups_are_shown_by_the_largest(tmp_path: Path) -> None:
    many = inventory([(f"t{i}", f"g{i}", (2, 2)) for i in range(1000)])
    g = gather(synthetic(tmp_path / "many", steps=3, grids=["bf16"], listed=many))
    assert len(g.scopes) == 1 + GROUPS
    assert np.array_equal(g.lost_share("bf16"), g.trace.frozen("bf16"))


def test_importing_halfulp_imports_no_plotting() -> None:
    unwanted = ("matplotlib", "halfulp.report", "halfulp.paper")
    code = f"import sys, halfulp; print([m for m in sys.modules if m.startswith({unwanted})])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "[]"
