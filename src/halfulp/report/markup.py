"""HTML that is safe by construction: whatever is not a tag made here is text and is escaped.

There is no template language, because a template is one forgotten filter away from an injection. A page
is nested calls of :func:`tag`; a string that is not :class:`Html` can only become text or an attribute's
value. Names that somebody else chose pass through :func:`name` as well, which makes what is invisible
visible, keeps right-to-left letters from rearranging their surroundings, and shortens.

>>> tag("p", "a < b & ", tag("b", "c"), class_="x")
Html('<p class="x">a &lt; b &amp; <b>c</b></p>')
>>> name("<script>")
Html('<bdi class="name">&lt;script&gt;</bdi>')
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from halfulp.text import shown

VOID = {"br", "col", "hr", "img", "input", "link", "meta"}
DRAWN = {"line", "path"}
"""Elements of SVG that hold nothing; these must say so."""
TITLE = 300
"""Most characters of a long name that a tooltip shows."""


class Html(str):
    """Markup; everything else is text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Html({str(self)!r})"


Content = str | float | int | None | Iterable[Any]


def text(content: Content) -> str:
    """Return content as markup: escaped unless it is markup already; None is empty, lists are joined."""
    if content is None:
        return ""
    if isinstance(content, Html):
        return content
    if isinstance(content, str | int | float):
        return html.escape(str(content), quote=True)
    return "".join(text(part) for part in content)


def tag(element: str, *content: Content, **attributes: str | float | int | bool | None) -> Html:
    """Return an element. ``class_`` and ``for_`` lose their underscore; True is an attribute without a value.

    >>> tag("input", type="checkbox", checked=True, aria_label='"x"', hidden=None)
    Html('<input type="checkbox" checked aria-label="&quot;x&quot;">')
    """
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        quoted = "" if value is True else f'="{html.escape(str(value), quote=True)}"'
        written += f" {attribute}{quoted}"
    if element in VOID | DRAWN:
        return Html(f"<{element}{written}{'/' if element in DRAWN else ''}>")
    return Html(f"<{element}{written}>{text(content)}</{element}>")


def name(chosen: str, width: int = 48) -> Html:
    """Return a name that somebody else chose, elided in the middle; the tooltip has more of it."""
    whole = shown(chosen, TITLE)
    return tag(
        "bdi",
        elided(shown(chosen, 10**9), width),
        class_="name",
        title=None if len(whole) <= width else whole,
    )


def prose(said: str, width: int = 400) -> Html:
    """Return sentences that somebody else wrote, shortened in the middle."""
    return tag("bdi", elided(shown(said, 10**9), width))


def elided(chosen: str, width: int) -> str:
    """Return the beginning and the end of a long string.

    >>> elided("transformer.h.11.attention.weight", 20)
    'transforme…on.weight'
    """
    if len(chosen) <= width:
        return chosen
    tail = (width - 1) // 2
    return f"{chosen[: width - 1 - tail]}…{chosen[len(chosen) - tail :]}"


def script_json(data: Any) -> Html:
    """Return JSON that is safe in a script element: no byte of it can end the element or open a comment."""
    script = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        script = script.replace(letter, f"\\u{ord(letter):04x}")
    return Html(script)


def table(
    head: Iterable[Content],
    rows: Iterable[Iterable[Content]],
    *,
    caption: Content = None,
    class_: str | None = None,
) -> Html:
    """Return a table in a box that scrolls sideways. A cell may be a ``td`` or ``th`` of its own."""

    def cell(content: Content, element: str, **attributes: str) -> Html:
        if isinstance(content, Html) and content.startswith(("<td", "<th")):
            return content
        return tag(element, content, **attributes)

    inside = tag(
        "table",
        tag("thead", tag("tr", *(cell(c, "th", scope="col") for c in head))),
        tag("tbody", *(tag("tr", *(cell(c, "td") for c in row)) for row in rows)),
        class_=class_,
    )
    spoken = caption if isinstance(caption, str) and not isinstance(caption, Html) else "Table"
    box = tag("div", inside, class_="scroll", tabindex=0, role="region", aria_label=spoken)
    return tag("figure", tag("figcaption", caption) if caption else None, box)


def number(*content: Content, **attributes: Any) -> Html:
    """Return a cell with a number in it."""
    return tag("td", *content, class_="number", **attributes)


def numeric(*content: Content) -> Html:
    """Return the head of a column of numbers."""
    return tag("th", *content, scope="col", class_="number")


def picture(said: str, width: int, height: int, parts: Iterable[Html], class_: str | None = None) -> Html:
    """Return a drawing of a fixed size; `said` is what a screen reader says of it."""
    return tag(
        "svg", *parts, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img",
        aria_label=said, class_=class_,
    )  # fmt: skip
