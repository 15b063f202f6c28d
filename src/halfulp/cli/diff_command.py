"""``halfulp diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfulp.cli.option_groups import CHECKPOINT, JSON, FailOptions, option
from halfulp.outputs import check_output, envelope
from halfulp.text import plain


def diff(
    base: Annotated[str, CHECKPOINT],
    trained: Annotated[str, typer.Argument(help="The same model, later.")],
    fail: FailOptions,
    page: Annotated[Path | None, option("Write an HTML page into this file as well.")] = None,
    every: Annotated[bool, option("List every tensor.", "--all")] = False,
    as_json: JSON = False,
) -> None:
    """Show what training changed between two checkpoints, in steps of their format, without a run or data."""
    from halfulp import files
    from halfulp.checkpoints import diff

    _ = fail.most  # refused before anything is read
    if page is not None:
        check_output(page, ".html", ".htm")
    result = diff(base, trained)
    if page is not None:
        files.put(page, result.page().encode())
    still = [t.name for t in result.tensors if t.share == 1]
    failed = fail.reason(result.total.share, "did not change", still, "did not change")
    if as_json:
        typer.echo(envelope("diff", result.to_json(), 1 if failed else 0, failed or "done"))
    else:
        for line in result.lines(None if every else 12):
            typer.echo(plain(line))
        if failed:
            typer.echo(plain(f"FAILED: {failed}."))
    raise typer.Exit(1 if failed else 0)
