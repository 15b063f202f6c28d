"""`margin-rehearsal`: its rehearsals are the product's, its projection is that of `margin`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from locked_cells import Alone, InterruptedCellError, run_cell

import halfulp as hu
from halfulp.kernels import rehearse_reference as reference
from halfulp.paper.models import lockstep_kernels as compiled
from halfulp.paper.models.lockstep import LockstepUnit, histograms
from halfulp.paper.studies import margin, margin_rehearsal
from halfulp.study.gates import decide, evaluate

CELL = next(iter(margin_rehearsal.cells(margin_rehearsal.STUDY.config("smoke"))))
CONFIG: dict[str, Any] = {**CELL.config, "steps": 40, "seeds": [3101]}


def test_cells_are_those_of_margin() -> None:
    for scale in ("smoke", "small", "paper"):
        ours, theirs = (s.cells(scale, "outcome") for s in (margin_rehearsal.STUDY, margin.STUDY))
        bare = [{k: v for k, v in cell.config.items() if k != "pulls"} for cell in ours]
        assert [c.name for c in ours] == [c.name for c in theirs]
        assert bare == [cell.config for cell in theirs]
        assert all(cell.config["pulls"][:2] == [0.0, 1.0] for cell in ours)  # 30 times these rates


def test_rehearsals_against_the_reference_kernel() -> None:
    """Codes of every rehearsal, and the events that it forecasts, step by step, bit for bit."""
    config = {**CONFIG, "pulls": [0.0, 0.3, 1.0]}
    unit, grid = LockstepUnit(config, 3101, measure=True), hu.grid(config["grid"]).within(np.float64)
    total, wrong = histograms(config)
    rule, plain = reference.Rule(grid), LockstepUnit(CONFIG, 3101, measure=True)
    alone = histograms(CONFIG)
    for _ in range(config["steps"]):
        w, q, held = unit.w.copy(), unit.q.copy(), unit.s.copy()
        (counts,) = unit.advance(1, total, wrong)
        assert counts.shape == (4, 6)
        for j, k in enumerate(config["pulls"]):
            s, _ = reference.step(rule, held[j], w, unit.w, k)
            assert np.array_equal(s, unit.s[j])
            stays, came = s == held[j], unit.q == q
            assert counts[1 + j, compiled.FORECAST] == int(stays.sum())
            assert counts[1 + j, compiled.DIVERGED] == int((held[j] != q).sum())
            assert counts[1 + j, compiled.MEASURED] == int(came.sum())
        assert np.array_equal(counts[0], plain.advance(1, *alone)[0, 0])  # the projection, as `margin` has it
    assert np.array_equal(plain.w, unit.w)
    assert np.array_equal(plain.q, unit.q)
    assert np.array_equal(total[0], alone[0][0])
    assert np.array_equal(wrong[0], alone[1][0])
    assert np.array_equal(unit.mistakes[0], plain.mistakes[0])
    assert unit.mistakes[1:, :2].sum(axis=1).tolist() == wrong[1:, 0].sum(axis=1).tolist()


def test_a_cell_resumes_and_the_study_decides() -> None:
    records: dict[str, Any] = {"forecast": {}, "outcome": {}}
    alone = Alone("m5-rate1", {**CONFIG, "steps": 600}, {})
    records["forecast"]["m5-rate1"] = run_cell(margin_rehearsal.forecast, alone)
    cell = Alone("m5-rate1", {**CONFIG, "steps": 600}, records)
    whole = run_cell(margin_rehearsal.outcome, cell)
    broken = Alone("m5-rate1", {**CONFIG, "steps": 600}, records, dies_after=1)
    with pytest.raises(InterruptedCellError):
        margin_rehearsal.outcome(broken)
    assert run_cell(margin_rehearsal.outcome, broken) == whole
    records["outcome"]["m5-rate1"] = whole
    values = evaluate(margin_rehearsal.STUDY.estimands, records)
    assert decide(margin_rehearsal.STUDY, values).label
    assert set(values["event-error"]) == set(margin_rehearsal.PREDICTORS)
    assert len(margin_rehearsal.table(records).rows) == 6
