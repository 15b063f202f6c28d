"""``halfulp check``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import typer

from halfulp.errors import UsageError
from halfulp.text import plain


def check(
    model: Path = typer.Argument(
        ..., help="A .safetensors file, the index of a sharded one, or a folder.", show_default=False
    ),
    lr: float = typer.Option(..., help="The learning rate."),
    optimizer: str = typer.Option("adamw", help="adamw, adam or lion; others with a --bound of your own."),
    bound: str = typer.Option(
        "step", help="step: one of size lr; worst: the most that Adam makes of any gradients; or times lr."
    ),
    betas: str = typer.Option("0.9,0.999", help="Adam's, for --bound worst."),
    weight_decay: float = typer.Option(0.0, help="Decoupled weight decay."),
    grid: str = typer.Option("", help="Where the weights would be stored; default: where they are."),
    fail_above: str = typer.Option("50%", help="Exit with 1 if more of the weights cannot move."),
    every: bool = typer.Option(False, "--all", help="List every tensor."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object instead of lines."),
) -> None:
    """Which weights of a checkpoint no step of a learning rate can move: no run, no data."""
    from halfulp.stored.checking import check as checked
    from halfulp.stored.checking import known

    most = _share(fail_above)
    kinds: dict[str, Literal["step", "worst"]] = {"step": "step", "worst": "worst"}
    far = kinds[bound] if bound in kinds else _number(bound, "--bound")
    pair = [_number(b, "--betas") for b in betas.split(",")]
    if len(pair) != 2:
        raise UsageError(f"--betas takes two numbers, such as 0.9,0.999, not {betas!r}.")
    found = checked(
        model, lr, optimizer=optimizer, betas=(pair[0], pair[1]), weight_decay=weight_decay, bound=far,
        grid=grid or None,
    )  # fmt: skip
    failed = not found.share <= most  # nor if none is finite
    if as_json:
        rates = {f"{s:g}": known(found.rate_for(s)) for s in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)}
        told: dict[str, Any] = {
            "said": found.reach.said, "lr": lr, "bound": found.reach.bound, "weight_decay": weight_decay,
            "weights": found.weights, "stuck": found.stuck, "share": known(found.share), "failed": failed,
            "could_move_from": rates, "tensors": found.table(), "skipped": found.skipped,
        }  # fmt: skip
        typer.echo(json.dumps(told, indent=1, allow_nan=False))
    else:
        for line in found.lines(None if every else 12):
            typer.echo(plain(line))
        if failed:
            what = (
                f"more than {most:.4g} of the weights cannot move"
                if found.share > most
                else "nothing is finite"
            )
            typer.echo(f"FAILED: {what} (--fail-above).")
    raise typer.Exit(1 if failed else 0)


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{what} takes a number, not {text!r}.") from None


def _share(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(\.[0-9]+)?)(%?)", text)
    share = float(found[1]) / (100 if found[3] else 1) if found else 2.0
    if share > 1:
        raise UsageError(f"--fail-above takes a share such as 50% or 0.5, not {text!r}.")
    return share


def register(app: typer.Typer) -> None:
    """Make it a command."""
    app.command()(check)
