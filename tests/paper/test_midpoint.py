"""The midpoint study: its estimands on records made by hand, and its forecast against a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from locked_cells import Alone, InterruptedCellError, run_cell

import halfulp as hu
from halfulp.errors import TamperingError
from halfulp.measures import events
from halfulp.measures.crossings import persistent_majority
from halfulp.paper.models import mlp
from halfulp.paper.models.teacher import Testbed, teacher_student
from halfulp.paper.studies import midpoint
from halfulp.study.gates import decide, evaluate

RATES, FLOORS = midpoint.STUDY.config("paper")["rates"], midpoint.STUDY.config("paper")["floors"]
SEEDS = (2027, 2028, 2029)


def by_hand() -> dict[str, Any]:
    """Records with the pattern that the paper describes: learning from rate * 2**m = 0.566 up; seed 2028
    missed there, by symmetric at four of the five mantissas; the other 55 positive cells with an onset at
    update 1000 (forecast at 1100, the first few at 1300), and all the rest frozen from the start."""
    records: dict[str, Any] = {"forecast": {}, "outcome": {}}
    timed = 0
    for i, rate in enumerate(RATES, 1):
        for seed in SEEDS:
            said = {}
            for m in range(1, 6):
                learns = rate * 2**m > 0.5
                missed = seed == 2028 and learns and rate * 2**m < 0.6
                late = learns and not missed
                timed += late
                share, onset = 0.4 if missed else float(learns), 1100 if late else 1
                said[f"m{m}"] = {
                    "directional": {**both(share), "onset": 1300 if timed <= 4 else onset},
                    "symmetric": {**both(1.0 if m == 1 and missed else share),
                                  "onset": 1300 if timed <= 4 else onset},
                    "scalar": {**both(float(learns)), "onset": 1300 if timed <= 5 else onset},
                    "monotone": {**both(float(rate >= FLOORS[str(m)])), "onset": None},
                }  # fmt: skip
                records["outcome"][f"m{m}-rate{i}-{seed}"] = {
                    "m": m, "rate": rate, "seed": seed, "reference": f"rate{i}-{seed}", "steps": 3000,
                    "learned": 0.55 if missed else float(learns), "onset": 1000 if late else 1,
                    "moved_ever": 0.55, "moved_ever_in": 0.5, "moved_ever_out": 1.0, "moved_at_most": 0.4,
                    "after_cut": 0.2,
                }  # fmt: skip
            records["forecast"][f"rate{i}-{seed}"] = {"forecast": said, "start": 1.0, "end": 0.1}
    assert timed == 55
    return records


def both(share: float) -> dict[str, float]:
    return {"before": share, "after": share}


def test_the_papers_table_comes_out_of_such_records() -> None:
    """From records to a label: 5, 5, 5 and 0 of 5 windows; 85, 86, 90 and 75 of 90 cells; 51, 51 and 50 of 55
    onsets. The monotone baseline's numbers are those of its floors, whatever else is in the records."""
    records = by_hand()
    values = evaluate(midpoint.STUDY.estimands, records)
    assert values["window-matches"] == {"directional": 1, "symmetric": 1, "scalar": 1, "monotone": 0}
    assert values["accuracy"] == {
        "directional": 85 / 90, "symmetric": 86 / 90, "scalar": 1, "monotone": 75 / 90,
    }  # fmt: skip
    assert values["onset-within"] == {"directional": 51 / 55, "symmetric": 51 / 55, "scalar": 50 / 55}
    assert values["false-negatives"] == {"study": 5}
    assert values["false-negatives-at-start"] == {"study": 5}
    assert decide(midpoint.STUDY, values).label == "not promoted"
    claims = midpoint.CLAIMS
    ours = {(c.claim, str(c.paper)): c.ours(records) for c in claims}
    printed = [f"{c.paper}" for c in claims if c.claim.startswith(("windows", "onsets"))]
    assert [ours[c.claim, str(c.paper)] for c in claims[:4] + claims[8:11]] == printed
    names = [row[0] for row in midpoint.misses_table(records).rows]
    assert names == [f"m{6 - i}-rate{i}-2028" for i in range(1, 6)]


def test_a_window_is_of_medians() -> None:
    """One seed of three that learns puts no rate into a window; two do. A diverged run counts as zero."""
    records = by_hand()
    cells = records["outcome"]
    for seed, learned in zip(SEEDS, (0.0, 1.0, 1.0), strict=True):
        cells[f"m1-rate1-{seed}"]["learned"] = learned
    assert RATES[0] in midpoint.windows(records)[1]
    cells["m1-rate1-2029"]["learned"] = 0.0
    assert RATES[0] not in midpoint.windows(records)[1]


@pytest.mark.parametrize(
    ("came", "eligible"), [(1, 54), (2, 54), (3, 55), (2999, 55), (3000, 54), (None, 54)]
)
def test_onsets_that_carry_a_ratio(came: int | None, eligible: int) -> None:
    records = by_hand()
    name = next(n for n, cell in records["outcome"].items() if cell["onset"] == 1000)
    records["outcome"][name]["onset"] = came
    assert midpoint.onset_eligible(records)["directional"] == eligible


def test_learned_share() -> None:
    errors = np.array([3.0, 2.0, 1.0])
    assert [midpoint.learned(5.0, errors, k, 1.0) for k in range(4)] == [0.0, 0.5, 0.75, 1.0]
    assert midpoint.learned(5.0, errors[:2], 3, 1.0) == 0.0  # diverged before the last update
    assert midpoint.learned(5.0, errors, 3, None) == 0.0  # no reference to take a share of
    assert midpoint.learned(1.0, errors, 3, 1.0) == 0.0  # nor any progress


# ---- cells ----------------------------------------------------------------------------------------------

BED = Testbed(hidden=0.1, output=0.1, teacher_hidden=8**-0.5, teacher_output=1.0)
CONFIG = {
    "testbed": BED.json(), "width": 6, "examples": 48, "steps": 80, "mantissas": [2, 6, 9], "rate": 0.1,
    "seed": 4,
    "floors": {"2": 0.2, "6": 0.02, "9": 0.0},
}  # fmt: skip


def plain_descent() -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Weights and proposals before every step, and test errors from the start on, with NumPy alone."""
    p = teacher_student(4, width=6, examples=48, tests=48, testbed=BED)
    (x, y), (u, v) = ((b.x[:, : b.n].T, b.y[:, : b.n].T) for b in (p.train, p.test))
    cuts = [p.net.part(name) for name in ("W1", "b1", "W2", "b2")]

    def parts(w: np.ndarray) -> tuple[np.ndarray, ...]:
        w1, b1, w2, b2 = (w[cut] for cut in cuts)
        return w1.reshape(6, 8), b1, w2.reshape(1, 6), b2

    def error(w: np.ndarray) -> float:
        w1, b1, w2, b2 = parts(w)
        return float(((np.tanh(u @ w1.T + b1) @ w2.T + b2 - v) ** 2).mean())

    w, weights, proposals, errors = p.start, [], [], [error(p.start)]
    for _ in range(80):
        w1, b1, w2, b2 = parts(w)
        h = np.tanh(x @ w1.T + b1)
        e = 2 * (h @ w2.T + b2 - y) / len(x)
        back = e @ w2 * (1 - h * h)
        g = np.concatenate([(back.T @ x).ravel(), back.sum(0), (e.T @ h).ravel(), e.sum(0)])
        weights.append(w)
        proposals.append(-0.1 * g)
        w = w - 0.1 * g
        errors.append(error(w))
    return np.array(weights), np.array(proposals), errors


def test_the_forecast_is_that_of_a_plain_loop() -> None:
    """Onsets are equal step for step; errors differ by the order of sums, some 1e-15 of a number near one."""
    found = run_cell(midpoint.forecast, Alone("rate1-4", CONFIG, {}))
    weights, proposals, errors = plain_descent()
    for m in CONFIG["mantissas"]:  # type: ignore[attr-defined]
        g = hu.grid(f"m{m}")
        w, d = torch.from_numpy(weights), torch.from_numpy(proposals)
        rho = np.linalg.norm(proposals, axis=1) / (2.0 ** -(m + 1) * np.linalg.norm(weights, axis=1))
        frozen = {
            "directional": events.frozen(g.round(w), d, g).double().mean(dim=1).numpy(),
            "symmetric": events.symmetric_frozen(w, d, g).double().mean(dim=1).numpy(),
            "scalar": (rho <= 2**-0.5).astype(float),
        }
        for name, f in frozen.items():
            onset = persistent_majority(f)
            said = found["forecast"][f"m{m}"][name]
            end = 80 if onset is None else onset - 1
            share, later = (
                (errors[0] - errors[at]) / (errors[0] - errors[80]) for at in (end, min(end + 1, 80))
            )
            assert said["onset"] == onset, (m, name)
            assert said["before"] == pytest.approx(share, abs=1e-12)
            assert said["after"] == pytest.approx(later, abs=1e-12)
    onsets = {said["onset"] for grid in found["forecast"].values() for said in grid.values()}
    assert None in onsets
    assert len(onsets) >= 4  # never, and at three different updates


def test_an_outcome_is_a_share_of_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an interrupted cell leaves the same record."""
    records = {"forecast": {"rate1-4": run_cell(midpoint.forecast, Alone("rate1-4", CONFIG, {}))}}
    config = {**CONFIG, "m": 6, "reference": "rate1-4"}
    found = run_cell(midpoint.outcome, Alone("m6-rate1-4", config, records))
    assert 0.5 < found["learned"] < 1.5
    assert 0 < found["moved_at_most"] <= found["moved_ever"] <= 1
    weights, (w1, w2) = 6 * 8 + 6 + 6 + 1, (48, 6)
    assert w1 * found["moved_ever_in"] + w2 * found["moved_ever_out"] <= weights * found["moved_ever"]
    assert found["after_cut"] < found["learned"]
    monkeypatch.setattr(mlp.run, "__defaults__", (None, 30))
    cell = Alone("m6-rate1-4", config, records, dies_after=2)
    with pytest.raises(InterruptedCellError):
        midpoint.outcome(cell)
    cell.dies_after = 0
    assert run_cell(midpoint.outcome, cell) == found


def test_an_outcome_refuses_other_data() -> None:
    sealed = run_cell(midpoint.forecast, Alone("rate1-4", CONFIG, {}))
    config = {**CONFIG, "m": 6, "reference": "rate1-4", "seed": 5}
    with pytest.raises(TamperingError, match="data is not what the forecast sealed"):
        midpoint.outcome(Alone("m6-rate1-4", config, {"forecast": {"rate1-4": sealed}}))
