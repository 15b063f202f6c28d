"""Print lines on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfulp.text import plain, wrapped

if TYPE_CHECKING:
    from rich.console import Console

NAMES = "e4m3@128: fp8, a scale of 128 (the value times 128 is cast); int4/g128: a scale per group of 128."
"""An explanation of the two kinds of grid names that are hard to guess."""


def print_plain(console: Console, *lines: str) -> None:
    """Print lines without markup; control characters in names are made harmless.

    A terminal gets long lines broken at words, but for the lines to paste, from ``Fix`` to the next label.
    """
    width, paste = console.width if console.is_terminal else None, False
    for line in lines:
        paste = line.startswith("Fix ") or (paste and line.startswith(" "))
        shown = plain(line) if paste else wrapped(plain(line), width)
        console.print(shown, highlight=False, markup=False, soft_wrap=True)
