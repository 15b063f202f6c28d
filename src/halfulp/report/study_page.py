"""The page of a study: its label and figures first, then gates, what they rest on and what is not claimed.

Everything comes from the study's folder, digest by digest: the ledger names the seal, the seal the
protocol, the ledger every record and the result. A page of a folder that was changed is refused, not made.

Tables and figures are functions of the study. Those of a registered study are this package's own. A user's
study carries its file in its folder, and a page must not run a file that came in the mail: it does so only
when told to (``code=True``).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfulp import canonical
from halfulp.drawing import house_style, vector
from halfulp.errors import UsageError
from halfulp.report.markup import Content, Html, name, number, numeric, prose, table, tag
from halfulp.report.outcomes import passed_mark
from halfulp.study import evidence, loading
from halfulp.study.declaration import Protocol
from halfulp.study.gates import SCOPES, RecomputationError, condition, deciding
from halfulp.study.ledger import Ledger
from halfulp.study.protocol import Records, Study
from halfulp.study.store import Store
from halfulp.text import beside, short

OPEN = 12
"""Tables with more rows than this are folded."""
SMOKE = "Not a scientific result: it shows that the study runs, or records were not all its own."


@dataclass(frozen=True)
class StudyView:
    """A study's folder, authenticated."""

    folder: Path
    protocol: Protocol
    events: Ledger
    sealed: Mapping[str, Any]
    result: Mapping[str, Any] | None
    """None while the study is not closed."""
    records: Records | None
    study: Study | None
    """The code; None if it may not or cannot be run."""

    @property
    def label(self) -> str:
        """Return the study's label, or how far it has come."""
        if self.result is not None:
            return str(self.result["label"])
        cells = sum(len(stage.cells) for stage in self.protocol.stages)
        return f"not finished: {len(self.events.records)} of {cells} cells have records"


def is_study(folder: Path) -> bool:
    """Return True if a folder holds a study."""
    return (folder / "ledger.jsonl").is_file() or (folder / "protocol.json").is_file()


def open_study(folder: Path, *, code: bool = False) -> StudyView:
    """Read a study's folder; ``code``: its own file may be run for tables and figures."""
    opened = evidence.open_study(folder)
    records = opened.records if opened.result is not None else None
    study = _code(opened.store, opened.sealed, code)
    return StudyView(folder, opened.protocol, opened.events, opened.sealed, opened.result, records, study)


def _code(store: Store, sealed: Mapping[str, Any], code: bool) -> Study | None:
    identity = sealed["code"]["study"]
    if "registered" in identity:
        with suppress(UsageError):  # this halfulp no longer has the study: its numbers are here all the same
            return loading.load_sealed(identity, store.study_file).study
    elif code:
        with own_code(store.folder):
            return loading.load_sealed(identity, store.study_file).study
    return None


@contextmanager
def own_code(folder: Path) -> Iterator[None]:
    """Run code of a study; whatever goes wrong in it, an exit included, is named as a fault of that code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise RecomputationError(
            f"The tables and figures of {folder} cannot be made by this halfulp: "
            f"{type(error).__name__}: {error}. Without --code, or with --no-code, they are left out."
        ) from error


# ---- the page -------------------------------------------------------------------------------------------


def study_sections(view: StudyView) -> list[Html | None]:
    """Return the parts of a study's page."""
    return [
        _verdict(view), *_figures(view), _gates(view), *_tables(view), _estimands(view), _claims(view),
        _protocol(view),
    ]  # fmt: skip


def _verdict(view: StudyView) -> Html:
    content, stages = view.protocol.content, view.protocol.stages
    cells = sum(len(stage.cells) for stage in stages)
    facts = (
        f"Study {view.protocol.study} at scale {view.protocol.scale}: {cells} cells in {len(stages)} stages."
    )
    scientific = view.result is None or view.result["scientific_result"]
    gates = view.result["gates"] if view.result is not None else []
    passed = sum(bool(gate["passed"]) for gate in gates)
    return tag(
        "section",
        tag("p", prose(content["question"]), class_="kicker"),
        tag("h1", prose(view.label, 200)),
        tag("p", prose(view.result["says"])) if view.result and "says" in view.result else None,
        tag("p", facts, f" {passed} of {len(gates)} gates passed." if gates else None, class_="facts"),
        None if scientific else tag("p", SMOKE, class_="facts"),
        class_="verdict",
        aria_label="Label",
    )  # fmt: skip


def _gates(view: StudyView) -> Html | None:
    if view.result is None:
        return None
    why = {gate.name: gate.why for gate in view.protocol.gates}
    what = {e["name"]: e["what"] for e in view.protocol.content["estimands"]}
    rows: list[list[Content]] = []
    for gate in view.result["gates"]:
        base = str(gate["name"]).partition("[")[0]
        at = f"in {gate['unit']}" if gate["unit"] and gate["scope"] == "all" else SCOPES[gate["scope"]]
        rows.append(
            [
                tag("th", name(gate["name"], 60), scope="row"),
                passed_mark(bool(gate["passed"])),
                number(beside(gate["value"], gate["threshold"])),
                tag("td", f"{gate['comparison']} {canonical.number(gate['threshold'])}", class_="onset"),
                tag("td", prose(what.get(gate["estimand"], gate["estimand"])), ", ", at, class_="words"),
                tag("td", prose(why.get(base, "")), class_="words"),
            ]
        )
    head = ["gate", "", numeric("value"), "asked", "of what", "why this threshold"]
    caption = (
        "Fixed before the outcome existed. Where every unit must pass, the value is that of the worst one."
    )
    return tag(
        "section", tag("h2", "Gates"), table(head, rows, caption=caption), _rules(view), aria_label="Gates"
    )


def _rules(view: StudyView) -> Html:
    """Explain how gates become a label."""
    assert view.result is not None
    passed = {gate["name"] for gate in view.result["gates"] if gate["passed"]}
    rules, events = view.protocol.rules, view.events
    decided = deciding(rules, passed, events.not_run, recovered=bool(events.recovered))
    items = []
    for rule in rules:
        says = [" (", prose(rule.says, 300), ")"] if rule.says else []
        said = [tag("b", prose(rule.label, 120)), *says, f": {condition(rule)}"]
        items.append(tag("li", *said, class_="fits" if rule is decided else None))
    return tag("div", tag("h3", "How gates become the label; the first that fits"), tag("ol", *items))


def _figures(view: StudyView) -> list[Html]:
    """Return the study's own figures."""
    if view.study is None or view.records is None or not view.study.figures:
        return []
    if find_spec("matplotlib") is None:
        note = "This study has figures; they are drawn where halfulp[figures] is installed."
        return [tag("section", tag("h2", "Figures"), tag("p", note))]
    parts: list[Html] = []
    for title, make_figure in view.study.figures.items():
        with own_code(view.folder), house_style():
            image = vector(make_figure(view.records), "svg")
        source = "data:image/svg+xml;base64," + base64.b64encode(image).decode("ascii")
        spoken = title.replace("-", " ")
        figure = tag("img", src=source, alt=spoken, class_="figure")
        parts.append(tag("section", tag("h2", prose(spoken, 80)), figure))
    return parts


def _tables(view: StudyView) -> list[Html]:
    """Return the study's own tables."""
    if view.study is None or view.records is None:
        return []
    parts: list[Html] = []
    for title, make_table in view.study.tables.items():
        with own_code(view.folder):
            own = make_table(view.records)
        rows = [[_cell(value) for value in row] for row in own.rows]
        worded = [any(isinstance(row[i], str) for row in own.rows) for i in range(len(own.columns))]
        head = [
            prose(column, 60) if words else numeric(prose(column, 60))
            for column, words in zip(own.columns, worded, strict=True)
        ]
        whole = table(head, rows, caption=prose(own.caption) if own.caption else None)
        parts.append(tag("section", tag("h2", prose(title.replace("-", " "), 80)), _folded(whole, len(rows))))
    return parts


def _folded(table: Html, rows: int) -> Html:
    """Return a long table, folded."""
    return tag("details", tag("summary", f"{rows} rows"), table) if rows > OPEN else table


def _cell(value: str | float | None) -> Html:
    return tag("td", prose(value, 120)) if isinstance(value, str) else number(short(value))


def _estimands(view: StudyView) -> Html | None:
    """Explain each estimand; then a table for those of the same units, with a row for each unit."""
    if view.result is None:
        return None
    values: Mapping[str, Mapping[str, float | None]] = view.result["estimands"]
    what = [
        (tag("dt", name(e["name"], 40)), tag("dd", prose(e["what"])))
        for e in view.protocol.content["estimands"]
    ]
    together: dict[tuple[str, ...], list[str]] = {}
    for estimand, given in values.items():
        together.setdefault(tuple(given), []).append(estimand)
    tables = []
    for units, names in together.items():
        rows: list[list[Content]] = [
            [tag("th", name(unit, 60), scope="row"), *(number(short(values[n][unit])) for n in names)]
            for unit in units
        ]
        head: Sequence[Content] = ["unit", *(numeric(name(n, 40)) for n in names)]
        caption = ["One row a unit: ", prose(view.protocol.content["units"]), "."]
        tables.append(_folded(table(head, rows, caption=caption), len(rows)))
    return tag("section", tag("h2", "Estimands"), tag("dl", *what), *tables, aria_label="Estimands")


def _claims(view: StudyView) -> Html:
    items = [tag("li", prose(claim, 600)) for claim in view.protocol.content["not_claimed"]]
    units = tag("p", "The scientific unit is ", prose(view.protocol.content["units"]), ".")
    return tag("section", tag("h2", "What is not claimed"), tag("ul", *items), units)


def _not_authorised(view: StudyView, stage: str) -> str:
    """Say why a stage was not authorised; nothing if it was."""
    if stage not in view.events.not_run:
        return ""
    failed = [name for name, passed in view.events.decided[stage]["gates"].items() if not passed]
    why = f"failed: {', '.join(failed)}" if failed else "it reads a stage that was not run"
    return f"not authorised ({why}); none of its cells was run"


def _protocol(view: StudyView) -> Html:
    events = view.events
    facts: list[tuple[str, Content]] = [
        ("folder", name(view.folder.name)),
        *(
            (f"stage {s.name}", _not_authorised(view, s.name) or f"{s.kind}, {len(s.cells)} cells")
            for s in view.protocol.stages
        ),
        *(
            (f"evidence {key}", [f"{one['study']} ({one['scale']}), ",
                                 tag("code", one["closed"], class_="digest")])
            for key, one in view.sealed.get("evidence", {}).items()
        ),
        ("data", name(", ".join(view.protocol.data), 200) if view.protocol.data else "none"),
        ("threads", f"{view.protocol.threads} a cell"),
        ("failed attempts", str(sum(events.failures.values())) if events.failures else None),
        ("recovered", ", ".join(f"{s}/{c}" for s, c in sorted(events.recovered)) or None),
        ("deviations", [tag("span", prose(str(d.get("reason")))) for d in events.deviations]),
        ("seal", tag("code", events.seal, class_="digest")),
        ("closed", tag("code", events.closed["digest"], class_="digest") if events.closed else "not yet"),
    ]  # fmt: skip
    listed = [(tag("dt", k), tag("dd", v)) for k, v in facts if v]
    return tag("section", tag("h2", "What was run"), tag("dl", *listed))
