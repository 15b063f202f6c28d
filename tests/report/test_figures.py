"""Figures: vectors, the same bytes every time, and names that are only names."""

from __future__ import annotations

import xml.etree.ElementTree as ET  # as everybody calls it
from pathlib import Path

import pytest
from report_traces import HOSTILE, inventory, synthetic
from typer.testing import CliRunner

from halfulp.cli import app
from halfulp.drawing import COLOURS, POLICY_COLOURS, house_style, label, new_figure, percent, save
from halfulp.errors import UsageError

mpl = pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'halfulp[figures]'")
from halfulp.report.figures import write_figures  # noqa: E402


def test_a_trace_has_its_figures(tmp_path: Path) -> None:
    synthetic(tmp_path / "run", grids=["bf16", "e4m3@128"], steps=20)
    said = CliRunner().invoke(
        app, ["figures", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--formats", "svg"]
    )
    assert said.exit_code == 0, said.output
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["run-lost.svg", "run-never-moved.svg"]


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    """No date and no random identifier."""
    synthetic(tmp_path / "run", grids=["bf16"], steps=10, layers=1)
    first, again = (write_figures([tmp_path / "run"], tmp_path / x) for x in ("a", "b"))
    assert {p.suffix for p in first} == {".svg", ".pdf"}
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    """In file names, in SVG, and as mathematics, which '$\\frac{1}{' would be."""
    listed = inventory([(n, "mlp", (8, 8)) for n in HOSTILE])
    synthetic(
        tmp_path / "run", listed=listed, grids=["bf16"], steps=5, run={"name": "../../<script>$\\frac{1}{"}
    )
    out = tmp_path / "out"
    for file in write_figures([tmp_path / "run"], out, ["svg"]):
        assert file.parent == out
        elements = {e.tag.partition("}")[2] for e in ET.parse(file).iter()}
        assert "script" not in elements
        assert "text" not in elements  # letters are outlines
        assert not [a for e in ET.parse(file).iter() for a in e.attrib if a.lower().startswith("on")]
    assert not list(tmp_path.glob("*.svg"))


def test_labels_show_what_is_invisible() -> None:
    assert label("\u202ex") == "\\u202ex"
    assert label("漢字") == "\\u6f22\\u5b57"  # a figure's font has no such letters
    assert len(label("x" * 10_000)) == 40


def test_the_style_leaves_no_trace(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    figure, panels = new_figure(2, 2, sharex=True)
    percent(panels[0])
    save(figure, tmp_path / "x")
    with house_style():
        assert mpl.rcParams["legend.frameon"] is False
    assert dict(mpl.rcParams) == before
    assert len(panels) == 4


def test_colours_are_those_of_okabe_and_ito() -> None:
    """Masataka Okabe and Kei Ito, Color Universal Design (2008)."""
    published = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    assert set(COLOURS) == published
    assert len(set(POLICY_COLOURS.values())) == len(POLICY_COLOURS)


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["figures", str(tmp_path), "--formats", "png"])
    assert isinstance(said.exception, UsageError)
