"""One definition of the share of lost updates, one default scope, one rule for a majority, one for wording.

The share is counted here by brute force: weights are copied around every step, rounded, and compared.
"""

from __future__ import annotations

import base64
import json
import math
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import batches, made
from report_traces import synthetic
from rich.console import Console

import halfulp as hu
from halfulp.integrations.optional import AuditedRun
from halfulp.integrations.scalars import Scalars
from halfulp.measures.crossings import majority
from halfulp.report.live import LiveView, line
from halfulp.report.page import open_traces, page
from halfulp.text import percent
from halfulp.trace import Memory
from halfulp.verdicts import held
from halfulp.verdicts.findings import (
    DISTORTED,
    FINE,
    MOST,
    SOME,
    STRONGLY,
    findings,
    majority_words,
    severity,
)

GRIDS = ["bf16", "e5m2"]
STEPS = 12


class Sparse(torch.nn.Module):
    """Most rows of the embedding are in no batch: under SGD their proposals are zero."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 8)
        self.head = torch.nn.Linear(8, 5)
        self.to(dtype)


def trained(model: Sparse, optimizer: Any, steps: int = STEPS) -> list[dict[str, tuple[Any, Any]]]:
    """Weights before and after every step."""
    found = []
    for step in range(steps):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        ids = torch.randint(0, 10, (6,), generator=batches(step))
        model.head(model.embedding(ids)).square().sum().backward()
        optimizer.step()
        found.append({n: (before[n], p.detach().clone()) for n, p in model.named_parameters()})
    return found


def shares(steps: list[dict[str, tuple[Any, Any]]], grid: str) -> list[float]:
    """Lost updates of those that were not zero, step by step, of all tensors."""
    made, g = [], hu.grid(grid)
    for moved in steps:
        lost = asked = 0
        for before, after in moved.values():
            q, d = g.round(before), after - before
            asked += int((d != 0).sum())
            lost += int(((g.round(q + d) == q) & (d != 0)).sum())
        made.append(lost / asked)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with many zero proposals, and everybody who is told of it."""
    torch.manual_seed(0)
    model = Sparse()
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    seen: list[dict[str, Any]] = []
    audited = AuditedRun(GRIDS, tmp_path_factory.mktemp("share") / "run", False, {"listeners": [seen.append]})
    audited.start(optimizer, model, Path("unused"), 0)
    told: list[dict[str, float]] = []
    optimizer.register_step_post_hook(lambda *_: told.append(audited.news()))
    steps = trained(model, optimizer)
    folder = audited.folder
    audited.stop()
    return {"steps": steps, "seen": seen, "told": told, "trace": hu.Trace.open(folder)}


@pytest.mark.parametrize("grid", GRIDS)
def test_one_share_everywhere(run: dict[str, Any], grid: str) -> None:
    """Verdict, its JSON, page, trace, live view, loggers and callbacks: the number of the brute force."""
    trace, expected = run["trace"], shares(run["steps"], grid)
    assert trace.zero_proposals().mean() > 0.3
    assert trace.frozen(grid).tolist() == expected
    assert [s["frozen"][grid] for s in run["seen"]] == expected
    assert [t[f"halfulp/frozen/{grid}"] for t in run["told"]] == expected
    assert [Scalars().of(s)[f"halfulp/frozen/{grid}"] for s in run["seen"]] == expected
    assert f"{grid} {percent(expected[-1])}" in line(run["seen"][-1])
    verdict, mean = hu.verdict(trace), float(np.mean(expected))
    (found,) = (f for f in verdict.findings if f.grid == grid)
    assert found.lost == mean == trace.frozen(grid).mean()
    (told,) = (
        g for g in json.loads(json.dumps(verdict.to_json(), allow_nan=False))["grids"] if g["grid"] == grid
    )
    assert told["lost"] == mean
    assert f"{grid}: {mean:.1%} of updates would be lost" in verdict.text(verbose=True)
    short = (
        f"Stored in {grid}, this run would lose {percent(mean)} of its updates"
        if grid == trace.grids[0]
        else f"  {grid}  {percent(mean)} of updates would be lost"
    )
    assert short in str(verdict)
    (gathered,) = open_traces([trace])
    assert gathered.gathered.lost_share(grid).tolist() == expected
    assert [f for f in gathered.gathered.findings() if f.grid == grid] == [found]
    html = page([trace.path])
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])["runs"][0]
    assert data["scopes"][data["scope"]] == "all"
    curve = data["curves"]["frozen"][data["scope"]][GRIDS.index(grid)][0]
    assert (
        np.frombuffer(base64.b64decode(curve), dtype="<u2").tolist()
        == np.rint(np.array(expected) * 65534).tolist()
    )
    assert f'<th scope="row">{grid}</th><td class="number">{percent(mean)}</td>' in html
    assert verdict.headline in unescape(html)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_paper_counts_all_weights(run: dict[str, Any], grid: str) -> None:
    """f_t, with the coordinates that a step was not asked to move, has to be asked for."""
    g, expected = hu.grid(grid), []
    for moved in run["steps"]:
        still = [g.round(g.round(b) + (a - b)) == g.round(b) for b, a in moved.values()]
        expected.append(float(torch.cat([x.reshape(-1) for x in still]).double().mean()))
    trace = run["trace"]
    assert trace.frozen(grid, of="weights").tolist() == expected
    assert trace.crossing(grid, of="weights").first == next(
        (i for i, x in enumerate(expected, 1) if x >= 0.5), None
    )
    with pytest.raises(hu.UsageError, match="of= takes updates or weights, not 'codes'"):
        trace.frozen(grid, of="codes")


def test_one_scope_everywhere(tmp_path: Path) -> None:
    """Where some tensors are stored on the grid and others are not, a share is of those that are."""
    torch.manual_seed(0)
    model = Sparse()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hu.WriteBack(inner, "e4m3@128", "rne", model=model)
    seen: list[dict[str, Any]] = []
    with hu.Audit(optimizer, ["e4m3@128"], model=model, out=tmp_path / "run", listeners=[seen.append]):
        steps = trained(model, optimizer)
    stored = ("embedding.weight", "head.weight")
    expected = []
    for moved in steps:
        same = torch.cat([(b == a).reshape(-1) for n, (b, a) in moved.items() if n in stored])
        expected.append(float(same.double().mean()))
    trace = hu.Trace.open(tmp_path / "run")
    assert trace.frozen("e4m3@128").tolist() == expected
    assert trace.frozen("e4m3@128", "all").tolist() != expected
    assert [s["frozen"]["e4m3@128"] for s in seen] == expected
    assert seen[-1]["measured"] == ["e4m3@128"]
    (found,) = hu.verdict(trace).findings
    assert (found.measured, found.lost) == (True, float(np.mean(expected)))
    assert found.of == (40 * 8 + 40) / trace.numel()
    assert f"e4m3@128: {found.lost:.1%} of updates lost" in hu.verdict(trace).text(verbose=True)
    html = page([trace.path])
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])["runs"][0]
    assert data["scopes"][data["scope"]] == "stored"
    assert f"<h1>This run LOST {percent(found.lost)} of its e4m3@128 updates; " in html
    (gathered,) = open_traces([trace])
    assert gathered.gathered.findings() == [found]


def test_a_view_of_a_step_in_which_nothing_was_finite() -> None:
    """No share is known then: nothing is shown for it, and loggers are told none."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    view, told = LiveView(Console(quiet=True)), []
    with hu.Audit(optimizer, "bf16", model=model, listeners=[view, lambda s: told.append(Scalars().of(s))]):
        for p in model.parameters():
            p.grad = torch.full_like(p, math.nan)
        optimizer.step()
    assert [sorted(t) for t in told] == [["halfulp/never_moved/bf16", "halfulp/update_ratio"]]


# ---- a majority ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "said"),
    [
        ([0.1, 0.2, 0.3], "no lasting majority"),
        ([0.1] * 4 + [0.6] + [0.1] * 95, "no lasting majority"),  # a single step is none
        ([0.1] * 4 + [0.6] * 9 + [0.1] * 87, "no lasting majority"),  # less than a tenth
        ([0.1] * 4 + [0.6] * 10 + [0.1] * 86, "a majority from step 5 to step 14"),
        ([0.1] * 40 + [0.6] + [0.1] * 28 + [0.6] * 31, "a majority from step 70 to the end"),
        ([0.6] * 60 + [0.1] + [0.6] * 20, "a majority from step 62 to the end"),
        ([0.6] * 60 + [0.1] + [0.6], "a majority from step 1 to step 60"),
        ([0.5] * 9, "a majority from the first step on"),
        ([0.9], "no lasting majority"),
        ([0.9, 0.1, 0.9], "no lasting majority"),
    ],
)
def test_a_majority_is_named_when_it_lasts(f: list[float], said: str) -> None:
    assert majority_words(majority(f)) == said


def test_a_majority_in_a_record_that_begins_late() -> None:
    assert majority_words(majority([0.9, 0.8], steps=[11, 21])) == (
        "a majority from step 11, the first that was audited, on"
    )


def test_a_page_and_a_verdict_name_the_same_majority(tmp_path: Path) -> None:
    trace = synthetic(tmp_path / "run")
    html = page([trace.path])
    told = [f for f in hu.verdict(trace).findings if f.majority is not None]
    assert told
    for f in told:
        assert f.majority == trace.majority(f.grid)
        assert f"a majority {f.majority.when}." in hu.verdict(trace).text(verbose=True)
        assert f.majority.when in html


# ---- wording ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "gain", "cosine", "hardly", "expected"),
    [
        (0.012, 0.254, 0.35, False, STRONGLY),  # int8/row on nanoGPT, by decoded value
        (0.382, 0.943, 0.91, False, SOME),  # bf16 there
        (0.928, 0.254, 0.35, False, MOST),  # int8/row by code
        (0.01, 0.95, 0.45, False, STRONGLY),
        (0.01, 0.7, 0.95, False, DISTORTED),
        (0.01, 1.3, 0.8, False, DISTORTED),
        (0.01, 0.99, 0.99, False, FINE),
        (0.01, None, None, False, FINE),
        (0.01, 0.99, 0.99, True, SOME),
    ],
)
def test_one_function_decides_on_the_wording(
    late: float, gain: float | None, cosine: float | None, hardly: bool, expected: str
) -> None:
    assert severity(late, late, gain, cosine, hardly) == expected


def test_where_little_arrives_nobody_says_hardly_any(tmp_path: Path) -> None:
    """A scale that moves with the data: whatever share is called lost, the cure is offered."""
    model = made("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with hu.Audit(optimizer, ["int8/row", "m20"], model=model, out=tmp_path / "run"):
        for step in range(8):
            optimizer.zero_grad()
            model.loss(batches(step)).backward()
            optimizer.step()
    trace = hu.Trace.open(tmp_path / "run")
    coarse, fine = findings(trace)
    assert coarse.cosine is not None
    assert coarse.cosine < 0.5
    assert (coarse.severity in (MOST, STRONGLY), fine.severity) == (True, FINE)
    said = hu.verdict(trace).text(verbose=True).partition("m20:")[0]
    assert "would keep them, in bytes per weight when stored packed: sr 1" in said
    html = page([trace.path])
    assert "int8/row, this run would" in html.partition("</h1>")[0]
    assert "Nothing found" not in html
    assert html.count("A lost share is not yet a loss") == 1


def test_what_happened_and_what_would_have_different_verbs(tmp_path: Path) -> None:
    """Weights that are stored in bfloat16: bf16 is measured, e5m2 a forecast."""
    torch.manual_seed(0)
    model = Sparse(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with hu.Audit(optimizer, GRIDS, model=model, out=tmp_path / "run"):
        trained(model, optimizer)
    html = page([tmp_path / "run"])
    assert "<h1>This run LOST 100% of its updates; " in html
    assert ("e5m2", "100% of updates would be lost; sr keeps them (1 byte per weight)") in hu.verdict(
        hu.Trace.open(tmp_path / "run")
    ).formats


@pytest.mark.parametrize(
    ("dtype", "grid", "policy", "storage", "said"),
    [
        (torch.bfloat16, "bf16", "sr", None, "parameters bf16 written by sr, in bfloat16;"),
        (torch.float32, "e4m3@128", "rne", None, "parameters e4m3@128 written by rne, in float32 (99%), "),
        (torch.float32, "int8/row", "sr", "packed", "parameters int8/row written by sr, packed (99%), "),
    ],
)  # fmt: skip
def test_what_a_write_back_holds(dtype: Any, grid: str, policy: str, storage: Any, said: str) -> None:
    model, memory = Sparse(dtype), Memory()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hu.WriteBack(inner, grid, policy, model=model, storage=storage)
    with hu.Audit(optimizer, [grid], model=model, out=memory):
        for step in range(2):
            optimizer.zero_grad()
            ids = torch.randint(0, 10, (6,), generator=batches(step))
            model.head(model.embedding(ids)).square().sum().backward()
            optimizer.step()
    assert said in (held.words(memory.trace) or "")
    assert said in hu.verdict(memory.trace).text(verbose=True)


# ---- what was not measured ---------------------------------------------------------------------------------


def test_what_was_not_followed_is_not_a_number() -> None:
    """Zero would say that stochastic rounding moves every weight."""
    model, memory = torch.nn.Linear(4, 4), Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hu.Audit(optimizer, "bf16", model=model, out=memory):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert memory.trace.table().to_polars()["expected"].is_nan().all()
    with pytest.raises(hu.UsageError, match="recorded without expected_never_moved"):
        memory.trace.expected_never_moved("bf16")


def test_probabilities_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the code sees one; nothing is turned off silently."""
    monkeypatch.setattr("halfulp.audit.sources.watchlist.on_gpu", lambda x: True)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4)).sum().backward()
    with hu.Audit(optimizer, "bf16", model=model):
        optimizer.step()
    with (
        pytest.raises(hu.UsageError, match=r"'weight': expected_never_moved= follows .* on the CPU only"),
        hu.Audit(optimizer, "bf16", model=model, expected_never_moved=True),
    ):
        optimizer.step()


# ---- steps without an update -----------------------------------------------------------------------------


@pytest.mark.parametrize(("rates", "of_which"), [([0.0] * 4, 0), ([0.0] * 6 + [1e-5] * 2, 2)])
def test_steps_at_a_rate_of_zero_lose_nothing(tmp_path: Path, rates: list[float], of_which: int) -> None:
    """Nothing is proposed there, also to weights stored in bf16: the steps are part of no share, anywhere."""
    torch.manual_seed(0)
    model, seen = torch.nn.Linear(40, 40).bfloat16(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    with hu.Audit(optimizer, "bf16", model=model, out=tmp_path / "run", listeners=[seen.append]):
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(torch.randn(8, 40).bfloat16()).square().mean().backward()
            optimizer.step()
    trace = hu.Trace.open(tmp_path / "run")
    share, verdict = trace.frozen("bf16"), hu.verdict(trace)
    assert np.isnan(share).tolist() == [rate == 0 for rate in rates]
    assert trace.frozen("bf16", of="weights")[0] == 1  # the paper's share is what it is
    assert np.array_equal([s["frozen"]["bf16"] for s in seen], share, equal_nan=True)
    (gathered,) = open_traces([trace])
    assert np.array_equal(gathered.gathered.lost_share("bf16"), share, equal_nan=True)
    assert str(gathered.gathered.findings()) == str(list(verdict.findings))
    if of_which:
        assert verdict.findings[0].lost == share[-of_which:].mean() > 0.9
        assert verdict.headline.startswith("This run LOST")
    else:
        said = "Nothing can be said: no update was proposed in 4 steps at a learning rate of 0."
        assert (verdict.headline, verdict.fix) == (said, None)
        assert f"<h1>{said}</h1>" in page([trace.path])
        assert json.loads(json.dumps(verdict.to_json(), allow_nan=False))["grids"][0]["lost"] is None
