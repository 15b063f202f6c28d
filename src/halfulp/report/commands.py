"""``halfulp report``, ``halfulp figures`` and ``halfulp paper``."""

from __future__ import annotations

from pathlib import Path

import typer

from halfulp.outputs import check_output
from halfulp.text import plain

PATHS = typer.Argument(..., help="Folders of traces or studies.", show_default=False)


def report(
    paths: list[Path] = PATHS,
    out: Path | None = typer.Option(None, "-o", "--out", help="The page; default PATH/report.html."),
    csv: Path | None = typer.Option(None, help="Write tensors by grid into this CSV file as well."),
    code: bool = typer.Option(
        False, help="Run the file that a study of your own carries, for its tables and figures."
    ),
    calibration: Path | None = typer.Option(
        None, help="What `halfulp calibrate` wrote: corrects the losses of rehearsals."
    ),
    browse: bool = typer.Option(False, "--open", help="Open the page in a browser."),
) -> None:
    """One self-contained HTML page of traces and studies; several stand side by side."""
    from halfulp.audit.calibration import Calibration
    from halfulp.report.document import write
    from halfulp.report.page import open_traces, page
    from halfulp.report.study import is_study
    from halfulp.report.tensors_csv import tensors_csv
    from halfulp.study.commands import say_code
    from halfulp.trace import Trace

    for place in filter(None, (out, csv)):
        check_output(place)
    for path in paths if code else ():
        say_code(path, "without --code none of it is run")
    known = None if calibration is None else Calibration.load(calibration)
    where = write(page(paths, code=code, calibration=known), out or default_page(paths[0]))
    typer.echo(f"The page is {plain(str(where))} ({where.stat().st_size / 1e6:.1f} MB).")
    if csv is not None:
        runs = open_traces([Trace.open(p) for p in paths if not is_study(p)])
        typer.echo(f"The table is {plain(str(write(tensors_csv(runs), csv)))}.")
    if browse:
        typer.launch(where.resolve().as_uri())


def default_page(path: Path) -> Path:
    """Beside a study, whose folder holds nothing that was not sealed; inside the folder of a trace."""
    from halfulp.report.study import is_study

    return path.with_name(f"{path.resolve().name}.html") if is_study(path) else path / "report.html"


def figures(
    paths: list[Path] = PATHS,
    out: Path = typer.Option(Path("figures"), "-o", "--out", help="The folder for the files."),
    formats: str = typer.Option("svg,pdf", help="svg, pdf, or both."),
) -> None:
    """Figures of traces and studies as vector files. Runs the file that a study of your own carries."""
    from halfulp.errors import UsageError
    from halfulp.integrations.optional import require

    kinds = [kind.strip() for kind in formats.split(",")]
    if not set(kinds) <= {"svg", "pdf"}:
        raise UsageError(f"formats are svg and pdf, not {formats!r}.")
    require("matplotlib")
    from halfulp.report.figures import write_figures
    from halfulp.study.commands import say_code

    check_output(out / "figure")
    for path in paths:
        say_code(path, "`halfulp report` runs none of it")
    for file in write_figures(paths, out, kinds):
        typer.echo(plain(str(file)))


def paper(
    studies: Path = typer.Option(Path("results/studies"), help="The folder of closed studies, NAME-SCALE."),
    scale: str = typer.Option("paper", help="The scale of the controlled studies to show."),
    out: Path = typer.Option(Path("results"), "-o", "--out", help="The folder for pages and figures."),
) -> None:
    """Set closed studies beside the paper: every number that it prints, and ours from the records."""
    from halfulp.integrations.optional import require

    require("matplotlib")
    from halfulp.report.beside_paper import write

    for file in write(studies, scale, out):
        typer.echo(plain(str(file)))


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (report, figures, paper):
        app.command()(command)
