"""What the paper adds to the library: its studies by name, its command, and modules by their former names."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from audit_command import Halfulp
from study.samples import SMALL, study_file

import halfulp as hu
from halfulp.errors import UsageError
from halfulp.paper import plugin
from halfulp.study import engine, loading, provenance
from halfulp.study.declaration import Protocol
from halfulp.study.loading import REGISTRY
from halfulp.study.validate import validate

RESULTS = Path(__file__).parents[2] / "results" / "studies"
MODULES = Path(plugin.__file__).parent / "studies"


def test_every_study_is_listed(halfulp: Halfulp) -> None:
    """Modules of studies that define ``STUDY``, the plug-in, and the command say the same."""
    defined = {
        f"halfulp.paper.studies.{path.stem}"
        for path in MODULES.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STUDY"
    }
    assert defined == set(plugin.STUDIES.values())
    code, text, _ = halfulp("study", "list")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == sorted(REGISTRY) == sorted(plugin.STUDIES)


def test_registered_studies_load() -> None:
    for name in REGISTRY:
        study = loading.load(name).study
        assert study.name == name
        for scale in study.scales:
            Protocol.of(study, scale)


def test_committed_studies_declare_what_was_sealed() -> None:
    """The protocols of committed studies, byte for byte, wherever the study still declares the same."""
    same = 0
    for folder in sorted(RESULTS.iterdir()):
        content = json.loads((folder / "protocol.json").read_text())
        if "evidence" in content:
            continue
        assert set(content) == {
            "config", "data", "estimands", "format", "gates", "not_claimed", "question", "retries", "rules",
            "scale", "stages", "study", "threads", "units",
        }  # fmt: skip
        if content["study"] in REGISTRY:
            study = loading.load(content["study"]).study
            same += Protocol.of(study, content["scale"]).bytes == (folder / "protocol.json").read_bytes()
    assert same >= 3


def test_the_closure_of_a_registered_study() -> None:
    """Its module with its table, what that imports, and nothing that only shows numbers."""
    paths = provenance.closure(None, "halfulp.paper.studies.emulator")
    names = {path.relative_to(provenance.PACKAGE).as_posix() for path in paths}
    assert {"paper/studies/emulator.py", "paper/studies/claims.py", "kernels/reference.py"} <= names
    unwanted = (
        "report/",
        "paper/report/",
        "paper/panels",
        "drawing",
        "paper/studies/cnn",
        "paper/studies/__init__",
        "cli",
    )
    assert not [name for name in names if name.startswith(unwanted)]


def test_the_page_without_matplotlib(halfulp: Halfulp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, error = halfulp("paper")
    assert code == hu.UsageError.exit_code
    assert "This needs matplotlib, which is not installed. Run: pip install matplotlib" in error


IMPORTS = {
    "halfulp.models.decoder": ("from halfulp.models.decoder import Decoder", "models.decoder"),
    "halfulp.models": ("from halfulp.models import decoder", "models"),
    "halfulp.arms.masks": ("from halfulp.arms.masks import Ranked", "arms.mask_recipes"),
    "halfulp.audit.trust": ("from halfulp.audit import trust", "trust"),
    "halfulp.measures.values": ("import halfulp.measures.values as values", "values"),
    "halfulp.studies.emulator": ("from halfulp.studies.emulator import STUDY as OTHER", "studies.emulator"),
}
"""By a former name: how a file imports it, and where it is in the paper's folder."""


def forget_former_names() -> None:
    for name in [m for m in sys.modules if m.startswith((*plugin.FORMER, "halfulp_file_"))]:
        del sys.modules[name]


@pytest.fixture
def _nothing_imported() -> Iterator[None]:
    forget_former_names()
    yield
    forget_former_names()


@pytest.mark.usefixtures("_nothing_imported")
@pytest.mark.parametrize("name", IMPORTS)
def test_a_closed_study_finds_modules_by_their_former_names(name: str, tmp_path: Path) -> None:
    """What is closed still validates; a new study is told that there is no such module."""
    statement, now = IMPORTS[name]
    out, path = tmp_path / "out", study_file(tmp_path, f"{statement}\n{SMALL}")
    with pytest.raises(UsageError, match=r"cannot be loaded: (ModuleNotFound|Import)Error: .*halfulp"):
        loading.load(str(path))
    loading.allow_former_names(path.read_bytes())  # as it was when these were the names
    engine.run(loading.load(str(path)), "small", out, executor="inline")
    forget_former_names()
    assert validate(out).exit_code == 0
    assert sys.modules[name] is importlib.import_module(f"halfulp.paper.{now}")


def test_every_study_can_be_planned_at_every_scale() -> None:
    """Cells are told apart by their configs: none of another kind is taken for a run of a decoder."""
    for name in plugin.STUDIES:
        study = loading.load(name).study
        for scale in study.scales:
            cells = [c.config for stage in study.stages for c in study.cells(scale, stage.name)]
            assert all(plugin.effort(config).updates >= 0 for config in cells), name
