"""Text that came from somewhere else, made harmless for a terminal, a ledger and a Markdown page.

Control characters, line separators, direction marks and the like are shown as their escapes, so they
cannot move a cursor, forge a line or reverse what is read.

>>> print(plain("a\\x1b[31m\\u202eb\\nc"))
a\\x1b[31m\\u202eb\\nc
>>> print(cell("a|b <script>"))
a\\|b &lt;script&gt;
"""

from __future__ import annotations

import re
import unicodedata

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#|~!])")


def plain(text: str) -> str:
    """The text with everything invisible escaped."""
    return "".join(c if _visible(c) else _escape(c) for c in text)


def shown(name: str, width: int = 60) -> str:
    """A name made harmless, and short.

    >>> print(shown("a\\x1b[31mb"))
    a\\x1b[31mb
    """
    safe = plain(name)
    return safe if len(safe) <= width else safe[: width - 1] + "…"


def quoted(text: str) -> str:
    """Lines from elsewhere (a traceback), each marked as such."""
    return "\n".join(f"  | {plain(line)}" for line in text.rstrip("\n").split("\n"))


def cell(value: str | float | None) -> str:
    """A cell of a Markdown table, or any text of a page: no markup, no HTML."""
    if value is None:
        return "-"
    if not isinstance(value, str):
        return number(value)
    safe = plain(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", safe)


def count(number: int, what: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def number(value: float | None) -> str:
    """Six digits, which is enough to read; files hold all of them."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _visible(character: str) -> bool:
    return character == " " or unicodedata.category(character)[0] not in "CZ"


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()
