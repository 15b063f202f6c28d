"""The command line. Exit codes: 0 done; 1 a gate or validation failed; 2 usage; 3 corrupted input."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.table import Table

from halfulp import __version__
from halfulp.errors import HalfulpError

app = typer.Typer(
    name="halfulp",
    help="Which weight updates a number format throws away, and what to do about it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halfulp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Which weight updates a number format throws away, and what to do about it."""


@app.command()
def grids(name: str = typer.Argument("", help="A grid, such as e4m3@128; none lists the known ones.")) -> None:
    """List the grids, or state the rules of one."""
    from halfulp.grids import SHOWN, grid

    console = Console()
    if not name:
        table = Table("name", "bits", "mantissa", "smallest normal", "largest", "bytes a weight", "scale")
        for known in SHOWN:
            g = grid(known)
            table.add_row(
                known,
                str(g.bits),
                str(g.mantissa),
                "-" if g.emin is None or g.integer else f"{g.smallest_normal:.3g}",
                "-" if g.largest is None else f"{g.largest:.4g}",
                f"{g.bytes_per_weight:g}",
                "fixed" if g.scaling is None else f"{g.scaling.rule} / {g.scaling.size or g.scaling.per}",
            )
        console.print(table)
        return
    g = grid(name)
    console.print(str(g), highlight=False, markup=False)
    for rule, text in g.rules.items():
        console.print(f"  {rule + ':':12}{text}", highlight=False, markup=False)
    if g.emin is not None and g.bits <= 8:
        values = g.values()
        shown = values[values >= 0]
        line = ", ".join(f"{v:g}" for v in shown[:12]) + (" ..." if len(shown) > 12 else "")
        console.print(f"  {'codes:':12}{len(values)} values; from zero up {line}", highlight=False, markup=False)


@app.command()
def demo() -> None:
    """What each grid does to one update."""
    from halfulp import demo as story

    story.run(Console())


def main() -> None:
    """The entry point: a halfulp error is one clear line and an exit code, not a traceback."""
    try:
        app()
    except HalfulpError as error:
        typer.echo(f"halfulp: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
