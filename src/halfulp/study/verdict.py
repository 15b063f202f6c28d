"""From numbers to a label: gates and rules, and nothing else.

Pure functions of values, so that typed-in numbers (a paper's table, say) go through the very code that
judges a run. A value that is missing or not finite never passes; the first rule that fits decides.

>>> from halfulp.study import Gate, Rule
>>> gates = (Gate(name="small", estimand="error", scope="all", comparison="<=", threshold=0.1),)
>>> rules = (Rule(label="supported", passed=("small",)), Rule(label="not supported"))
>>> decision = judge(gates, rules, {"error": {"seed-0": 0.02, "seed-1": 0.3}})
>>> decision.label, decision.gates["small"].passed, decision.gates["small"].value
('not supported', False, 0.3)
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from halfulp.errors import UsageError
from halfulp.study.outcomes import NotRun
from halfulp.study.protocol import Estimand, Gate, Records, Rule, Study, Values

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
_UNIT = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@ .,:;_=+/*()%^-]{0,119}")


@dataclass(frozen=True)
class GateResult:
    """What became of a gate.

    `value` is what was compared: the unit's value, the mean, or (scope ``all``) the value of `unit`,
    the first that failed, or of the one nearest to the threshold if none did.
    """

    gate: Gate
    unit: str | None
    value: float | None
    passed: bool


@dataclass(frozen=True)
class Decision:
    """Every gate by the name that rules use (``gate`` or ``gate[unit]``), and the label."""

    gates: Mapping[str, GateResult]
    label: str
    says: str = ""
    recovered: bool = False
    """Whether the label is that of the rule for records made by hand."""

    def passed(self, gate: str) -> bool:
        """Whether a gate passed, by the name that rules use; one of a unit that has no value did not."""
        return gate in self.gates and self.gates[gate].passed


def decide(
    study: Study, values: Mapping[str, Values], not_run: Collection[str] = (), *, recovered: bool = False
) -> Decision:
    """The gates and the label of a study, given its estimands' values by unit.

    An estimand left out counts as missing, so its gates fail; one that the study does not have is an error.
    `not_run` names stages that were not authorised; `recovered`: whether a record was made by hand.
    """
    unknown = sorted(set(values) - {estimand.name for estimand in study.estimands})
    if unknown:
        raise UsageError(f"Study {study.name} has no estimand {', '.join(unknown)}.")
    return judge(study.gates, study.rules, values, not_run, recovered=recovered)


def judge(
    gates: Iterable[Gate],
    rules: Iterable[Rule],
    values: Mapping[str, Values],
    not_run: Collection[str] = (),
    *,
    recovered: bool = False,
) -> Decision:
    """As :func:`decide`, for gates and rules that come from a sealed protocol."""
    results: dict[str, GateResult] = {}
    for gate in gates:
        units = {unit: finite(value) for unit, value in values.get(gate.estimand, {}).items()}
        results.update(_judge_gate(gate, units))
    passed = {name for name, result in results.items() if result.passed}
    for rule in rules:
        run = set(rule.not_run) - set(not_run)
        fits = passed.issuperset(rule.passed) and passed.isdisjoint(rule.failed) and not run
        if fits and rule.recovered <= recovered:
            return Decision(results, rule.label, rule.says, rule.recovered)
    raise UsageError("No rule fits: the last rule of a study must have no condition.")


def _judge_gate(gate: Gate, units: Mapping[str, float | None]) -> dict[str, GateResult]:
    for unit in units:
        check_unit(gate.estimand, unit)
    if gate.scope == "unit":
        return {
            f"{gate.name}[{unit}]": GateResult(gate, unit, value, _meets(gate, value))
            for unit, value in units.items()
        }
    if gate.scope == "mean":
        known = [value for value in units.values() if value is not None]
        mean = math.fsum(known) / len(known) if known and len(known) == len(units) else None
        return {gate.name: GateResult(gate, None, finite(mean), _meets(gate, mean))}
    failing = [unit for unit, value in units.items() if not _meets(gate, value)]
    shown = failing[0] if failing else min(units, key=lambda u: _distance(gate, units[u]), default=None)
    value = units[shown] if shown is not None else None
    return {gate.name: GateResult(gate, shown, value, bool(units) and not failing)}


def _meets(gate: Gate, value: float | None) -> bool:
    return value is not None and math.isfinite(value) and _COMPARE[gate.comparison](value, gate.threshold)


def _distance(gate: Gate, value: float | None) -> float:
    return abs((value if value is not None else math.inf) - gate.threshold)


def finite(value: Any) -> float | None:
    """A number as a Python float; None if it is missing, infinite or not a number."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def check_unit(estimand: str, unit: object) -> None:
    """Units become text on pages; so they are plain."""
    if not isinstance(unit, str) or not _UNIT.fullmatch(unit):
        raise UsageError(
            f"Estimand {estimand}: the unit {str(unit)[:80]!a} is not plain: 1 to 120 ASCII letters, digits, "
            "spaces and @.,:;_=+/*()%^-, a letter, digit or @ first."
        )


def evaluate(estimands: Iterable[Estimand], records: Records) -> dict[str, dict[str, float | None]]:
    """Every estimand's values by unit, sorted by unit; what is not finite becomes None.

    One that reads a stage which was not authorised has no values.
    """
    values: dict[str, dict[str, float | None]] = {}
    for estimand in estimands:
        try:
            computed = estimand.compute(records, **estimand.args)
        except NotRun:
            computed = {}
        for unit in computed:
            check_unit(estimand.name, unit)
        values[estimand.name] = {unit: finite(computed[unit]) for unit in sorted(computed)}
    return values
