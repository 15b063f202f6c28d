"""Nothing that is read can run: what ruff does not see. (It sees exec, eval, pickles and yaml.load.)"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(p for place in ("src", "examples", "benchmarks") for p in (ROOT / place).rglob("*.py"))
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def hazards(tree: ast.AST) -> list[str]:
    """What could run code from a file, line by line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        found += [f"imports {n}" for n in names if n.partition(".")[0] in PICKLING]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            owner = ast.unparse(node.func.value)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if owner == "torch" and given.get("weights_only") != "True":
                found.append(f"line {node.lineno}: torch.load without weights_only=True")
            if owner in ("np", "numpy") and given.get("allow_pickle", "False") != "False":
                found.append(f"line {node.lineno}: numpy.load that allows pickles")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_file_runs_what_it_reads(file: Path) -> None:
    assert hazards(ast.parse(file.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from dill import loads", "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)", "np.load('x', allow_pickle=True)",
        "def f():\n    import marshal",
    ],
)  # fmt: skip
def test_the_lint_sees(code: str) -> None:
    assert len(hazards(ast.parse(code))) == 1


def test_what_is_allowed() -> None:
    code = "import json\nimport torch\ntorch.load('x', weights_only=True)\nnp.load('x')\nmodel.load('x')"
    assert hazards(ast.parse(code)) == []
