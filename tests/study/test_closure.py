"""Which files of halfulp a study depends on, and what a changed one means."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from study.forging import load
from study.samples import SMALL, run, study_file

from halfulp import canonical
from halfulp.errors import TamperingError
from halfulp.study import engine, ledger, loading, provenance
from halfulp.study import seal as seals
from halfulp.study.validate import validate


def names(text: str) -> set[str]:
    return {p.relative_to(provenance.PACKAGE).as_posix() for p in provenance.closure(text.encode(), "")}


ENGINE = {f"{name.replace('halfulp.', '').replace('.', '/')}.py" for name in provenance.ENGINE} | {
    "canonical.py"
}


def test_the_closure_of_a_study() -> None:
    assert names(SMALL) == ENGINE
    assert "study/gates.py" in ENGINE
    grids = names("def run(cell):\n    from halfulp.numbers.grids import grid\n")
    assert {
        "numbers/grids.py",
        "kernels/reference.py",
        "kernels/native/write.cpp",
        "numbers/streams.py",
    } <= grids
    assert not [name for name in grids if name.startswith(("report/", "paper/", "audit/", "data/"))]
    assert names("from halfulp.numbers import grids") == grids == names("import halfulp.numbers.grids as g")
    whole = names("import halfulp as hu")
    assert grids | {"__init__.py", "audit/session.py", "writeback/__init__.py"} <= whole
    assert whole == names("from halfulp import grid") == names("import halfulp.numbers.grids")
    assert names("import importlib\nimportlib.import_module('halfulp.numbers.streams')") >= ENGINE | {
        "numbers/streams.py"
    }
    assert names("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import halfulp\n") == ENGINE
    assert "data/datasets.tsv" in names("from halfulp import data")


def changed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As if somebody had edited a file of the package."""
    real = canonical.sha256_file
    monkeypatch.setattr(
        canonical, "sha256_file", lambda path: "0" * 64 if path == provenance.PACKAGE / name else real(path)
    )


def test_a_changed_style_sheet_is_no_deviation_and_a_changed_kernel_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SMALL.replace("def outcome(cell):", "def outcome(cell):\n    from halfulp.numbers import grids")
    path, out = study_file(tmp_path, text), tmp_path / "out"
    source = loading.load(str(path))
    engine.seal(source, "small", out)
    sealed = load(out / "seal.json")
    assert "report/assets/page.css" in sealed["noted"]["files"]
    assert "kernels/reference.py" in sealed["code"]["package"]
    with monkeypatch.context() as patch:
        changed(patch, "kernels/reference.py")
        with pytest.raises(TamperingError, match=r"code\.package\.kernels/reference\.py: was"):
            run(path, out)
    plain = tmp_path / "plain"
    engine.seal(loading.load(str(study_file(tmp_path, SMALL, "plain.py"))), "small", plain)
    for name in ("report/assets/page.css", "report/page.py", "paper/studies/__init__.py", "study/publish.py"):
        with monkeypatch.context() as patch:
            changed(patch, name)
            engine.seal(source, "small", out)
    with monkeypatch.context() as patch:
        changed(patch, "report/assets/page.css")
        assert run(path, out)["label"] == "close"
        assert validate(out, strict_code=True).exit_code == 0
    assert not ledger.read(out / "ledger.jsonl").deviations
    with monkeypatch.context() as patch:
        changed(patch, "kernels/reference.py")  # a study that uses no kernel does not mind
        assert run(tmp_path / "plain.py", plain)["label"] == "close"
        assert validate(out).exit_code == 0
        assert validate(out, strict_code=True).exit_code == 1


def test_seals_of_the_first_release_hold_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read and compared in their own form."""
    path, out = study_file(tmp_path), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(seals, "make", functools.partial(seals.make, whole=True))
        engine.seal(loading.load(str(path)), "small", out)
    sealed = load(out / "seal.json")
    assert {"report/assets/page.css", "study/engine.py"} <= set(sealed["code"]["package"])
    assert "noted" not in sealed
    with monkeypatch.context() as patch:
        changed(patch, "report/assets/page.css")
        with pytest.raises(TamperingError, match=r"page\.css"):
            run(path, out)
    assert run(path, out)["label"] == "close"
    assert validate(out, strict_code=True).exit_code == 0
