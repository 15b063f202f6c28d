"""The decoder studies inside the engine: outcomes after forecasts, and a kill anywhere changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import decoder_kill
import pytest
from study.forging import chain, events
from study.samples import quick_identity, tree

from halfulp.errors import TamperingError, UsageError
from halfulp.study import engine, loading, provenance
from halfulp.study.validate import validate
from halfulp.study.worker import Session

QUICK = ("neox-transfer", "source-amortized", "template-challenge")


def kill(folder: Path, *names: str) -> dict[str, Any]:
    script = Path(decoder_kill.__file__)
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(folder), "150", *names],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def closed() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The closed studies, and what became of those that were killed on their way; in memory if possible."""
    shared = Path("/dev/shm")
    place = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="halfulp-test-") as folder:
        yield Path(folder), kill(Path(folder), "neox-transfer:whole", *QUICK[1:])


@pytest.fixture
def studies(closed: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Path:
    quick_identity(monkeypatch)
    monkeypatch.setattr(provenance, "locate", lambda name, beside: closed[0] / name)
    monkeypatch.setattr(provenance.data, "verify", lambda *given: None)
    return closed[0] / "whole"


def test_killed_anywhere_it_gives_the_same_bytes(closed: tuple[Path, dict[str, Any]]) -> None:
    """Before operations on the disk drawn at random, again and again, inside cells and between them."""
    found = closed[1]
    assert {name: one["same"] for name, one in found.items()} == dict.fromkeys(QUICK, True)
    assert found["source-amortized"]["runs"] > 1
    assert found["template-challenge"]["runs"] > 1


@pytest.mark.large
def test_the_others_too(tmp_path: Path) -> None:
    names = ("policy-3k", "nearest-10k", "modern-transfer", "neox-transfer")
    found = kill(tmp_path, *names)
    assert {name: one["same"] for name, one in found.items()} == dict.fromkeys(names, True)


def test_closed_studies_are_valid(studies: Path) -> None:
    for name in QUICK:
        page = validate(studies / name)
        assert page.problems == [], name
        assert page.exit_code == 0


# ---- a target's outcome after its forecast --------------------------------------------------------------


def partly(studies: Path, tmp_path: Path, name: str, stages: int) -> Path:
    """A closed study cut back to its first stages, as if it had been interrupted there."""
    out = tmp_path / name
    shutil.copytree(studies / name, out)
    lines = events(out)
    sealed = [i for i, event in enumerate(lines) if event["event"] == "stage-sealed"]
    kept = lines[: sealed[stages - 1] + 1] if stages else lines[:1]
    settled = {event["stage"] for event in kept if event["event"] == "stage-sealed"}
    chain(out, kept)
    (out / "result.json").unlink()
    for part in ("records", "attached", "seals"):
        for path in list((out / part).glob("*")) if (out / part).exists() else ():
            if path.name.removesuffix(".json") not in settled:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return out


@pytest.mark.parametrize(
    ("name", "prediction", "outcome", "cell"),
    [
        ("source-amortized", "forecast", "outcome", "target-693147"),
        ("template-challenge", "predictors", "opened", "target-693147"),
    ],
)
def test_no_outcome_before_its_forecast(
    name: str, prediction: str, outcome: str, cell: str, studies: Path, tmp_path: Path
) -> None:
    """A worker refuses to start one; one that lies there is not used; a ledger with one is refused."""
    before = 1 if name == "source-amortized" else 0  # the source has run, nothing is foretold
    out = partly(studies, tmp_path, name, before)
    seal = events(out)[0]["seal"]
    given = {e["stage"]: e["seal"] for e in events(out) if e["event"] == "stage-sealed"}
    answer = Session(out, seal, "", None).run(outcome, cell, given)
    assert answer["answer"] == "refused"
    assert f"stage {prediction} is not sealed" in answer["error"]

    whole = studies / name
    early = out / "records" / outcome / f"{cell}.json"
    early.parent.mkdir(parents=True)
    early.write_bytes((whole / "records" / outcome / f"{cell}.json").read_bytes().replace(b"0.", b"1.", 1))
    decoder_kill.run(name, out, evidence={})
    assert tree(out) == tree(whole)  # what lay there is no record: the ledger does not name it

    told = tmp_path / "told"
    shutil.copytree(whole, told)
    lines = events(told)
    begun = [e for e in lines if e.get("stage") == outcome and e.get("cell") == cell]
    at = next(i for i, e in enumerate(lines) if e["event"] == "stage-sealed" and e["stage"] == prediction)
    moved = [e for e in lines if e not in begun]
    early_ones = [{**e, "at": lines[at - 1]["at"]} for e in begun]
    chain(told, [*moved[:at], *early_ones, *moved[at:]], renumber=True)
    with pytest.raises(TamperingError, match=f"stage {prediction} was not sealed"):
        validate(told)


def test_predictors_may_not_open_the_outcomes(studies: Path, tmp_path: Path) -> None:
    """The runs exist, in evidence that stays closed until the predictors are sealed."""
    out = partly(studies, tmp_path, "template-challenge", 0)
    session = Session(out, events(out)[0]["seal"], "", None)
    study = session.study

    def peek(running: Any) -> dict[str, Any]:
        return {"seen": len(running.evidence("outcomes")["outcome"])}

    object.__setattr__(study.stages[0], "run", peek)
    try:
        answer = session.run("predictors", "target-693147", {})
    finally:
        from halfulp.paper.studies import template_challenge

        object.__setattr__(study.stages[0], "run", template_challenge.predict)
    assert answer["answer"] == "failed"
    assert "may not open evidence outcomes: stage predictors is not sealed" in answer["error"]


def test_evidence_must_be_the_studies_that_are_named(studies: Path, tmp_path: Path) -> None:
    """Another study, or none, is not evidence."""
    source = loading.load("template-challenge")
    with pytest.raises(UsageError, match="needs evidence archive, a closed study neox-transfer"):
        engine.seal(source, "smoke", tmp_path / "a")
    swapped = {"archive": studies / "source-amortized"} | dict.fromkeys(
        ("references", "outcomes"), studies / "source-amortized"
    )
    with pytest.raises(UsageError, match="must be of study neox-transfer"):
        engine.seal(source, "smoke", tmp_path / "b", evidence=swapped)
