"""A result names the commit of its code: what a seal says, and what is committed under `results/`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from study.samples import invoke, run, study_file

from halfulp import canonical
from halfulp.study import provenance
from halfulp.study import validate as validation

RESULTS = Path(__file__).parents[2] / "results" / "studies"

NAMED = ("-c", "user.name=a", "-c", "user.email=a@b.c")


def folders() -> list[Path]:
    return sorted(path.parent for path in RESULTS.glob("*/seal.json"))


def test_committed_results_name_a_commit() -> None:
    unnamed = {
        folder.name
        for folder in folders()
        if not provenance.sealed_commit(canonical.loads((folder / "seal.json").read_bytes(), folder))
    }
    assert unnamed == set(), "run these from a clean checkout before they are committed"


def test_a_result_without_a_commit_is_said_to_be_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(provenance, "git_state", lambda folder: None)
    run(study_file(tmp_path), tmp_path / "out")
    code, page, _ = invoke(capsys, "study", "validate", str(tmp_path / "out"), "--strict-provenance")
    assert code == 1
    assert "the seal names no commit" in page
    assert validation.validate(tmp_path / "out").exit_code == 0


def test_code_of_a_commit_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean tree: authenticated; another content at the commit, a dirty tree, an unknown commit: named."""
    package = tmp_path / "halfulp"
    package.mkdir()
    (package / "one.py").write_text("# one")
    monkeypatch.setattr(provenance, "PACKAGE", package)

    def commit() -> str:
        for command in (("init", "-q"), ("add", "."), (*NAMED, "commit", "-q", "-m", "a commit")):
            subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
        head = ["git", "-C", str(tmp_path), "rev-parse", "HEAD"]
        return subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()

    def said(commit: str, dirty: bool = False) -> validation.Validation:
        code = {"package": {"one.py": canonical.sha256(b"# one")}}
        sealed = {"git": {"package": {"commit": commit, "dirty": dirty}}, "code": code}
        page = validation.Validation()
        validation._check_commit(SimpleNamespace(sealed=sealed), page)  # type: ignore[arg-type]
        return page

    first = commit()
    assert said(first).authenticated == [f"the sealed code is that of commit {first[:12]}, file by file"]
    assert "a commit with changes beside it" in said(first, dirty=True).problems[0]
    (package / "one.py").write_text("# another")
    second = commit()
    assert said(second).problems == [f"1 sealed file of commit {second[:12]} is another there: one.py"]
    assert "which is not known here" in said("0" * 40).not_checked[0]
