"""``halfulp pilot``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from halfulp.cli.console import NAMES
from halfulp.cli.option_groups import Program, listed, option, share
from halfulp.errors import UsageError
from halfulp.outputs import check_output
from halfulp.text import plain


def pilot(
    context: typer.Context,
    program: Program,
    formats: Annotated[str, option(f"Formats in question, such as e4m3@128,e5m2,bf16:sr. {NAMES}")] = "",
    evaluate: Annotated[
        str,
        option(
            "The script's own evaluation: FUNCTION, or FUNCTION:KEY for a key of its result or the variable "
            "that it prints."
        ),
    ] = "",
    budget: Annotated[
        str, option("How much more than the run itself may be computed, all formats together.")
    ] = "15%",
    small: Annotated[
        str,
        option(
            "Twins: how many sequences of a DataLoader's batches (default: a twelfth); or arguments that "
            "give the script a small batch, '--batch_size 1'."
        ),
    ] = "",
    out: Annotated[Path | None, option("A folder; default runs/pilot-NAME.")] = None,
    seed: Annotated[int, option("Seed of stochastic rounding.")] = 0,
    as_json: Annotated[bool, option("Print the answer as JSON.", "--json")] = False,
) -> None:
    """Run a training script, and forecast what each number format would cost it in loss."""
    from halfulp.pilots.scripts import ScriptPilot

    if program.script is None and not program.module:
        raise UsageError("nothing to run: give a training script, or -m and a module. See --help.")
    for name, value in (("formats", formats), ("evaluate", evaluate)):
        if not value:
            raise UsageError(f"--{name} is missing: see halfulp pilot --help.")
    folder = out or Path("runs") / f"pilot-{program.stem}"
    check_output(folder)
    try:
        smaller = shlex.split(small)
    except ValueError as error:
        raise UsageError(
            f"--small takes arguments as in a shell, such as '--batch_size 1', not {small!r}: {error}."
        ) from None
    pilots = ScriptPilot(
        script=program.script, module=program.module, arguments=list(context.args), small=smaller,
        formats=listed(formats), evaluate=evaluate, budget=share(budget, "--budget", most=10), out=folder,
        seed=seed, aside=as_json,
    )  # fmt: skip
    prices = pilots.run()
    if as_json:
        typer.echo(json.dumps(prices.to_json(), indent=1))
        return
    for line in prices.lines:
        typer.echo(plain(line))
    typer.echo(plain(f"The results are in {folder}; the run itself: halfulp report {pilots.trace}"))
