"""The library without the paper's folder: it imports, its commands work, its quick tests pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import halfulp
from halfulp import plugins

TESTS = Path(__file__).parent
QUICK = (
    "allocation/test_masks",
    "audit/test_errors",
    "data/test_data",
    "demo/test_demo",
    "kernels/test_auditing",
    "measures/test_crossings",
    "measures/test_forecasts",
    "numbers/test_grids",
    "numbers/test_streams",
    "report/test_page",
    "report/test_recoveries",
    "report/test_study_page",
    "cli/test_study_command",
    "study/test_gates",
    "study/test_protocol",
    "test_canonical",
    "test_errors",
    "test_fixtures",
    "test_selftest",
    "trace/test_trace",
    "writeback/test_policies",
)
"""Test files of every room of the library that take seconds."""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, compiled kernels included, from which the folder was deleted."""
    source = Path(halfulp.__file__).parent
    copy = tmp_path_factory.mktemp("without") / "src"
    shutil.copytree(source, copy / "halfulp", copy_function=shutil.copy2)
    shutil.rmtree(copy / "halfulp" / "paper")
    return copy


def python(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=TESTS.parent
    )


def test_it_imports_without_the_paper(without: Path) -> None:
    code = "import halfulp, halfulp.plugins; print(halfulp.__file__, halfulp.plugins.installed())"
    said = python(without, "-c", code)
    assert said.stdout.split() == [str(without / "halfulp" / "__init__.py"), "[]"], said.stderr


def test_its_commands_work_without_the_paper(without: Path) -> None:
    shown = python(without, "-m", "halfulp", "--help")
    assert shown.returncode == 0
    assert " audit " in shown.stdout
    assert " paper " not in shown.stdout
    listed = python(without, "-m", "halfulp", "study", "list")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.startswith("This halfulp comes without studies.")
    asked = python(without, "-m", "halfulp", "study", "show", "emulator")
    assert asked.returncode == 2
    assert "There is no study 'emulator'; known: none; or give a file.py of your own." in asked.stderr


def test_its_quick_tests_pass_without_the_paper(without: Path) -> None:
    files = [str(TESTS / f"{name}.py") for name in QUICK]
    options = ("-q", "-m", "not slow and not large", "-p", "no:cacheprovider")
    said = python(without, "-m", "pytest", *options, *files)
    assert said.returncode == 0, said.stdout[-4000:]


def test_a_broken_plugin_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent is fine; there, and without something that it needs, is not."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("absent_room.plugin", "broken_room.plugin"):
        monkeypatch.setattr(plugins, "NAMES", (name,))
        assert plugins.installed() == []
        if name.startswith("broken"):
            (tmp_path / "broken_room").mkdir()
            (tmp_path / "broken_room" / "plugin.py").write_text("import needed_and_missing\n")
            with pytest.raises(ModuleNotFoundError, match="needed_and_missing"):
                plugins.installed()


def test_a_worker_imports_no_command_line() -> None:
    """Finding plug-ins must not cost every cell of a study the start of a command line."""
    code = "import sys, halfulp.study.loading; print([m for m in ('typer', 'click') if m in sys.modules])"
    said = python(Path(halfulp.__file__).parents[1], "-c", code)
    assert said.stdout.strip() == "[]", said.stderr
