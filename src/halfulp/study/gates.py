"""Turn records into a label by estimands, gates and rules, and nothing else.

These are pure functions of values, so that typed-in numbers (such as a paper's table) go through the same
code that judges a run. A value that is missing or not finite never passes; the first rule that fits decides.

The label of a study is *promoted* only if every record came from a cell that the engine ran, under the sealed
code and environment. Otherwise the label says that it is not promoted, and why; the gates are still shown.

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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from halfulp.errors import CorruptionError, TamperingError, UsageError
from halfulp.study.declaration import FORMAT, Protocol, sealed_argument
from halfulp.study.ledger import Ledger
from halfulp.study.protocol import (
    Estimand,
    Gate,
    Json,
    NotRun,
    Outcomes,
    Records,
    Rule,
    SealedStage,
    Study,
    Values,
    check_unit,
)

Numbers = dict[str, dict[str, float | None]]
SCOPES = {"all": "in every unit", "mean": "in the mean over units", "unit": "unit by unit"}

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip


class RecomputationError(CorruptionError):
    """Raised when records are intact, but code that changed since computes something else from them."""

    exit_code = 1


@dataclass(frozen=True)
class GateResult:
    """The outcome of a gate.

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
    """The label is that of the rule for records made by hand."""

    def passed(self, gate: str) -> bool:
        """Return True if a gate passed, by the name that rules use; without a value it did not pass."""
        return gate in self.gates and self.gates[gate].passed


def decide(
    study: Study, values: Mapping[str, Values], not_run: Collection[str] = (), *, recovered: bool = False
) -> Decision:
    """Judge the gates and the label of a study, given its estimands' values by unit.

    Args:
        study: The study, whose gates and rules decide.
        values: The values of each estimand by unit. One that is left out counts as missing: its gates fail.
        not_run: The stages that were not authorised.
        recovered: True if a record was made by hand.

    Returns:
        The outcome of every gate, and the label.

    Raises:
        UsageError: If the study does not have an estimand of `values`.
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
    """Judge gates and rules that come from a sealed protocol; see :func:`decide`."""
    results: dict[str, GateResult] = {}
    for gate in gates:
        units = {unit: finite(value) for unit, value in values.get(gate.estimand, {}).items()}
        results.update(_judge_gate(gate, units))
    rule = deciding(rules, {name for name, result in results.items() if result.passed}, not_run, recovered)
    return Decision(results, rule.label, rule.says, rule.recovered)


def deciding(
    rules: Iterable[Rule], passed: Collection[str], not_run: Collection[str], recovered: bool
) -> Rule:
    """Return the first rule that fits, given the gates that passed and the stages that were not run."""
    for rule in rules:
        gates_fit = set(rule.passed).issubset(passed) and set(rule.failed).isdisjoint(passed)
        if gates_fit and set(rule.not_run).issubset(not_run) and rule.recovered <= recovered:
            return rule
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
    """Return a number as a Python float; None if it is missing, infinite or not a number."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def evaluate(estimands: Iterable[Estimand], records: Records) -> Numbers:
    """Compute every estimand's values by unit, sorted by unit; what is not finite becomes None.

    One that reads a stage which was not authorised has no values.
    """
    values: Numbers = {}
    for estimand in estimands:
        try:
            computed = estimand.compute(records, **estimand.args)
        except NotRun:
            computed = {}
        for unit in computed:
            check_unit(estimand.name, unit)
        values[estimand.name] = {unit: finite(computed[unit]) for unit in sorted(computed)}
    return values


# ---- the result of a sealed study ----


def values(
    study: Study, protocol: Protocol, records: Outcomes, names: Iterable[str] | None = None
) -> Numbers:
    """Compute estimands by unit: functions from the study's code, arguments and all else from the seal."""
    functions = {estimand.name: estimand for estimand in study.estimands}
    numbers: Numbers = {}
    for name in protocol.estimands if names is None else names:
        if name not in functions:
            raise UsageError(f"The code of study {protocol.study} no longer computes {name}.")
        own, sealed = functions[name].args, protocol.args[name]
        # The first release sealed no arguments: what the code gives must then lead to the stored values.
        args = {key: own[key] if callable(own.get(key)) else value for key, value in sealed.items()} or own
        if any(sealed_argument(args[key]) != value for key, value in sealed.items()):
            raise UsageError(f"The code of study {protocol.study} computes {name} with another function.")
        numbers |= evaluate([replace(functions[name], args=args)], records.of(protocol.judged_from(name)))
    return numbers


def authorise(study: Study, protocol: Protocol, stage: SealedStage, records: Outcomes) -> dict[str, bool]:
    """Judge the gates on which a stage depends, from the records of earlier stages."""
    wanted = {name.partition("[")[0] for name in stage.only_if}
    gates = [gate for gate in protocol.gates if gate.name in wanted]
    numbers = values(study, protocol, records, sorted({gate.estimand for gate in gates}))
    decision = judge(gates, protocol.rules[-1:], numbers)
    return {name: decision.passed(name) for name in stage.only_if}


def assemble(
    protocol: Protocol, ledger: Ledger, evidence: Mapping[str, Mapping[str, Json]], numbers: Numbers
) -> dict[str, Json]:
    """Make the result that follows from the estimands' values."""
    by_hand = bool(ledger.recovered)
    decision = judge(protocol.gates, protocol.rules, numbers, ledger.not_run, recovered=by_hand)
    for stage, event in ledger.decided.items():
        if event["gates"] != {name: decision.passed(name) for name in event["gates"]}:
            raise TamperingError(f"{ledger.path}: the gates that decided on stage {stage} say otherwise.")
    reasons = []
    if ledger.recovered:
        cells = ", ".join(f"{stage}/{cell}" for stage, cell in sorted(ledger.recovered))
        reasons.append(f"recovered records ({cells})")
    if ledger.deviations:
        reasons.append(f"deviations from the seal ({len(ledger.deviations)})")
    reasons += [f"evidence that was not ({name})" for name, one in evidence.items() if not one["promoted"]]
    own = not reasons or decision.recovered
    result: dict[str, Json] = {
        "format": FORMAT, "study": protocol.study, "scale": protocol.scale, "seal": ledger.seal,
        "stages": dict(ledger.stages), "estimands": numbers, "gates": gates_json(decision),
        "label": decision.label if own else f"not promoted: {'; '.join(reasons)}",
        "not_promoted": reasons, "scientific_result": not reasons and protocol.scale != "smoke",
    }  # fmt: skip
    if decision.says and own:
        result["says"] = decision.says
    if ledger.decided:
        result["decisions"] = {
            stage: {"authorised": event["authorised"], "gates": event["gates"]}
            for stage, event in ledger.decided.items()
        }
    return result


def gates_json(decision: Decision) -> list[dict[str, Json]]:
    """Return every gate's outcome, under the name that rules use."""
    return [
        {"name": name, "estimand": one.gate.estimand, "scope": one.gate.scope, "unit": one.unit,
         "value": one.value, "comparison": one.gate.comparison, "threshold": one.gate.threshold,
         "passed": one.passed}
        for name, one in decision.gates.items()
    ]  # fmt: skip


def condition(rule: Rule) -> str:
    """Say in words when a rule decides."""
    when = [f"{name} passed" for name in rule.passed] + [f"{name} failed" for name in rule.failed]
    return " and ".join(when + [f"stage {name} was not run" for name in rule.not_run]) or "otherwise"
