"""Every code block in the README and the documentation runs.

A ``python`` block runs by itself, in an empty folder. One with a title is a file; on pages with files, the
``bash`` blocks run one after the other in a folder that holds them. What cannot run here (a cluster, a
download) is ``text``.
"""

from __future__ import annotations

import filecmp
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTIONAL = {"lightning", "ray", "transformers"}


def blocks() -> list[object]:
    found = []
    for page in PAGES:
        alone = [m[3] for m in BLOCK.finditer(page.read_text()) if m[1] == "python" and not m[2]]
        name = page.relative_to(ROOT)
        found += [pytest.param(code, id=f"{name}:{i}") for i, code in enumerate(alone)]
    return found


@pytest.mark.parametrize("code", blocks())
def test_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block runs from top to bottom in an empty folder."""
    monkeypatch.chdir(tmp_path)
    if any(f"from {name}" in code for name in OPTIONAL):
        warnings.simplefilter("ignore")  # of other people's libraries; pytest puts the filters back
    try:
        exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})  # noqa: S102  # our own pages
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if "e4m3@128" in p.read_text() and p.name != "log.md"],  # a diary of dated entries
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_a_scale_is_told_from_a_group(page: Path) -> None:
    """Where ``e4m3@128`` comes first on a page, the page says that 128 is a scale."""
    lines = page.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "e4m3@128" in line)
    told = [i for i, line in enumerate(lines) if re.search("scale of 128|times 128 is cast", line)]
    assert told
    assert min(told) - first < 40


@pytest.mark.parametrize(
    "page", [p for p in PAGES if 'python title="' in p.read_text()], ids=lambda p: str(p.relative_to(ROOT))
)
def test_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """The page's files and commands, in the order in which it shows them."""
    place = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    place["OMP_NUM_THREADS"] = "1"
    for language, title, code in (m.groups() for m in BLOCK.finditer(page.read_text())):
        if language == "python" and title:
            (tmp_path / title).write_text(code)
        elif language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", code]
            done = subprocess.run(
                command, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=570
            )
            assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def test_pictures_are_what_the_library_gives(tmp_path: Path) -> None:
    """The committed pictures are those that their script draws: to the byte where nothing is trained. Sums in
    training may be taken in another order on another machine."""
    pytest.importorskip("matplotlib")
    runpy.run_path(str(ROOT / "docs" / "pictures.py"))["main"](tmp_path)
    assets = ROOT / "docs" / "assets"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in assets.glob("*.svg")}
    exact = ["cell.svg", "dead-zone.svg", "many-steps.svg"]
    assert filecmp.cmpfiles(tmp_path, assets, exact, shallow=False) == (exact, [], [])
