"""The command line: one module for each command, each of which imports what it needs when it runs.

Exit codes are those of `entry`. A new command is a module ``NAME_command.py`` with a function, and a line
in `COMMANDS`; a plug-in adds its own.
"""

from __future__ import annotations

from typing import Annotated

import typer

from halfulp import plugins
from halfulp.cli.allocate_command import allocate
from halfulp.cli.audit_command import ScriptCommand, audit
from halfulp.cli.calibrate_command import calibrate
from halfulp.cli.check_command import check
from halfulp.cli.compare_command import compare
from halfulp.cli.data_command import app as data_app
from halfulp.cli.demo_command import demo
from halfulp.cli.diff_command import diff
from halfulp.cli.entry import Command, Commands, run
from halfulp.cli.figures_command import figures
from halfulp.cli.grids_command import grids
from halfulp.cli.option_groups import grouped
from halfulp.cli.pilot_command import pilot
from halfulp.cli.report_command import report, study_report
from halfulp.cli.selftest_command import selftest
from halfulp.cli.study_command import app as study_app
from halfulp.version import __version__

COMMANDS = (
    check, diff, report, figures, compare, allocate, grids, demo, selftest,
)  # fmt: skip

app = typer.Typer(
    name="halfulp",
    cls=Commands,
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
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Find the weight updates that a number format loses, and what to do about it."""


for script_command in (audit, pilot):
    app.command(cls=ScriptCommand)(grouped(script_command))
for command in COMMANDS:
    app.command(cls=Command)(grouped(command))
anything = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command(hidden=True, context_settings=anything)(calibrate)
app.add_typer(data_app)
study_app.command("report", cls=Command)(grouped(study_report))
app.add_typer(study_app)
for plugin in plugins.installed():
    plugin.register(app)


def main() -> None:
    """Run the command line."""
    run(app)
