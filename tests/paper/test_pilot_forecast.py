"""``pilot-forecast``: its smallest scale, its estimands on made-up records, and every gate that can fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from halfulp.paper.studies import _pilot_runs, pilot_forecast
from halfulp.paper.studies.pilot_forecast import BUDGETS, FORMATS, STUDY
from halfulp.pilots.pilot import Pilot
from halfulp.study.gates import Decision, decide, evaluate
from halfulp.study.protocol import Outcomes

LABEL = "pilots know the loss: order, size, intervals, guard"
GAPS = dict(zip(FORMATS, (0.4, 1.0, 0.01, 0.2, 2.0, 0.03, 0.3), strict=True))


def records() -> dict[str, dict[str, Any]]:
    """Such as pass every gate: six units, and two of 42 cells outside their intervals."""
    found: dict[str, dict[str, Any]] = {"pilot": {}, "forecast": {}, "outcome": {}}
    for i in range(6):
        each = {}
        for spec, gap in GAPS.items():
            far = 1.0 if spec == "e5m2:sr" and i < 2 else 0.0
            told = {"gap": 1.05 * gap, "low": 0.8 * gap + far, "high": 1.3 * gap + far}
            each[spec] = {**told, "kind": "twin", "trusted": True, "floor": 0.01}
        budgets = {f"{b:g}": copy.deepcopy(each) for b in BUDGETS}
        old = {spec: 0.6 * gap for spec, gap in GAPS.items()}
        alone = {spec: {"free": gap, "twin": 1.05 * gap} for spec, gap in GAPS.items()}
        found["forecast"][f"unit{i}"] = {
            "reference": 2.0, "budgets": budgets, "old": old, "estimators": alone,
        }  # fmt: skip
        for place, gap in enumerate(GAPS.values()):
            found["outcome"][f"unit{i}-{place}"] = {"loss": 2.0 + gap}
    return found


def decided(found: dict[str, Any]) -> Decision:
    return decide(STUDY, evaluate(STUDY.estimands, Outcomes(found)))


def test_records_that_pass() -> None:
    found = decided(records())
    assert found.label == LABEL
    assert all(gate.passed for gate in found.gates.values())


def test_records_as_they_are_read_have_sorted_keys() -> None:
    stored = json.loads(json.dumps(records(), sort_keys=True))
    assert pilot_forecast.gap(stored) == pilot_forecast.gap(records())
    assert decided(stored).label == LABEL


def _change(unit: str, spec: str, **to: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        units = [unit] if unit else list(found["forecast"])
        for name in units:
            found["forecast"][name]["budgets"]["0.1"][spec].update(to)

    return change


def _all(found: dict[str, Any], **factors: float) -> None:
    for told in found["forecast"].values():
        for cell in told["budgets"]["0.1"].values():
            cell.update({key: factor * cell[key] for key, factor in factors.items()})


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "order": _change("unit1", "e5m2", gap=0.3, trusted=False),
    "median": lambda found: _all(found, gap=1.1),
    "near": _change("", "mxfp4", gap=2.8, trusted=False),
    "covers": _change("", "mxfp4", low=2.5),
    "not-idle": _change("", "e5m2:sr", low=-1.0),
    "guard": _change("unit1", "mxfp4", gap=2.7),
}


@pytest.mark.parametrize("gate", CHANGES)
def test_each_gate_can_fail_alone(gate: str) -> None:
    found = records()
    CHANGES[gate](found)
    decision = decided(found)
    assert [name for name, result in decision.gates.items() if not result.passed] == [gate]
    assert decision.label != LABEL
    missing = records()
    missing["outcome"]["unit2-4"]["loss"] = None  # it diverged
    assert decided(missing).label != LABEL


def test_tables_and_picture() -> None:
    found = Outcomes(records())
    for make in STUDY.tables.values():
        table = make(found)
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert STUDY.figures["against-measured"](found) is not None


class Running:
    """A cell, as its function sees it."""

    def __init__(self, config: Mapping[str, Any], done: Mapping[str, Any]) -> None:
        self.config, self.done = config, done

    def read(self, stage: str, cell: str) -> Any:
        return self.done[stage][cell]

    def data(self, name: str) -> Path:
        raise AssertionError(name)

    def progress(self, done: float, total: float) -> None:
        assert 0 < done <= total


def test_the_classifier_of_the_smallest_scale_runs_whole() -> None:
    """Records are JSON; what a budget buys is what a pilot with that budget says, from the same runs."""
    done: dict[str, dict[str, Any]] = {}
    for stage in STUDY.stages:
        cells = [c for c in STUDY.cells("smoke", stage.name) if c.name.startswith("nn")]
        done[stage.name] = {
            c.name: json.loads(json.dumps(stage.run(Running(c.config, done))))  # type: ignore[arg-type]
            for c in cells
        }
    assert decided(done).label
    config = dict(next(c for c in STUDY.cells("smoke", "pilot") if c.name == "nn").config)
    what = _pilot_runs.training(config, Path)
    for budget in (0.0, 0.1, 0.4):
        found = Pilot(
            what.make, FORMATS, updates=what.updates, budget=budget * len(FORMATS), cost=lambda b: b / 12
        ).run()
        bought = done["forecast"]["nn"]["budgets"][f"{budget:g}"]
        for spec in FORMATS:
            said = found[spec].estimate
            if said.kind in ("free", "twin", "raw"):  # a study's forks are of few lengths
                assert (bought[spec]["gap"], bought[spec]["kind"]) == (said.gap, said.kind)


def test_seeds_are_new_and_scales_as_asked() -> None:
    units = pilot_forecast.CONFIGS["paper"]
    seeds = [
        _pilot_runs.training({**u, "formats": ["bf16"]}, Path).make
        for n, u in units.items()
        if "classifier" in u
    ]
    assert len(seeds) == 3
    rates = {
        u["arm"]["recipe"]["schedule"]["peak"]
        for u in units.values()
        if "arm" in u and u["optimizer"] == "adamw"
    }
    assert min(rates) == 4e-4
    assert max(rates) == 3.6e-3
    assert {u.get("optimizer", "adamw") for u in units.values()} == {"adamw", "lion", "sgd"}
    assert not any("eco" in f for u in units.values() if u.get("optimizer") == "lion" for f in u["formats"])
