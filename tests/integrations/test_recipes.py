"""The recipes of the documentation run: audit, fix and resume in each framework that is installed.

Those of other packages run where these are installed: ``python examples/recipes/run_all.py``.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how" / "recipes.md"


def runner() -> Any:
    spec = importlib.util.spec_from_file_location("run_all", ROOT / "examples" / "recipes" / "run_all.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN_ALL = runner()
HERE = {"transformers", "accelerate", "lightning"}
"""What the development environment has of the recipes' packages."""


@pytest.mark.parametrize("name", [name for name, needs in RUN_ALL.RECIPES.items() if HERE.issuperset(needs)])
def test_recipe(name: str) -> None:
    if lacking := RUN_ALL.missing(name):
        pytest.skip(f"needs {', '.join(lacking)}")
    shown = RUN_ALL.run(name)
    assert set(shown) >= {"audit", "fix", "resume"}


@pytest.mark.parametrize("name", RUN_ALL.DISTRIBUTED)
def test_recipe_on_two_ranks(name: str) -> None:
    if lacking := RUN_ALL.missing(name):
        pytest.skip(f"needs {', '.join(lacking)}")
    assert RUN_ALL.run(name, ranks=2)["distributed"] == "DDP, two ranks agree"


def test_the_page_names_every_recipe() -> None:
    """And only files that are there."""
    named = set(re.findall(r"(\w+)\.py", PAGE.read_text(encoding="utf-8")))
    files = {path.stem for path in (ROOT / "examples" / "recipes").glob("*.py")}
    assert named == files - {"shared"}
    assert set(RUN_ALL.RECIPES) == files - {"shared", "run_all"}
