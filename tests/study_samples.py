"""Small studies, and quick ways to run them, for the tests of the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from halfulp import canonical, cli
from halfulp.study import engine, loading
from halfulp.study import seal as seals
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
        seals.code, seals.noted, seals.git_state = code, noted, lambda path: None
    else:
        monkeypatch.setattr(seals, "code", code)
        monkeypatch.setattr(seals, "noted", noted)
        monkeypatch.setattr(seals, "git_state", lambda path: None)


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


__all__ = ["SMALL", "invoke", "quick_identity", "run", "study_file", "tree", "validate"]
