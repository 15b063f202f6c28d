"""The page and the table: whole, self-contained, honest in words, and inert whatever the names are."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import made, train
from report_traces import HOSTILE, inventory, synthetic
from typer.testing import CliRunner

import halfulp as hu
from halfulp.cli import app
from halfulp.errors import UsageError
from halfulp.report.markup import Html, elided, name, script_json, tag
from halfulp.report.page import open_traces, page
from halfulp.report.runs import arms, forecasts, shown_first
from halfulp.report.tensors_csv import COLUMNS
from halfulp.text import percent

GRIDS = ["fp16", "bf16", "e4m3@128"]


class Reader(HTMLParser):
    """Elements with their attributes, and all text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, element: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((element, dict(attributes)))
        if element in self.inside:
            self.open = element
            self.inside[element].append("")

    def handle_endtag(self, element: str) -> None:
        self.open = "" if element == self.open else self.open

    def handle_data(self, data: str) -> None:
        if self.open:
            self.inside[self.open][-1] += data
        else:
            self.words.append(data)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page on which everything that can have a name has a hostile one."""
    folder = tmp_path_factory.mktemp("hostile") / HOSTILE[4]
    named = [
        (n, HOSTILE[-1 - i] if i % 2 else "mlp", (8, 8) if i % 3 else (8,)) for i, n in enumerate(HOSTILE)
    ]
    run = {"name": HOSTILE[0], "script": HOSTILE[1], "arguments": list(HOSTILE), HOSTILE[2]: HOSTILE[3]}
    synthetic(folder, listed=inventory(named), grids=["bf16", "e5m2"], run=run)
    return page([folder])


@pytest.fixture(scope="module")
def matched(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A reference and three arms of the same small decoder."""
    top = tmp_path_factory.mktemp("matched")
    for policy in (None, "rne", "sr", "master"):
        model = made("gpt")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if policy is not None:
            optimizer = hu.WriteBack(optimizer, "e4m3@128", policy, model=model, seed=0)
        grids = ["bf16", "e4m3@128"] if policy is None else ["e4m3@128"]
        with hu.Audit(optimizer, grids, model=model, out=top / (policy or "fp32")) as audit:
            train(model, optimizer, 20, audit=audit)
    return [top / n for n in ("fp32", "rne", "sr", "master")]


# ---- one file, and nothing else ---------------------------------------------------------------------------


def test_the_policy_allows_the_page_and_nothing_else(hostile: str) -> None:
    """The digests in the policy are those of the one script and the one style sheet."""
    found = Reader(hostile)
    policy = next(a["content"] for e, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    data, script = found.inside["script"]
    assert parts == {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(found.inside["style"][0]),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert len(found.inside["style"]) == 1
    json.loads(data)


def test_nothing_is_loaded_and_nothing_inline_needs_leave(hostile: str) -> None:
    """No address, no style attribute, no handler: the policy would block them, and they are not there."""
    for element, attributes in Reader(hostile).elements:
        assert element not in ("link", "iframe", "object", "embed", "base", "form", "a")
        assert not {a for a in attributes if a.startswith("on") or a in ("style", "href", "srcset")}
        assert element == "img" or "src" not in attributes


def test_hostile_names_are_text(hostile: str) -> None:
    """They make no element, end no script, and show what is invisible."""
    found = Reader(hostile)
    assert [e for e, _ in found.elements].count("script") == 2
    assert not [e for e, _ in found.elements if e == "img"]
    assert "owned" in "".join(found.words)
    assert "\u202e" not in hostile
    assert "\x1b" not in hostile
    assert "\x00" not in hostile
    assert "\\u202egnirts" in "".join(found.words)
    assert "x" * 400 not in hostile  # a name of 10,000 letters is shortened,
    assert "…" in hostile  # visibly
    assert "<" not in found.inside["script"][0]


def test_names_are_elided_in_the_middle() -> None:
    assert elided("abcdefghij", 5) == "ab…ij"
    assert name("x" * 10_000, 20).count("x") == 19 + 299  # twice: what is seen, and the tooltip
    assert len(html.unescape(name("<" * 100, 10))) < 2 * 300


def test_markup_escapes_everything_but_markup() -> None:
    assert tag("p", "<b>", Html("<b>x</b>"), title='"') == '<p title="&quot;">&lt;b&gt;<b>x</b></p>'
    assert json.loads(script_json({"</script>": "<!--&"})) == {"</script>": "<!--&"}
    with pytest.raises(ValueError, match="Out of range float"):
        script_json(float("nan"))


# ---- what the page says ---------------------------------------------------------------------------------


def test_the_verdict_comes_first_and_in_words(tmp_path: Path) -> None:
    synthetic(tmp_path / "run", steps=80, grids=GRIDS)
    found = Reader(page([tmp_path / "run"]))
    order = [e for e, _ in found.elements if e in ("h1", "h2", "table")]
    assert order[:3] == ["h1", "h2", "table"]
    said = " ".join(found.words)
    (run,) = open_traces([hu.Trace.open(tmp_path / "run")])
    finding = run.gathered.findings()[1]
    assert (
        f"Nothing is lost in float32. Stored in bf16, this run would lose {percent(finding.lost)} of" in said
    )
    assert json.loads(found.inside["script"][0])["grid"] == "bf16"  # what the headline is about
    assert "this forecast is untested" in said
    assert "Not claimed" in said


def test_charts_are_drawn_from_the_numbers_of_the_trace(tmp_path: Path) -> None:
    trace = synthetic(tmp_path / "run", steps=30, grids=GRIDS)
    data = json.loads(Reader(page([tmp_path / "run"])).inside["script"][0])
    (run,) = data["runs"]
    assert run["grids"] == GRIDS
    scope = run["scopes"].index("core")
    for i, grid in enumerate(GRIDS):
        codes = np.frombuffer(base64.b64decode(run["curves"]["frozen"][scope][i][0]), dtype="<u2")
        assert np.array_equal(codes, np.rint(trace.frozen(grid, "core") * 65534))
        found = trace.majority(grid, "core")
        assert (run["marks"][scope][i] or [None])[0] == (None if found is None else found.first)


def test_a_long_trace_gives_a_small_page(tmp_path: Path) -> None:
    """400,000 rows; the page holds what it shows. benchmarks/report.py does it with 40 million."""
    synthetic(tmp_path / "run", steps=2000, layers=4, grids=GRIDS[:4], part=500)
    assert len(page([tmp_path / "run"])) < 700_000


def test_references_stand_side_by_side(tmp_path: Path) -> None:
    for seed in (0, 1):
        synthetic(tmp_path / f"run-{seed}", seed=seed, grids=GRIDS)
    found = Reader(page([tmp_path / "run-0", tmp_path / "run-1"]))
    assert [e for e, _ in found.elements].count("h1") == 2
    assert any(a.get("id") == "lines" for _, a in found.elements)
    assert len(json.loads(found.inside["script"][0])["runs"]) == 2


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    traces = [synthetic(tmp_path / x / "run", grids=GRIDS) for x in "ab"]
    assert [r.name for r in open_traces(traces)] == ["run", "run (2)"]


def test_forecast_and_policies(matched: list[Path]) -> None:
    """The nearest arm is the outcome of the reference; recovery is against both."""
    runs = open_traces([hu.Trace.open(p) for p in matched])
    assert [r.policy for r in runs] == [None, "rne", "sr", "master"]
    assert [r.bytes_per_weight for r in runs] == [4, 1, 1, 5]
    assert [r.loses for r in runs] == [True, True, False, False]
    assert shown_first(runs) == runs[:1]
    (found,) = forecasts(runs)
    assert (found.reference, found.measured, found.grid) == (*runs[:2], "e4m3@128")
    assert found.comparison.rmse == pytest.approx(
        float(((found.forecast - found.outcome) ** 2).mean() ** 0.5),
        rel=1e-12,  # the same sum in another order
    )
    (group,) = arms(runs)
    assert group.reference is runs[0]
    assert group.recovery(runs[1]) in (0.0, None)
    said = " ".join(Reader(page(matched)).words)
    assert "Policies" in said
    assert "full fp32 masters" in said
    assert "Kept is not lost" in said


def test_an_arm_alone_does_not_call_kept_codes_lost(matched: list[Path]) -> None:
    said = " ".join(Reader(page([matched[2]])).words)
    assert "Nothing lost: sr write-back carries the updates to e4m3@128" in said
    assert "LOST" not in said
    assert "This run LOST " in " ".join(Reader(page([matched[1]])).words)


def test_pages_need_something_to_show(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one trace"):
        page([])
    model = torch.nn.Linear(4, 4)
    audit = hu.Audit(torch.optim.SGD(model.parameters(), lr=1e-3), "bf16", model=model, out=tmp_path / "run")
    audit.start()
    with pytest.raises(UsageError, match="no complete part yet"):
        page([tmp_path / "run"])
    audit.stop()


# ---- the commands ---------------------------------------------------------------------------------------


def test_the_report_command(tmp_path: Path) -> None:
    synthetic(tmp_path / "run", grids=GRIDS)
    said = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert hu.Trace.open(tmp_path / "run").grids == GRIDS  # the trace is still one
    said = CliRunner().invoke(app, ["report", str(tmp_path)], catch_exceptions=True)
    assert "is not a trace" in str(said.exception)


def test_csv_is_no_formula(tmp_path: Path) -> None:
    """Every cell that a spreadsheet would evaluate is text; numbers are numbers."""
    listed = inventory([(n, "+group", (8, 8)) for n in HOSTILE])
    trace = synthetic(tmp_path / "run", listed=listed, grids=["bf16"], run={"name": "=1+1"})
    out = tmp_path / "tensors.csv"
    said = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--csv", str(out)])
    assert said.exit_code == 0, said.output
    text = out.read_text()
    assert "\x1b" not in text
    assert "\u202e" not in text
    head, *rows = csv.reader(text.splitlines())
    assert tuple(head) == COLUMNS
    assert len(rows) == len(HOSTILE)
    for row in rows:
        assert not [cell for cell in row if re.match(r"\s*[=+\-@\t\r]", cell)]
        assert row[0] == "'=1+1"
    shares = {row[1]: float(row[7]) for row in rows}
    assert shares["'=cmd()|' /C calc'!A0"] == pytest.approx(
        trace.frozen("bf16", HOSTILE[4]).mean(),
        abs=1e-6,  # six digits are written
    )


def test_outputs_do_not_replace_what_is_read(tmp_path: Path) -> None:
    """Not a file of the trace, nor anything among them; other files in its folder are free."""
    trace = synthetic(tmp_path / "run", steps=2, layers=1, grids=["bf16"])
    before = {f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()}
    (tmp_path / "elsewhere").symlink_to(tmp_path / "run", target_is_directory=True)
    for place in ("run/manifest.json", "elsewhere/parts/000000/tables.safetensors", "run/parts/page.html"):
        commands = [
            ["report", str(trace.path), "-o", str(tmp_path / place)],
            ["report", str(trace.path), "-o", str(tmp_path / "page.html"), "--csv", str(tmp_path / place)],
            ["allocate", str(trace.path), "--budget", "10%", "-o", str(tmp_path / place)],
        ]
        for command in commands:
            said = CliRunner().invoke(app, command)
            assert isinstance(said.exception, hu.UsageError), command
            assert f"{place} belongs to the trace" in str(said.exception)
    said = CliRunner().invoke(app, ["figures", str(trace.path), "-o", str(trace.path / "state")])
    assert isinstance(said.exception, hu.UsageError)
    assert before == {f: f.read_bytes() for f in (tmp_path / "run").rglob("*") if f.is_file()}
    assert (
        CliRunner().invoke(app, ["report", str(trace.path), "-o", str(trace.path / "x.html")]).exit_code == 0
    )


def test_drawing_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said, as an error of ours that is an ImportError, too."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = CliRunner().invoke(app, ["figures", "run"])
    assert isinstance(said.exception, hu.HalfulpError)
    assert isinstance(said.exception, ImportError)
    assert said.exception.exit_code == 2
    assert str(said.exception) == "This needs matplotlib, which is not installed. Run: pip install matplotlib"
