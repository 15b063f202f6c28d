"""Write the comparison of two checkpoints as one self-contained HTML page, without a script or a library.

Names come from the files, so they are made visible, shortened and escaped: none can be markup.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from halfulp.text import shown

STYLE = (
    ":root{color-scheme:light dark}body{margin:1rem auto;padding:0 1rem;max-width:70rem;"
    "font:14px/1.5 system-ui,sans-serif}table{display:block;overflow-x:auto}h1{font-size:1.2rem;"
    "overflow-wrap:anywhere}h2{font-size:1rem}p{max-width:80ch}td{white-space:nowrap;padding:1px 8px}"
    "meter{width:160px}td:last-child{white-space:normal;min-width:16rem}@media(max-width:50rem){"
    "tr{display:block;margin:.5rem 0}td{display:inline-block;white-space:normal}}"
)
ROWS = 24
"""Rows of a table that are shown; the others are counted."""


def page(title: str, lines: Sequence[str], tables: Mapping[str, Sequence[tuple[str, float, str]]]) -> str:
    """Return the page: a title, paragraphs, and tables of a name, a share between 0 and 1, and a note."""
    body = [f"<h1>{_safe(title, 400)}</h1>", *(f"<p>{_safe(line, 600)}</p>" for line in lines)]
    for heading, rows in tables.items():
        body += [f"<h2>{_safe(heading, 200)}</h2><table>", *(_row(*row) for row in rows[:ROWS]), "</table>"]
        body += [f"<div>and {len(rows) - ROWS} more</div>"] if len(rows) > ROWS else []
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">"
        f"<title>halfulp diff</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _row(name: str, share: float, note: str) -> str:
    cells = (_safe(name, 60), f'<meter value="{share:.4f}"></meter>', f"{share:.1%}", _safe(note, 120))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _safe(text: str, most: int) -> str:
    return html.escape(shown(text, most))
