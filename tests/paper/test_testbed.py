"""The search for a testbed: its facts on records made by hand, its choice against the code, and its gates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from locked_cells import run_study

from halfulp.paper.models import learning_forecasts, mlp
from halfulp.paper.models.learning_forecasts import follow, forecasts
from halfulp.paper.models.teacher import CHOSEN, Testbed, teacher_student
from halfulp.paper.report import beside_paper
from halfulp.paper.studies import _facts as facts
from halfulp.paper.studies import (
    ce_transfer,
    emulator,
    finite_size,
    margin,
    midpoint,
    phase_diagram,
    testbed,
    two_layer,
)
from halfulp.study import engine, loading
from halfulp.study.gates import decide, evaluate
from halfulp.study.protocol import Study

COMMITTED = Path(__file__).parents[2] / "results" / "studies" / "testbed-paper"


# ---- the facts ------------------------------------------------------------------------------------------


def as_printed() -> dict[str, Any]:
    """The record of a candidate whose references are as the paper prints them."""
    references = []
    for role, rate, seed in testbed.STUDY.config("paper")["whole"]:
        said = {}
        for m in range(1, 6):
            x, slow = rate * 2**m, seed == 2028
            diverged = rate == 1.6 or (rate == 0.8 and seed >= 2024)
            learns = x > (0.5 if role == "midpoint" else 0.6)
            frozen = not learns or (role == "midpoint" and slow and x < 0.6)
            one = [1, 1, 0.0, 0.0] if frozen else [40, 40, 0.7, 0.7]
            scalar = [40, 40, 0.7, 0.7] if learns else [1, 1, 0.0, 0.0]
            lost = [1, None, None, None]
            said[f"m{m}"] = dict(zip(learning_forecasts.PREDICTORS, (one, one, scalar), strict=True))
            if diverged:
                said[f"m{m}"] = dict.fromkeys(learning_forecasts.PREDICTORS, lost)
        references.append(
            {"role": role, "rate": rate, "seed": seed, "diverged": diverged, "slow": False, "said": said}
        )
    first = {0: 61, 1: 1800, 2: 1810, 3: 1790}
    timing = [
        {"rate": 0.1, "seed": s, "mantissa": m, "first": step, "rho": 0.74}
        for m, steps in ((3, dict.fromkeys(range(4), 11)), (9, first), (11, dict.fromkeys(range(4), 4575)))
        for s, step in steps.items()
    ]
    sizes = [
        {"width": width, "seed": 1, "mantissa": m, "step": 9,
         "z": {"0.16": 0.0, "0.50": 1.0, "0.84": ends[i]}}
        for m, ends in facts.PAPER_WIDTHS.items()
        for i, width in enumerate((16, 512))
    ]  # fmt: skip
    return {"candidate": "made", "references": references, "timing": timing, "sizes": sizes}


def test_what_the_paper_prints_meets_every_fact() -> None:
    record = as_printed()
    counts = facts.met(record, "before")
    assert list(counts) == [fact.name for fact in facts.FACTS]
    assert {name: a for name, (a, b) in counts.items() if a != b} == {}
    assert facts.score(record, "before") == (len(facts.FACTS), 1.0)


def changed(record: dict[str, Any], **how: Any) -> dict[str, Any]:
    """The record with some references changed: ``at`` chooses, ``to`` changes one."""
    for r in record["references"]:
        if how["at"](r):
            how["to"](r)
    return record


@pytest.mark.parametrize(
    ("fact", "at", "to"),
    [
        ("stable", lambda r: r["rate"] > 0.56 and r["seed"] == 2028, lambda r: r.update(diverged=True)),
        ("half-at-0.8", lambda r: r["rate"] == 0.8, lambda r: r.update(diverged=True)),
        ("ceiling", lambda r: r["rate"] == 1.6 and r["seed"] == 2021, lambda r: r.update(diverged=False)),
        ("windows", lambda r: r["rate"] == 0.2 and r["seed"] != 2021,
         lambda r: r["said"]["m1"].update(directional=[2, 9, 0.6, 0.6])),
        ("frozen-below", lambda r: r["rate"] < 0.02 and r["seed"] == 2029,
         lambda r: r["said"]["m4"].update(directional=[2, 2, 0.1, 0.1])),
        ("frozen-edge", lambda r: r["seed"] == 2029,
         lambda r: r["said"]["m1"]["directional"].__setitem__(0, 1)),
        ("later-above", lambda r: r["seed"] == 2029,
         lambda r: r["said"]["m5"]["directional"].__setitem__(0, 1)),
        ("onsets", lambda r: r["rate"] > 0.5 and r["seed"] == 2027,
         lambda r: r["said"]["m5"].update(scalar=[40, None, 1.0, 1.0])),
        ("directional", lambda r: r["seed"] == 2028,
         lambda r: r["said"]["m1"].update(directional=[1, 9, 0.6, 0.6])),
        ("symmetric", lambda r: r["seed"] == 2027,
         lambda r: r["said"]["m1"].update(symmetric=[1, 1, 0.0, 0.0])),
        ("scalar", lambda r: r["seed"] == 2028, lambda r: r["said"]["m1"].update(scalar=[1, 1, 0.0, 0.0])),
    ],
)  # fmt: skip
def test_every_fact_can_fail(fact: str, at: Any, to: Any) -> None:
    a, b = facts.met(changed(as_printed(), at=at, to=to), "before")[fact]
    assert a < b


def test_timing_and_width_facts_can_fail() -> None:
    record = as_printed()
    for row in record["timing"]:
        row |= {"rho": 0.9, "first": 50 if row["first"] == 1800 else min(row["first"], 2000)}
    for row in record["sizes"]:
        row["z"]["0.84"] = 3.0 if row["width"] == 16 else 2.0
    counts = facts.met(record, "before")
    failed = {name for name, (a, b) in counts.items() if a < b}
    assert failed == {"rho", "range", "lone-seed", "widths", "widening"}


def test_the_best_is_chosen_and_ties_go_to_the_first() -> None:
    good, bad = as_printed(), as_printed()
    bad["references"][-1]["diverged"] = True
    assert facts.ranked({"a": bad, "b": good, "c": good}) == ["b", "c", "a"]
    records = {"whole": {"rank1": {**good, "candidate": "x"}, "former": {**bad, "candidate": "former"}}}
    assert testbed.choice(records) == ("x", "before")


def test_the_table_counts_the_facts_that_each_candidate_meets() -> None:
    """The chosen misses one, the other two."""
    best, other = as_printed(), as_printed()
    best["timing"] = [{**row, "rho": 0.9} for row in best["timing"]]
    for r in other["references"]:
        r["diverged"] = r["rate"] > 0.5
    records = {"whole": {"rank1": {**best, "candidate": "x"}, "former": {**other, "candidate": "former"}}}
    assert testbed.choice(records)[0] == "x"
    assert testbed.whole_table(records).rows[-1] == ("facts met", "", "", "15 of 16", "14 of 16")


def test_the_side_of_the_error_is_part_of_the_choice() -> None:
    """Where only the error after an onset fits, that side is chosen."""
    record = as_printed()
    for r in record["references"]:
        for by in r["said"].values():
            for each in by.values():
                each[2:] = [0.3 if each[2] == 0.7 else each[2], each[3]]
    assert facts.best_side(record) == "after"


# ---- the choice -----------------------------------------------------------------------------------------


def test_the_code_has_what_the_committed_record_chose() -> None:
    """The constants that every study uses are the choice of the closed study, and of no other."""
    closed = beside_paper.read(COMMITTED)
    name, side = testbed.choice(closed.records)
    assert Testbed.of(testbed.CANDIDATES[name]) == CHOSEN
    assert side == learning_forecasts.SIDE
    assert closed.result["scale"] == "paper"


@pytest.mark.parametrize(
    "study",
    [emulator.STUDY, finite_size.STUDY, margin.STUDY, midpoint.STUDY, phase_diagram.STUDY, ce_transfer.STUDY],
    ids=lambda study: study.name,
)
def test_every_study_seals_the_chosen_testbed(study: Study) -> None:
    for scale in study.scales:
        assert study.config(scale)["testbed"] == CHOSEN.json()


def test_the_two_layer_systems_seal_it_too() -> None:
    for scale in two_layer.STUDY.scales:
        assert all(c["testbed"] == CHOSEN.json() for c in two_layer.STUDY.config(scale)["systems"].values())


def test_no_cell_of_the_search_runs_on_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    whole = mlp.Trainer.__init__

    def watched(self: mlp.Trainer, *args: Any, **how: Any) -> None:
        made.append(how.get("store"))
        whole(self, *args, **how)

    monkeypatch.setattr(mlp.Trainer, "__init__", watched)
    records = run_study(testbed.STUDY, "smoke")
    assert len(made) > 20
    assert set(made) == {None}
    values = evaluate(testbed.STUDY.estimands, records)
    assert decide(testbed.STUDY, values).label


# ---- learned shares -------------------------------------------------------------------------------------

BED = Testbed(hidden=0.1, output=0.1, teacher_hidden=8**-0.5, teacher_output=1.0)


def test_a_run_that_ends_above_its_start_has_diverged() -> None:
    """A rate at which the error stays finite and ends where it began, or above: no progress, no forecast."""
    p = teacher_student(4, width=6, examples=48, tests=48, testbed=BED)
    fine, slow = follow(p, 0.1, 60, audit=["m5"]), follow(p, 2.0, 60, audit=["m5"])
    assert not fine.diverged
    assert slow.slow
    assert not slow.trainer.diverged
    assert slow.diverged
    assert forecasts(slow, [5])["m5"]["directional"]["before"] is None
    assert forecasts(slow, [5])["m5"]["directional"]["onset"] is None
    still = follow(replace_start(p), 0.0, 5, audit=["m5"])
    assert still.diverged  # it ends at its start: no progress either


def replace_start(p: Any) -> Any:
    return replace(p, start=p.start.copy())


def test_both_sides_of_an_onset() -> None:
    p = teacher_student(4, width=6, examples=48, tests=48, testbed=BED)
    run = follow(p, 0.1, 60, audit=["m3"])
    said = forecasts(run, [3])["m3"]["directional"]
    errors = np.array([run.start, *run.series.test])
    onset = said["onset"]
    assert onset is not None
    assert onset > 1
    for side, at in (("before", onset - 1), ("after", onset)):
        assert said[side] == (errors[0] - errors[at]) / (errors[0] - errors[-1])


def test_half_the_loss_is_half_the_rate() -> None:
    half = teacher_student(4, width=6, examples=48, testbed=replace(BED, factor=0.5))
    plain = teacher_student(4, width=6, examples=48, testbed=BED)
    a, b = follow(half, 0.1, 30), follow(plain, 0.05, 30)
    np.testing.assert_array_equal(a.trainer.weights, b.trainer.weights)


# ---- the transfer that stops itself ---------------------------------------------------------------------


def test_the_papers_stopped_transfer_has_no_outcome() -> None:
    """48 references, 12 without progress: the integrity gate fails, and no other gate has a value."""
    values: dict[str, dict[str, float | None]] = {
        "progress": {f"reference {k}": 0.5 if k < 36 else -0.2 for k in range(48)},
        "failed": {"study": 12},
    }
    decision = decide(ce_transfer.STUDY, values, not_run=("nearest",))
    assert decision.label.startswith("stopped before any run on a grid")
    assert not decision.gates["integrity"].passed
    assert not decision.gates["windows"].passed


@pytest.mark.parametrize("stops", [True, False])
def test_one_reference_without_progress_stops_every_run(
    stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the engine, at scale smoke: one of four references ends above its start, and none is run."""

    def worse(p: Any, rate: float, steps: int, running: Any, **how: Any) -> Any:
        found = follow(p, rate, steps, running, **how)
        return replace(found, start=0.0) if stops and running.name == "rate=0.4.seed=2042" else found

    monkeypatch.setattr(ce_transfer, "follow", worse)
    engine.run(loading.load("ce-transfer"), "smoke", tmp_path / "out", executor="inline")
    closed = beside_paper.read(tmp_path / "out")
    assert closed.result["label"].startswith("stopped before any run") == stops
    assert (tmp_path / "out" / "records" / "nearest").exists() != stops
    assert ce_transfer.failed(closed.records) == {"study": float(stops)}
    assert ce_transfer.runs(closed.records) == {"study": 0.0 if stops else 8.0}
    ours = [claim.ours(closed.records) for claim in ce_transfer.CLAIMS]
    assert ours == [4, float(stops), 0.0 if stops else 8.0]
