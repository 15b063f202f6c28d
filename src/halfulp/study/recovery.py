"""A record made by hand, where a cell could not leave its own.

It lets a study go on to its end, and it is marked for ever: in the record (``origin``, ``reason``,
``scientific_result`` false) and in the ledger. The two must agree, and a study with such a record is not
promoted to any label but one that its protocol declares for this very case.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from halfulp import canonical, files
from halfulp.errors import UsageError
from halfulp.study import ledger
from halfulp.study.order import conditional
from halfulp.study.protocol import Json
from halfulp.study.store import Binding, Store
from halfulp.text import plain


def recover(out: Path, cell: str, outcome: Mapping[str, Json], reason: str) -> None:
    """Put a record made by hand in the place of one that a cell could not leave; it is never promoted."""
    if not reason.strip():
        raise UsageError("A recovered record needs a reason.")
    store = Store(out)
    with files.lock(store.lock_file):
        events = ledger.reopen(store.ledger_file)
        sealed = store.read_seal(events.seal)
        protocol = store.read_protocol(sealed)
        stage, name = protocol.cell(cell)
        settled = {*events.stages, *events.not_run}
        unsealed = [earlier.name for earlier in protocol.before(stage) if earlier.name not in settled]
        if unsealed:
            raise UsageError(
                f"Cell {stage}/{name} cannot be recovered: stage {unsealed[0]} is not sealed yet."
            )
        if conditional(protocol.stage(stage), events) and not events.decided.get(stage, {}).get("authorised"):
            raise UsageError(f"Cell {stage}/{name} cannot be recovered: its stage is not authorised.")
        if events.closed or (stage, name) in events.records:
            raise UsageError(f"Cell {stage}/{name} has a record; records are not replaced.")
        record = Binding.of(protocol, sealed).record(stage, name, outcome, {}, plain(reason))
        content = canonical.dumps(record)
        files.put(store.record_file(stage, name), content, store.work)
        events.append(
            {"event": "recovered", "stage": stage, "cell": name, "record": canonical.sha256(content),
             "reason": plain(reason), "process": ledger.process()}
        )  # fmt: skip
