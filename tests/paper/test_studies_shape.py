"""Studies are short declarations over one engine: lengths, tables, and nothing said twice."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import halfulp
from halfulp.study.loading import REGISTRY

ROOT = Path(halfulp.__file__).parent / "paper"
RUN = 6
"""Lines of code that two places may not share."""
FIRST = (
    "__init__", "_timing", "char_gpt", "claims", "cnn", "declared", "emulator", "finite_size", "margin",
    "matched_10k", "midpoint", "phase_diagram", "prospective_modern", "theory", "two_layer",
)  # fmt: skip
"""What is left in `studies/` of the studies that there were before arms were a package."""
BUDGET = 3760
"""Lines of code of these and of all of `arms/`, which serves later studies too, when 5,772 lines with their
docstrings were the budget; docstrings are held by ruff's rules instead."""


def code(path: Path) -> list[str]:
    """The lines of a module but for its docstring, blank lines and comments."""
    text = path.read_text(encoding="utf-8")
    doc = ast.parse(text).body[0]
    assert isinstance(doc, ast.Expr)
    lines = text.splitlines()[doc.end_lineno or 0 :]
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def undocumented(path: Path) -> int:
    """Count the lines of a module but for docstrings, blank lines and comments."""
    text = path.read_text(encoding="utf-8")
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            said.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(x.strip()) and not x.strip().startswith("#") and i not in said for i, x in lines)


@pytest.mark.parametrize("name", ["char_gpt", "matched_10k", "prospective_modern"])
def test_a_decoder_study_is_a_page(name: str) -> None:
    assert len(code(ROOT / "studies" / f"{name}.py")) <= 120


def test_studies_and_arms_stay_short() -> None:
    """A study is a declaration: what many need is in arms once, and neither grows unseen."""
    files = [*(ROOT / "studies" / f"{name}.py" for name in FIRST), *(ROOT / "arms").glob("*.py")]
    assert sum(map(undocumented, files)) <= BUDGET


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_study_is_declared_in_one_place(name: str) -> None:
    """In its module, in Python, by the helpers of `declared`: there is no table beside it."""
    module = ROOT.joinpath(*REGISTRY[name].split(".")[2:]).with_suffix(".py")
    assert not list(module.parent.glob("*.toml"))
    assert not re.search(r"\b(Gate|Rule|Study)\(|\bGate\.of\(", "\n".join(code(module)))


def test_no_code_stands_twice() -> None:
    """Six lines in a row that are the same to the letter, in studies and arms; imports do not count."""
    seen: dict[tuple[str, ...], str] = {}
    twice = []
    for path in sorted([*(ROOT / "studies").glob("*.py"), *(ROOT / "arms").glob("*.py")]):
        lines = [line.strip() for line in code(path)]
        telling = [x for x in lines if re.search(r"\w{2}", x) and not re.match(r"(from|import) ", x)]
        for i in range(len(telling) - RUN + 1):
            window = tuple(telling[i : i + RUN])
            where = seen.setdefault(window, f"{path.name}:{i}")
            if where != f"{path.name}:{i}":
                twice.append((path.name, where, window[0]))
    assert not twice
