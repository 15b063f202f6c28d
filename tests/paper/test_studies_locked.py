"""The three locked studies as declarations: the paper's numbers through our gates, and smoke runs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from halfulp.paper.studies import margin, midpoint, theory
from halfulp.study import engine, loading
from halfulp.study.gates import Decision, decide, evaluate
from halfulp.study.protocol import Study
from halfulp.study.validate import validate

STUDIES = {"margin": margin, "midpoint": midpoint, "theory": theory}


def passed(decision: Decision) -> dict[str, bool]:
    return {name: result.passed for name, result in decision.gates.items()}


# ---- the paper's tables through our gates -------------------------------------------------------------

PROSPECTIVE = {  # tab:e4-prospective: windows, cell accuracy, onsets within 15%
    "directional": (5 / 5, 0.944, 51 / 55),
    "symmetric": (5 / 5, 0.956, 51 / 55),
    "scalar": (5 / 5, 1.000, 50 / 55),
    "monotone": (0 / 5, 0.833, None),
}


def midpoint_values(rows: dict[str, tuple[float, float, float | None]]) -> dict[str, dict[str, float | None]]:
    accuracy = {name: row[1] for name, row in rows.items()}
    return {
        "window-matches": {name: row[0] for name, row in rows.items()},
        "accuracy": dict(accuracy),
        "onset-within": {name: row[2] for name, row in rows.items() if row[2] is not None},
        "directional-windows": {"directional": rows["directional"][0]},
        "directional-onset": {"directional": rows["directional"][2]},
        "against-symmetric": {"directional": accuracy["directional"] - accuracy["symmetric"]},
        "against-monotone": {"directional": accuracy["directional"] - accuracy["monotone"]},
        "progress": {f"reference {k}": 0.9 for k in range(18)},
    }


def test_the_papers_midpoint_table_is_not_promoted() -> None:
    """94.4% against 95.6%: one gate of four fails, and that decides."""
    decision = decide(midpoint.STUDY, midpoint_values(PROSPECTIVE))
    assert decision.label == "not promoted"
    assert passed(decision) == {
        "windows": True, "onsets": True, "no-worse-than-symmetric": False, "no-worse-than-monotone": True,
        "tie": False, "progress": True,
    }  # fmt: skip


def test_a_tie_is_told_to_be_one() -> None:
    tied = {name: (row[0], 0.95, row[2]) for name, row in PROSPECTIVE.items() if name != "monotone"}
    rows = PROSPECTIVE | tied
    decision = decide(midpoint.STUDY, midpoint_values(rows))
    assert decision.label == "promoted"
    assert decision.says.startswith("By a tie")


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ((5 / 5, 0.956, 51 / 55), "promoted"),  # as good as symmetric would have done
        ((3 / 5, 0.956, 51 / 55), "not promoted"),
        ((4 / 5, 0.956, 44 / 55), "promoted"),  # both at their thresholds
        ((5 / 5, 0.956, 43 / 55), "not promoted"),
        ((5 / 5, 0.956, None), "not promoted"),
    ],
)
def test_every_clause_of_the_promotion_rule_counts(row: Any, label: str) -> None:
    decision = decide(midpoint.STUDY, midpoint_values({**PROSPECTIVE, "directional": row}))
    assert decision.label == label


def test_without_progress_there_is_no_result() -> None:
    """The paper's integrity condition comes before its rule."""
    values = midpoint_values({**PROSPECTIVE, "directional": (1.0, 0.956, 51 / 55)})
    assert decide(midpoint.STUDY, values).label == "promoted"
    values["progress"]["reference 3"] = None
    assert decide(midpoint.STUDY, values).label == "no result: a reference made no progress"


TRANSFER: dict[str, dict[str, float | None]] = {  # app:margin-transfer
    "events": {"study": 762_880_000},
    "auroc": {"exact": 0.722, "symmetric": 0.656},
    "auroc-gain": {"study": 0.722 - 0.656},
    "primary-coverage": {"study": 0.932},
    "risk": {"all": 0.118, "above 0.125": 0.105},
    "risk-ratio": {"study": 0.105 / 0.118},
    "containment": {"study": 0.368},
    "onset-inside": {"study": 33 / 64},
    "certified": {"study": 0.00715},
    "first-divergence": {f"cell {k}": 3 for k in range(64)},
    "wrong-diverged": {"study": 0.99863},
    "refuted": {f"cell {k}": 0 for k in range(64)},
}


def test_the_papers_margin_numbers_support_nothing() -> None:
    """All three decisions are negative; ranking and coverage alone would have passed."""
    decision = decide(margin.STUDY, TRANSFER)
    assert decision.label == "no support: coordinate, interval and path negative"
    assert passed(decision) == {
        "margin-ranks": True, "margin-covers": True, "margin-halves-risk": False,
        "interval-contains": False, "onset-inside": False,
        "path-premises": False,
        "paths-diverge-early": True, "mistakes-follow-divergence": True, "bound-holds": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"risk-ratio": 0.059 / 0.118}, "coordinate supported"),
        ({"containment": 0.9, "onset-inside": 58 / 64}, "interval supported"),
        ({"containment": 0.9, "onset-inside": 57 / 64}, "no support: coordinate, interval and path negative"),
        ({"certified": 0.95}, "path supported"),
        ({"risk-ratio": 0.5, "certified": 0.95}, "coordinate and path supported"),
        ({"risk-ratio": 0.5, "containment": 0.9, "onset-inside": 1.0, "certified": 1.0},
         "coordinate, interval and path supported"),
    ],
)  # fmt: skip
def test_every_margin_decision_can_come_out_either_way(changes: dict[str, float], label: str) -> None:
    values = {**TRANSFER, **{name: {"study": value} for name, value in changes.items()}}
    assert decide(margin.STUDY, values).label == label


def test_the_papers_interval_counts_are_its_containment() -> None:
    """Steps outside, by mantissa, against 0.368 of 64 x 4,000: so containment is pooled over steps."""
    printed = [claim.paper for claim in margin.CLAIMS if claim.claim.startswith("steps above/below")]
    outside = sum(int(k) for pair in printed for k in str(pair).split("/"))
    assert round(1 - outside / (64 * 4000), 3) == 0.368


def test_the_paper_scale_has_the_papers_size() -> None:
    config = margin.STUDY.config("paper")
    units = len(config["seeds"]) * len(config["rates"]) * len(config["mantissas"])
    sizes = [8, *config["hidden"], 4]
    weights = sum((a + 1) * b for a, b in pairwise(sizes))
    assert (units, weights, units * weights * config["steps"]) == (64, 2980, 762_880_000)
    counts = [len(midpoint.STUDY.cells("paper", stage)) for stage in ("forecast", "outcome")]
    assert counts == [18, 90]


# ---- smoke --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(STUDIES))
def twice(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A study run twice at smoke scale, in worker processes and in this one."""
    folders = []
    for executor in ("local", "inline"):
        out = tmp_path_factory.mktemp(request.param) / executor
        engine.run(loading.load(request.param), "smoke", out, executor=executor, workers=1)
        folders.append(out)
    return STUDIES[request.param], folders[0], folders[1]


def records_of(study: Study, out: Path) -> dict[str, dict[str, Any]]:
    return {
        stage.name: {
            path.stem: json.loads(path.read_bytes())["outcome"]
            for path in sorted((out / "records" / stage.name).glob("*.json"))
        }
        for stage in study.stages
    }


def test_two_runs_leave_the_same_bytes(twice: tuple[Any, Path, Path]) -> None:
    module, first, second = twice
    files = sorted(p.relative_to(first) for p in (first / "records").rglob("*.json"))
    assert len(files) == sum(len(module.STUDY.cells("smoke", s.name)) for s in module.STUDY.stages)
    assert all((first / f).read_bytes() == (second / f).read_bytes() for f in files)


def test_the_run_is_valid(twice: tuple[Any, Path, Path]) -> None:
    assert validate(twice[1]).problems == []


def test_reports_are_made_of_records_alone(twice: tuple[Any, Path, Path]) -> None:
    """Tables are rectangular, figures draw, claims give numbers, words or nothing."""
    module, out, _ = twice
    records = records_of(module.STUDY, out)
    for make in module.STUDY.tables.values():
        made = make(records)
        assert made.rows or made.columns[0] == "cell"  # no miss, no row
        assert all(len(row) == len(made.columns) for row in made.rows)
    for draw in module.STUDY.figures.values():
        assert all(axes.has_data() for axes in draw(records).axes)
    for claim in module.CLAIMS:
        assert isinstance(claim.ours(records), int | float | str | None), claim.claim
    values = evaluate(module.STUDY.estimands, records)
    assert decide(module.STUDY, values).label == json.loads((out / "result.json").read_bytes())["label"]


def test_theorems_hold_at_every_scale(twice: tuple[Any, Path, Path]) -> None:
    """What is proved must pass even in a smoke run, whatever the label."""
    module, out, _ = twice
    gates = passed(decide(module.STUDY, evaluate(module.STUDY.estimands, records_of(module.STUDY, out))))
    proved = ("bound-holds", "no-contradiction", "opposite-events", "paths-diverge-early")
    assert all(gates[name] for name in proved if name in gates)
