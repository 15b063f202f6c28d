"""One Markdown page about a closed study: figures, question, gates, tables, and what is not claimed.

Everything on it comes from files that were checked. `figures` and `tables` of the study decide nothing; they
only show. Long tables are folded. Numbers have three digits; files hold all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from halfulp import canonical
from halfulp.drawing import house_style, vector
from halfulp.study import loading
from halfulp.study.declaration import Protocol
from halfulp.study.protocol import Json, Study, Table
from halfulp.study.reading import Opened, open_closed
from halfulp.study.seal import code_digest, version
from halfulp.study.show import SCOPES, condition
from halfulp.study.validate import RecomputationError
from halfulp.text import beside, cell, count, short

OPEN = 12
"""Rows of a table that is not folded, at most."""
WIDE = 6
"""Estimands of a table, at most."""


def page(folder: Path, *, code: bool = True, figures: Mapping[str, str] | None = None) -> str:
    """The page; without `code`, the study's own tables, which its code makes, are left out.

    `figures` says where each of the study's figures lies, as :func:`drawn` named them.
    """
    opened = open_closed(folder)
    assert opened.result is not None
    result, content = opened.result, opened.protocol.content
    lines = [
        f"# {content['study']} ({content['scale']})",
        f"**{cell(result['label'])}**"
        + ("" if result["scientific_result"] else " (not a scientific result)"),
        cell(result.get("says", "")),
        f"Question: {cell(content['question'])}",
        *(f"![{cell(title.replace('-', ' '))}]({place})" for title, place in (figures or {}).items()),
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
        with _own_code(opened) as study:
            for title, make in study.tables.items():
                lines += [f"## {cell(title)}", *_study_table(make(opened.records))]
    lines += ["## Provenance", "\n".join(_provenance(opened))]
    return "\n\n".join(line for line in lines if line) + "\n"


def drawn(folder: Path) -> dict[str, bytes]:
    """The figures that a study declares, as SVG by title; none where they cannot be drawn."""
    if find_spec("matplotlib") is None:
        return {}
    opened = open_closed(folder)
    with _own_code(opened) as study, house_style():
        return {title: vector(draw(opened.records), "svg") for title, draw in study.figures.items()}


@contextmanager
def _own_code(opened: Opened) -> Iterator[Study]:
    """The study's own code; whatever goes wrong in it is said to be that."""
    try:
        yield loading.load_sealed(opened.sealed["code"]["study"], opened.store.study_file).study
    except (Exception, SystemExit) as error:
        raise RecomputationError(
            f"The tables and figures of {opened.store.folder} cannot be made by this halfulp: "
            f"{type(error).__name__}: {error}. Without them: --no-code."
        ) from error


def _gates(gates: Sequence[dict[str, Json]]) -> Iterator[list[str | float | None]]:
    for gate in gates:
        at = f" ({gate['unit']})" if gate["scope"] == "all" and gate["unit"] else ""
        yield [
            gate["name"], gate["estimand"], SCOPES[gate["scope"]],
            beside(gate["value"], gate["threshold"]) + at,
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
    """What each is; then a table for those that are of the same units, a row a unit."""
    yield "\n".join(f"- {cell(e['name'])}: {cell(e['what'])}" for e in declared)
    together: dict[tuple[str, ...], list[str]] = {}
    for estimand in declared:
        together.setdefault(tuple(values[estimand["name"]]), []).append(estimand["name"])
    for units, names in together.items():
        for some in (names[i : i + WIDE] for i in range(0, len(names), WIDE)):
            yield _table(("unit", *some), [[unit, *(values[name][unit] for name in some)] for unit in units])


def _study_table(table: Table) -> Iterator[str]:
    yield _table(table.columns, table.rows)
    if table.caption:
        yield cell(table.caption)


def _table(
    columns: Sequence[str], rows: Iterator[list[str | float | None]] | Sequence[Sequence[str | float | None]]
) -> str:
    """A table, folded if it is long."""
    lines = [[cell(column) for column in columns], ["---"] * len(columns)]
    lines += [[cell(value) if isinstance(value, str) else short(value) for value in row] for row in rows]
    made = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if len(lines) - 2 <= OPEN:
        return made
    return f"<details><summary>{len(lines) - 2} rows</summary>\n\n{made}\n\n</details>"


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
