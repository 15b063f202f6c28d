"""``gain-rate``: its parabola, its ladder, and what it computes from records that are made up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from halfulp.paper.studies import gain_rate as study

CONFIG = study.STUDY.scales["smoke"]


def made_up(at_nearest: float, at_masters: float, gain: float) -> dict[str, dict[str, Any]]:
    """Losses that are parabolas over the logarithm of the rate, lowest at these rungs."""
    found: dict[str, dict[str, Any]] = {"nearest": {}, "forecast": {}, "outcome": {}}
    for stage, cells, lowest in (
        ("nearest", study.nearest(CONFIG), at_nearest),
        ("outcome", study.masters(CONFIG), at_masters),
    ):
        for cell in cells:
            rung = cell.config.get("rung", 0.0)
            rate = CONFIG["middle"] * 2.0**rung
            found[stage][cell.name] = {
                "rate": rate, "loss": 2 + 0.1 * (rung - lowest) ** 2, "gain": gain, "start": cell.name[:4],
            }  # fmt: skip
    for cell in study.forecasts(CONFIG):
        ladder = [found["nearest"][name] for name in cell.config["cells"]]
        best, rung = study.lowest(ladder)
        found["forecast"][cell.name] = {"nearest": best, "rung": rung, "gain": gain, "rate": best * gain}
    return found


def test_best_rates_lie_between_rungs() -> None:
    found = made_up(0.25, -0.25, 0.7)
    for unit, rate in study.nearest_rate(found).items():
        assert rate == pytest.approx(CONFIG["middle"] * 2**0.25)
        assert study.master_rate(found)[unit] == pytest.approx(CONFIG["middle"] * 2**-0.25)
        assert study.rate_change(found)[unit] == pytest.approx(-0.5)
        assert study.forecast_change(found)[unit] == pytest.approx(math.log2(0.7))
        assert study.forecast_error(found)[unit] == pytest.approx(off := abs(0.5 + math.log2(0.7)))
        assert study.nearer(found)[unit] == pytest.approx(0.5 - off)
        assert study.cost(found)[unit] == pytest.approx(0.0)  # the made-up run is on the best rung
        assert study.cost_of_same(found)[unit] == pytest.approx(0.0)
        assert study.inside(found)[unit] == 1.0


def test_the_end_of_a_ladder_is_no_best_rate() -> None:
    found = made_up(1.2, 0.0, 0.9)
    assert set(study.inside(found).values()) == {0.0}
    assert set(study.nearest_rate(found).values()) == {CONFIG["middle"] * 2}


def test_a_run_that_diverged_is_never_the_best() -> None:
    runs = [{"rate": 1.0, "loss": None}, {"rate": 2.0, "loss": 3.0}, {"rate": 4.0, "loss": 3.5}]
    assert study.lowest(runs) == (2.0, 1)


def test_every_unit_has_its_cells() -> None:
    units = [cell.name for cell in study.forecasts(CONFIG)]
    assert len(units) == len(study.GRIDS) * len(study.SEEDS)
    near = [cell.name for cell in study.nearest(CONFIG)]
    assert near == [name for unit in study.forecasts(CONFIG) for name in unit.config["cells"]]
    more = {cell.name for cell in study.masters(CONFIG)} - set(near)
    assert more == {f"{unit}-forecast" for unit in units}
