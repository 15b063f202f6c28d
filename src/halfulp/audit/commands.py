"""``halfulp compare`` and ``halfulp calibrate``."""

from __future__ import annotations

from pathlib import Path

import typer

from halfulp.outputs import check_output
from halfulp.text import plain


def compare(
    reference: Path = typer.Argument(..., help="The trace whose forecast is tested."),
    measured: Path = typer.Argument(..., help="The trace of the run on the grid."),
    grid: str = typer.Option("", help="A grid of both traces; default: all that they share."),
    scope: str = typer.Option("all", help="all, all-2d, core, a group, or a tensor's name."),
    warmup: int = typer.Option(0, help="Steps left out at the start."),
) -> None:
    """Set a forecast beside an outcome: the projection's, and that of the rehearsal of this run."""
    from halfulp.audit.outcome import compare_traces
    from halfulp.trace import Trace

    for line in compare_traces(Trace.open(reference), Trace.open(measured), grid or None, scope, warmup):
        typer.echo(plain(line))


def calibrate(
    reference: Path = typer.Argument(..., help="The trace of a run that rehearsed a format."),
    measured: str = typer.Argument(
        ..., help="The trace of the run that really stored its weights so, or its loss as a number."
    ),
    rehearsal: str = typer.Option("", help="Which rehearsal it was; default: by grid and policy of the run."),
    step: int | None = typer.Option(None, help="Of which evaluation; default: all (of a number: the last)."),
    output: Path = typer.Option(Path("calibration.json"), "--output", "-o", help="The calibration."),
    add: bool = typer.Option(False, help="Add to the calibration that is there."),
) -> None:
    """How far a rehearsal was off: what corrects the next one (--calibration of audit and report)."""
    from halfulp.audit.calibration import Calibration
    from halfulp.trace import Trace

    check_output(output)
    loss = _number(measured)
    outcome = Trace.open(Path(measured)) if loss is None else loss
    made = Calibration.from_runs(Trace.open(reference), outcome, rehearsal or None, step)
    whole = Calibration.load(output) + made if add else made
    whole.save(output)
    for line in made.lines:
        typer.echo(plain(line))
    typer.echo(plain(f"The calibration is {output}: halfulp report --calibration {output} TRACE"))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (compare, calibrate):
        app.command()(command)
