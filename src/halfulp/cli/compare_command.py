"""``halfulp compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from halfulp.cli.option_groups import JSON, option
from halfulp.outputs import envelope
from halfulp.text import plain


def compare(
    reference: Annotated[Path, typer.Argument(help="The trace whose forecast is tested.")],
    measured: Annotated[Path, typer.Argument(help="The trace of the run on the grid.")],
    grid: Annotated[str, option("A grid of both traces; default: all that they share.")] = "",
    scope: Annotated[
        str,
        option("all, all-2d, core, a group, or a tensor's name; default: what is stored on the grid."),
    ] = "",
    warmup: Annotated[int, option("Steps left out at the start.", min=0)] = 0,
    as_json: JSON = False,
) -> None:
    """Compare forecasts with an outcome: the projection's, and that of the rehearsal of this run."""
    from halfulp.audit.rehearsal.forecast_outcome import GridOutcome, compare_traces
    from halfulp.trace import Trace

    traces = Trace.open(reference), Trace.open(measured)
    outcomes = compare_traces(*traces, grid or None, scope or None, warmup)
    if as_json:
        result: dict[str, Any] = {"reference": str(reference), "measured": str(measured)}
        result["grids"] = [o.to_json() for o in outcomes if isinstance(o, GridOutcome)]
        result["rehearsals"] = [o.to_json() for o in outcomes if not isinstance(o, GridOutcome)]
        typer.echo(envelope("compare", result))
        return
    for outcome in outcomes:
        for line in outcome.lines:
            typer.echo(plain(line))
