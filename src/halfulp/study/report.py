"""One Markdown page about a closed study: what was asked, what the gates said, and what is not claimed.

Everything on it comes from files that were checked. `tables` of the study decide nothing; they only show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from halfulp import canonical
from halfulp.study import loading
from halfulp.study.declaration import Protocol
from halfulp.study.protocol import Json, Table
from halfulp.study.reading import Opened, open_closed
from halfulp.study.seal import code_digest, version
from halfulp.study.show import SCOPES, condition
from halfulp.study.validate import RecomputationError
from halfulp.text import cell, count, number

MOST_UNITS = 24  # of an estimand on the page; files hold all


def page(folder: Path, *, code: bool = True) -> str:
    """The page; without `code`, the study's own tables, which its code makes, are left out."""
    opened = open_closed(folder)
    assert opened.result is not None
    result, content = opened.result, opened.protocol.content
    lines = [
        f"# {content['study']} ({content['scale']})",
        f"**{cell(result['label'])}**"
        + ("" if result["scientific_result"] else " (not a scientific result)"),
        cell(result.get("says", "")),
        f"Question: {cell(content['question'])}",
        f"Scientific units: {cell(content['units'])}",
        "Not claimed:\n\n" + "\n".join(f"- {cell(claim)}" for claim in content["not_claimed"])
        if content["not_claimed"]
        else "",
        "## Gates",
        _table(("gate", "estimand", "scope", "value", "threshold", "verdict"), _gates(result["gates"])),
        "\n".join(_not_run(result.get("decisions", {}))),
        "## Labels",
        "\n".join(_rules(opened.protocol)),
        "## Estimands",
        *_estimands(content["estimands"], result["estimands"]),
    ]
    if code:
        try:
            study = loading.load_sealed(opened.sealed["code"]["study"], opened.store.study_file).study
            for title, make in study.tables.items():
                lines += [f"## {cell(title)}", *_study_table(make(opened.records))]
        except (Exception, SystemExit) as error:  # of the study's own code
            raise RecomputationError(
                f"The tables of {folder} cannot be made by this halfulp: {type(error).__name__}: {error}. "
                "Without them: --no-code."
            ) from error
    lines += ["## Provenance", "\n".join(_provenance(opened))]
    return "\n\n".join(line for line in lines if line) + "\n"


def _gates(gates: Sequence[dict[str, Json]]) -> Iterator[list[str | float | None]]:
    for gate in gates:
        at = f" ({gate['unit']})" if gate["scope"] == "all" and gate["unit"] else ""
        yield [
            gate["name"], gate["estimand"], SCOPES[gate["scope"]], number(gate["value"]) + at,
            f"{gate['comparison']} {canonical.number(gate['threshold'])}",
            "pass" if gate["passed"] else "FAIL",
        ]  # fmt: skip


def _not_run(decisions: Mapping[str, Mapping[str, Json]]) -> Iterator[str]:
    for stage, decision in decisions.items():
        if not decision["authorised"]:
            failed = [name for name, passed in decision["gates"].items() if not passed]
            why = f"failed: {cell(', '.join(failed))}" if failed else "it reads a stage that was not run"
            yield f"Stage {stage} was not authorised ({why}); none of its cells was run."


def _rules(protocol: Protocol) -> Iterator[str]:
    for i, rule in enumerate(protocol.rules, 1):
        says = f" ({cell(rule.says)})" if rule.says else ""
        yield f"{i}. {cell(rule.label)}{says}: {cell(condition(rule))}"


def _estimands(
    declared: Sequence[dict[str, Json]], values: dict[str, dict[str, float | None]]
) -> Iterator[str]:
    for estimand in declared:
        units = values[estimand["name"]]
        yield f"### {cell(estimand['name'])}"
        yield cell(estimand["what"])
        yield _table(("unit", "value"), [[unit, units[unit]] for unit in list(units)[:MOST_UNITS]])
        if len(units) > MOST_UNITS:
            yield f"and {len(units) - MOST_UNITS} more units in result.json"


def _study_table(table: Table) -> Iterator[str]:
    yield _table(table.columns, table.rows)
    if table.caption:
        yield cell(table.caption)


def _table(
    columns: Sequence[str], rows: Iterator[list[str | float | None]] | Sequence[Sequence[str | float | None]]
) -> str:
    lines = [[cell(column) for column in columns], ["---"] * len(columns)]
    lines += [[cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _provenance(opened: Opened) -> Iterator[str]:
    events, sealed = opened.events, opened.sealed
    yield f"- sealed {events.events[0]['at']}, sha256 {events.seal}"
    yield f"- closed {events.events[-1]['at']}, sha256 {events.head}"
    yield f"- code: halfulp {cell(version(sealed))}, sha256 {code_digest(sealed)}"
    for name, identity in sealed["data"].items():
        yield f"- data: {cell(name)}, sha256 {identity['sha256']}"
    for name, one in sealed.get("evidence", {}).items():
        study = f"{cell(one['study'])} ({one['scale']})"
        yield f"- evidence: {cell(name)}, {study}, {cell(one['label'])}, closed sha256 {one['closed']}"
    env = sealed["environment"]
    yield f"- environment: {cell(env['python'])}, {cell(env['platform'])}, {cell(env['cpu'])}"
    failures = sum(events.failures.values())
    yield f"- {count(len(events.records), 'record')}, {count(failures, 'failed attempt')}"
    for (stage, name), reason in sorted(events.recovered.items()):
        yield f"- record {stage}/{name} was made by hand: {cell(reason)}"
    for deviation in events.deviations:
        yield f"- deviation from the seal: {cell(deviation['reason'])}"
