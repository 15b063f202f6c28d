"""Declarations: what is refused, what is shown, and what a change of one looks like."""

from __future__ import annotations

import ast
import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study.samples import SMALL, invoke, study_file

import halfulp.study
from halfulp import canonical
from halfulp.errors import CorruptionError, UsageError
from halfulp.study import Cell, Estimand, Evidence, Gate, Outcomes, Rule, Stage, loading
from halfulp.study.declaration import Protocol, changes
from halfulp.study.gates import decide, evaluate
from halfulp.study.protocol import NotRun, Study, check_name
from halfulp.text import cell, plain

HOSTILE = [
    "../up",
    "a/b",
    "",
    ".",
    "..",
    "<script>",
    "a\0b",
    "\u202eabc",
    "a\nb",
    "a b",
    "a" * 121,
    "é",
    "-x",
    "a|b",
]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return loading.load(str(study_file(tmp_path))).study


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as raised:
        Cell(name=name)
    message = str(raised.value)
    assert message == plain(message)  # the message itself is harmless


def test_unknown_fields_of_a_declaration_are_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        Cell(name="a", colour="red")  # type: ignore[call-arg]


def spoilt(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Protocols that are not quite ones."""

    def changed(path: list[Any], value: Any) -> dict[str, Any]:
        new = copy.deepcopy(content)
        place: Any = new
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return new

    lacking = copy.deepcopy(content)
    del lacking["units"]
    return [
        ("colour", changed(["colour"], 1)),
        ("units", lacking),
        ("colour", changed(["gates", 0, "colour"], 1)),
        ("colour", changed(["stages", 0, "cells", 0, "colour"], 1)),
        ("threshold", changed(["gates", 0, "threshold"], "0.1")),
        ("threshold", changed(["gates", 0, "threshold"], True)),
        ("comparison", changed(["gates", 0, "comparison"], "!=")),
        ("kind", changed(["stages", 0, "kind"], "guess")),
        ("scale", changed(["scale"], "huge")),
        ("plain", changed(["stages", 1, "cells", 0, "name"], "../../up")),
        ("plain", changed(["study"], "\u202e")),
        ("format", changed(["format"], 2)),
    ]


def test_a_protocol_is_read_back_strictly(study: Study) -> None:
    content = Protocol.of(study, "small").content
    assert Protocol(copy.deepcopy(content), "p").digest == canonical.digest(content)
    for part, bad in spoilt(content):
        with pytest.raises(CorruptionError, match=part):
            Protocol(bad, "protocol.json")


def test_changes_are_named_by_path(study: Study) -> None:
    old = Protocol.of(study, "small").content
    new = Protocol.of(
        replace(
            study,
            scales={"small": {"forecast": 0.3, "seeds": [1, 2, 4]}},
            gates=(replace(study.gates[0], threshold=0.5),),
        ),
        "small",
    ).content
    assert list(changes(old, new)) == [
        "config.forecast: was 0.2, now 0.3",
        "config.seeds: was [1,2,3], now [1,2,4]",
        "gates.close.threshold: was 0.15, now 0.5",
        "stages.forecast.cells.all.config.value: was 0.2, now 0.3",
        'stages.outcome.cells.arm-3: gone, was {"config":{"seed":3},"name":"arm-3"}',
        'stages.outcome.cells.arm-4: added, {"config":{"seed":4},"name":"arm-4"}',
    ]
    assert list(changes(old, copy.deepcopy(old))) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rules": (Rule(label="x", passed=("nothing",)), Rule(label="y"))}, "names gate 'nothing'"),
        ({"rules": (Rule(label="x", passed=("close",)),)}, "last rule"),
        (
            {"gates": (Gate(name="g", estimand="none", scope="all", comparison="<", threshold=1),)},
            "no estimand",
        ),
        ({"retries": -1}, "retries"),
        ({"threads": 0}, "threads"),
        ({"scales": {"huge": {}}}, "scale"),
        ({"stages": ()}, "at least one"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(study: Study, change: dict[str, Any], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        replace(study, **change)


def test_a_prediction_cannot_come_after_an_outcome(study: Study) -> None:
    first, second = study.stages
    with pytest.raises(UsageError, match="comes after outcome"):
        replace(study, stages=(replace(second, reads=()), first))
    with pytest.raises(UsageError, match="not an earlier stage"):
        replace(study, stages=(replace(first, reads=("outcome",)), second))


def test_show_prints_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = study_file(tmp_path)
    code, text, _ = invoke(capsys, "study", "show", str(path))
    protocol = Protocol.of(loading.load(str(path)).study, "small")
    assert code == 0
    for part in (
        "Is it close?", "one arm", "not claimed  anything", "forecast=0.2", "cell   seed", "arm-3  3",
            "reads forecast",
        "gate close: error <= 0.15, in every unit", "label close: close passed", "label not close: otherwise",
        "retries      0", "threads      1", protocol.digest,
    ):  # fmt: skip
        assert part in text
    code, text, _ = invoke(capsys, "study", "show", str(path), "--json")
    assert text.encode() == protocol.bytes + b"\n"


# ---- loading ----


def test_a_file_is_loaded_by_attribute(tmp_path: Path) -> None:
    path = study_file(tmp_path, SMALL.replace("study = Study(", "other = Study("))
    with pytest.raises(UsageError, match="no Study called study or STUDY"):
        loading.load(str(path))
    assert loading.load(f"{path}:other").study.name == "small"


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no study"):
        loading.load("no-such-study")
    with pytest.raises(UsageError, match="cannot be read"):
        loading.load(str(tmp_path / "missing.py"))
    with pytest.raises(UsageError, match="No module named 'helper_beside'"):
        loading.load(str(study_file(tmp_path, "import helper_beside")))


# ---- text from elsewhere ----


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "a\u202eb", "a\u2028b", "a\rb", "\x00", "\u200f", "\ufeff", "\ud800"]
)
def test_text_cannot_move_the_cursor_or_turn_around(text: str) -> None:
    shown = plain(text)
    assert shown.isascii()
    assert shown.isprintable()
    shown.encode()


def test_text_is_not_markup() -> None:
    assert cell("<script>alert(1)</script>|[x](y)`*") == (
        r"&lt;script&gt;alert\(1\)&lt;/script&gt;\|\[x\]\(y\)\`\*"
    )


def test_names_stay_short_in_messages() -> None:
    with pytest.raises(UsageError) as raised:
        check_name("cell", "x" * 10_000)
    assert len(str(raised.value)) < 300


def test_the_engine_neither_pickles_nor_evaluates() -> None:
    banned = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in sorted(Path(halfulp.study.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not banned & {name.partition(".")[0] for name in names}, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path


def declared(**changes: Any) -> Study:
    def cells(config: Any) -> list[Cell]:
        return [Cell(name="a")]

    def some(records: Any) -> dict[str, float]:
        return {"a": records["one"]["a"]["n"]}

    given: dict[str, Any] = {
        "stages": (
            Stage(name="one", kind="outcome", cells=cells, run=lambda cell: {"n": 1}),
            Stage(name="two", kind="outcome", cells=cells, run=lambda cell: {"n": 2}, only_if=("g",)),
        ),
        "rules": (Rule(label="stopped", not_run=("two",), says="It stopped."), Rule(label="all")),
    }
    return Study(
        name="s", question="q", units="u", not_claimed=(), scales={"small": {}},
        estimands=(Estimand(name="e", what="e", compute=some),),
        gates=(Gate(name="g", estimand="e", scope="all", comparison=">", threshold=1),), **given | changes,
    )  # fmt: skip


def test_what_can_not_be_declared() -> None:
    cells = declared().stages[0].cells
    first = Stage(name="one", kind="outcome", cells=cells, run=lambda cell: {}, only_if=("g",))
    with pytest.raises(UsageError, match="no gate can be judged before it"):
        declared(stages=(first,))
    second = Stage(name="two", kind="outcome", cells=cells, run=lambda cell: {}, only_if=("h",))
    with pytest.raises(UsageError, match="Stage two names gate 'h'"):
        declared(stages=(declared().stages[0], second))
    with pytest.raises(UsageError, match="no gate decides"):
        declared(rules=(Rule(label="x", not_run=("one",)), Rule(label="y")))
    with pytest.raises(UsageError, match="the last rule"):
        declared(rules=(Rule(label="x", not_run=("two",)),))
    with pytest.raises(UsageError, match="evidence name used twice"):
        declared(evidence=(Evidence(name="x", study="a", records=("*",)),) * 2)


def test_typed_in_numbers_and_stages_that_were_not_run() -> None:
    study = declared()
    assert decide(study, {"e": {"a": 2}}).label == "all"
    stopped = decide(study, {"e": {"a": 0}}, not_run=("two",))
    assert (stopped.label, stopped.says) == ("stopped", "It stopped.")
    records = Outcomes({"one": {"a": {"n": 5}}}, not_run=("two",))
    assert evaluate(study.estimands, records) == {"e": {"a": 5}}
    late = Estimand(name="late", what="l", compute=lambda records: {"a": records["two"]["a"]["n"]})
    assert evaluate([late], records) == {"late": {}}
    with pytest.raises(NotRun):
        records["two"]
    assert ("two" in records, records.get("two"), list(records), len(records)) == (False, None, ["one"], 1)
    with pytest.raises(UsageError, match="no records of stage 'three'"):
        records["three"]


def test_partials_are_taken_apart() -> None:
    def by(records: Any, value: Any, stage: str, power: float) -> dict[str, float]:
        return {cell: value(record) ** power for cell, record in records[stage].items()}

    def count(record: Any) -> float:
        return float(record["n"])

    estimand = Estimand(
        name="e", what="e", compute=functools.partial(by, value=count, stage="one"), args={"power": 2}
    )
    study = declared()
    object.__setattr__(study, "estimands", (estimand,))
    sealed = Protocol.of(study, "small").content["estimands"][0]
    assert sealed["compute"].endswith("by")
    assert sealed["args"]["value"]["function"].endswith("count")
    assert {key: sealed["args"][key] for key in ("stage", "power")} == {"stage": "one", "power": 2}
    assert evaluate([estimand], {"one": {"a": {"n": 3}}}) == {"e": {"a": 9.0}}
    with pytest.raises(UsageError, match="give the arguments of a partial by name"):
        Estimand(name="e", what="e", compute=functools.partial(by, count))


def test_show_says_once_what_cells_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Shared parameters once, and a table of what differs."""
    text = SMALL.replace(
        'config={"seed": seed}) for',
        'config={"seed": seed, "model": config["model"] | {"width": 8}, "rate": 0.5, "policy": "sr"}) for',
    ).replace('"seeds": [1, 2, 3]', '"seeds": [1, 2, 3], "model": {"depth": 4, "kind": "mlp", "width": 9}')
    shown = invoke(capsys, "study", "show", str(study_file(tmp_path, text)))[1]
    assert (
        shown[shown.index("stage outcome") : shown.index("\nestimand")]
        == """\
stage outcome: outcome, 3 cells by outcome, reads forecast
  all  model.depth=4  model.kind=mlp  model.width=8  policy=sr  rate=0.5
  cell   seed
  arm-1  1
  arm-2  2
  arm-3  3
"""
    )
    from halfulp.study.loading import REGISTRY

    for name in REGISTRY:
        study = loading.load(name).study
        scale = next(iter(study.scales))
        text = invoke(capsys, "study", "show", name, "--scale", scale)[1]
        protocol = Protocol.of(study, scale)
        assert all(cell in text for stage in protocol.stages for cell in stage.cells)
        assert len(text) < len(protocol.bytes)
