r"""Text that came from somewhere else, made harmless for a terminal, a ledger and a Markdown page.

Control characters, line separators, direction marks and the like are shown as their escapes, so they
cannot move a cursor, forge a line or reverse what is read.

>>> print(plain("a\x1b[31m\u202eb\nc"))
a\x1b[31m\u202eb\nc
>>> print(cell("a|b <script>"))
a\|b &lt;script&gt;
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Container, Iterable

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#|~!])")


def plain(text: str) -> str:
    """Return the text with everything invisible escaped."""
    return "".join(c if _visible(c) else _escape(c) for c in text)


def tell(*lines: str) -> None:
    """Print lines to stderr, where a terminal gets them broken at words.

    Lines that cannot be written (a full disk, a closed pipe) are dropped, so that training continues.
    """
    if sys.stderr is not None:  # for print, that would be stdout
        with contextlib.suppress(OSError, ValueError):
            width = shutil.get_terminal_size().columns if is_terminal(sys.stderr) else None
            print("\n".join(wrapped(line, width) for line in lines), file=sys.stderr, flush=True)


def is_terminal(stream: object) -> bool:
    """Return True if a stream is a terminal; streams that scripts put in the place of stderr may not say."""
    isatty = getattr(stream, "isatty", None)
    return callable(isatty) and bool(isatty())


def wrapped(line: str, width: int | None) -> str:
    """Break a long line at words, never inside one; None leaves it whole, and so does an indent.

    What follows a short label and spaces stays in its column. Indented lines may be code, to be copied.

    >>> print(wrapped("Why    weights are bfloat16, no fp32 master", 30))
    Why    weights are bfloat16,
           no fp32 master
    """
    if width is None or len(line) <= width or line.startswith(" "):
        return line
    label = re.match(r"\w{1,6} {2,}", line)
    indent = " " * (label.end() if label and label.end() < width // 2 else 0)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def time_left(spent: float, done: float, whole: float) -> str:
    """Return an estimate of the time that work still takes, from what is done of it; empty if there is none.

    >>> time_left(30, 1, 4), time_left(30, 0, 4), time_left(30, 4, 4)
    (', about 0:01:30 left', '', '')
    """
    if done <= 0 or whole <= done:
        return ""
    seconds = round(spent / done * (whole - done))
    return f", about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"


def shown(name: str, width: int = 60) -> str:
    r"""Return a name with invisible characters escaped, shortened to ``width``.

    >>> print(shown("a\x1b[31mb"))
    a\x1b[31mb
    """
    safe = plain(name)
    return safe if len(safe) <= width else safe[: width - 1] + "…"


def percent(share: float | None, digits: int | None = None) -> str:
    """Format a share without false precision; only exact values print as 0% or 100%.

    >>> [percent(x) for x in (0.0, 0.0000004, 0.0042, 0.634, 0.9996, 1.0, None)]
    ['0%', '<0.1%', '0.4%', '63%', '>99.9%', '100%', '-']
    """
    if share is None or share != share:
        return "-"
    if digits is None:
        digits = 0 if 0.1 <= share < 0.9 else 1
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    smallest = 10.0 ** -(digits + 2)
    if share < smallest:
        return f"<{smallest:.{digits}%}"
    if share > 1 - smallest:
        return f">{1 - smallest:.{digits}%}"
    return f"{share:.{digits}%}"


WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts that torch.compile and others add to the names of modules that they wrap."""


def unwrapped_name(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers add.

    >>> unwrapped_name("block._checkpoint_wrapped_module.weight")
    'block.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unique(name: str, taken: Container[str]) -> str:
    """Make a name distinct from those that are taken: the second ``weight`` is ``weight#2``.

    >>> unique("weight", {"weight", "bias"}), unique("weight", {"bias"})
    ('weight#2', 'weight')
    """
    candidate, n = name, 2
    while candidate in taken:
        candidate, n = f"{name}#{n}", n + 1
    return candidate


def several(given: object) -> tuple[str, ...] | None:
    """Return one text, or several in a sequence, as a tuple; None if there is an empty one or anything else.

    >>> several("*norm*"), several(["a", "b"]), several(3)
    (('*norm*',), ('a', 'b'), None)
    """
    texts = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    return texts if all(isinstance(text, str) and text for text in texts) else None


def meant(name: str, known: Iterable[str]) -> str:
    """Return the question whether another name was meant, after a space; empty if none is near.

    >>> meant("sampel", ["sample", "seed"]), meant("x", ["sample", "seed"])
    (' Did you mean sample?', '')
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def quoted(text: str) -> str:
    """Quote foreign lines, such as a traceback, with a mark before each."""
    return "\n".join(f"  | {plain(line)}" for line in text.rstrip("\n").split("\n"))


def cell(value: str | float | None) -> str:
    """Return a cell of a Markdown table, or any text of a page: no markup, no HTML."""
    if value is None:
        return "-"
    if not isinstance(value, str):
        return number(value)
    safe = plain(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", safe)


def count(number: int, what: str) -> str:
    """Format a count with its noun: ``1 cell``, ``2 cells``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def number(value: float | None) -> str:
    """Format a number with six digits, enough for reading; files hold all digits."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def short(value: float | None) -> str:
    """Format a measured number: three decimals from one up, three significant digits below.

    >>> short(5.43219), short(0.0088213), short(1.0), short(21120.0), short(None)
    ('5.432', '0.00882', '1', '21120', '-')
    """
    if value is None:
        return "-"
    if float(value).is_integer() and abs(value) < 2**53:
        return str(int(value))
    return f"{value:.3f}" if 1 <= abs(value) < 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.6g}"


def beside(value: float | None, threshold: float) -> str:
    """Return the same, with more digits where fewer would not say on which side of a threshold it lies.

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
