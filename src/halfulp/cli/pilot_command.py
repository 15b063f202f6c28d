"""``halfulp pilot``."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from halfulp.cli.console import NAMES
from halfulp.cli.option_groups import listed
from halfulp.errors import UsageError
from halfulp.outputs import check_output
from halfulp.text import plain


@dataclass(frozen=True)
class Piloted:
    """The program."""

    script: Annotated[
        Path | None,
        typer.Argument(
            help="A training script, unmodified; all that follows is its own.", metavar="SCRIPT [ARGS]...",
            show_default=False,
        ),
    ] = None  # fmt: skip
    module: Annotated[str, typer.Option("-m", help="A module instead, as by `python -m`.")] = ""


def pilot(
    context: typer.Context,
    program: Piloted,
    formats: Annotated[
        str, typer.Option(help=f"Formats in question, such as e4m3@128,e5m2,bf16:sr. {NAMES}")
    ] = "",
    evaluate: Annotated[
        str,
        typer.Option(
            help="The script's own evaluation: FUNCTION, or FUNCTION:KEY for a key of its result or the "
            "variable that it prints."
        ),
    ] = "",
    budget: Annotated[
        str, typer.Option(help="How much more than the run itself may be computed, all formats together.")
    ] = "15%",
    small: Annotated[
        str,
        typer.Option(
            help="Twins: how many sequences of a DataLoader's batches (default: a twelfth); or arguments "
            "that give the script a small batch, '--batch_size 1'."
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="A folder; default runs/pilot-NAME.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of stochastic rounding.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Run a training script, and forecast what each number format would cost it in loss."""
    from halfulp.pilots.scripts import ScriptPilot

    if program.script is None and not program.module:
        raise UsageError("nothing to run: give a training script, or -m and a module. See --help.")
    for name, value in (("formats", formats), ("evaluate", evaluate)):
        if not value:
            raise UsageError(f"--{name} is missing: see halfulp pilot --help.")
    stem = program.module or (program.script.stem if program.script else "")
    folder = out or Path("runs") / f"pilot-{stem}"
    check_output(folder)
    made = ScriptPilot(
        script=program.script, module=program.module, arguments=list(context.args), small=shlex.split(small),
        formats=listed(formats), evaluate=evaluate, budget=share(budget), out=folder, seed=seed,
        aside=as_json,
    )  # fmt: skip
    found = made.run()
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    for line in found.lines:
        typer.echo(plain(line))
    typer.echo(plain(f"The results are in {folder}; the run itself: halfulp report {made.trace}"))


def share(text: str) -> float:
    """Parse a share.

    >>> share("15%"), share("0.15")
    (0.15, 0.15)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%?)", text.strip())
    if found is None or (value := float(found[1]) / (100 if found[2] else 1)) > 10:
        raise UsageError(f"--budget takes a share of the run's compute, such as 15% or 0.15, not {text!r}.")
    return value
