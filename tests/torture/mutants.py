"""Mutation testing: the definitions with one small mistake each, and whether the tests notice.

A mutant is one operator, comparison, constant or condition changed in one place of a module's syntax tree. It
exists in memory only: a process of its own imports the changed module in place of the file, whose digest (and
so the compiled kernels) stays what it is, and runs the tests that should notice. Those that come to the
changed line, as a first run of the module as it is has found, go first, the quickest ahead; then the rest of
the developer's loop. A mutant that passes survives. It is lost, unless ``survivors.toml`` says why it is no
mistake: a line and a change there stand for mutants of which a person has seen that they do the same.

All mutants of a module take half an hour. So the long form keeps which were noticed, beside the digest of
the module's text (``results/mutants``), and tries the others: it can be stopped and gone on with, and a test
that is added costs only the survivors. ``--again`` tries all; the short form keeps nothing.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from torture import ROOT, Clock, Effort, Trial

HERE = Path(__file__).parent.parent
SOURCE = HERE.parent / "src"
NOT_LOADED = 99  # pytest's own codes are below
HANGS = 5.0  # a mutant that takes so many times as long as the module as it is does not end: noticed
EXPLAINED = Path(__file__).parent / "survivors.toml"
NOTICED = ROOT / "results" / "mutants"

POLICY_TESTS = (
    "writeback/test_policies.py",
    "writeback/test_reference.py",
    "writeback/test_optimizers.py",
    "writeback/test_eco.py",
    "writeback/test_errors.py",
    "writeback/test_nonfinite.py",
    "writeback/test_state_dict.py",
    "writeback/test_one_file.py",
    "writeback/test_narrow.py",
    "writeback/test_storage.py",
    "writeback/test_packed.py",
    "writeback/test_edits.py",
    "writeback/test_mask.py",
    "writeback/test_tile_master.py",
    "writeback/test_onepass.py",
    "kernels/test_onepass.py",
)
REFERENCE_TESTS = (
    "kernels/test_rounding.py",
    "kernels/test_stochastic.py",
    "kernels/test_kernels.py",
    "kernels/test_writing.py",
    "kernels/test_auditing.py",
    "kernels/test_scoring.py",
    "kernels/test_codes.py",
    "kernels/test_scales.py",
)
POLICIES = ("policy", "nearest", "stochastic", "kahan", "eco", "master", "tile_master", "remainder", "dqt")
# What is mutated, and the tests that should notice, the quickest first.
TARGETS: dict[str, Sequence[str]] = {
    "halfulp.numbers.grids": ("numbers/test_grids.py", "kernels/test_rounding.py", "kernels/test_oracles.py"),
    "halfulp.numbers.grid_names": (
        "numbers/test_grids.py",
        "numbers/test_spellings.py",
        "kernels/test_rounding.py",
    ),
    "halfulp.numbers.scaling": (
        "numbers/test_grids.py",
        "kernels/test_scales.py",
        "kernels/test_rounding.py",
    ),
    **dict.fromkeys(("halfulp.kernels.reference_rounding", "halfulp.kernels.reference"), REFERENCE_TESTS),
    **{f"halfulp.writeback.policies.{name}": POLICY_TESTS for name in POLICIES},
    "halfulp.study.gates": ("study/test_gates.py", "study/test_engine.py", "study/test_evidence.py"),
    "halfulp.study.validate": (
        "study/test_forgery.py",
        "study/test_evidence.py",
        "study/test_tampering.py",
        "study/test_publish.py",
        "study/test_executor.py",
    ),
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
    """Every (node, mistake), by their numbers in a walk. Types, decorators, what errors say and what cannot
    happen (``assert``) are left alone."""
    left: set[int] = set()
    for node in ast.walk(tree):
        kept: list[ast.AST | None] = []
        if isinstance(node, ast.Raise | ast.Assert):
            kept = [node]
        elif isinstance(node, ast.FunctionDef):
            kept = [node.returns, *(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg))]
            kept += node.decorator_list
        elif isinstance(node, ast.ClassDef):
            kept = [*node.decorator_list]
        elif isinstance(node, ast.AnnAssign):
            kept = [node.annotation]
        left |= {id(inner) for one in kept if one is not None for inner in ast.walk(one)}
    return [
        (i, j)
        for i, node in enumerate(ast.walk(tree))
        if id(node) not in left
        for j, _ in enumerate(changes(node))
    ]


@dataclass(frozen=True)
class Mistake:
    """Where it is and what."""

    line: int
    column: int
    change: str

    def key(self, source: Sequence[str]) -> tuple[str, str]:
        """The text of its line, and what becomes of which part: as ``survivors.toml`` has them."""
        text = source[self.line - 1]
        return text.strip(), f"{self.column - len(text) + len(text.lstrip())}: {self.change}"


def mutated(tree: ast.Module, place: tuple[int, int]) -> tuple[ast.Module, Mistake]:
    """The tree with one mistake, and what that is."""
    made = copy.deepcopy(tree)
    node: Any = list(ast.walk(made))[place[0]]
    told = list(changes(node))[place[1]](node)
    return ast.fix_missing_locations(made), Mistake(node.lineno, node.col_offset, told)


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


class Watch:
    """A plugin of pytest: how long each test takes, and to which lines of a file it comes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.found: dict[str, dict[str, Any]] = {}
        self.lines: set[int] = set()

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._line if frame.f_code.co_filename == self.path else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self.lines.add(frame.f_lineno)
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines = set()
        began = time.perf_counter()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            self.found[item.nodeid] = {"seconds": time.perf_counter() - began, "lines": sorted(self.lines)}


class First:
    """A plugin of pytest: what comes to a line first, the quickest ahead; the rest without what is slow. All
    of it for a line to which no test comes by itself: it is run when the module is imported."""

    def __init__(self, seen: dict[str, dict[str, Any]], line: int) -> None:
        self.seen, self.line = seen, line

    def rank(self, item: pytest.Item) -> tuple[bool, float]:
        known = self.seen.get(item.nodeid, {"seconds": 0.0, "lines": ()})
        return self.line not in known["lines"], known["seconds"]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        imported = all(self.rank(item)[0] for item in items)
        items[:] = sorted(
            (i for i in items if imported or not self.rank(i)[0] or not i.get_closest_marker("slow")),
            key=self.rank,
        )


def forked(
    name: str, tree: ast.Module | None, tests: Sequence[str], plugin: object, out: Path, seconds: float = 0.0
) -> int | None:
    """pytest's exit code with the tree in place of the module, in a fork; nothing if that was killed, as it
    is after so many seconds."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.alarm(int(seconds))
        quiet = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        code = 1
        try:
            if tree is not None:
                sys.meta_path.insert(0, Instead(name, tree))
            files = [str(HERE / test) for test in tests]
            chosen = ["-m", "not large", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
            chosen.append("--assert=plain")  # pytest would load modules itself, to rewrite their assertions
            code = int(pytest.main([*chosen, *files], plugins=[plugin]))
            if tree is not None and not isinstance(sys.modules[name].__loader__, Instead):
                code = NOT_LOADED
            if isinstance(plugin, Watch):
                out.with_suffix(".json").write_text(json.dumps(plugin.found))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def explained(name: str) -> dict[tuple[str, str], str]:
    """Of a module: line and change of each mutant that is no mistake, and why."""
    rows = tomllib.loads(EXPLAINED.read_text()).get(name, [])
    return {(row["line"], change): row["why"] for row in rows for change in row["changes"]}


class Noticed:
    """The mutants of a module's text that tests have noticed, by their places; kept in the long form."""

    def __init__(self, name: str, source: str, effort: Effort) -> None:
        self.file = NOTICED / f"{name}.json" if effort.long else None
        self.digest = hashlib.sha256(source.encode()).hexdigest()
        self.places: set[tuple[int, int]] = set()
        if self.file is not None and self.file.is_file() and not effort.again:
            held = json.loads(self.file.read_text())
            if held["sha256"] == self.digest:
                self.places = {(i, j) for i, j in held["noticed"]}

    def add(self, place: tuple[int, int]) -> None:
        self.places.add(place)
        if self.file is not None:
            self.file.parent.mkdir(exist_ok=True)
            aside = self.file.with_suffix(".part")
            aside.write_text(json.dumps({"sha256": self.digest, "noticed": sorted(self.places)}) + "\n")
            aside.replace(self.file)


def attack(name: str, tests: Sequence[str], effort: Effort) -> Trial:
    """All mutants of a module, or some."""
    clock, began = Clock(), time.perf_counter()
    source = _file(name).read_text()
    tree, lines = ast.parse(source), source.splitlines()
    out = effort.folder / name
    if forked(name, None, tests, Watch(_file(name)), out) != 0:
        raise SystemExit(f"{tests} fail on {name} as it is:\n{out.read_text()[-2000:]}")
    limit = 60 + HANGS * clock()
    seen = json.loads(out.with_suffix(".json").read_text())
    out.with_suffix(".json").unlink()
    found = places(tree)
    chosen = random.Random(name).sample(found, min(len(found), effort.of(20, len(found))))
    noticed = same = before = 0
    survivors, known, kept = [], explained(name), Noticed(name, source, effort)
    for number, place in enumerate(chosen, start=1):
        if number % 50 == 0:
            print(f"{name}: {number} of {len(chosen)} mutants", flush=True)
        made, mistake = mutated(tree, place)
        key = mistake.key(lines)
        if key in known:
            same += 1
        elif place in kept.places:
            before += 1
        elif (code := forked(name, made, tests, First(seen, mistake.line), out, limit)) != 0:
            if code == NOT_LOADED:
                raise SystemExit(f"{name} was imported from its file and not from the mutant")
            noticed += 1
            kept.add(place)
        else:
            survivors.append(f"line {mistake.line}, {key[1]}")
            print(f"survived: {name} line {mistake.line}: {key}", flush=True)
    note = f"{noticed + before} noticed, {same} no mistakes, of {len(found)} possible"
    note += f"; survived: {'; '.join(survivors)}" if survivors else ""
    return Trial(
        "Mutants noticed", f"`{name}`", len(chosen), len(survivors), time.perf_counter() - began, note
    )


def trials(effort: Effort) -> Iterator[Trial]:
    # What every child needs, before the forks: nothing of halfulp.
    import numba  # noqa: F401
    import torch

    torch.set_num_threads(1)
    assert not any(name == target for name in sys.modules for target in TARGETS), "import order"
    for name, tests in TARGETS.items():
        if effort.wants(name):
            yield attack(name, tests, effort)
