"""The instruments of ``make torture`` themselves: they attack what they say, and they can find something."""

from __future__ import annotations

import ast
import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torture
from study.samples import quick_identity
from torture import Effort, Trial, disks, forge, fuzz, mutants, native
from torture import readers as kinds

import halfulp as hu


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fuzz.Reader]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "quick_identity", lambda: None)  # which would stay for the tests that follow
        return {reader.name: reader for reader in fuzz.readers(tmp_path_factory.mktemp("fuzz"))}


def test_every_reader_withstands_some_mutants(readers: dict[str, fuzz.Reader], tmp_path: Path) -> None:
    for name, reader in readers.items():
        trial = fuzz.attack(reader, 20, tmp_path / name)
        assert (trial.tried, trial.lost) == (20, 0), trial


def test_crashers_of_the_past(readers: dict[str, fuzz.Reader], tmp_path: Path) -> None:
    """What once got past the readers: ``tests/fixtures/crashers/READER-NUMBER-FILE``."""
    named = {name.replace(" ", "-") + "-": reader for name, reader in readers.items()}
    crashers = sorted(fuzz.CRASHERS.glob("*"))
    assert crashers
    for crasher in crashers:
        start = max((n for n in named if crasher.name.startswith(n)), key=len)
        reader, target = named[start], tmp_path / crasher.name
        if reader.place.is_dir():
            shutil.copytree(reader.place, target)
            (damaged,) = target.rglob(crasher.name.removeprefix(start).partition("-")[2])
        else:
            damaged = target
        damaged.write_bytes(crasher.read_bytes())
        with contextlib.suppress(hu.HalfulpError):
            reader.read(target)


def test_forgeries_are_noticed_by_the_witnesses_that_the_page_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(forge, "quick_identity", lambda: quick_identity(patch))
        told = list(forge.trials(Effort(long=False, folder=tmp_path)))
        assert [t.what for t in told] == list(forge.FORGERIES)
        assert sum(t.lost for t in told) == 0, told


def test_a_witness_that_is_silent_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forge, "FORGERIES", {"nothing": (lambda out: None, {forge.FOLDER})})
    with monkeypatch.context() as patch:
        patch.setattr(forge, "quick_identity", lambda: quick_identity(patch))
        (told,) = forge.trials(Effort(long=False, folder=tmp_path))
    assert told.lost == 3


def test_a_reader_that_crashes_or_dawdles_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "CRASHERS", tmp_path / "crashers")
    file = tmp_path / "it"
    file.write_bytes(b"abcdefgh")

    def read(path: Path) -> None:
        if path.read_bytes() != b"abcdefgh":
            raise ValueError

    trial = fuzz.attack(fuzz.Reader("it", file, read), 10, tmp_path / "attack")
    assert trial.lost > 5
    assert len(list((tmp_path / "crashers").iterdir())) == trial.lost
    assert "crash: it/" in capsys.readouterr().out
    monkeypatch.setattr(fuzz, "SECOND", -1.0)
    assert fuzz.attack(fuzz.Reader("it", file, lambda path: None), 3, tmp_path / "slow").lost == 3


def test_mutants_are_one_mistake_each() -> None:
    source = (
        "def f(x: int = 1) -> int:\n    if x < 3 and not x == 2:\n        return x + 1\n    raise E(2 * x)\n"
    )
    tree = ast.parse(source)
    made = [mutants.mutated(tree, place) for place in mutants.places(tree)]
    texts = {ast.unparse(one) for one, _ in made}
    assert (
        len(texts) == len(made) == 9
    )  # < and not == 2 + and the constants 1, 3, 2, 1; none in what is raised
    assert ast.unparse(tree) not in texts
    assert all("raise E(2 * x)" in text for text in texts)
    assert ast.unparse(tree) == ast.unparse(ast.parse(source))


MUTANT = """
import ast
from pathlib import Path
from torture import mutants
name, out = "halfulp.numbers.spellings", Path(OUT)
source = mutants._file(name).read_text()
for text in (source, source + "grid_name = None"):
    tree = ast.parse(text)
    print(mutants.forked(name, tree, ["numbers/test_spellings.py"], mutants.First({}, 1), out))
"""


def test_tests_run_against_the_mutant(tmp_path: Path) -> None:
    """In a process of its own, which has not imported the module; pytest's own loader does not take it."""
    script = MUTANT.replace("OUT", repr(str(tmp_path / "out")))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    unchanged, mutant = map(int, done.stdout.split())
    assert (unchanged, mutant in (0, mutants.NOT_LOADED)) == (0, False), done.stderr


def test_mutants_of_cpp_are_one_mistake_each() -> None:
    source = (
        "#if A < 4  // not code\n"
        "template <class T, int N> inline int f(T* x, bool y = true) {  // x < 1\n"
        '    if (*x < 3 && !y) return x[0] * 0x1F + g("a < b");\n'
        "    return (int)0x1p-3f;\n}\n"
    )
    made = [native.mutated(source, place) for place in native.places(source)]
    assert len({text for text, _ in made}) == len(made)
    assert [mistake.change for _, mistake in made] == [
        "true to false", "< to <=", "3 to 4", "&& to ||", "! to nothing", "0 to 1", "* to /", "0x1F to 0x20",
        "+ to -", "-3 to -2",
    ]  # fmt: skip
    assert all(
        sum(a != b for a, b in zip(t.split("\n"), source.split("\n"), strict=True)) == 1 for t, _ in made
    )


def test_a_writer_that_is_silent_or_believed_is_found(tmp_path: Path) -> None:
    """On a disk that takes nothing: what says nothing, what says it badly, and half a file."""

    def full(out: Path) -> None:
        raise hu.errors.DiskError("the disk is full")

    def bad(out: Path) -> None:
        raise OSError(28, "full")

    def read(out: Path) -> bytes:
        return b"half"

    assert disks.refused(disks.Writer("it", full, read), tmp_path, "disk is full") == ""
    assert disks.refused(disks.Writer("it", full, read), tmp_path, "quota")
    assert disks.refused(disks.Writer("it", bad, read), tmp_path, "full")
    assert disks.refused(disks.Writer("it", lambda out: None, read), tmp_path, "full", b"whole")
    assert disks.left(disks.Writer("it", full, read), tmp_path, b"whole")
    assert disks.left(disks.Writer("it", full, read), tmp_path, b"half") == ""
    assert disks.left(disks.Writer("it", full, read, lambda found: True), tmp_path, b"whole") == ""


def test_what_is_explained_is_there() -> None:
    """A line that was changed since, or a column that was counted wrong, explains nothing."""
    for path in native.build.HERE.glob("*.[hc]*"):
        source = path.read_text()
        lines = source.split("\n")
        known = native.explained(path.name)
        texts = {line for line, _ in known}
        near = [place for place in native.places(source) if lines[place[0] - 1].strip() in texts]
        assert set(known) <= {native.mutated(source, place)[1].key(lines) for place in near}, path.name
    for name in mutants.TARGETS:
        source = mutants._file(name).read_text()
        tree, lines = ast.parse(source), source.splitlines()
        texts = {line for line, _ in mutants.explained(name)}
        numbers = {i for i, line in enumerate(lines, start=1) if line.strip() in texts}
        walked = list(ast.walk(tree))
        near = [p for p in mutants.places(tree) if getattr(walked[p[0]], "lineno", 0) in numbers]
        possible = {mutants.mutated(tree, place)[1].key(lines) for place in near}
        assert set(mutants.explained(name)) <= possible, name


def test_the_table_keeps_the_most_and_every_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torture, "RESULTS", tmp_path / "torture.json")
    monkeypatch.setattr(torture, "PAGE", tmp_path / "page.md")
    torture.PAGE.write_text(f"before\n{torture.BEGIN}\nold\n{torture.END}\nafter\n")
    torture.keep([Trial("Kill", "it", 100, 0, 1.0)])
    torture.keep([Trial("Kill", "it", 10, 0, 1.0)])
    assert json.loads(torture.RESULTS.read_text())[0]["tried"] == 100
    torture.keep([Trial("Kill", "it", 10, 1, 2.0, "a note", "c0ffee")])
    text = torture.PAGE.read_text()
    assert "| it | 10 | 1 | 2 | c0ffee | a note |" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
