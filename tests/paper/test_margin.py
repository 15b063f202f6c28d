"""The margin study's kernel against the library's own margins and events, and its counting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from locked_cells import Alone, InterruptedCellError, run_cell
from margin_oracle import answered, auroc, relative_margin, symmetric_margin

import halfulp as hu
from halfulp.errors import TamperingError
from halfulp.measures import events
from halfulp.paper.models import lockstep as runs
from halfulp.paper.models import lockstep_kernels as compiled
from halfulp.paper.models.mlp import Trainer
from halfulp.paper.models.rounding_kernels import patterns
from halfulp.paper.models.teacher import CHOSEN, classification
from halfulp.paper.studies import margin
from halfulp.paper.trust import PRIMARY, THRESHOLDS, auroc_of_counts, posterior

GRIDS = ("m1", "m5", "m11")
BED = {"testbed": CHOSEN.json(), "label_noise": 0.1}


def levels(x: np.ndarray) -> np.ndarray:
    return np.array([runs.level(v) for v in x.tolist()])


def histogram(x: np.ndarray) -> np.ndarray:
    return np.bincount(levels(x), minlength=compiled.LEVELS)


def hard_values(grid: str, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of all magnitudes, zeros, powers of two and codes; proposals from far below to far above a gap,
    on midpoints and on codes too."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(n) * 2.0 ** rng.integers(-40, 10, n)
    w[::7] = 2.0 ** rng.integers(-30, 5, w[::7].size) * rng.choice([-1.0, 1.0], w[::7].size)
    w[::11] = 0.0
    w[5::11] = -0.0
    w[3::13] = hu.grid(grid).round(torch.from_numpy(w[3::13].copy())).numpy()
    w[-4:] = [5e-324, 2.0**-1022, -(2.0**-1030), 1e-310]
    gap = hu.grid(grid).gap(torch.from_numpy(w), torch.ones(n, dtype=torch.float64)).numpy()
    d = rng.standard_normal(n) * gap * 2.0 ** rng.integers(-8, 4, n)
    d[::5] = gap[::5] * rng.choice([-1.0, -0.5, 0.0, 0.25, 0.5, 1.5], d[::5].size)
    return w, d


def arrays(n: int) -> dict[str, Any]:
    return {
        "rows": np.zeros((5, n)), "levels": np.zeros((4, n), np.int64), "step": np.zeros(6, np.int32),
        "total": np.zeros((2, compiled.LEVELS), np.int64), "wrong": np.zeros((3, compiled.LEVELS), np.int64),
        "mistakes": np.zeros(3, np.int64),
    }  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS)
def test_every_event_is_judged_as_the_library_judges_it(grid: str) -> None:
    """Margins, levels, events, premises and mistakes of 60,000 hard coordinates, one by one."""
    n, g = 60_000, hu.grid(grid).within(np.float64)
    w, d_r = hard_values(grid, n, 0)
    other, d_a = hard_values(grid, n, 1)
    hat = g.round(torch.from_numpy(w)).numpy()
    rng = np.random.default_rng(2)
    same = rng.random(n) < 0.5
    q = np.where(same, hat, g.round(torch.from_numpy(other)).numpy())
    d_a = np.where(rng.random(n) < 0.7, d_r * (1 + 0.1 * rng.standard_normal(n)), d_a)

    a, k = arrays(n), patterns(grid, np.float64)
    compiled.forecast(w, d_r, k, runs.level(PRIMARY), a["rows"], a["levels"], a["step"], a["total"])
    before = q.copy()
    compiled.settle(q, d_a, d_r, k, a["rows"], a["levels"], a["step"], a["mistakes"], a["wrong"])

    margins = relative_margin(hat, d_r, grid)
    with np.errstate(over="ignore"):  # a finite proposal over a subnormal spacing
        comparator = symmetric_margin(w, d_r, grid)
    at, by, there = (torch.from_numpy(x.copy()) for x in (hat, d_r, before))
    said, came = events.frozen(at, by, g).numpy(), events.frozen(there, torch.from_numpy(d_a), g).numpy()
    p = posterior(before, d_a, hat, d_r, grid)
    wrong, sure = said != came, margins > PRIMARY

    assert (a["rows"][compiled.CODE] == hat).all()
    assert (a["rows"][compiled.GAMMA] == events.margin(at, by, g).numpy()).all()
    assert (a["levels"][0] == levels(margins)).all()
    assert (a["levels"][1] == levels(comparator)).all()
    assert (q == g.round(there + torch.from_numpy(d_a)).numpy()).all()
    assert a["step"].tolist() == [
        said.sum(), (said & sure).sum(), (~sure).sum(), came.sum(), p.diverged, p.violated,
    ]  # fmt: skip
    assert a["mistakes"].tolist() == [p.wrong_diverged, p.wrong_same, 0]
    assert (a["total"] == [histogram(margins), histogram(comparator)]).all()
    own = events.symmetric_frozen(torch.from_numpy(w), by, g).numpy() != came
    assert (
        a["wrong"] == [histogram(margins[wrong]), histogram(comparator[wrong]), histogram(comparator[own])]
    ).all()
    assert (own != wrong).sum() > 100  # the two forecasts err apart
    assert (
        min(p.wrong_diverged, p.wrong_same, p.violated, n - p.diverged - p.violated) > 100
    )  # all kinds occur


def test_what_is_not_finite_is_a_mistake() -> None:
    n = 4
    w, d = np.ones(n), np.array([np.nan, np.inf, 0.0, 0.0])
    q, d_a = np.ones(n), np.array([0.0, 0.0, -np.inf, 0.0])
    a, k = arrays(n), patterns("m5", np.float64)
    compiled.forecast(w, d, k, 0, a["rows"], a["levels"], a["step"], a["total"])
    compiled.settle(q, d_a, d, k, a["rows"], a["levels"], a["step"], a["mistakes"], a["wrong"])
    assert a["mistakes"].tolist() == [0, 3, 0]
    assert a["step"][compiled.VIOLATED] == 3
    assert a["levels"][0].tolist() == [0, 0, *levels(relative_margin(np.ones(2), np.zeros(2), "m5"))]


@pytest.mark.parametrize("grid", ["m3", "m9"])
def test_both_paths_are_the_trainers(grid: str) -> None:
    """Lockstep follows, bit for bit, a reference and a stored run of the trainer, and counts their events."""
    config = {**BED, "hidden": [6, 6], "examples": 40, "grid": grid, "rate": 0.3}
    p, g = classification(5, hidden=(6, 6), examples=40, label_noise=0.1), hu.grid(grid)
    start = g.round(torch.from_numpy(p.start)).numpy()
    reference = Trainer(p.net, p.train, start, rate=0.3)
    stored = Trainer(p.net, p.train, start, rate=0.3, store=grid)
    unit = runs.LockstepUnit(config, 5, measure=True)
    rows = unit.advance(40, *runs.histograms())
    added = np.zeros((40, 6), int)
    for t in range(40):
        hat, q = g.round(torch.from_numpy(reference.weights)).numpy(), stored.weights.copy()
        reference.advance(1)
        stored.advance(1)
        post = posterior(q, stored.proposal, hat, reference.proposal, grid)
        sure = relative_margin(hat, reference.proposal, grid) > PRIMARY
        said = events.frozen(torch.from_numpy(hat), torch.from_numpy(reference.proposal), grid).numpy()
        added[t] = (
            post.frozen_hat, (said & sure).sum(), (~sure).sum(), post.frozen_actual, post.diverged,
            post.violated,
        )  # fmt: skip
    assert (rows == added).all()
    assert (unit.w == reference.weights).all()
    assert (unit.q == stored.weights).all()
    assert (added[:2, compiled.DIVERGED] == 0).all()  # the first two codes always agree
    assert added[2, compiled.DIVERGED] > 0


# ---- the ladder ---------------------------------------------------------------------------------------


def test_levels_never_fall() -> None:
    """Over a dense sweep, every power of two, the neighbours of every threshold, and infinity."""
    ends = [np.nextafter(t, s) for t in THRESHOLDS for s in (-1.0, 1.0)]
    near_half = 0.5 - 2.0 ** -np.arange(1.0, 60.0)
    x = np.sort(
        np.concatenate([
            np.linspace(0, 1, 40_001), 2.0 ** np.arange(-1074.0, 1024.0), ends, THRESHOLDS, near_half,
            [0.5, np.inf],
        ])
    )  # fmt: skip
    found = levels(np.maximum(x, 0.0))
    assert (np.diff(found) >= 0).all()
    assert found[0] == 0
    assert found[-1] == compiled.LEVELS - 1
    assert runs.level(0.5) == compiled.MIDDLE


def test_coverage_and_risk_by_level_are_exact() -> None:
    """With margins on thresholds and one ulp beside them, counts by level are counts by margin."""
    rng = np.random.default_rng(0)
    t = rng.choice(THRESHOLDS, 3000)
    x = np.concatenate(
        [t, np.nextafter(t, 1.0), np.maximum(np.nextafter(t, -1.0), 0.0), rng.random(3000) / 2]
    )
    wrong = rng.random(x.size) < 0.3
    for some in (x, x[wrong]):
        assert runs.answered(histogram(some), THRESHOLDS) == [int((some > t).sum()) for t in THRESHOLDS]


@pytest.mark.parametrize("spread", [1.0, 0.1])
def test_the_auroc_by_level_is_within_its_bound(spread: float) -> None:
    """However closely margins crowd towards 1/2, the AUROC of margins lies within the stated error."""
    rng = np.random.default_rng(0)
    x = 0.5 - np.minimum(rng.random(4000) ** 3 * spread, 0.5)
    wrong = rng.random(4000) < 0.1 + 0.4 * (x < np.median(x))
    right_counts, wrong_counts = histogram(x[~wrong]), histogram(x[wrong])
    found, bound = auroc_of_counts(right_counts, wrong_counts), runs.auroc_bound(right_counts, wrong_counts)
    true = auroc(x, ~wrong)
    assert found is not None
    assert true is not None
    assert bound is not None
    assert abs(found - true) <= bound < 1e-2


def test_the_bound_is_attained() -> None:
    """All events on one level, every right one above every wrong one: 1/2 instead of 1."""
    x = np.array([0.2000001, 0.2000002, 0.2000003, 0.2000004])
    wrong = np.array([True, True, False, False])
    found = auroc_of_counts(histogram(x[~wrong]), histogram(x[wrong]))
    assert (found, auroc(x, ~wrong)) == (0.5, 1.0)
    assert runs.auroc_bound(histogram(x[~wrong]), histogram(x[wrong])) == 0.5


def test_histograms_survive_their_text() -> None:
    rng = np.random.default_rng(0)
    for top in (1, 127, 128, 2**14, 2**40):
        counts = rng.integers(0, top, 500, endpoint=True)
        counts[:3] = (0, top, 0)
        assert (runs.from_text(runs.to_text(counts)) == counts).all()


# ---- cells --------------------------------------------------------------------------------------------

CONFIG = {**BED, "hidden": [5, 5], "examples": 32, "steps": 90, "seeds": [7, 8], "grid": "m5", "rate": 0.2}


@pytest.fixture(scope="module")
def forecast() -> dict[str, Any]:
    return run_cell(margin.forecast, Alone("cell", CONFIG, {}))


@pytest.mark.parametrize("dies_after", [1, 3, 5, 6])
def test_an_interrupted_cell_goes_on_where_it_was(
    forecast: dict[str, Any], dies_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints in the first unit, at its end and in the second; the record is the same, byte for byte."""
    records = {"forecast": {"cell": forecast}}
    whole = run_cell(margin.outcome, Alone("cell", CONFIG, records))
    monkeypatch.setattr(runs, "CHUNK", 30)
    cell = Alone("cell", CONFIG, records, dies_after)
    with pytest.raises(InterruptedCellError):
        margin.outcome(cell)
    cell.dies_after = 0
    assert run_cell(margin.outcome, cell) == whole
    assert cell.saved == 6


@pytest.mark.parametrize("key", ["data", "path", "forecast"])
def test_an_outcome_refuses_another_forecast(forecast: dict[str, Any], key: str) -> None:
    units = [dict(unit) for unit in forecast["units"]]
    units[1][key] = "0" * 64
    with pytest.raises(TamperingError, match=key):
        margin.outcome(Alone("cell", CONFIG, {"forecast": {"cell": {**forecast, "units": units}}}))


def test_a_measured_run_adds_no_event_to_the_forecast(forecast: dict[str, Any]) -> None:
    """The forecast stage sees the same events as the outcome stage, and no outcome."""
    assert forecast["events"] == 2 * 90 * classification(7, hidden=(5, 5), examples=32).net.count
    assert set(forecast["units"][0]) == {"seed", "data", "path", "forecast", "onset"}


def test_estimands_are_those_of_the_events_themselves() -> None:
    """From a record's counts: the same coverage, risk and share of mistakes as from a list of events."""
    config = {**CONFIG, "seeds": [7], "steps": 60}
    records = {"forecast": {"m5-rate1": run_cell(margin.forecast, Alone("m5-rate1", config, {}))}}
    records["outcome"] = {"m5-rate1": run_cell(margin.outcome, Alone("m5-rate1", config, records))}
    p, g = classification(7, hidden=(5, 5), examples=32, label_noise=0.1), hu.grid("m5")
    start = g.round(torch.from_numpy(p.start)).numpy()
    reference = Trainer(p.net, p.train, start, rate=0.2)
    stored = Trainer(p.net, p.train, start, rate=0.2, store="m5")
    margins, wrong, apart = [], [], []
    for _ in range(60):
        hat, q = g.round(torch.from_numpy(reference.weights)).numpy(), stored.weights.copy()
        reference.advance(1)
        stored.advance(1)
        margins.append(relative_margin(hat, reference.proposal, "m5"))
        said = events.frozen(torch.from_numpy(hat), torch.from_numpy(reference.proposal), g).numpy()
        wrong.append(said != (stored.weights == q))
        apart.append(hat != q)
    x, mistakes, differ = (np.concatenate(parts) for parts in (margins, wrong, apart))
    curve = [answered(x, mistakes, t) for t in (-math.inf, *THRESHOLDS)]
    assert list(margin.risk(records).values()) == [risk for _, risk in curve]
    assert list(margin.coverage(records).values()) == [share for share, _ in curve[1:]]
    assert (
        margin.share(records, "wrong_diverged", "wrong_diverged wrong_same")["study"]
        == (mistakes & differ).sum() / mistakes.sum()
    )
    exact, bound = margin.auroc(records)["exact"], margin.auroc_error(records)["exact"]
    assert abs(exact - auroc(x, ~mistakes)) <= bound
    assert 0.0 <= margin.auroc_own(records)["symmetric"] <= 1.0
