"""``halfulp report`` and ``halfulp study report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfulp.cli.option_groups import option
from halfulp.cli.study_command import in_short
from halfulp.cli.study_options import StudyPlace, say_code
from halfulp.deprecation import CALIBRATION
from halfulp.errors import UsageError
from halfulp.outputs import check_output
from halfulp.text import plain, tell

PAGES = (".html", ".htm")


def report(
    paths: Annotated[list[Path], typer.Argument(help="Folders of traces or studies.")],
    out: Annotated[Path | None, option("The page; default PATH/report.html.", "-o", "--out")] = None,
    csv: Annotated[Path | None, option("Write tensors by grid into this CSV file as well.")] = None,
    code: Annotated[
        bool, option("Run the file that a study of your own carries, for its tables and figures.")
    ] = False,
    calibration: Annotated[
        Path | None,
        option("Gone: `halfulp pilot` takes its place.", hidden=True),
    ] = None,
    browse: Annotated[bool, option("Open the page in a browser.", "--open")] = False,
) -> None:
    """Write one self-contained HTML page of traces and studies; several are shown side by side."""
    from halfulp.report.document import write
    from halfulp.report.page import open_traces, page
    from halfulp.report.study_page import is_study
    from halfulp.report.tensors_csv import tensors_csv
    from halfulp.trace import Trace

    for place, kinds in ((out, PAGES), (csv, (".csv",))):
        if place is not None:
            check_output(place, *kinds)
    if csv is not None and all(map(is_study, paths)):
        raise UsageError("--csv writes the tensors of traces, and only studies were given: leave it out.")
    for path in paths if code else ():
        say_code(path, "without --code none of it is run")
    if calibration is not None:
        tell(f"halfulp: --calibration is not used. {CALIBRATION}")
    where = write(page(paths, code=code), out or default_page(paths[0]))
    _say_page(where)
    if csv is not None:
        runs = open_traces([Trace.open(p) for p in paths if not is_study(p)])
        typer.echo(f"The table is {plain(str(write(tensors_csv(runs), csv)))}.")
    if browse:
        typer.launch(where.resolve().as_uri())


def study_report(
    place: StudyPlace,
    output: Annotated[
        Path | None,
        option("The page, one HTML file; default: gates and label on the terminal.", "--output", "-o"),
    ] = None,
    no_code: Annotated[
        bool, option("Run no code of the study: its own tables and figures are left out.", "--no-code")
    ] = False,
) -> None:
    """Print the gates and the label of a closed study, or write its page, as `halfulp report` does."""
    from halfulp.report.document import write
    from halfulp.report.page import page
    from halfulp.study.evidence import open_closed

    if output is not None:
        check_output(output, *PAGES)
        if output.suffix == ".md":
            raise UsageError(f"The page of a study is HTML: write it to {output.with_suffix('.html')}.")
    with place.opened(code=output is not None and not no_code) as folder:
        if output is not None:
            _say_page(write(page([folder], code=not no_code), output))
            return
        closed = open_closed(folder)
        for line in in_short(closed.result or {}, closed.digest):
            typer.echo(line)


def _say_page(where: Path) -> None:
    typer.echo(f"The page is {plain(str(where))} ({where.stat().st_size / 1e6:.1f} MB).")


def default_page(path: Path) -> Path:
    """Return a path beside a study, whose folder holds nothing unsealed, or inside the folder of a trace."""
    from halfulp.report.study_page import is_study

    return path.with_name(f"{path.resolve().name}.html") if is_study(path) else path / "report.html"
