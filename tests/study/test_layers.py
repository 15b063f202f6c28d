"""The engine as a building: imports point one way and stand at the top, rooms are small and well named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import halfulp
import halfulp.study

PACKAGE = Path(halfulp.__file__).parent
ENGINE = Path(halfulp.study.__file__).parent

ORDER = (
    "protocol", "declaration", "loading", "provenance", "ledger", "store", "gates", "evidence", "worker",
    "executor", "publish", "validate", "seal", "engine", "planning",
)  # fmt: skip
"""Every module knows only those before it."""
HELPERS = {
    "canonical", "data", "deprecation", "documents", "errors", "files", "plugins", "text", "version",
}  # fmt: skip
"""What the engine uses of halfulp: nothing of the science."""


def imported(node: ast.AST) -> list[str]:
    """The modules of halfulp that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "halfulp"]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "halfulp":
        below = [f"{node.module}.{alias.name}" for alias in node.names]
        return below if node.module in ("halfulp", "halfulp.study") else [str(node.module)]
    return []


def test_the_modules_are_these() -> None:
    assert {path.stem for path in ENGINE.glob("*.py")} == {"__init__", *ORDER}


@pytest.mark.parametrize("name", ORDER)
def test_imports_stand_at_the_top_and_point_one_way(name: str) -> None:
    tree = ast.parse((ENGINE / f"{name}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for module in imported(node):
            assert node in tree.body, f"{module} is imported inside of something"
            parts = module.split(".")
            if parts[1] == "study":
                assert parts[2] in ORDER[: ORDER.index(name)], module
            else:
                assert parts[1] in HELPERS, module


@pytest.mark.parametrize("name", ORDER)
def test_a_module_fits_in_the_head(name: str) -> None:
    """No module past 500 lines, no function past 60, no name that a module elsewhere has."""
    text = (ENGINE / f"{name}.py").read_text(encoding="utf-8")
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name
    assert [path.parent for path in PACKAGE.rglob(f"{name}.py")] == [ENGINE]
