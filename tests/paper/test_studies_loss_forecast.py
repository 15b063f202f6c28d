"""``loss-forecast``: its square, its estimands on made-up records, and every gate that these can fail."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from halfulp.paper.arms import Arm
from halfulp.paper.studies import loss_forecast as declared
from halfulp.study.gates import Decision, decide, evaluate
from halfulp.study.protocol import Records

GAPS = {"bf16": 0.01, "e4m3": 0.4, "e5m2": 1.0, "mxfp4": 2.0}
POINT = {"bf16": 0.012, "e4m3": 0.44, "e5m2": 0.9, "mxfp4": 2.1}
LABEL = "loss is forecast: order, bounds, size, frozen fractions; R beats P"


def records() -> dict[str, dict[str, Any]]:
    """Such as pass every gate: references end at 2 nats; there are four coordinates and two updates."""
    found: dict[str, dict[str, Any]] = {"reference": {}, "forecast": {}, "outcome": {}, "again": {}}
    shared = {"updates": 2, "warmup": 0, "initial": "i", "coordinates": {"mlp": 4}}

    def run(loss: float, **more: Any) -> dict[str, Any]:
        return {**shared, "evaluations": [{"update": 2, "loss": loss}], **more}

    def told(gap: float) -> dict[str, dict[str, float]]:
        return {"2": {"lower": 2.0, "point": 2 + gap, "upper": 2 + 3 * gap}}

    for name, runs in declared.RUNS.items():
        grids = list(declared.GRIDS.values())
        found["reference"][name] = run(
            2.0, start="raw", projected=None, frozen={g: {"mlp": [1, 1]} for g in grids},
            rehearsed={g: {"mlp": [3, 2]} for g in grids},
        )  # fmt: skip
        for unit, (condition, _) in runs.units.items():
            grid = declared.GRIDS[condition]
            found["forecast"][unit] = {"losses": {"rne": told(POINT[condition])}}
            found["outcome"][unit] = run(
                2 + GAPS[condition], start="codes", grid=grid, frozen={grid: {"mlp": [3, 3]}}
            )
    left = {"rne": 1.0, "sr": 0.02, "master": 0.01, "P": 0.2, "R": 0.1}
    for unit in declared.MASKED.units:
        found["reference"][unit] = run(2.0, start="raw", projected=None)
        found["forecast"][unit] = {"losses": {arm: told(left[arm] + 0.01) for arm in declared.POLICIES}}
        for arm, gap in left.items():
            found["outcome"][f"{unit}-{arm}"] = run(2 + gap, start="codes")
    return found


def decided(found: Records) -> Decision:
    return decide(declared.STUDY, evaluate(declared.STUDY.estimands, found))


def test_every_kind_rate_and_horizon_meets_every_other_once() -> None:
    cells = list(declared.SQUARE.values())
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert len({(cell[a], cell[b]) for cell in cells}) == 9
    for stage in ("reference", "outcome"):
        seeds = {Arm.from_json(c.config).seed for c in declared.STUDY.cells("small", stage)}
        assert seeds == {cell[3] for cell in cells} | set(declared.SEEDS)
    for name, (_, rate, place, _) in declared.SQUARE.items():
        arm = Arm.from_json(
            next(c.config for c in declared.STUDY.cells("small", "reference") if c.name == name)
        )
        assert name.endswith(f"-{rate}-{arm.recipe.updates}")
        assert arm.recipe.updates == (300, 1000, 3000)[place]
        assert arm.recipe.schedule.peak == declared.RATES[rate]
        assert arm.rehearse == tuple(declared.GRIDS.values())


def test_records_that_pass() -> None:
    decision = decided(records())
    assert decision.label == LABEL
    assert all(gate.passed for gate in decision.gates.values())


def _order(found: Any) -> None:
    found["forecast"]["gpt2-low-300-e4m3"]["losses"]["rne"]["2"]["point"] = 2 + 0.95


def _outside(found: Any) -> None:
    found["forecast"]["neox-high-1000-e5m2"]["losses"]["rne"]["2"]["upper"] = 2.99


def _far(found: Any) -> None:
    found["forecast"]["neox-high-1000-mxfp4"]["losses"]["rne"]["2"]["point"] = 2 + 2.0 * 1.31


def _all_off(found: Any) -> None:
    for unit, record in found["forecast"].items():
        gap = GAPS.get(unit.rpartition("-")[2])
        if gap is not None:
            record["losses"]["rne"]["2"]["point"] = 2 + 1.2 * gap


def _frozen(found: Any) -> None:
    found["reference"]["modern-high-300"]["rehearsed"]["e5m2"]["mlp"] = [0, 0]


def _worse(found: Any) -> None:
    found["outcome"][f"{next(iter(declared.MASKED.units))}-R"]["evaluations"][0]["loss"] = 2.6


def _loud(found: Any) -> None:
    found["forecast"]["policies-71012"]["losses"]["sr"]["2"]["point"] = 2.2


BROKEN: dict[str, tuple[Callable[[Any], None], str]] = {
    "order": (_order, "loss is not forecast"),
    "bracket": (_outside, "loss is forecast in order only"),
    "every": (_far, "loss is forecast in order and within bounds, not in size"),
    "median": (_all_off, "loss is forecast in order and within bounds, not in size"),
    "frozen": (_frozen, "loss is forecast: order, bounds, size; not every other gate passes"),
    "ninth": (_worse, "loss is forecast: order, bounds, size; not every other gate passes"),
    "quiet": (_loud, LABEL),
}


@pytest.mark.parametrize("gate", BROKEN)
def test_one_gate_fails(gate: str) -> None:
    """And no other, but those that must with it; the label is the one that was declared for it."""
    found = copy.deepcopy(records())
    change, label = BROKEN[gate]
    change(found)
    decision = decided(found)
    failed = {name for name, result in decision.gates.items() if not result.passed}
    assert failed == ({"order", "every"} if gate == "order" else {gate})
    assert decision.label == label
