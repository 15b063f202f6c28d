"""One HTML file that needs nothing else and asks nobody.

Words and tables are in the HTML itself, so they are there without scripts, in a reader mode and on paper;
charts are drawn from packed numbers (:mod:`halfulp.report.charts`) by uPlot, a library of 120 kB that
becomes part of the file (``assets/uplot``: release 1.6.16 as its author published it, MIT). The content
security policy allows the one script and the one style sheet of the page by their digests, and nothing else:
no request, no inline handler, no inline style, no evaluated string. So a name that got past every escape
would still be inert.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from halfulp import files
from halfulp.report.markup import Html, name, script_json, tag
from halfulp.text import shown
from halfulp.version import __version__


def document(title: str, sections: Sequence[Html | None], data: object) -> str:
    """Return a whole HTML document; ``data`` is what its charts are drawn from."""
    script = "\n".join([_asset("uplot", "uPlot.iife.js"), _asset("tree.js"), _asset("page.js")])
    style = "\n".join([_asset("uplot", "uPlot.min.css"), _asset("page.css")])
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{shown(title, 80)} - halfulp"),
        Html(f"<style>{style}</style>"),
    )
    colophon = f"Made by halfulp {__version__}. One file; it asks nobody for anything."
    body = tag(
        "body",
        tag("header", tag("p", "halfulp", class_="brand"), tag("p", name(title, 80), class_="run")),
        tag("main", *sections),
        tag("footer", tag("p", colophon)),
        Html(f'<script type="application/json" id="data">{script_json(data)}</script>'),
        Html(f"<script>{script}</script>"),
    )
    return f'<!doctype html>\n<html lang="en">{head}\n{body}</html>\n'


def write(page: str, out: Path) -> Path:
    """Put a page where it belongs, in one go."""
    files.put(out, page.encode())
    return out


def _asset(*parts: str) -> str:
    """Read a file of the page's own."""
    return resources.files("halfulp.report").joinpath("assets", *parts).read_text(encoding="utf-8").strip()


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
