"""A forger who computes every digest anew, and damage that a JSON file can still hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations import edit

from halfulp import canonical
from halfulp.errors import HalfulpError, UsageError


def load(path: Path) -> Any:
    return canonical.loads(path.read_bytes(), path)


def events(out: Path) -> list[dict[str, Any]]:
    return [canonical.loads(line, "line") for line in (out / "ledger.jsonl").read_bytes().splitlines()]


def chain(out: Path, told: list[Any], *, renumber: bool = False) -> None:
    """Write a ledger whose digests are all right; and its numbers, if asked."""
    lines, previous = [], ""
    for n, event in enumerate(told):
        if isinstance(event, dict):
            event = {key: value for key, value in event.items() if key != "digest"}
            event |= {"previous": previous} | ({"n": n} if renumber else {})
            event["digest"] = previous = canonical.digest(event)
        lines.append(canonical.dumps(event) + b"\n")
    (out / "ledger.jsonl").write_bytes(b"".join(lines))


def forge(out: Path, name: str, value: Any) -> None:
    """Put a file in its place and make every digest above it right: record, stage seal, seal, ledger."""
    path = out / name
    content = value if isinstance(value, bytes) else canonical.dumps(value)
    path.write_bytes(content)
    digest, told, parts = canonical.sha256(content), events(out), Path(name).parts
    if name == "protocol.json":
        forge(out, "seal.json", load(out / "seal.json") | {"protocol": digest})
    elif name == "seal.json":
        told[0]["seal"] = digest
        chain(out, told)
    elif parts[0] == "records":
        for event in told:
            if event["event"] == "finished" and (event["stage"], event["cell"]) == (
                parts[1],
                Path(name).stem,
            ):
                event["record"] = digest
        chain(out, told)
        sealed = load(out / "seals" / f"{parts[1]}.json")
        sealed["records"][Path(name).stem] = digest
        forge(out, f"seals/{parts[1]}.json", sealed)
    elif parts[0] == "seals":
        for event in told:
            if event["event"] == "stage-sealed" and event["stage"] == Path(name).stem:
                event["seal"] = digest
        chain(out, told)
    elif name == "result.json":
        for event in told:
            if "result" in event:
                event["result"] = digest
        chain(out, told)


def only_ours(out: Path, look: Callable[[Path], object]) -> bool:
    """Whether it was refused; whatever is not an error of halfulp's own goes through."""
    try:
        look(out)
    except HalfulpError as error:
        if error.exit_code in (1, 3):
            return True
        raise
    return False


def writable(value: Any, rng: random.Random) -> Any:
    """An edit that has a canonical form: NaN and half a surrogate pair have none."""
    while True:
        made = edit(value, rng)
        try:
            canonical.dumps(made)
        except UsageError:
            continue
        return made
