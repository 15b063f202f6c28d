"""Every code block in the README and the documentation runs.

A ``python`` block runs by itself, in an empty folder. One with a title is a file; on pages with files, the
``bash`` blocks run one after the other in a folder that holds them. What cannot run here (a cluster, a
download) is ``text``.
"""

from __future__ import annotations

import filecmp
import importlib
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

import halfulp as hu

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXTRA = re.compile(r"pip install -c constraints\.txt '\.\[([a-z,]+)\]'")
OPTIONAL = {"lightning", "ray", "transformers"}


def blocks() -> list[object]:
    found = []
    for page in PAGES:
        alone = [m[3] for m in BLOCK.finditer(page.read_text()) if m[1] == "python" and not m[2]]
        name = page.relative_to(ROOT)
        found += [pytest.param(code, id=f"{name}:{i}") for i, code in enumerate(alone)]
    return found


@pytest.mark.parametrize("code", blocks())
def test_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block runs from top to bottom in an empty folder."""
    monkeypatch.chdir(tmp_path)
    if any(f"from {name}" in code for name in OPTIONAL):
        warnings.simplefilter("ignore")  # of other people's libraries; pytest puts the filters back
    try:
        exec(compile(code, "<documentation>", "exec"), {"__name__": "__main__"})  # noqa: S102  # our own pages
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if "e4m3@128" in p.read_text() and p.name != "log.md"],  # a diary of dated entries
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_a_scale_is_told_from_a_group(page: Path) -> None:
    """Where ``e4m3@128`` comes first on a page, the page says that 128 is a scale."""
    lines = page.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "e4m3@128" in line)
    told = [i for i, line in enumerate(lines) if re.search("scale of 128|times 128 is cast", line)]
    assert told
    assert min(told) - first < 40


@pytest.mark.parametrize(
    "page", [p for p in PAGES if 'python title="' in p.read_text()], ids=lambda p: str(p.relative_to(ROOT))
)
def test_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """The page's files and commands, in the order in which it shows them."""
    place = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    place["OMP_NUM_THREADS"] = "1"
    for language, title, code in (m.groups() for m in BLOCK.finditer(page.read_text())):
        if language == "python" and title:
            (tmp_path / title).write_text(code)
        elif language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", code]
            done = subprocess.run(
                command, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=570
            )
            assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def test_pictures_are_what_the_library_gives(tmp_path: Path) -> None:
    """The committed pictures are those that their script draws: to the byte where nothing is trained. Sums in
    training may be taken in another order on another machine."""
    pytest.importorskip("matplotlib")
    runpy.run_path(str(ROOT / "docs" / "pictures.py"))["main"](tmp_path)
    assets = ROOT / "docs" / "assets"
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in assets.glob("*.svg")}
    exact = ["cell.svg", "dead-zone.svg", "many-steps.svg"]
    assert filecmp.cmpfiles(tmp_path, assets, exact, shallow=False) == (exact, [], [])


# ---- the reference ----------------------------------------------------------------------------------

REFERENCE = ROOT / "docs" / "reference"


def shown_there() -> dict[str, Any]:
    """Every object of the Python page, by the name that the page gives it."""
    names = re.findall(r"^::: (\S+)", (REFERENCE / "api.md").read_text(), re.MULTILINE)
    objects: dict[str, Any] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        try:
            objects[name] = getattr(importlib.import_module(module), last)
        except AttributeError:
            objects[name] = importlib.import_module(name)
    kernels = objects.pop("halfulp.kernels")
    objects |= {
        f"halfulp.kernels.{k}": getattr(kernels, k) for k in ("round", "audit", "write_back", "score")
    }
    return {name: thing for name, thing in objects.items() if callable(thing)}


def test_the_python_page_is_complete() -> None:
    """It has every public name, and each says what it takes."""
    objects = shown_there()
    last = {name.rpartition(".")[2] for name in objects}
    errors = {name for name in hu.__all__ if name.endswith("Error")}  # the module of errors is on the page
    assert set(hu.__all__) - last - errors == {"__version__"}
    without = []
    for name, thing in objects.items():
        if name.startswith("halfulp.study.") or name.endswith("Error"):
            continue  # declarations: the how-to has an example of all
        said = inspect.getdoc(thing) or ""
        parameters = [p for p in inspect.signature(thing).parameters.values() if not p.name.startswith("_")]
        without += [
            f"{name}({p.name})"
            for p in parameters
            if p.kind is not p.VAR_KEYWORD
            and not re.search(rf"^ +(\w+, )*\**{p.name}(, \w+)*:", said, re.MULTILINE)
            and not inspect.isclass(thing)
        ]
        returns = inspect.signature(thing).return_annotation
        if not inspect.isclass(thing) and returns not in (None, "None") and "Returns:" not in said:
            without.append(f"{name} -> {returns}")
    assert not without


def test_every_name_has_an_example() -> None:
    """In its own docstring, or in that of what makes it."""
    objects = shown_there()
    made_by = {
        "Check": "check", "Sweep": "check", "Diff": "diff", "Change": "Sync", "Contract": "require",
        "CheckpointWeightPatch": "SparseWeightPatch", "Dispatch": "native", "Pilot": "docs/how/pilot.md",
    }  # fmt: skip
    without = [
        name
        for name, thing in objects.items()
        if not name.startswith("halfulp.study.")
        and not name.endswith("Error")
        and name.rpartition(".")[2] not in made_by
        and ">>>" not in (inspect.getdoc(thing) or "")
    ]
    assert without == []


def errors_of(kind: type[BaseException]) -> set[str]:
    return {kind.__name__}.union(*(errors_of(k) for k in kind.__subclasses__()))


def test_every_error_is_shown_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page names each, and the messages on it are those that its blocks print."""
    for module in ("contract.contract", "pilots.scripts", "study.engine", "study.gates", "study.planning"):
        importlib.import_module(f"halfulp.{module}")
    page = (REFERENCE / "errors.md").read_text()
    assert [e for e in sorted(errors_of(hu.HalfulpError)) if f"`{e}`" not in page.replace("`hu.", "`")] == []
    shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(shown) >= 7
    for number, (code, text) in enumerate(shown):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        capsys.readouterr()
        exec(compile(code, "<errors.md>", "exec"), {"__name__": "__main__"})  # noqa: S102  # our own page
        printed = " ".join(capsys.readouterr().out.split())
        expected = re.escape(" ".join(text.split())).replace(r"\.\.\./", r"\S*/")
        assert re.fullmatch(expected, printed), printed


# ---- words and numbers ------------------------------------------------------------------------------

SPEED = {
    "torch fused, float32": "torch AdamW, fp32, fused",
    "`hu.AdamW`, bfloat16 weights, `sr`": "halfulp AdamW sr, bf16, fp32 moments",
    "the same, bfloat16 moments": "halfulp AdamW sr, bf16, bf16 moments",
    "the same, fp8 weights": "halfulp AdamW sr, e4m3@128 packed, bf16 moments",
    "optimi Kahan, bfloat16": "optimi AdamW, bf16, kahan",
    "heavyball stochastic rounding, bfloat16": "heavyball AdamW, bf16, stochastic, compiled",
    "torchao stochastic rounding, bfloat16": "torchao _AdamW, bf16, stochastic",
}
"""Rows of the README's table, and the contestants of the benchmark."""


def test_the_speed_table_is_the_measured_one() -> None:
    """Every row of the README's table is a row of ``results/bench/writeback.json``."""
    measured = json.loads((ROOT / "results" / "bench" / "writeback.json").read_text())["rows"]
    rows = {row["contestant"]: row for row in measured}
    table = (ROOT / "README.md").read_text().partition("## Speed")[2].partition("\n## ")[0]
    stated = re.findall(r"^\| (.+?) \| ([\d.]+) \| (\d+) \|$", table, re.MULTILINE)
    assert {label for label, _, _ in stated} == set(SPEED)
    for label, ms, size in stated:
        row = rows[SPEED[label]]
        assert (ms, size) == (f"{1000 * row['seconds']:.1f}", f"{row['bytes_per_parameter']:.0f}"), label


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_navigation() -> None:
    """At most 15 entries in four groups; the records are a fifth, apart."""
    lines = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines()
    groups: dict[str, list[str]] = {}
    for line in lines:
        if match := re.match(r"^  - (.+):$", line):
            groups[match[1]] = entries = []
        elif line.strip():
            entries.append(line)
    assert list(groups) == ["Start", "How to", "Understand", "Reference", "Paper and records"]
    assert sum(len(entries) for name, entries in groups.items() if name != "Paper and records") <= 15


RECORDS = {"allocation", "controlled", "decoder", "locked", "log", "loss-forecast", "optimizers", "releasing",
           "reliability", "seen", "studies", "trust"}  # fmt: skip


def test_no_paragraph_in_a_cell() -> None:
    """Tables for readers hold a sentence a cell: at most 180 characters, links aside."""
    long = []
    for page in PAGES:
        if page.stem in RECORDS:
            continue
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for line in re.findall(r"^ *\|(.*)\|$", text, re.MULTILINE):
            cells = [re.sub(r"\]\([^)]*\)", "]", cell.strip()) for cell in line.split(" | ")]
            long += [f"{page.name}: {cell[:80]}" for cell in cells if len(cell) > 180]
    assert long == []


def test_the_glossary_is_linked_at_first_use() -> None:
    """Twelve words, and the pages that a newcomer reads first link to them."""
    glossary = (ROOT / "docs" / "concepts.md").read_text().partition("## Words")[2]
    assert len(re.findall(r"^\| \*\*", glossary, re.MULTILINE)) == 12
    for page in ("index", "start", "symptoms"):
        assert "concepts.md#words" in (ROOT / "docs" / f"{page}.md").read_text(), page


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    """``make docs`` fails on them: a file, a place in a page, or a heading that is not there."""
    links = runpy.run_path(str(ROOT / "docs" / "links.py"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top"></h1><a href="sub/page.html#here"></a><a href="#top"></a><a href="https://example.org/x"></a>'
        '<a href="sub/page.html#gone"></a><img src="gone.svg"><a href="#gone"></a>'
    )
    (tmp_path / "sub" / "page.html").write_text(
        '<p id="here"></p><a href="../index.html#top"></a><a href="..">'
    )
    assert links["broken_in_site"](tmp_path) == [
        "index.html: sub/page.html#gone", "index.html: gone.svg", "index.html: #gone"
    ]  # fmt: skip
    (tmp_path / "README.md").write_text("# A b: c\n[x](#a-b-c) [x](#d) [x](sub/page.html) [x](gone.md)")
    assert links["broken_in_sources"](tmp_path) == ["README.md: #d", "README.md: gone.md"]
    assert links["broken_in_sources"](ROOT) == []


def test_pages_install_from_a_clone_what_there_is() -> None:
    """The name on a package index may be another's; the extras that pages name are those of the package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {m[1] for page in PAGES for m in EXTRA.finditer(page.read_text())}
    assert {"huggingface", "lightning", "ray"} <= named <= set(extras)
    pages = [page for page in PAGES if page.stem not in RECORDS]
    assert [page.name for page in pages if re.search(r"`pip install halfulp\[", page.read_text())] == []
