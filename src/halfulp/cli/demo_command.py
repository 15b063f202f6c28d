"""``halfulp demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    quick: Annotated[bool, typer.Option(help="A smaller model and fewer steps: half a minute.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The folder; default runs/demo.")] = None,
    browse: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page when there is a screen.")
    ] = True,
) -> None:
    """Run the whole story on this machine's CPU: audit, forecast, and the runs that were forecast."""
    from rich.console import Console

    from halfulp import demo as story

    raise typer.Exit(story.run(Console(), size=story.QUICK if quick else story.FULL, out=out, browse=browse))
