"""Small studies, and quick ways to run them, for the tests of the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from halfulp import canonical, cli
from halfulp.study import engine, loading, provenance
from halfulp.study.validate import validate

SMALL = """
from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study, Table


def forecasts(config):
    return [Cell(name="all", config={"value": config["forecast"]})]


def forecast(cell):
    cell.attach("note.txt", b"sealed first")
    return {"value": cell.config["value"]}


def arms(config):
    return [Cell(name=f"arm-{seed}", config={"seed": seed}) for seed in config["seeds"]]


def outcome(cell):
    done = int(cell.load() or b"0")
    for step in range(done, 2):
        cell.save(str(step + 1).encode())
        cell.progress(step, 2)
    cell.attach("trace.bin", bytes([cell.config["seed"]]))
    said = cell.read("forecast", "all")["value"]
    assert cell.read_bytes("forecast", "all", "note.txt") == b"sealed first"
    return {"value": cell.config["seed"] / 10, "said": said}


def error(records):
    return {name: abs(r["value"] - r["said"]) for name, r in records["outcome"].items()}


study = Study(
    name="small",
    question="Is it close?",
    units="one arm",
    not_claimed=("anything",),
    scales={"smoke": {"forecast": 0.2, "seeds": [1, 2]}, "small": {"forecast": 0.2, "seeds": [1, 2, 3]}},
    stages=(
        Stage(name="forecast", kind="prediction", cells=forecasts, run=forecast),
        Stage(name="outcome", kind="outcome", cells=arms, run=outcome, reads=("forecast",)),
    ),
    estimands=(Estimand(name="error", what="distance", compute=error),),
    gates=(Gate(name="close", estimand="error", scope="all", comparison="<=", threshold=0.15),),
    rules=(Rule(label="close", passed=("close",)), Rule(label="not close")),
    tables={"Errors": lambda records: Table(columns=("arm", "error"), rows=list(error(records).items()))},
)
"""

NEXT = """
from halfulp.study import Cell, Estimand, Evidence, Gate, Rule, Stage, Study


def one(config):
    return [Cell(name="all")]


def several(config):
    return [Cell(name=f"arm-{seed}", config={"seed": seed}) for seed in (1, 2)]


def prepare(cell):
    first = cell.evidence("first")
    assert first.label == "close"
    return {"worst": max(first.estimands["error"].values())}


def follow(cell):
    assert cell.evidence("first").attached("outcome", "arm-1", "trace.bin") == bytes([1])
    return {"value": cell.config["seed"] * cell.read("prepare", "all")["worst"]}


def worst(records, times):
    return {"all": times * records["prepare"]["all"]["worst"]}


def followed(records):
    first = records.evidence["first"]
    return {name: r["value"] + first["outcome"][name]["value"] for name, r in records["follow"].items()}


study = Study(
    name="next",
    question="Does it go on?",
    units="one arm",
    not_claimed=(),
    scales={"small": {}},
    evidence=(
        Evidence(
            name="first", study="small", records=("outcome/*",), attached=("outcome/arm-1/*",),
            estimands=("error",),
        ),
    ),
    stages=(
        Stage(name="prepare", kind="prediction", cells=one, run=prepare),
        Stage(
            name="follow", kind="outcome", cells=several, run=follow, reads=("prepare",), only_if=("worth",)
        ),
        Stage(name="report", kind="outcome", cells=one, run=lambda cell: {"n": 2}, reads=("follow",)),
        Stage(name="apart", kind="outcome", cells=one, run=lambda cell: {"n": 1}),
    ),
    estimands=(
        Estimand(name="worst", what="the worst error", compute=worst, args={"times": 10}),
        Estimand(name="followed", what="both together", compute=followed),
        Estimand(name="apart", what="one", compute=lambda records: {"all": records["apart"]["all"]["n"]}),
    ),
    gates=(
        Gate(name="worth", estimand="worst", scope="all", comparison=">=", threshold=0.5),
        Gate(name="more", estimand="followed", scope="all", comparison=">", threshold=0),
    ),
    rules=(
        Rule(label="follow_not_authorised", says="It was not worth it.", not_run=("follow",)),
        Rule(label="GO", says="It goes on.", passed=("more",)),
        Rule(label="no_go"),
    ),
)
"""

LATE = '''
from halfulp.study import Estimand, Gate, Retrospective, Rule


def value(records):
    return {name: record["value"] for name, record in records["outcome"].items()}


retrospective = Retrospective(
    name="late", study="small", why="somebody asked",
    estimands=(Estimand(name="value", what="v", compute=value),),
    gates=(Gate(name="positive", estimand="value", scope="all", comparison=">", threshold=0),),
    rules=(Rule(label="positive", passed=("positive",)), Rule(label="not positive")),
)
'''  # fmt: skip


def study_file(folder: Path, text: str = SMALL, name: str = "study_of_mine.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    return path


def run(path: Path, out: Path, scale: str = "small", **options: Any) -> dict[str, Any]:
    """Run a study file to its end, in this process unless another executor is asked for."""
    return engine.run(loading.load(str(path)), scale, out, **{"executor": "inline", **options})


def tree(out: Path, *, ledger: bool = False) -> dict[str, str]:
    """Digests of a study's files; those of its ledger only if asked, because it holds times."""
    return {
        p.relative_to(out).as_posix(): canonical.sha256(p.read_bytes())
        for p in sorted(out.rglob("*"))
        if p.is_file() and "work" not in p.relative_to(out).parts and (ledger or p.name != "ledger.jsonl")
    }


def quick_identity(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Identities that cost nothing: one file stands for the package, and git is not asked."""
    package = {"one.py": canonical.sha256(b"one")}

    def code(source: loading.Source) -> dict[str, Any]:
        return {"package": dict(package), "study": source.identity}

    def noted(behind: dict[str, Any]) -> dict[str, Any]:
        return {"version": "0", "files": {}}

    if monkeypatch is None:
        provenance.code, provenance.noted, provenance.git_state = code, noted, lambda path: None
    else:
        monkeypatch.setattr(provenance, "code", code)
        monkeypatch.setattr(provenance, "noted", noted)
        monkeypatch.setattr(provenance, "git_state", lambda path: None)


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command line, in this process: exit code, standard output, standard error."""
    before = sys.argv
    sys.argv = ["halfulp", *arguments]
    code: Any = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    output = capsys.readouterr()
    return int(code or 0), output.out, output.err


__all__ = ["LATE", "NEXT", "SMALL", "invoke", "quick_identity", "run", "study_file", "tree", "validate"]
