"""Every estimator on numbers that are known, the guard, and intervals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfulp import documents
from halfulp.errors import CorruptionError, HalfulpError
from halfulp.pilots.estimates import Forks, Seen, Twin, estimate, floor_of, row
from halfulp.pilots.prices import Prices, priced
from halfulp.verdicts import intervals
from halfulp.verdicts.intervals import WIDEST, interval, quantile, score, shipped

TABLE = {
    "twin eco": [0.3] * 20, "free eco": [2.0] * 20,
    "free": [0.5] * 20, "twin": [0.1] * 20, "raw": [0.7] * 20, "fork 20%": [0.2] * 20, "bracket": [0.1] * 20,
}  # fmt: skip
TWIN = Twin(share=1 / 16, reference=2.5, upper=3.5, real=2.8)
SEEN = Seen(start=4.5, reference=2.45, upper=4.45, point=2.9, twin=TWIN, floor=0.01)
CORNER = replace(SEEN, reference=2.21, upper=3.0, point=2.4, twin=replace(TWIN, reference=2.77, real=2.79))
"""As it was seen at a rate of 3e-3: a small-batch reference that is limited by noise."""


def forks(**losses: float) -> Forks:
    return Forks(share=0.2, losses=losses)


def test_a_twin_scales_the_open_loop() -> None:
    found = estimate(SEEN, TABLE)
    assert found.kind == "twin"
    assert found.gap == pytest.approx(2.0 * 0.3)
    assert found.low == pytest.approx(0.6 * math.exp(-0.1) - 0.01)
    assert found.high == pytest.approx(0.6 * math.exp(0.1) + 0.01)
    assert not found.zero
    assert found.notes == ()


def test_the_guard_needs_both() -> None:
    """Little progress of the small batch alone tells nothing, nor does a small gap alone."""
    assert CORNER.reads_low()
    assert not replace(CORNER, twin=replace(TWIN, reference=2.77, real=3.2)).reads_low()
    assert not replace(CORNER, reference=2.75).reads_low()
    assert not SEEN.reads_low()
    assert not replace(SEEN, twin=None).reads_low()
    stuck = replace(CORNER, twin=replace(TWIN, reference=4.6, upper=5.6, real=4.6))
    assert stuck.progress() == math.inf
    assert stuck.reads_low()


def test_where_noise_rules_a_fork_answers() -> None:
    free = estimate(CORNER, TABLE)
    assert free.kind == "free"
    assert "noise" in free.notes[0]
    assert not free.trusted
    one = estimate(replace(CORNER, forks=forks(point=2.5)), TABLE)
    assert one.kind == "fork"
    assert one.gap == pytest.approx(0.29)
    assert one.trusted
    closed = replace(CORNER, forks=forks(lower=2.31, point=2.5, upper=2.61))
    both = estimate(closed, TABLE)
    assert both.kind == "bracket"
    assert both.gap == pytest.approx(0.2)
    apart = replace(CORNER, forks=forks(lower=2.22, point=2.5, upper=2.91))
    assert estimate(apart, TABLE).kind == "fork"


def test_forks_are_rows_by_their_share() -> None:
    for share, name in (
        (0.45, "fork 40%"),
        (0.4, "fork 40%"),
        (0.3, "fork 20%"),
        (0.1, "fork 10%"),
        (0.05, "free"),
    ):
        known = replace(CORNER, forks=Forks(share=share, losses={"point": 2.5}))
        assert row("fork", known) == name


def test_estimates_that_disagree_widen_the_interval() -> None:
    found = estimate(replace(SEEN, point=2.46), TABLE)
    assert found.kind == "twin"
    assert found.low == pytest.approx(0.01 * math.exp(-0.5) - 0.01)
    assert "free estimate (+0.010) disagrees" in found.notes[0]


def test_an_open_loop_that_shows_nothing_gives_no_ratio() -> None:
    quiet = replace(SEEN, upper=2.46, point=2.451, twin=replace(TWIN, upper=2.51, real=2.505))
    found = estimate(quiet, TABLE)
    assert quiet.kept() is None
    assert found.kind == "raw"
    assert found.gap == pytest.approx(0.005)
    assert found.zero


def test_runs_that_diverge() -> None:
    found = estimate(replace(SEEN, twin=replace(TWIN, real=math.inf)), TABLE)
    assert found.gap == math.inf
    wild = replace(SEEN, upper=math.inf, twin=replace(TWIN, upper=math.inf))
    assert estimate(wild, TABLE).kind == "free"


def test_eco_is_not_bounded_by_a_rehearsal_that_is_too_low() -> None:
    low = replace(SEEN, upper=2.8, point=2.47, twin=replace(TWIN, upper=2.8, real=2.9), family="eco")
    assert estimate(low, TABLE).high > low.upper - low.reference
    assert (row("twin", low), row("free", low), row("fork", low)) == ("twin eco", "free eco", "free eco")


def test_the_guard_trusts_what_was_within_a_third_where_it_was_calibrated() -> None:
    assert estimate(SEEN, TABLE).trusted
    assert not estimate(SEEN, {**TABLE, "twin": [0.27] * 20}).trusted
    assert not estimate(replace(SEEN, family="eco"), TABLE).trusted
    assert estimate(SEEN, shipped()).trusted
    assert not estimate(replace(SEEN, family="eco"), shipped()).trusted


def test_the_floor() -> None:
    assert floor_of(2.0, 2.0, 2.5, 2.5) == 0.01
    assert floor_of(2.0, 2.2, 2.5, 2.53) == 0.2


def test_scores_are_what_an_interval_needs() -> None:
    """An interval with a score as its quantile just holds what was measured."""
    for gap, measured, floor in ((0.5, 1.0, 0.01), (1.0, 0.2, 0.0), (0.3, 0.32, 0.05), (0.2, -0.005, 0.01)):
        found = score(gap, measured, floor)
        low, high = interval(gap, floor, "one", {"one": [found] * 20})
        assert low - 1e-12 <= measured <= high + 1e-12
        if found > 0.01:
            low, high = interval(gap, floor, "one", {"one": [0.99 * found] * 20})
            assert not low <= measured <= high
    assert score(0.5, -0.3, 0.01) == WIDEST
    assert score(-0.1, 0.5, 0.01) == WIDEST


def test_quantiles_are_those_of_split_conformal_prediction() -> None:
    assert quantile([i / 10 for i in range(9)]) == 0.8  # the ninth of nine: ceil(.9 x 10)
    assert quantile([i / 100 for i in range(99)]) == 0.89  # the ninetieth of 99
    assert quantile([0.1, 0.2]) == pytest.approx(0.3)  # too few: the largest, and half again
    assert quantile([]) == WIDEST


def test_the_shipped_table_has_every_estimator() -> None:
    table = shipped()
    assert {"free", "twin", "fork 40%", "fork 20%", "fork 10%", "free eco", "twin kept"} <= set(table)
    assert len(table["twin"]) >= 20
    assert quantile(table["twin"]) < quantile(table["free"])
    for name in table:
        kind: Any = name.partition(" ")[0]
        assert interval(0.5, 0.01, name, table)[0] < 0.5 < interval(0.5, 0.01, name, table)[1], kind


@pytest.mark.parametrize("change", [{"kind": "x"}, {"scores": {"twin": [-1]}}, {"scores": {"twin": "a"}}])
def test_other_tables_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    told = {"kind": intervals.KIND, "units": [], "scores": {"twin": [0.1]}, **change}
    (tmp_path / "a.json").write_bytes(documents.sealed(told))
    with pytest.raises(CorruptionError, match="table of scores"):
        intervals.load(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(documents.sealed(told).replace(b"scores", b"scored"))
    with pytest.raises(HalfulpError):
        intervals.load(tmp_path / "a.json")


def test_prices_are_ranked_and_say_what_was_paid() -> None:
    zero = replace(SEEN, point=2.451, twin=replace(TWIN, real=2.501))
    found = Prices(
        prices=(priced("e4m3@128", SEEN), priced("bf16:sr", zero), priced("bf16:kahan", replace(SEEN,
        twin=None))), reference=2.45, updates=300, weights=1_000_000, budget=0.15, paid={"twins": 0.125},
    )  # fmt: skip
    assert [p.spec for p in found.prices] == ["bf16:sr", "bf16:kahan", "e4m3@128"]
    text = str(found)
    assert "bf16:sr     not distinguishable from zero (floor 0.010" in text
    assert "e4m3@128    +0.600 (" in text
    assert "saves 3 bytes per weight (3 MB); twin, 6.2% of a run" in text
    assert "adds 2 bytes per weight (2 MB); rehearsed point, nothing paid" in text
    assert "Paid: 12.5% of the run's own compute beside it (budget 15%): twins 12.5%." in text
    told = json.loads(json.dumps(found.to_json()))
    assert [f["distinguishable"] for f in told["formats"]] == [False, True, True]
    assert told["formats"][2]["saved_bytes"] == 3_000_000
    assert found["e4m3@128:rne"].spec == "e4m3@128"
