"""Pictures in notebooks: well-formed, of the right numbers, and inert whatever the names are."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp import pictures

HOSTILE = '<img src=x onerror="alert(1)">&\x1b[31m\u202e\'</div><script>'
ALLOWED = {
    "div",
    "b",
    "span",
    "table",
    "tr",
    "td",
    "svg",
    "rect",
    "line",
    "text",
    "polyline",
    "circle",
    "pre",
}
SVG = "{http://www.w3.org/2000/svg}"


def read(made: str) -> ET.Element:
    """The markup as a tree: it must close what it opens, and hold nothing but drawings and text."""
    tree = ET.fromstring(made)
    for element in tree.iter():
        assert element.tag.removeprefix(SVG) in ALLOWED
        assert not [a for a in element.attrib if a.startswith("on") or a in ("href", "src")]
        for value in element.attrib.values():
            assert not re.search(r"onerror|script|alert", value)
    text = "".join(tree.itertext())
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", text)
    return tree


def named(*names: str) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    params = {name: torch.nn.Parameter(torch.randn(40, 30)) for name in names}
    return params, torch.optim.SGD(list(params.items()), lr=1e-3)


def recorded(out: Any, *names: str, steps: int = 3) -> dict[str, torch.nn.Parameter]:
    params, opt = named(*names)
    with hu.Audit(opt, ["bf16", "e5m2"], out=out):
        for _ in range(steps):
            for p in params.values():
                p.grad = torch.randn_like(p)
            opt.step()
    return params


def test_a_trace_shows_its_curves_and_tensors(tmp_path: Path) -> None:
    recorded(tmp_path / "run", "plain", HOSTILE)
    trace = hu.Trace.open(tmp_path / "run")
    tree = read(trace._repr_html_())
    text = "".join(tree.itertext())
    assert "<img src=x" in text  # as text
    lines = [e for e in tree.iter() if e.tag == f"{SVG}polyline"]
    assert len(lines) == 2
    for line, grid in zip(lines, trace.grids, strict=True):
        drawn = [float(p.split(",")[1]) for p in line.attrib["points"].split()]
        expected = 8 + 120 * (1 - trace.frozen(grid))
        np.testing.assert_allclose(drawn, expected, atol=0.051)
    for name in ("plain", HOSTILE):
        assert f"{trace.frozen('bf16', name).mean():.1%}" in text


def test_memory_and_empty_traces() -> None:
    memory = hu.Memory()
    recorded(memory, "a", steps=1)
    assert any(
        e.tag == f"{SVG}circle" for e in read(memory.trace._repr_html_()).iter()
    )  # one step is a point
    model = torch.nn.Linear(2, 2)
    empty = hu.Memory()
    with hu.Audit(torch.optim.SGD(model.parameters()), "bf16", model=model, out=empty):
        pass
    assert "no step was recorded" in "".join(read(empty.trace._repr_html_()).itertext())


def test_a_verdict_shows_its_grids() -> None:
    memory = hu.Memory()
    recorded(memory, HOSTILE)
    verdict = hu.verdict(memory.trace)
    tree = read(verdict._repr_html_())
    text = "".join(tree.itertext())
    assert str(verdict) in text
    for finding in verdict.findings:
        assert f"{finding.lost:.1%}" in text
    assert len([e for e in tree.iter() if e.tag == "tr"]) == 2


def test_events_and_masks() -> None:
    params, opt = named("plain", HOSTILE)
    wrapped = hu.WriteBack(opt, "e5m2", "rne")
    for p in params.values():
        p.grad = torch.randn_like(p)
    wrapped.step()
    text = "".join(read(wrapped.events._repr_html_()).itertext())
    for row in wrapped.events.rows:
        assert f"{row.frozen_fraction:.1%}" in text
    tiles = {HOSTILE: torch.tensor([True, False]), "plain": torch.tensor([True, True])}
    mask = hu.Mask(tiles=tiles, sizes=dict.fromkeys(tiles, 1200), score=HOSTILE, budget=10_000)
    tree = read(mask._repr_html_())
    assert "1 of 2 tiles, 3,072 bytes" in "".join(tree.itertext())
    blue = [e for e in tree.iter() if e.attrib.get("fill") == pictures.COLOURS[0]]
    assert len(blue) == 3


def test_many_rows_are_counted_and_nothing_is_drawn_out_of_bounds() -> None:
    made = pictures.bars([(f"t{i}", x, "") for i, x in enumerate([-1.0, 2.0, float("nan")] * 20)])
    tree = read(f"<div>{made}</div>")
    widths = [float(e.attrib["width"]) for e in tree.iter() if e.tag == f"{SVG}rect"]
    assert set(widths) == {0.0, 160.0}
    assert "and 36 more" in "".join(tree.itertext())
    long = np.linspace(0, 1, 10_000)
    line = pictures.curves({"x": (np.arange(10_000), long)})
    assert line.count(",") <= pictures.POINTS + 10
    assert pictures.curves({}) == ""


@pytest.mark.parametrize("size", [1, 7, 119, 120, 121, 1000])
def test_strips_of_any_length(size: int) -> None:
    tree = read(f"<div>{pictures.strips([('x', np.ones(size, dtype=bool), '')])}</div>")
    marks = [e for e in tree.iter() if e.attrib.get("fill") == pictures.COLOURS[0]]
    assert len(marks) == min(size, 120)
    assert all(m.attrib["fill-opacity"] == "1.00" for m in marks)
