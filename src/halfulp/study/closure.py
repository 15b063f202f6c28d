"""Which files of the package a study's numbers can depend on: those that its code imports, and theirs.

Imports are read from the source (`ast`), so lazy ones inside functions count and nothing is run. Importing
``halfulp.grids`` makes a study depend on that module, not on what the package's ``__init__`` happens to
import as well; ``import halfulp``, or a name that ``__init__`` defines, does. Imports for type checkers alone
are left out.

Of the engine, every study depends on the modules that make a record and turn records into a label
(`ENGINE`), and on no others: the registry grows, reports and figures change their looks, and neither is a
study's business. A
module's data goes with it: ``margin.toml`` with ``margin.py``, any other table with its package's
``__init__``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
ROOT = "halfulp"
ENGINE = tuple(
    f"halfulp.study.{name}"
    for name in ("declaration", "evidence", "outcomes", "protocol", "result", "running", "verdict")
)

IMPLIED = {"halfulp.grids": ("halfulp.kernels", "halfulp.events")}
"""What puts itself behind a module's methods without being imported by it (``grids.OPERATIONS``)."""
LOOKS = ("halfulp.drawing", "halfulp.report")
"""How numbers are shown: no number depends on it."""


def closure(content: bytes | None, module: str) -> set[Path]:
    """The files behind a study: from the bytes of its own file, or the module of this package."""
    found: dict[str, Path] = {}
    waiting = [*ENGINE, *([module] if content is None else _imported(content, ""))]
    while waiting:
        name = waiting.pop()
        path = _file(name)
        engine = f"{name}.".startswith("halfulp.study.") and name not in ENGINE
        if path is None or name in found or engine or name.startswith(LOOKS):
            continue
        found[name] = path
        waiting += IMPLIED.get(name, ())
        if name not in ENGINE:
            waiting += _imports(path, name if path.name == "__init__.py" else name.rpartition(".")[0])
    tables = {
        beside
        for path in found.values()
        if path.name == "__init__.py" and path.parent != PACKAGE
        for beside in path.parent.iterdir()
        if beside.is_file() and beside.suffix not in (".py", ".pyc", ".nbi", ".nbc")
    }
    tables |= {table for path in found.values() if (table := path.with_suffix(".toml")).is_file()}
    return {*found.values(), *tables, PACKAGE / "canonical.py"}


@cache
def _file(name: str) -> Path | None:
    """The file of a module of this package; None if there is no such module."""
    if name != ROOT and not name.startswith(f"{ROOT}."):
        return None
    path = PACKAGE.joinpath(*name.split(".")[1:])
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


@cache
def _imports(path: Path, package: str) -> tuple[str, ...]:
    return tuple(_imported(path.read_bytes(), package))


def _imported(content: bytes, package: str) -> Iterator[str]:
    """The modules of this package that a source imports, anywhere in it."""
    for node in _walk(ast.parse(content).body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                if not alias.asname and alias.name.startswith(f"{ROOT}."):
                    yield ROOT  # the name that is bound is the package's
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                below = f"{base}.{alias.name}"
                yield below if _file(below) else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every node, but for the bodies of ``if TYPE_CHECKING``."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _walk(node.orelse)
        else:
            yield from _walk(ast.iter_child_nodes(node))
