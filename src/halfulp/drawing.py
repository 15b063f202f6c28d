"""Draw every figure in one style: sizes, fonts, and colours that colour-blind readers can tell apart.

Figures are made without pyplot, so that there is no current figure, no window and no setting that
outlives a call; a figure function is a pure function of its numbers. ``halfulp figures`` calls those of a
study inside :func:`house_style`, so that legends and lines made after :func:`new_figure` have the look, too.

Colours are those of Okabe and
Ito (2008), in the order of use, the hard-to-see yellow last. Line styles repeat the distinction, so
that a figure survives a black-and-white printer.

:func:`save` writes vectors: SVG for pages and PDF for papers. The same figure gives the same bytes on
every run, since the files hold neither a date nor random identifiers.

A name from elsewhere (a tensor's, a run's) goes through :func:`label` first: matplotlib
would read the dollar signs in it as mathematics.

>>> figure, (left, right) = new_figure(1, 2)
>>> line = left.plot([1, 2, 3], [0.1, 0.4, 0.6], color=COLOURS[0], label=label("e4m3@128"))
>>> text = left.set_xlabel("step"), left.set_ylabel("updates lost")
>>> percent(left)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfulp import files
from halfulp.text import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PURPLE, SKY, BLACK, YELLOW = "#CC79A7", "#56B4E9", "#000000", "#F0E442"
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, YELLOW)
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
GREY = "#767676"
"""Colour of everything that is not data: thresholds, baselines, captions."""

POLICY_COLOURS: Mapping[str, str] = {
    "master": BLACK,
    "rne": VERMILLION,
    "sr": BLUE,
    "eco": GREEN,
    "deadzone-sr": SKY,
    "kahan": ORANGE,
    "tile": PURPLE,
}
"""The same policy has the same colour in every figure."""

WIDTH = 6.4
"""Inches: a page of text."""
HEIGHT = 2.6

RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.linewidth": 0.6,
    "axes.prop_cycle": f"cycler(color={list(COLOURS[:7])})",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters everywhere
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "pdf.fonttype": 42,  # letters stay letters
    "svg.fonttype": "path",  # and need no font on the reader's side
    "svg.hashsalt": "halfulp",
    "xtick.labelsize": 8,
    "xtick.major.width": 0.6,
    "ytick.labelsize": 8,
    "ytick.major.width": 0.6,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in the house style within the context; afterwards matplotlib is as it was."""
    import matplotlib as mpl

    with mpl.rc_context(RC):
        yield


def new_figure(
    rows: int = 1,
    columns: int = 1,
    *,
    width: float = WIDTH,
    height: float | None = None,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Return a figure in the house style and its panels, row by row. Sizes in inches.

    >>> figure, (panel,) = new_figure()
    >>> figure, (top, bottom) = new_figure(2, 1, sharex=True)
    """
    from matplotlib.figure import Figure

    with house_style():
        size = (width, HEIGHT * rows if height is None else height)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    return figure, [panel for row in panels for panel in row]


def vector(figure: Figure, kind: str) -> bytes:
    """Return a figure as the bytes of an ``svg`` or ``pdf`` file."""
    undated: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = BytesIO()
    with house_style():
        figure.savefig(buffer, format=kind, metadata=undated.get(kind))
    return buffer.getvalue()


def save(figure: Figure, stem: Path, formats: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Write a figure as ``stem.svg`` and ``stem.pdf``, each whole or not at all; what was written."""
    contents = [(stem.with_name(f"{stem.name}.{kind}"), vector(figure, kind)) for kind in formats]
    files.put_all(contents, stem.parent)
    return [file for file, _ in contents]


def percent(axes: Axes, axis: str = "y", *, full: bool = True) -> None:
    """Format an axis of shares as percentages; ``full`` sets its range to 0% to 100%."""
    from matplotlib.ticker import PercentFormatter

    chosen = axes.yaxis if axis == "y" else axes.xaxis
    chosen.set_major_formatter(PercentFormatter(1.0))
    if full:
        (axes.set_ylim if axis == "y" else axes.set_xlim)(0.0, 1.0)


def label(name: str, width: int = 40) -> str:
    r"""Return a user's name as text for a figure: short, visible, and never mathematics.

    >>> print(label("a$b$"), label("\u202eabc"), label("x" * 50, 10))
    a\$b\$ \u202eabc xxxxxxxxx…
    """
    letters = (c if ord(c) < 0x250 else c.encode("unicode_escape").decode() for c in name)
    return shown("".join(letters), width).replace("$", r"\$")
