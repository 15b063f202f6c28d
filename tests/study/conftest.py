"""What the tests of studies share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from study.samples import quick_identity, run, study_file

from halfulp.study import provenance

ENVIRONMENT = provenance.environment()  # asked once: it reads what every library says of itself


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_identity(monkeypatch)
    monkeypatch.setattr(provenance, "environment", lambda: ENVIRONMENT)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study, sealed, run and closed."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        quick_identity(patch)
        run(study_file(folder), folder / "out", "smoke")
    return folder / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"
