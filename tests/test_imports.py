"""Imports point one way: every package of halfulp knows only those to its left, lazy imports included.

The paper's folder has an order of its own, and nothing outside knows it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import halfulp

ROOT = Path(halfulp.__file__).parent

ORDER = (
    ("contexts", "version", "text", "plugins"),
    ("errors",),
    ("canonical", "deprecation", "files", "outputs"),
    ("documents",),
    ("tensors",),
    ("numbers",),
    ("kernels",),
    ("measures",),
    ("checkpoints",),
    ("trace",),
    ("writeback",),
    ("verdicts",),
    ("audit",),
    ("pilots",),
    ("allocation", "contract", "data", "drawing"),
    ("integrations",),
    ("study",),
    ("report",),
    ("demo", "selftest"),
    ("cli",),
    ("__main__",),
    ("paper",),
    (
        "paper.panels",
        "paper.dominance",
        "paper.values",
        "paper.tokens",
        "paper.certificates",
        "paper.trust",
    ),
    ("paper.models",),
    ("paper.arms",),
    ("paper.studies",),
    ("paper.report", "paper.effort"),
    ("paper.plugin",),
)
"""Leftmost first; those in one place know nothing of each other."""
PLACE = {name: i for i, names in enumerate(ORDER) for name in names}


def package(module: str) -> str:
    """The package of halfulp that a module belongs to, in the paper's folder the room; empty for halfulp."""
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["paper"] else 1])


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("halfulp", *path.relative_to(ROOT).with_suffix("").parts)
        found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


def imported(tree: ast.AST, known: set[str]) -> set[str]:
    """The modules of halfulp that a module imports, anywhere in it but for type checkers."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "halfulp"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "halfulp":
            for a in node.names:
                inner = f"{node.module}.{a.name}"
                found.add(inner if inner in known else str(node.module))
    return found


ALL = modules()
KNOWN = {name for name, _ in ALL}
EDGES = [
    (name, other)
    for name, path in ALL
    for other in sorted(imported(ast.parse(path.read_text(encoding="utf-8")), KNOWN))
]


def test_every_package_has_a_place() -> None:
    assert {package(name) for name in KNOWN} - {""} == set(PLACE)


@pytest.mark.parametrize("name", sorted({package(n) for n in KNOWN} - {""}))
def test_imports_point_one_way(name: str) -> None:
    """halfulp itself only gathers names, so nothing inside imports it."""
    wrong = [
        (here, other)
        for here, other in EDGES
        if package(here) == name
        and package(other) != name
        and (package(other) == "" or PLACE[package(other)] >= PLACE[name])
    ]
    assert not wrong


def test_only_the_plugins_name_the_paper() -> None:
    """Neither an import nor a text elsewhere: without the folder nothing is missed."""
    outside = [(name, path) for name, path in ALL if not name.startswith("halfulp.paper")]
    naming = [name for name, path in outside if "halfulp.paper" in path.read_text(encoding="utf-8")]
    assert naming == ["halfulp.plugins"]
    assert not [edge for edge in EDGES if edge[1].startswith("halfulp.paper") and edge[0] in dict(outside)]


ALIKE = {"AuditCallback", "ContractCallback", "Lion"}
"""Callbacks of two libraries, called the same for users of both; `halfulp.Lion`, and the plain one in it."""


def test_classes_have_names_of_their_own() -> None:
    """One word for one thing. The parts of kernels are their modules' own, and compiled under these names."""
    places: dict[str, list[str]] = {}
    for name, path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and package(name) != "kernels":
                places.setdefault(node.name, []).append(name)
    twice = {name: where for name, where in places.items() if len(where) > 1 and name not in ALIKE}
    assert not twice
