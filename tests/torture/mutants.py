"""Mutation testing: the definitions with one small mistake each, and whether the tests notice.

A mutant is one operator, comparison, constant or condition changed in one place of a module's syntax tree. It
exists in memory only: a process of its own imports the changed module in place of the file, whose digest (and
so the compiled kernels) stays what it is, and runs the tests that should notice. One that passes survives.
"""

from __future__ import annotations

import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from torture import Clock, Effort, Trial

HERE = Path(__file__).parent.parent
SOURCE = HERE.parent / "src"
SECONDS = 400  # a mutant that runs longer hangs: noticed

# What is mutated, and the tests that should notice, the quickest first.
TARGETS: dict[str, Sequence[str]] = {
    "halfulp.grids": ("test_grids.py", "test_rounding.py", "test_oracles.py"),
    "halfulp.kernels.reference": ("test_rounding.py", "test_stochastic.py", "test_kernels.py"),
    "halfulp.writeback.policies": (
        "test_writeback_reference.py",
        "test_writeback_optimizers.py",
        "test_writeback_eco.py",
    ),
    "halfulp.study.verdict": ("test_study_verdict.py", "test_study_engine.py"),
    "halfulp.study.validate": ("test_study_forgery.py", "test_study_evidence.py", "test_study_tampering.py"),
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip

Change = Callable[[ast.AST], str]


def changes(node: ast.AST) -> Iterator[Change]:
    """The mistakes that can be made at a node: each changes it and says how."""

    def said(old: object, new: object) -> str:
        return f"{old} to {new}"

    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            other = COMPARISONS.get(type(op))
            if other is not None:

                def compare(n: ast.AST, i: int = i, new: type[ast.cmpop] = other) -> str:
                    assert isinstance(n, ast.Compare)
                    old, n.ops[i] = type(n.ops[i]).__name__, new()
                    return said(old, new.__name__)

                yield compare
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        instead = OPERATORS[type(node.op)]

        def operate(n: ast.AST, new: type[ast.operator] = instead) -> str:
            assert isinstance(n, ast.BinOp | ast.AugAssign)
            old, n.op = type(n.op).__name__, new()
            return said(old, new.__name__)

        yield operate
    elif isinstance(node, ast.BoolOp):

        def both(n: ast.AST) -> str:
            assert isinstance(n, ast.BoolOp)
            old, n.op = type(n.op).__name__, ast.Or() if isinstance(n.op, ast.And) else ast.And()
            return said(old, type(n.op).__name__)

        yield both
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):

        def drop(n: ast.AST) -> str:
            assert isinstance(n, ast.UnaryOp)
            n.operand = ast.UnaryOp(op=ast.Not(), operand=n.operand)
            return "not x to x"

        yield drop
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):

        def constant(n: ast.AST) -> str:
            assert isinstance(n, ast.Constant)
            old = n.value
            n.value = (not old) if isinstance(old, bool) else old + 1
            return said(old, n.value)

        yield constant


def places(tree: ast.AST) -> list[tuple[int, int]]:
    """Every (node, mistake), by their numbers in a walk; types and what errors say are left alone."""
    left: set[int] = set()
    for node in ast.walk(tree):
        kept: list[ast.AST | None] = []
        if isinstance(node, ast.Raise):
            kept = [node]
        elif isinstance(node, ast.FunctionDef):
            kept = [node.returns, *(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg))]
            kept += node.decorator_list
        elif isinstance(node, ast.AnnAssign):
            kept = [node.annotation]
        left |= {id(inner) for one in kept if one is not None for inner in ast.walk(one)}
    return [
        (i, j)
        for i, node in enumerate(ast.walk(tree))
        if id(node) not in left
        for j, _ in enumerate(changes(node))
    ]


def mutated(tree: ast.Module, place: tuple[int, int]) -> tuple[ast.Module, str]:
    """The tree with one mistake, and where and what it is."""
    made = copy.deepcopy(tree)
    node = list(ast.walk(made))[place[0]]
    told = list(changes(node))[place[1]](node)
    return ast.fix_missing_locations(made), f"line {getattr(node, 'lineno', 0)}: {told}"


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a tree."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self.tree = name, tree
        self.path = _file(name)

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)  # noqa: S102  # our own source, one mistake


def _file(name: str) -> Path:
    return SOURCE.joinpath(*name.split(".")).with_suffix(".py")


def notices(name: str, tree: ast.Module | None, tests: Sequence[str]) -> bool:
    """Whether the tests fail with the tree in place of the module. In a fork, which has the imports."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.alarm(SECONDS)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        code = 1
        try:
            if tree is not None:
                sys.meta_path.insert(0, Instead(name, tree))
            import pytest

            files = [str(HERE / test) for test in tests]
            chosen = ["-m", "not slow and not large", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            code = int(pytest.main([*chosen, "-p", "no:randomly", *files]))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0)


def trials(effort: Effort) -> Iterator[Trial]:
    # What every child needs, before the forks: nothing of halfulp, and no plugin of pytest (it would warn).
    import numba  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert not any(name == target for name in sys.modules for target in TARGETS), "import order"
    for name, tests in TARGETS.items():
        if not effort.wants(name):
            continue
        clock = Clock()
        tree = ast.parse(_file(name).read_text())
        found = places(tree)
        chosen = random.Random(name).sample(found, min(len(found), effort.of(20, len(found))))
        if notices(name, None, tests):
            raise SystemExit(f"{tests} fail on {name} as it is")
        survivors = []
        for place in chosen:
            made, told = mutated(tree, place)
            if not notices(name, made, tests):
                survivors.append(told)
                print(f"survived: {name} {told}", flush=True)
        killed = len(chosen) - len(survivors)
        note = f"{killed / len(chosen):.0%} noticed, of {len(found)} possible"
        note += f"; survived: {'; '.join(survivors)}" if survivors else ""
        yield Trial("Mutants noticed", f"`{name}`", len(chosen), 0, clock(), note)
