"""Gates and rules, on typed-in values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from halfulp.errors import UsageError
from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study
from halfulp.study.gates import Decision, condition, decide, evaluate, judge


def study(scope: Any, comparison: Any, threshold: float, *rules: Rule) -> Study:
    return Study(
        name="s", question="q", units="u", not_claimed=(), scales={"smoke": {}},
        stages=(Stage(name="t", kind="outcome", cells=lambda c: [Cell(name="a")], run=lambda r: {}),),
        estimands=(Estimand(name="e", what="w", compute=lambda r: {}),),
        gates=(Gate(name="g", estimand="e", scope=scope, comparison=comparison, threshold=threshold),),
        rules=rules or (Rule(label="yes", passed=("g",)), Rule(label="no")),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("comparison", "below", "at", "above"),
    [("<", 1, 0, 0), ("<=", 1, 1, 0), ("==", 0, 1, 0), (">=", 0, 1, 1), (">", 0, 0, 1)],
)
def test_comparisons(comparison: str, below: int, at: int, above: int) -> None:
    for value, passes in ((0.9, below), (1.0, at), (1.1, above)):
        decision = decide(study("mean", comparison, 1.0), {"e": {"u": value}})
        assert decision.gates["g"].passed == bool(passes)
        assert decision.label == ("yes" if passes else "no")


@pytest.mark.parametrize("scope", ["all", "mean"])
@pytest.mark.parametrize(
    "values",
    [{}, {"a": None}, {"a": 0.0, "b": None}, {"a": math.nan}, {"a": 0.0, "b": math.inf}, {"a": -math.inf}],
)
def test_what_is_missing_or_not_finite_never_passes(scope: str, values: dict[str, float | None]) -> None:
    for comparison in ("<", "<=", ">=", ">"):
        assert not decide(study(scope, comparison, 0.0), {"e": values}).gates["g"].passed


def test_an_estimand_that_is_left_out_fails_its_gates() -> None:
    assert decide(study("all", "<", 1.0), {}).label == "no"
    with pytest.raises(UsageError, match="no estimand typo"):
        decide(study("all", "<", 1.0), {"typo": {"u": 0.0}})


def test_scope_all_shows_the_unit_that_decides() -> None:
    gate = decide(study("all", "<=", 1.0), {"e": {"a": 0.2, "b": 0.9, "c": 0.5}}).gates["g"]
    assert (gate.passed, gate.unit, gate.value) == (True, "b", 0.9)
    gate = decide(study("all", "<=", 1.0), {"e": {"a": 0.2, "b": 1.9, "c": 5.0}}).gates["g"]
    assert (gate.passed, gate.unit, gate.value) == (False, "b", 1.9)


def test_scope_mean_is_exact_where_a_running_sum_is_not() -> None:
    values = {"a": 1e16, "b": 1.0, "c": -1e16}  # a running sum gives 0
    gate = decide(study("mean", "==", 1 / 3), {"e": values}).gates["g"]
    assert gate.passed


def test_scope_unit_is_named_with_its_unit() -> None:
    rules = (Rule(label="b only", passed=("g[b]",), failed=("g[a]",)), Rule(label="other"))
    decision = decide(study("unit", ">", 0.0, *rules), {"e": {"a": -1.0, "b": 1.0}})
    assert {name: g.passed for name, g in decision.gates.items()} == {"g[a]": False, "g[b]": True}
    assert decision.label == "b only"
    assert decide(study("unit", ">", 0.0, *rules), {"e": {"a": -1.0}}).label == "other"  # b is missing
    absent = (Rule(label="a failed", failed=("g[a]",)), Rule(label="other"))
    assert decide(study("unit", ">", 0.0, *absent), {"e": {}}).label == "a failed"


def test_the_first_rule_that_fits_decides() -> None:
    rules = (Rule(label="first", passed=("g",)), Rule(label="second", passed=("g",)), Rule(label="last"))
    assert decide(study("mean", "<", 1.0, *rules), {"e": {"u": 0.0}}).label == "first"


@pytest.mark.parametrize("unit", ["<script>", "a\nb", "\u202e", "a|b", "", "x" * 121, "[a]"])
def test_hostile_units_are_refused(unit: str) -> None:
    with pytest.raises(UsageError, match="not plain"):
        decide(study("mean", "<", 1.0), {"e": {unit: 0.0}})
    with pytest.raises(UsageError, match="not plain"):
        evaluate([Estimand(name="e", what="w", compute=lambda records: {unit: 0.0})], {})


def test_estimands_are_sorted_by_unit_and_finite() -> None:
    import numpy as np

    computed = {"b": np.float32(0.5), "a": math.nan, "c": 2}
    values = evaluate([Estimand(name="e", what="w", compute=lambda records: computed)], {})
    assert values == {"e": {"a": None, "b": 0.5, "c": 2.0}}
    assert list(values["e"]) == ["a", "b", "c"]


def test_a_decision_knows_its_gates_and_that_nothing_was_recovered() -> None:
    """A rule for records made by hand fits only where one was; a gate that was not judged did not pass."""
    rules = (Rule(label="by hand", recovered=True), Rule(label="other"))
    given = {"e": {"u": 0.0}}
    for threshold in (1.0, -1.0):
        made = study("mean", "<", threshold, *rules)
        for decision in (decide(made, given), judge(made.gates, made.rules, given)):
            assert (decision.label, decision.recovered) == ("other", False)
            assert decision.passed("g") == (threshold > 0)
            assert not decision.passed("g[a]")
        assert decide(made, given, recovered=True).label == "by hand"
    assert not Decision({}, "other").recovered


def test_when_a_rule_decides_in_words() -> None:
    rule = Rule(label="a", passed=("small",), failed=("late", "odd"), not_run=("follow",))
    assert condition(rule) == "small passed and late failed and odd failed and stage follow was not run"
    assert condition(Rule(label="b")) == "otherwise"
