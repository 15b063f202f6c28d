"""Whether what a ledger tells could have happened: declared names, stages in turn, conditions kept.

No file is read but the ledger, so this also holds for evidence, of which only a part is at hand.
"""

from __future__ import annotations

from halfulp import canonical
from halfulp.errors import CorruptionError, TamperingError
from halfulp.study.declaration import Protocol, SealedStage
from halfulp.study.ledger import Event, Ledger
from halfulp.study.store import Store


def check_names(store: Store, protocol: Protocol, events: Ledger) -> None:
    """Events are of stages and cells that were declared."""
    cells = {stage.name: stage.cells for stage in protocol.stages}
    for event in events.events:
        if "stage" in event and event["stage"] not in cells:
            raise CorruptionError(
                f"{store.ledger_file} names a stage that the protocol does not have: {event['stage']!a}."
            )
        if "cell" in event and event["cell"] not in cells[event["stage"]]:
            raise CorruptionError(
                f"{store.ledger_file} names a cell that the protocol does not have: "
                f"{event['stage']}/{event['cell']}."
            )


def check_order(store: Store, protocol: Protocol, events: Ledger) -> None:
    """No cell began before the stages ahead of it were settled; a stage's seal is that of its records."""
    check_names(store, protocol, events)
    settled: dict[str, bool] = {}  # sealed, or (False) not authorised
    begun: set[tuple[str, str]] = set()
    for event in events.events:
        kind = event["event"]
        if kind not in ("started", "retried", "finished", "recovered", "stage-sealed", "decided"):
            continue
        stage = protocol.stage(event["stage"])
        early = [s.name for s in protocol.before(stage.name) if s.name not in settled]
        told = f"{store.ledger_file}: "
        if "cell" in event:
            key = (stage.name, event["cell"])
            why = f"stage {early[0]} was not sealed" if early else ""
            why = why or ("it had not started" if kind == "finished" and key not in begun else "")
            if not why and conditional(stage, events) and not _authorised(stage, events, event):
                why = "its stage was not authorised"
            if why:
                raise TamperingError(f"{told}cell {'/'.join(key)} {kind} when {why}.")
            begun.add(key)
        elif early or stage.name in settled:
            raise TamperingError(f"{told}stage {stage.name} was {kind} out of turn.")
        elif kind == "decided":
            _check_decision(store, stage, event, events, settled)
            settled |= {} if event["authorised"] else {stage.name: False}
        else:
            missing = [cell for cell in stage.cells if (stage.name, cell) not in events.records]
            allowed = not conditional(stage, events) or _authorised(stage, events, event)
            if missing or not allowed:
                raise TamperingError(f"{told}stage {stage.name} was sealed out of turn.")
            if canonical.digest(store.stage_seal(stage.name, protocol, events)) != event["seal"]:
                raise TamperingError(
                    f"{store.stage_seal_file(stage.name)} is not the seal of the stage's records."
                )
            settled[stage.name] = True
    if events.closed is not None and set(settled) != {stage.name for stage in protocol.stages}:
        raise TamperingError(f"{store.ledger_file}: the study was closed before all its stages were sealed.")


def conditional(stage: SealedStage, events: Ledger) -> bool:
    """Whether something must be decided before a stage runs: it has gates, or reads what was not run."""
    return bool(stage.only_if) or bool(events.not_run & set(stage.reads))


def _authorised(stage: SealedStage, events: Ledger, event: Event) -> bool:
    decision = events.decided.get(stage.name)
    return decision is not None and decision["authorised"] and decision["n"] < event["n"]


def _check_decision(
    store: Store, stage: SealedStage, event: Event, events: Ledger, settled: dict[str, bool]
) -> None:
    """A decision is that of its gates; whether they passed is recomputed with the result."""
    unread = [name for name in stage.reads if settled.get(name) is False]
    follows = all(event["gates"].values()) and not unread
    if set(event["gates"]) != set(stage.only_if) or event["authorised"] != follows:
        raise TamperingError(
            f"{store.ledger_file}: the decision on stage {stage.name} is not that of its gates."
        )
