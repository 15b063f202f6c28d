"""A stranger's path in an empty environment: the wheel, the demo, the five-minute start, the how-tos.

As the pages write it, by the pages' own blocks. Needs minutes, and a package index for the dependencies:
``make stranger``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from environments import ROOT, empty, said, wheel
from test_docs import BLOCK, EXTRA

pytestmark = [pytest.mark.large, pytest.mark.timeout(3600)]

PAGES = [ROOT / "docs" / "start.md", *sorted((ROOT / "docs" / "how").glob("*.md"))]


def extras_of(page: Path) -> list[str]:
    """What the page says to install beside the wheel: ``pip install -c constraints.txt '.[...]'``."""
    return [m[1] for m in EXTRA.finditer(page.read_text())]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stranger") / "environment"


def test_the_demo(environment: Path, package: Path, tmp_path: Path) -> None:
    """Straight after the installation: kernels are compiled, and the story is told to its end."""
    found = empty(environment, package)
    installed = said([str(found / "python"), "-m", "pip", "list", "--format=freeze"], tmp_path)
    assert "pytest==" not in installed
    assert "halfulp==" in installed
    assert said([str(found / "halfulp"), "demo"], tmp_path)


@pytest.mark.parametrize("page", sorted(PAGES, key=lambda p: bool(extras_of(p))), ids=lambda p: p.stem)
def test_a_page_as_written(environment: Path, package: Path, tmp_path: Path, page: Path) -> None:
    """Files, commands and Python blocks in their order. Pages that need nothing more come first."""
    found = empty(environment, package, *extras_of(page))
    place = {"PATH": f"{found}{os.pathsep}{os.environ['PATH']}"}
    for number, (language, title, code) in enumerate(m.groups() for m in BLOCK.finditer(page.read_text())):
        if language == "python":
            (tmp_path / (title or f"block{number}.py")).write_text(code)
            if not title:
                said([str(found / "python"), f"block{number}.py"], tmp_path, **place)
        elif language == "bash":
            said(["bash", "-euo", "pipefail", "-c", code], tmp_path, **place)
