"""What is shipped: the wheel holds the sources, the library that is made of them and nothing else."""

from __future__ import annotations

import hashlib
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from environments import ROOT, said, thin, wheel
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import halfulp as hu
from halfulp.kernels.native.build import library_name


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(tmp_path_factory.mktemp("wheel"))


def test_the_version_is_in_one_place(package: Path) -> None:
    """Whoever states it reads it there; the changelog has a section for it."""
    assert package.name.startswith(f"halfulp-{hu.__version__}-py3-none-")
    assert re.search(rf"^## {re.escape(hu.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    stated = re.compile(rf"\b{re.escape(hu.__version__)}\b")
    for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "Makefile", "README.md"):
        assert not stated.search((ROOT / name).read_text()), name
    for name in ("action.yml", "recipe/recipe.yaml", "docs/reference/json.md"):  # they cannot read it
        assert stated.search((ROOT / name).read_text()), name


def test_the_wheel_holds_the_sources(package: Path) -> None:
    """Byte for byte: modules, the page's own files, py.typed. And the licence."""
    source = ROOT / "src"
    made_here = ("__pycache__", ".nbi", ".nbc", ".told", "/native/built/")
    files = {
        p.relative_to(source).as_posix(): p.read_bytes()
        for p in (source / "halfulp").rglob("*")
        if p.is_file() and not any(part in p.as_posix() for part in made_here)
    }
    with zipfile.ZipFile(package) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
        told = [name for name in archive.namelist() if ".dist-info/" in name]
        metadata = archive.read(next(name for name in told if name.endswith("/METADATA"))).decode()
    (library,) = set(held) - set(files)
    assert library == f"halfulp/kernels/native/built/{library_name()}"
    del held[library]
    assert held == files
    assert "halfulp/py.typed" in held
    assert any(name.endswith("/licenses/LICENSE") for name in told)
    assert "Requires-Dist: torch" in metadata


VENDORED = {
    "uPlot.iife.js": "655bc8aa33781e8721c5af6b59f1699c03c9bda951aa74a6ab518ac20cc4326d",
    "uPlot.min.css": "3f121cd4a997b634e07a887658850018e475c26f0bddd874109a8d382c19de87",
    "LICENSE": "5b01587206f9fdd334b0f381d877ec66de5c8c2886398f3b49abdb8eac080b4d",
}
"""SHA-256 of what release 1.6.16 of github.com/leeoniya/uPlot has, in ``dist`` and beside it."""


def test_the_chart_library_is_its_authors(package: Path) -> None:
    """uPlot is shipped as it was published, with its licence, and no package is needed for it."""
    folder = "halfulp/report/assets/uplot/"
    with zipfile.ZipFile(package) as archive:
        held = {
            name.removeprefix(folder): hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if name.startswith(folder)
        }
        beside = [n for n in archive.namelist() if n.endswith("/licenses/src/" + folder + "LICENSE")]
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))).decode()
        licence = archive.read(folder + "LICENSE").decode()
    assert held == VENDORED
    assert len(beside) == 1
    assert "License-Expression: Apache-2.0 AND MIT" in metadata
    assert "Copyright (c) 2021 Leon Sorokin" in licence
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not [name for name in asked if "uplot" in name.lower()]
    assert "uplot" not in (ROOT / "constraints.txt").read_text()


def test_what_is_installed_fits_what_is_declared() -> None:
    """The tested versions lie within the declared ones, and the recipe declares the same as the package."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = dict(
        re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    recipe = re.findall(r"^    - ([a-z]+) (\S+)$", (ROOT / "recipe/recipe.yaml").read_text(), re.MULTILINE)
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement
        if requirement.name in dict(recipe):
            assert requirement.specifier == SpecifierSet(dict(recipe)[requirement.name]), requirement


EVERY_MODULE = """
import importlib, pathlib, pkgutil, sys, halfulp
assert ROOT not in pathlib.Path(halfulp.__file__).parents, halfulp.__file__
skip = {"halfulp.__main__", *(f"halfulp.kernels.gpu{end}" for end in ("", "_maths", "_tiles"))}
names = [m.name for m in pkgutil.walk_packages(halfulp.__path__, "halfulp.") if m.name not in skip]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_the_wheel_works_without_the_sources(package: Path, tmp_path: Path) -> None:
    """Every module imports, the command answers, and a grid rounds."""
    folder = thin(tmp_path / "environment", package)
    code = EVERY_MODULE.replace("ROOT", f"pathlib.Path({str(ROOT)!r})")
    assert int(said([str(folder / "python"), "-c", code], tmp_path)) > 50
    assert said([str(folder / "halfulp"), "--version"], tmp_path) == f"halfulp {hu.__version__}\n"
    rounded = "import halfulp as hu, torch; print(hu.grid('e4m3').round(torch.tensor([0.3])).item())"
    assert said([str(folder / "python"), "-c", rounded], tmp_path) == "0.3125\n"
