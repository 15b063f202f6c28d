"""Small pictures for notebooks: curves, bars and strips as inline SVG, without a script or a library.

What somebody else chose (names of tensors, grids, policies) only ever becomes text: it is made visible,
shortened and escaped here, so no name can be markup, and none reaches an attribute.

>>> safe("<b>")
'&lt;b&gt;'
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.text import shown

Array = npt.NDArray[Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#767676")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
WIDTH, HEIGHT = 480, 150
POINTS = 400
"""Most points of a curve; a longer one is drawn by the means of its chunks."""
ROWS = 24
"""Bars and strips that are drawn; the others are counted."""
FONT = "font-family:sans-serif;font-size:12px"


def safe(name: object, most: int = 60) -> str:
    """Return text made safe for HTML."""
    return html.escape(shown(str(name), most), quote=True)


def percent(share: float) -> str:
    """Write a share in percent."""
    return "-" if share != share else f"{share:.1%}"


def framed(title: str, *parts: str) -> str:
    """Return a title in plain text, and what stands below it."""
    head = f"<div><b>{safe(title, 300)}</b></div>" if title else ""
    return f'<div style="{FONT}">{head}{"".join(parts)}</div>'


def curves(series: Mapping[str, tuple[Array, Array]]) -> str:
    """Draw shares between 0 and 1 over steps, one line each, with a legend."""
    drawn = {name: _binned(x, y) for name, (x, y) in series.items() if len(x)}
    if not drawn:
        return ""
    first = min(float(x[0]) for x, _ in drawn.values())
    last = max(float(x[-1]) for x, _ in drawn.values())
    left, top, wide, high = 36, 8, WIDTH - 44, HEIGHT - 30
    marks, legend = [], []
    for share in (0.0, 0.5, 1.0):
        y = top + high * (1 - share)
        marks.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + wide}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-opacity="0.2"/><text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end" '
            f'fill="currentColor" font-size="10">{share:.0%}</text>'
        )
    for x, anchor, step in ((left, "start", first), (left + wide, "end", last)):
        marks.append(
            f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="{anchor}" fill="currentColor" font-size="10">step '
            f"{step:.0f}</text>"
        )
    for i, (name, (steps, shares)) in enumerate(drawn.items()):
        colour = COLOURS[i % len(COLOURS)]
        at = left + wide * ((steps - first) / max(last - first, 1.0))
        height = top + high * (1 - np.clip(shares, 0.0, 1.0))
        known = np.isfinite(height)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(at[known], height[known], strict=True))
        marks.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if known.sum() == 1:
            marks.append(
                f'<circle cx="{at[known][0]:.1f}" cy="{height[known][0]:.1f}" r="2" fill="{colour}"/>'
            )
        legend.append(f'<span style="color:{colour}">&#9632;</span> {safe(name)} ')
    return f"{_svg(WIDTH, HEIGHT, *marks)}<div>{''.join(legend)}</div>"


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Draw a table of names with bars for shares between 0 and 1 and a note each."""
    made = []
    for name, share, note in rows[:ROWS]:
        full = 0.0 if share != share else min(max(share, 0.0), 1.0)
        bar = (
            '<rect width="160" height="10" fill="currentColor" fill-opacity="0.1"/>'
            f'<rect width="{160 * full:.1f}" height="10" fill="{COLOURS[1]}"/>'
        )
        made.append(_row(safe(name), _svg(160, 10, bar), percent(share), safe(note, 120)))
    return _table(made, len(rows) - ROWS)


def strips(rows: Sequence[tuple[str, Array, str]], wide: int = 240) -> str:
    """Draw a table of names with strips of booleans (darker where more are true) and a note each."""
    made = []
    for name, chosen, note in rows[:ROWS]:
        edges = np.linspace(0, len(chosen), min(len(chosen), 120) + 1).round().astype(int)
        shares = [float(chosen[a:b].mean()) for a, b in pairwise(edges) if b > a]
        each = wide / max(len(shares), 1)
        marks = [
            f'<rect x="{i * each:.2f}" width="{each + 0.1:.2f}" height="10" fill="{COLOURS[0]}" '
            f'fill-opacity="{share:.2f}"/>'
            for i, share in enumerate(shares)
            if share
        ]
        ground = f'<rect width="{wide}" height="10" fill="currentColor" fill-opacity="0.1"/>'
        made.append(_row(safe(name), _svg(wide, 10, ground, *marks), "", safe(note, 120)))
    return _table(made, len(rows) - ROWS)


def pre(text: str) -> str:
    """Return preformatted text as HTML."""
    return f'<pre style="white-space:pre-wrap;max-width:110ch">{html.escape(text)}</pre>'


def _binned(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(x) <= POINTS:
        return x, y
    pieces = np.array_split(np.arange(len(x)), POINTS)
    return np.array([x[p].mean() for p in pieces]), np.array([y[p].mean() for p in pieces])


def _svg(width: int, height: int, *marks: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">{"".join(marks)}</svg>'
    )


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f'<td style="text-align:left;padding:1px 8px">{c}</td>' for c in cells) + "</tr>"


def _table(rows: Sequence[str], more: int) -> str:
    rest = f"<div>and {more} more</div>" if more > 0 else ""
    return f'<table style="border-collapse:collapse">{"".join(rows)}</table>{rest}' if rows else ""
