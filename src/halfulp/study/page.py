"""The page that validation ends with: what was authenticated, what was recomputed, and what was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from halfulp.study.declaration import Protocol
from halfulp.study.ledger import Ledger
from halfulp.study.protocol import Json
from halfulp.study.store import Record
from halfulp.text import count, plain


@dataclass
class Validation:
    """What validation found, in lines to read."""

    study: str = ""
    scale: str = ""
    label: str = ""
    says: str = ""
    scientific_result: bool = False
    authenticated: list[str] = field(default_factory=list)
    recomputed: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if all is well, else 1; what is corrupted or tampered with is raised, not reported."""
        return 1 if self.problems else 0


def lines(page: Validation) -> Iterator[str]:
    """The page."""
    yield f"{page.study} ({page.scale})"
    parts = (
        ("authenticated", page.authenticated), ("recomputed", page.recomputed),
        ("NOT checked", page.not_checked), ("PROBLEMS", page.problems),
    )  # fmt: skip
    for title, found in parts:
        if found:
            yield f"\n{title}"
            yield from (f"  - {plain(line)}" for line in found)
    yield ""
    if page.label:
        yield f"label: {plain(page.label)}{'' if page.scientific_result else ' (not a scientific result)'}"
    if page.says:
        yield f"       {plain(page.says)}"
    yield "valid" if not page.problems else "NOT valid: see the problems above"


def counted(
    protocol: Protocol, sealed: Mapping[str, Json], events: Ledger, records: Mapping[tuple[str, str], Record]
) -> list[str]:
    """What was authenticated, in numbers, and what the ledger says that a reader must know."""
    attached = sum(len(record["attached"]) for record in records.values())
    processes = {event["process"]["nonce"] for event in events.events if event["event"] == "finished"}
    parts = [
        "the seal", "the protocol", *(["the study file"] if "sha256" in sealed["code"]["study"] else []),
        count(len(records), "record"), count(attached, "attached file"),
        count(len(events.stages), "stage seal"), *(f"evidence {name}" for name in sealed.get("evidence", {})),
    ]  # fmt: skip
    lines = [
        f"{count(len(events.events), 'event')} of the ledger: digests, chain, and the order of stages",
        f"{', '.join(parts)}: all digests, canonical bytes, no file too many or too few",
        f"the {len(processes)} processes that made the records are identified in the ledger",
    ]
    for name, one in sealed.get("evidence", {}).items():
        lines.append(f"evidence {name} is of {one['study']} ({one['scale']}), closed with {one['closed']}")
    for stage in sorted(events.not_run):
        lines.append(f"stage {stage} was not authorised by its gates, and none of its cells ran")
    failures = sum(events.failures.values())
    if failures:
        lines.append(
            f"{count(failures, 'failed attempt')} (the protocol tries again {protocol.retries} times a run)"
        )
    for stage, cell in sorted(events.recovered):
        lines.append(f"record {stage}/{cell} was made by hand: {events.recovered[stage, cell]}")
    for deviation in events.deviations:
        lines.append(
            f"deviation from the seal: {deviation['reason']} ({count(len(deviation['changes']), 'change')})"
        )
    for part, state in sealed["git"].items():
        if state is not None and state["dirty"]:
            lines.append(f"the git tree of the {part} was dirty when the study was sealed")
    return lines
