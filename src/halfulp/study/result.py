"""What a study says: estimands, gates and label, from its records.

A label is *promoted* only if every record came from a cell that the engine ran, under the sealed code and
environment. Otherwise the label says that it is not, and why; the gates are still shown, for what they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from halfulp.errors import UsageError
from halfulp.study.declaration import FORMAT, Protocol
from halfulp.study.ledger import Ledger
from halfulp.study.protocol import Json, Study
from halfulp.study.store import Record, outcomes
from halfulp.study.verdict import Decision, evaluate, judge


def compute(
    study: Study, protocol: Protocol, ledger: Ledger, records: Mapping[tuple[str, str], Record]
) -> dict[str, Json]:
    """The content of result.json: functions from the study's code, everything else from what was sealed."""
    functions = {estimand.name: estimand for estimand in study.estimands}
    gone = [name for name in protocol.estimands if name not in functions]
    if gone:
        raise UsageError(f"The code of study {protocol.study} no longer computes {', '.join(gone)}.")
    values = evaluate([functions[name] for name in protocol.estimands], outcomes(protocol, records))
    return assemble(protocol, ledger, values)


def assemble(
    protocol: Protocol, ledger: Ledger, values: Mapping[str, Mapping[str, float | None]]
) -> dict[str, Json]:
    """The result that follows from the estimands' values."""
    decision = judge(protocol.gates, protocol.rules, values)
    reasons = not_promoted(ledger)
    return {
        "format": FORMAT,
        "study": protocol.study,
        "scale": protocol.scale,
        "seal": ledger.seal,
        "stages": dict(ledger.stages),
        "estimands": values,
        "gates": gates_json(decision),
        "label": f"not promoted: {'; '.join(reasons)}" if reasons else decision.label,
        "not_promoted": reasons,
        "scientific_result": not reasons and protocol.scale != "smoke",
    }


def gates_json(decision: Decision) -> list[dict[str, Json]]:
    """Every gate's outcome, under the name that rules use."""
    return [
        {
            "name": name,
            "estimand": outcome.gate.estimand,
            "scope": outcome.gate.scope,
            "unit": outcome.unit,
            "value": outcome.value,
            "comparison": outcome.gate.comparison,
            "threshold": outcome.gate.threshold,
            "passed": outcome.passed,
        }
        for name, outcome in decision.gates.items()
    ]


def not_promoted(ledger: Ledger) -> list[str]:
    """Why a label may not be promoted; nothing if it may."""
    reasons = []
    if ledger.recovered:
        cells = ", ".join(f"{stage}/{cell}" for stage, cell in sorted(ledger.recovered))
        reasons.append(f"recovered records ({cells})")
    if ledger.deviations:
        reasons.append(f"deviations from the seal ({len(ledger.deviations)})")
    return reasons
