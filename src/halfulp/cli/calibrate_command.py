"""``halfulp calibrate``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from halfulp.cli.option_groups import JSON, number
from halfulp.outputs import check_output, envelope
from halfulp.text import plain


def calibrate(
    reference: Annotated[Path, typer.Argument(help="The trace of a run that rehearsed a format.")],
    measured: Annotated[
        str,
        typer.Argument(
            help="The trace of the run that really stored its weights so, or its loss as a number."
        ),
    ],
    rehearsal: Annotated[
        str, typer.Option(help="Which rehearsal it was; default: by grid and policy of the run.")
    ] = "",
    step: Annotated[
        int | None, typer.Option(help="Of which evaluation; default: all (of a number: the last).")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The calibration.")] = Path(
        "calibration.json"
    ),
    add: Annotated[bool, typer.Option(help="Add to the calibration that is there.")] = False,
    as_json: JSON = False,
) -> None:
    """Measure how far a rehearsal was off, to correct the next one (--calibration of audit and report)."""
    from halfulp.trace import Trace
    from halfulp.verdicts.calibration import Calibration

    check_output(output)
    loss = number(measured)
    outcome = Trace.open(Path(measured)) if loss is None else loss
    made = Calibration.from_runs(Trace.open(reference), outcome, rehearsal or None, step)
    whole = Calibration.load(output) + made if add else made
    whole.save(output)
    if as_json:
        ratios = [{b: p.ratio(b) for b in p.usable} for p in made.pairs]
        pairs = [{**asdict(p), "ratio": ratio} for p, ratio in zip(made.pairs, ratios, strict=True)]
        typer.echo(envelope("calibrate", {"output": str(output), "pairs": pairs}))
        return
    for line in made.lines:
        typer.echo(plain(line))
    typer.echo(plain(f"The calibration is {output}: halfulp report --calibration {output} TRACE"))
