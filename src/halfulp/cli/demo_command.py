"""``halfulp demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfulp.cli.option_groups import option


def demo(
    quick: Annotated[bool, option("A smaller model and fewer steps: half a minute.")] = False,
    out: Annotated[Path | None, option("The folder; default runs/demo.", "-o", "--out")] = None,
    browse: Annotated[bool, option("Open the page when there is a screen.", "--open/--no-open")] = True,
) -> None:
    """Run the whole story on this machine's CPU: audit, forecast, and the runs that were forecast."""
    from rich.console import Console

    from halfulp import demo as story

    raise typer.Exit(story.run(Console(), size=story.QUICK if quick else story.FULL, out=out, browse=browse))
