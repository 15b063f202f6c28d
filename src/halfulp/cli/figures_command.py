"""``halfulp figures``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfulp.cli.option_groups import option
from halfulp.errors import UsageError
from halfulp.outputs import check_output
from halfulp.text import plain


def figures(
    paths: Annotated[list[Path], typer.Argument(help="Folders of traces or studies.")],
    out: Annotated[Path, option("The folder for the files.", "-o", "--out")] = Path("figures"),
    formats: Annotated[str, option("svg, pdf, or both.")] = "svg,pdf",
) -> None:
    """Write figures of traces and studies as vector files. Runs the file that a study of your own carries."""
    from halfulp.integrations.optional import require

    kinds = [kind.strip() for kind in formats.split(",")]
    if not set(kinds) <= {"svg", "pdf"}:
        raise UsageError(f"formats are svg and pdf, not {formats!r}.")
    require("matplotlib")
    from halfulp.cli.study_options import say_code
    from halfulp.report.figures import write_figures

    check_output(out / "figure")
    for path in paths:
        say_code(path, "`halfulp report` runs none of it")
    for file in write_figures(paths, out, kinds):
        typer.echo(plain(str(file)))
