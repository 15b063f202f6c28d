"""The page of a study: gates, label, what is not claimed; refused when the folder was changed."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfulp.cli import app
from halfulp.cli.report_command import default_page
from halfulp.errors import CorruptionError
from halfulp.report.page import page
from halfulp.report.study_page import is_study, open_study
from halfulp.study import engine, loading

FILE = """
from halfulp.study import Cell, Estimand, Gate, Rule, Stage, Study, Table


def cells(config):
    return [Cell(name=f"seed-{s}", config={"seed": s}) for s in range(config["seeds"])]


def run(cell):
    return {"heads": cell.config["seed"] % 2}


def heads(records):
    return {name: record["heads"] for name, record in records["toss"].items()}


def tosses(records):
    rows = [[name, record["heads"]] for name, record in records["toss"].items()]
    return Table(columns=["<i>toss</i>", "heads"], rows=rows, caption="every <b>toss</b>")


def drawn(records):
    from halfulp.drawing import new_figure

    figure, (panel,) = new_figure()
    panel.plot([record["heads"] for record in records["toss"].values()])
    return figure


study = Study(
    name="coin",
    question="Does it land on <script>alert(1)</script> both sides?",
    units="one toss",
    not_claimed=("that the coin is fair",),
    scales={"smoke": {"seeds": 3}, "small": {"seeds": 4}},
    stages=(Stage(name="toss", kind="outcome", cells=cells, run=run),),
    estimands=(Estimand(name="heads", what="1 for heads, by toss", compute=heads),),
    gates=(
        Gate(name="both", estimand="heads", scope="mean", comparison="==", threshold=0.5, why="half of them"),
        Gate(name="always", estimand="heads", scope="all", comparison=">", threshold=0.5),
    ),
    rules=(
        Rule(label="made by hand", recovered=True),
        Rule(label="always heads", passed=("always",)),
        Rule(label="both sides", passed=("both",), failed=("always",)),
        Rule(label="neither"),
    ),
    tables={"tosses": tosses},
    figures={"drawn": drawn},
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that was run to its end."""
    top = tmp_path_factory.mktemp("study")
    (top / "coin.py").write_text(FILE)
    engine.run(loading.load(str(top / "coin.py")), "small", top / "coin-small", executor="inline")
    return top / "coin-small"


def words(text: str) -> str:
    return re.sub(
        r"\s+", " ", re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style).*?</\1>", "", text, flags=re.S))
    )


def test_label_gates_units_and_what_is_not_claimed(folder: Path) -> None:
    said = words(page([folder]))
    assert said.index("both sides") < said.index("Gates")
    assert "both ✓ passed 0.5 == 0.5" in said
    assert "always ✗ failed 0 &gt; 0.5 1 for heads, by toss , in seed-0" in said
    assert "half of them" in said
    assert "that the coin is fair" in said
    assert "The scientific unit is one toss" in said
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in said
    assert open_study(folder).events.seal in said


def test_the_rule_that_decided_is_marked(folder: Path) -> None:
    """Not one for records that were made by hand, where none was."""
    (fits,) = re.findall(r'<li class="fits">(.*?)</li>', page([folder]))
    assert "both sides" in fits


def test_a_study_of_ones_own_is_run_only_when_told(folder: Path) -> None:
    """A folder that came in the mail brings a Python file; a page does not run it."""
    assert open_study(folder).study is None
    assert "every &lt;b&gt;toss" not in page([folder])
    text = page([folder], code=True)
    assert "every &lt;b&gt;toss" in text
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'halfulp[figures]'")
    (image,) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)"', text)
    assert b"<svg" in base64.b64decode(image)


def test_a_smoke_run_says_that_it_is_none(tmp_path: Path, folder: Path) -> None:
    source = loading.load(str(folder.parent / "coin.py"))
    engine.run(source, "smoke", tmp_path / "coin-smoke", executor="inline")
    assert "Not a scientific result" in page([tmp_path / "coin-smoke"])
    assert "Not a scientific result" not in page([folder])


def test_an_unfinished_study_has_a_page(tmp_path: Path, folder: Path) -> None:
    engine.seal(loading.load(str(folder.parent / "coin.py")), "small", tmp_path / "coin")
    assert "not finished: 0 of 4 cells have records" in page([tmp_path / "coin"])


@pytest.mark.parametrize("file", ["result.json", "protocol.json", "records/toss/seed-1.json", "ledger.jsonl"])
def test_a_changed_folder_has_no_page(folder: Path, tmp_path: Path, file: str) -> None:
    import shutil

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content.replace(b"1", b"2", 1))
    with pytest.raises(CorruptionError):
        page([copy])


def test_the_page_lies_beside_the_study(folder: Path) -> None:
    """A study's folder holds nothing that was not sealed."""
    assert is_study(folder)
    assert default_page(folder) == folder.parent / "coin-small.html"
    said = CliRunner().invoke(app, ["report", str(folder)])
    assert said.exit_code == 0, said.output
    assert CliRunner().invoke(app, ["study", "validate", str(folder)]).exit_code == 0


def test_figures_of_a_study(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'halfulp[figures]'")
    said = CliRunner().invoke(app, ["figures", str(folder), "-o", str(tmp_path)])
    assert said.exit_code == 0, said.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["coin-drawn.pdf", "coin-drawn.svg"]


def test_figures_lead_and_long_tables_fold(folder: Path, tmp_path: Path) -> None:
    """Figures before gates; a table of many rows is folded, with three digits."""
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'halfulp[figures]'")
    long = FILE.replace(
        "rows = [[name, record[", "rows = [[str(i), i / 7] for i in range(30)] or [[name, record["
    )
    assert long != FILE
    (tmp_path / "coin.py").write_text(long)
    out = tmp_path / "coin-small"
    engine.run(loading.load(str(tmp_path / "coin.py")), "small", out, executor="inline")
    text = page([out], code=True)
    assert text.index("<img") < text.index("<h2>Gates</h2>")
    assert "<summary>30 rows</summary>" in text
    assert "0.143" in text
    assert "0.142857" not in text
