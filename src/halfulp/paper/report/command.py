"""``halfulp paper``."""

from __future__ import annotations

from pathlib import Path

import typer

from halfulp.text import plain


def paper(
    studies: Path = typer.Option(Path("results/studies"), help="The folder of closed studies, NAME-SCALE."),
    scale: str = typer.Option("paper", help="The scale of the controlled studies to show."),
    out: Path = typer.Option(Path("results"), "-o", "--out", help="The folder for pages and figures."),
) -> None:
    """Set closed studies beside the paper: every number that it prints, and ours from the records."""
    from halfulp.integrations.optional import require

    require("matplotlib")
    from halfulp.paper.report.beside_paper import write

    for file in write(studies, scale, out):
        typer.echo(plain(str(file)))
