"""What a study says: estimands, gates and label, from its records.

A label is *promoted* only if every record came from a cell that the engine ran, under the sealed code and
environment. Otherwise the label says that it is not, and why; the gates are still shown, for what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from halfulp.errors import TamperingError, UsageError
from halfulp.study.declaration import FORMAT, Protocol, SealedStage, sealed_argument
from halfulp.study.ledger import Ledger
from halfulp.study.outcomes import Outcomes
from halfulp.study.protocol import Json, Study
from halfulp.study.verdict import Decision, evaluate, judge

Numbers = dict[str, dict[str, float | None]]


def values(
    study: Study, protocol: Protocol, records: Outcomes, names: Iterable[str] | None = None
) -> Numbers:
    """Estimands by unit: functions from the study's code, their arguments and all else from the seal."""
    functions = {estimand.name: estimand for estimand in study.estimands}
    found: Numbers = {}
    for name in protocol.estimands if names is None else names:
        if name not in functions:
            raise UsageError(f"The code of study {protocol.study} no longer computes {name}.")
        own, sealed = functions[name].args, protocol.args[name]
        # The first release sealed no arguments: what the code gives must then lead to the stored values.
        args = {key: own[key] if callable(own.get(key)) else value for key, value in sealed.items()} or own
        if any(sealed_argument(args[key]) != value for key, value in sealed.items()):
            raise UsageError(f"The code of study {protocol.study} computes {name} with another function.")
        found |= evaluate([replace(functions[name], args=args)], records.of(protocol.judged_from(name)))
    return found


def authorise(study: Study, protocol: Protocol, stage: SealedStage, records: Outcomes) -> dict[str, bool]:
    """Whether the gates passed on which a stage depends, judged from the records of earlier stages."""
    wanted = {name.partition("[")[0] for name in stage.only_if}
    gates = [gate for gate in protocol.gates if gate.name in wanted]
    numbers = values(study, protocol, records, sorted({gate.estimand for gate in gates}))
    decision = judge(gates, protocol.rules[-1:], numbers)
    return {name: decision.passed(name) for name in stage.only_if}


def assemble(
    protocol: Protocol, ledger: Ledger, evidence: Mapping[str, Mapping[str, Json]], numbers: Numbers
) -> dict[str, Json]:
    """The result that follows from the estimands' values."""
    by_hand = bool(ledger.recovered)
    decision = judge(protocol.gates, protocol.rules, numbers, ledger.not_run, recovered=by_hand)
    for stage, event in ledger.decided.items():
        if event["gates"] != {name: decision.passed(name) for name in event["gates"]}:
            raise TamperingError(f"{ledger.path}: the gates that decided on stage {stage} say otherwise.")
    reasons = not_promoted(ledger)
    reasons += [f"evidence that was not ({name})" for name, one in evidence.items() if not one["promoted"]]
    result: dict[str, Json] = {
        "format": FORMAT,
        "study": protocol.study,
        "scale": protocol.scale,
        "seal": ledger.seal,
        "stages": dict(ledger.stages),
        "estimands": numbers,
        "gates": gates_json(decision),
        "label": decision.label
        if not reasons or decision.recovered
        else f"not promoted: {'; '.join(reasons)}",
        "not_promoted": reasons,
        "scientific_result": not reasons and protocol.scale != "smoke",
    }
    if decision.says and (not reasons or decision.recovered):
        result["says"] = decision.says
    if ledger.decided:
        result["decisions"] = {
            stage: {"authorised": event["authorised"], "gates": event["gates"]}
            for stage, event in ledger.decided.items()
        }
    return result


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
