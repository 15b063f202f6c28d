"""Mutation testing of the C++ kernels: their sources with one small mistake each, built, and tested.

As ``mutants`` does for Python, but on text: an operator between spaces, a number or a truth value of a line
that the compiler sees for this machine's best target. The unit with the mistake is compiled for that target
and linked with the objects of all others as they are; of a header the units that include it, the quickest to
compile first, until one lets the mistake be noticed. A fork of one pytest session loads the library that
comes out and runs the tests that call a kernel of the unit, the quickest first, and then those that are slow
(by the table of durations). What does not compile is no mutant. ``survivors.toml`` explains here, too, and
the long form keeps what was noticed.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import durations
import pytest

from halfulp.kernels import native
from halfulp.kernels.native import build
from torture import Clock, Effort, Trial
from torture.mutants import HANGS, HERE, Mistake, Noticed, explained

TESTS = (
    "kernels/test_native.py",
    "kernels/test_kernels.py",
    "kernels/test_writing.py",
    "kernels/test_codes.py",
    "kernels/test_threads.py",
    "kernels/test_rounding.py",
    "kernels/test_scales.py",
    "kernels/test_stochastic.py",
    "kernels/test_auditing.py",
    "kernels/test_scoring.py",
    "kernels/test_oracles.py",
    "kernels/test_onepass.py",
    "writeback/test_onepass.py",
    "writeback/test_chunked.py",
    "audit/test_rehearsals.py",
    "checkpoints/test_check.py",
)

INSTEAD = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/",
    "/": "*", "%": "*", "&": "|", "|": "&", "^": "&", "<<": ">>", ">>": "<<", "&&": "||", "||": "&&",
    "+=": "-=", "-=": "+=", "|=": "&=", "&=": "|=", "true": "false", "false": "true",
}  # fmt: skip
_SYMBOLS = "|".join(re.escape(op) for op in sorted(INSTEAD, key=len, reverse=True) if not op.isalpha())
TOKENS = re.compile(
    rf"(?<= )(?P<operator>{_SYMBOLS})(?= )|\b(?P<word>true|false)\b|(?<![\w.])(?P<number>\d+)(?![\w.])"
    r"|(?<![\w.])(?P<hex>0x[0-9A-Fa-f]+)(?![\w.])|(?<=p)(?P<exponent>[-+]?\d+)(?=f?\b)|(?P<no>!)(?=[\w(])"
)
_SILENT = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*"
    r"|\btemplate <[^\n]*?>(?= )|\bstatic_assert\([^\n]*",
    re.DOTALL | re.MULTILINE,
)

TABLE = durations.read()
Place = tuple[int, int]


def places(source: str) -> list[Place]:
    """Return line and column (from 0) of every token that a mistake can be made of."""
    code = _SILENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)
    return [(n, m.start()) for n, line in enumerate(code.split("\n"), start=1) for m in TOKENS.finditer(line)]


def mutated(source: str, place: Place) -> tuple[str, Mistake]:
    """Return the source with one mistake, and what that is."""
    lines = source.split("\n")
    line, column = place
    found = next(m for m in TOKENS.finditer(lines[line - 1]) if m.start() == column)
    old = found[0]
    new = INSTEAD.get(old, "")
    if found["number"] or found["exponent"]:
        new = str(int(old) + 1)
    elif found["hex"]:
        new = hex(int(old, 16) + 1)
    lines[line - 1] = lines[line - 1][:column] + new + lines[line - 1][found.end() :]
    return "\n".join(lines), Mistake(line, column, f"{old} to {new or 'nothing'}")


@dataclass
class Units:
    """How the kernels are compiled for one target, and the objects of the sources as they are."""

    folder: Path
    target: str
    compiler: list[str]
    flags: dict[str, list[str]] = field(default_factory=dict)
    """Of each unit that belongs to the target or to all: how it is compiled."""
    objects: dict[str, Path] = field(default_factory=dict)
    """Every object that the library is linked from, by the name of its unit and target."""

    def prepare(self) -> None:
        shutil.copytree(build.HERE, self.folder, ignore=shutil.ignore_patterns("built", "*.py", "__py*"))
        units = list(build._units(self.compiler))
        with ThreadPoolExecutor(2) as pool:  # found where the library was built, if it was
            built = pool.map(lambda u: build._compiled(self.compiler, build.HERE / "built", *u), units)
        self.objects = {name: made for (_, name, _), made in zip(units, built, strict=True)}
        for source, name, flags in units:
            if name.endswith("." + self.target) or source.stem in build.ONCE:
                self.flags[source.stem] = [*build.FLAGS, *flags, "-O1"]

    def including(self, file: str) -> list[str]:
        """Return the units that a file is part of, the quickest to compile first."""
        if file.endswith(".cpp"):
            return [Path(file).stem]

        def reaches(name: str) -> bool:
            parts = re.findall(r'#include "(\w+\.h)"', (build.HERE / name).read_text())
            return file in parts or any(reaches(part) for part in parts)

        cost = {unit: (build.HERE / f"{unit}.cpp").stat().st_size for unit in self.flags}
        return sorted((unit for unit in self.flags if reaches(f"{unit}.cpp")), key=lambda u: cost[u])

    def seen(self, file: str) -> set[int]:
        """Return the lines of a file that the compiler sees."""
        unit = self.including(file)[0]
        command = [*self.compiler, *self.flags[unit], "-E", f"{unit}.cpp"]
        text = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout
        found, here, number = set(), False, 0
        for line in text.split("\n"):
            if marker := re.match(r'# (\d+) "([^"]*)"', line):
                number, here = int(marker[1]), Path(marker[2]).name == file
            else:
                found |= {number} if here and line.strip() else set()
                number += 1
        return found

    def library(self, file: str, text: str, unit: str) -> Path | None:
        """Build the library with this text of a file in one unit; None where the compiler refuses."""
        place = self.folder / file
        original = place.read_text()
        made, out = self.folder / "mutant.o", self.folder / f"mutant-{time.monotonic_ns()}.so"
        try:
            place.write_text(text)
            command = [*self.compiler, *self.flags[unit], "-c", f"{unit}.cpp", "-o", str(made)]
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        finally:
            place.write_text(original)
        if done.returncode:
            return None
        name = unit if unit in build.ONCE else f"{unit}.{self.target}"
        linked = [str(p) for p in ({**self.objects, name: made}).values()]
        subprocess.run([*self.compiler, "-shared", *linked, *build._LINKED, "-o", str(out)], check=True)
        return out


def kernels_of(unit: str) -> set[str]:
    """Return the names of the entry points of a unit; of the core's, of every one."""
    text = (build.HERE / f"{unit}.cpp").read_text()
    own = re.findall(r"^KERNEL(?:_OF_TYPE)?\((\w+)", text, re.MULTILINE)
    return (
        set(native.CALLS)
        if unit == "core"
        else {*own, *re.findall(r"^PUBLIC .*?halfulp_(\w+)\(", text, re.M)}
    )


class Noted:
    """The library, with a note of every entry point that is called."""

    def __init__(self, library: native.Library) -> None:
        self.called: set[str] = set()
        self.library = library._replace(
            kernels={k: self.noting(k, f) for k, f in library.kernels.items()}, opened=self
        )
        self.opened = library.opened

    def noting(self, name: str, function: Any) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            self.called.add(name)
            return function(*given)

        return call

    def __getattr__(self, name: str) -> Any:
        self.called.add(name.removeprefix("halfulp_"))
        return getattr(self.opened, name)


class Session:
    """A plugin of pytest that has the tests collected once and runs some of them in forks."""

    def __init__(self, work: Callable[[Session], None], target: str) -> None:
        self.work, self.target = work, target
        self.items: list[pytest.Item] = []
        self.known: dict[str, tuple[float, list[str]]] = {}
        self.failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        others = {*build.targets(), "off"} - {self.target}
        self.items = [i for i in items if not any(f"[{o}-" in i.name or f"[{o}]" in i.name for o in others)]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def forked(
        self, library: Path | None, items: Sequence[pytest.Item], seconds: float, out: Path
    ) -> int | None:
        """Run tests, until one fails, in a fork with another library: its exit code; None: it was killed."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        code = 1
        try:
            os.setpgid(0, 0)
            signal.alarm(int(seconds))
            quiet = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            if library is not None:
                native._file = lambda: library  # type: ignore[assignment]
            native.library.cache_clear()
            code = self._all(items, None if library is not None else out.with_suffix(".json"))
        finally:
            os._exit(code)

    def _all(self, items: Sequence[pytest.Item], note: Path | None) -> int:
        """Run tests until one fails; note what each calls, and how long it takes."""
        notes: list[Noted] = []
        if note is not None:
            real = native.library.__wrapped__

            def noted() -> native.Library | None:
                found = real()
                notes.extend([Noted(found)] if found is not None else [])
                return found and notes[-1].library

            native.library = functools.cache(noted)  # type: ignore[assignment]
        found = {}
        for item, after in zip(items, [*items[1:], None], strict=True):
            began = time.perf_counter()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
            called = {name for one in notes for name in one.called}
            for one in notes:
                one.called.clear()
            found[item.nodeid] = (time.perf_counter() - began, sorted(called))
            if self.failed:
                print(item.nodeid)
                return 1
        if note is not None:
            note.write_text(json.dumps(found))
        return 0

    def comers(self, unit: str) -> list[pytest.Item]:
        """Return the tests that call a kernel of a unit, the quickest first, and all that are slow."""
        wanted = kernels_of(unit)
        quick = [i for i in self.items if i.nodeid in self.known and wanted & set(self.known[i.nodeid][1])]
        return sorted(quick, key=self.seconds) + self.slow()

    def slow(self) -> list[pytest.Item]:
        return [i for i in self.items if i.get_closest_marker("slow")]

    def seconds(self, item: pytest.Item) -> float:
        """Return how long a test takes: as measured, or by the table."""
        if item.nodeid in self.known:
            return self.known[item.nodeid][0]
        function = durations.function_of(item.nodeid)
        return TABLE.seconds[function] / max(TABLE.tests[function], 1)


def attack(file: str, session: Session, units: Units, effort: Effort) -> Trial:
    """All mutants of a source, or some."""
    clock, source = Clock(), (build.HERE / file).read_text()
    lines, seen = source.split("\n"), units.seen(file)
    found = [place for place in places(source) if place[0] in seen]
    order = random.Random(file).sample(found, len(found))
    tried = noticed = same = before = refused = 0
    survivors, known, kept = [], explained(file), Noticed(file, source, effort)
    for place in order:
        if tried >= effort.of(3, len(found)):
            break
        text, mistake = mutated(source, place)
        key = mistake.key(lines)
        if key in known:
            outcome = "same"
        elif place in kept.places:
            outcome = "before"
        else:
            outcome = _tried(file, text, session, units, effort)
        refused += outcome == "refused"
        tried += outcome != "refused"
        same += outcome == "same"
        before += outcome == "before"
        if outcome == "noticed":
            noticed += 1
            kept.add(place)
        elif outcome == "survived":
            survivors.append(f"line {mistake.line}, {key[1]}")
            print(f"survived: {file} line {mistake.line}: {key}", flush=True)
    note = f"{noticed + before} noticed, {same} no mistakes, of {len(found) - refused} possible"
    note += f"; survived: {'; '.join(survivors)}" if survivors else ""
    return Trial("Mutants noticed", f"`{file}` (C++)", tried, len(survivors), clock(), note)


def _tried(file: str, text: str, session: Session, units: Units, effort: Effort) -> str:
    """Whether a mutant is noticed, unit by unit; refused where it does not compile."""
    compiled = False
    for unit in units.including(file):
        library = units.library(file, text, unit)
        if library is None:
            return "refused"
        compiled = True
        items = session.comers(unit)
        seconds = 60 + HANGS * sum(map(session.seconds, items))
        code = session.forked(library, items, seconds, effort.folder / "told")
        library.unlink()
        if code != 0:
            return "noticed"
    return "survived" if compiled else "refused"


def trials(effort: Effort) -> Iterator[Trial]:
    import torch

    torch.set_num_threads(1)
    library = native.library()
    compiler = build.compiler()
    if library is None or compiler is None:
        return
    units = Units(effort.folder / "native", library.name, compiler)
    files = sorted(p.name for p in build.HERE.iterdir() if p.suffix in (".cpp", ".h"))
    files = [file for file in files if effort.wants(file)]
    made: list[Trial] = []

    def work(session: Session) -> None:
        out = effort.folder / "told"
        slow = set(session.slow())
        if session.forked(None, [i for i in session.items if i not in slow], 3600, out) != 0:
            raise SystemExit(f"the kernels' tests fail as they are:\n{out.read_text()[-2000:]}")
        session.known = json.loads(out.with_suffix(".json").read_text())
        for file in files:
            made.append(attack(file, session, units, effort))
            print(made[-1], flush=True)

    if files:
        units.prepare()
        chosen = ["-m", "not large", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-s"]
        chosen += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # halfulp is there already
        pytest.main([*chosen, *(str(HERE / test) for test in TESTS)], plugins=[Session(work, library.name)])
    yield from made
