"""Text that came from somewhere else, made harmless for a terminal, a ledger and a Markdown page.

Control characters, line separators, direction marks and the like are shown as their escapes, so they
cannot move a cursor, forge a line or reverse what is read.

>>> print(plain("a\\x1b[31m\\u202eb\\nc"))
a\\x1b[31m\\u202eb\\nc
>>> print(cell("a|b <script>"))
a\\|b &lt;script&gt;
"""

from __future__ import annotations

import contextlib
import re
import sys
import unicodedata

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#|~!])")


def plain(text: str) -> str:
    """The text with everything invisible escaped."""
    return "".join(c if _visible(c) else _escape(c) for c in text)


def tell(*lines: str) -> None:
    """Lines for whoever watches, on stderr. Where they cannot be written (a full disk, a pipe that is closed)
    they are left out: no training ends for that."""
    if sys.stderr is not None:  # for print, that would be stdout
        with contextlib.suppress(OSError, ValueError):
            print("\n".join(lines), file=sys.stderr, flush=True)


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


def short(value: float | None) -> str:
    """As many digits as a measured number means: three decimals from one on, three digits below.

    >>> short(5.43219), short(0.0088213), short(1.0), short(21120.0), short(None)
    ('5.432', '0.00882', '1', '21120', '-')
    """
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) < 2**53:
        return str(int(value))
    return f"{value:.3f}" if 1 <= abs(value) < 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.6g}"


def beside(value: float | None, threshold: float) -> str:
    """The same, with more digits where fewer would not say on which side of a threshold it lies.

    >>> beside(0.89998, 0.9), beside(0.9, 0.9), beside(0.8924, 0.9)
    ('0.89998', '0.9', '0.892')
    """
    text = short(value)
    if value is None:
        return text
    for digits in range(4, 18):
        if (float(text) > threshold) - (float(text) < threshold) == (value > threshold) - (value < threshold):
            break
        text = f"{value:.{digits}g}"
    return text


def _visible(character: str) -> bool:
    return character == " " or unicodedata.category(character)[0] not in "CZ"


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode()
