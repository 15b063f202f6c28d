"""What benchmarks/moments.py shows in three thousand steps, in a few hundred."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def demonstration(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("kernels", "moments"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("moments")


def test_nearest_moments_and_gains_stand_still(demonstration: Any) -> None:
    """A second moment that is rounded to nearest stays above the average of its gradients, a drawn one does
    not; all gains stay at exactly 1 under nearest only."""
    arms = [
        ("sr", "fp32", ""),
        ("sr", "bf16", ""),
        ("sr", "int8", ""),
        ("sr", "fp32", "bf16"),
        ("rne", "fp32", ""),
    ]
    assert set(arms) <= set(demonstration.ARMS.values())
    exact, drawn, coded, nearest, still = (demonstration.train(*arm, 400) for arm in arms)
    assert abs(exact["second_moment"] - 1) < 1e-3
    assert abs(drawn["second_moment"] - 1) < 0.02
    assert abs(coded["second_moment"] - 1) < 0.1
    assert abs(coded["arrives"] - 1) < 0.02
    assert nearest["second_moment"] > 1.05
    assert still["gains_at_one"] == demonstration.HIDDEN
    assert max(exact["gains_at_one"], drawn["gains_at_one"]) < demonstration.HIDDEN // 8
    for narrow in (drawn, coded):
        assert abs(narrow["losses"][400] / exact["losses"][400] - 1) < 0.05
    assert still["losses"][400] > 1.2 * exact["losses"][400]
