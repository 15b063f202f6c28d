"""Running chosen cells again and comparing what they leave, bit for bit."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from halfulp import canonical
from halfulp.study.declaration import Protocol, changes
from halfulp.study.executor import Local, Opening
from halfulp.study.ledger import Ledger
from halfulp.study.page import Validation
from halfulp.study.protocol import Json
from halfulp.study.running import Message
from halfulp.study.store import Binding, Record, Store


def replay_cells(
    store: Store, sealed: Mapping[str, Json], protocol: Protocol, events: Ledger,
    records: Mapping[tuple[str, str], Record], page: Validation, names: Sequence[str], folder: Path | None,
    workers: int | None,
) -> None:  # fmt: skip
    """Replay cells (all, if none is named); differences become problems of the page."""
    chosen = [protocol.cell(name) for name in names] or list(records)
    by_hand = [key for key in chosen if key in events.recovered]
    timed = [key for key in chosen if key not in by_hand and protocol.stage(key[0]).clocks]
    waiting = deque(key for key in chosen if key not in by_hand + timed)
    executor = Local(Opening(store.folder, events.seal, "", folder, protocol.threads, replay=True), workers)
    same, under_way = 0, 0
    try:
        while waiting or under_way:
            while waiting and under_way < executor.capacity:
                executor.submit(*waiting.popleft(), dict(events.stages))
                under_way += 1
            for answer in executor.wait(1.0):
                if answer["answer"] == "progress":
                    continue
                under_way -= 1
                problem = _compare(answer, Binding.of(protocol, sealed), records)
                same += not problem
                page.problems += [problem] if problem else []
    finally:
        executor.close()
    again = len(chosen) - len(timed)
    page.recomputed.append(f"{same} of {again} cells run again left the same record, bit for bit")
    for stage, cell in by_hand:
        page.not_checked.append(f"cell {stage}/{cell} was not run again: its record was made by hand")
    for stage, cell in timed:
        page.not_checked.append(f"cell {stage}/{cell} was not run again: its record holds clocks")
    if len(chosen) < len(records):
        page.not_checked.append(f"the other {len(records) - len(chosen)} cells were not run again")


def _compare(answer: Message, binding: Binding, records: Mapping[tuple[str, str], Record]) -> str:
    if answer["answer"] != "finished":
        where = f"cell {answer['stage']}/{answer['cell']} " if "cell" in answer else ""
        return f"replay: {where}{answer['answer']}: {answer.get('error', '')}"
    stage, cell = answer["stage"], answer["cell"]
    before = records[stage, cell]
    attached = {name: base64.b64decode(text) for name, text in answer["attached"].items()}
    again = binding.record(stage, cell, answer["outcome"], attached) | {"code": before["code"]}
    if canonical.dumps(again) == canonical.dumps(before):
        return ""
    return f"replay: cell {stage}/{cell} gave another record: {next(changes(before, again))}"
