"""``halfulp check``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halfulp.cli.option_groups import CHECKPOINT, JSON, FailOptions, listed, number, option
from halfulp.errors import UsageError
from halfulp.outputs import envelope
from halfulp.text import plain

if TYPE_CHECKING:
    from halfulp.checkpoints import Check, Sweep

SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""The shares of weights for which ``--json`` gives the learning rate from which on they could move."""
STEP = "The step"
"""The panel of options that ``--help`` leaves to ``--help-all``."""
LISTED = 12
"""The number of tensors that are listed without ``--all``."""


@dataclass(frozen=True)
class StepOptions:
    """The step that is taken."""

    lr: Annotated[float | None, option("The learning rate; default: a table of rates, 1e-7 to 1e-3.")] = None
    optimizer: Annotated[str, option("adamw, adam or lion; others with a --bound of your own.")] = "adamw"
    bound: Annotated[
        str,
        option(
            "step: one of size lr, which is typical (the worst case is stated too); worst: the most "
            "that Adam makes of any gradients; or a number, times lr."
        ),
    ] = "step"
    betas: Annotated[
        str | None, option("Adam's, from which its worst case follows; default 0.9,0.999.", panel=STEP)
    ] = None
    rare: Annotated[
        str | None,
        option(
            "Tensors whose rows see gradients rarely, such as '*embed*', separated by commas: for them "
            "the worst case counts.",
            panel=STEP,
        ),
    ] = None
    weight_decay: Annotated[float, option("Decoupled weight decay; with --lr.", panel=STEP)] = 0.0
    grid: Annotated[
        str | None,
        option(
            "Where the weights would be stored, such as e4m3@128 (fp8, a scale of 128: the value times "
            "128 is cast); default: where they are."
        ),
    ] = None

    def check(self, model: str) -> Check | Sweep:
        """Check a model with this step, or with steps of many rates."""
        from halfulp.checkpoints import check, sweep

        kinds: dict[str, Literal["step", "worst"]] = {"step": "step", "worst": "worst"}
        far = kinds[self.bound] if self.bound in kinds else _number(self.bound, "--bound")
        if self.betas is not None and not (self.optimizer.lower() in ("adam", "adamw") and far in kinds):
            raise UsageError("--betas are for Adam's own bounds, of adam or adamw: leave them out.")
        pair = [_number(b, "--betas") for b in (self.betas or "0.9,0.999").split(",")]
        if len(pair) != 2:
            raise UsageError(f"--betas takes two numbers, such as 0.9,0.999, not {self.betas!r}.")
        options: dict[str, Any] = {
            "optimizer": self.optimizer, "betas": (pair[0], pair[1]), "bound": far, "grid": self.grid,
            "rare": () if self.rare is None else listed(self.rare) or self.rare,
        }  # fmt: skip
        if self.lr is not None:
            return check(model, self.lr, weight_decay=self.weight_decay, **options)
        if self.weight_decay:
            raise UsageError("--weight-decay is for one learning rate: name it with --lr.")
        return sweep(model, **options)


def check(
    model: Annotated[str, CHECKPOINT],
    step: StepOptions,
    fail: FailOptions,
    every: Annotated[bool, option("List every tensor.", "--all")] = False,
    as_json: JSON = False,
) -> None:
    """List the weights of a checkpoint that a step at a learning rate cannot move, without a run or data."""
    if step.lr is None and (fail.most is not None or fail.fail_stuck):
        raise UsageError("--fail-above and --fail-stuck judge one learning rate: name it with --lr.")
    result = step.check(model)
    failed = _failed(result, fail)
    if as_json:
        answer = {"model": str(Path(model)), **_to_json(result, step)}
        typer.echo(envelope("check", answer, 1 if failed else 0, failed or "done"))
    else:
        for line in result.lines(None if every else LISTED if step.lr is not None else 0):
            typer.echo(plain(line))
        if failed:
            typer.echo(plain(f"FAILED: {failed}."))
    raise typer.Exit(1 if failed else 0)


def _failed(result: Check | Sweep, fail: FailOptions) -> str | None:
    from halfulp.checkpoints import Check

    if not isinstance(result, Check):
        return None
    stuck = [t.name for t in result.tensors if t.share == 1]
    return fail.reason(result.share, "cannot be moved by such a step", stuck, "cannot be moved")


def _to_json(result: Check | Sweep, step: StepOptions) -> dict[str, Any]:
    from halfulp.checkpoints import Sweep

    rates = result.table() if isinstance(result, Sweep) else []
    checked = result.found if isinstance(result, Sweep) else result
    whole = {
        "weights": checked.weights, "fix": checked.fix("..." if rates else None), "skipped": checked.skipped,
        "could_move_from": {f"{s:g}": checked.rate_for(s) for s in SHARES},
    }  # fmt: skip
    if rates:
        kept = ("tensor", "group", "dtype", "grid", "weights", "nonfinite", "half_from")
        return {**whole, "rates": rates, "tensors": [{k: t[k] for k in kept} for t in checked.table()]}
    worst = None if checked.worst is None else {
        "said": checked.worst.said, "bound": checked.worst.bound, "stuck": checked.stuck_worst,
        "share": checked.worst_share,
    }  # fmt: skip
    return {
        **whole, "said": checked.reach.said, "lr": step.lr, "bound": checked.reach.bound,
        "weight_decay": step.weight_decay, "stuck": checked.stuck, "share": checked.share, "worst": worst,
        "tensors": checked.table(),
    }  # fmt: skip


def _number(text: str, what: str) -> float:
    value = number(text)
    if value is None:
        raise UsageError(f"{what} takes a number, not {text!r}.")
    return value
