"""The command line. Exit codes: 0 done; 1 a gate or validation failed; 2 usage; 3 corrupted input."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from halfulp import __version__
from halfulp.errors import HalfulpError, UsageError
from halfulp.report import commands as report_commands
from halfulp.study.commands import app as study_app
from halfulp.text import shown

AUDITED = ("bf16", "fp16", "e5m2", "e4m3@128")

app = typer.Typer(
    name="halfulp",
    help="Which weight updates a number format throws away, and what to do about it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(study_app)
report_commands.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halfulp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Which weight updates a number format throws away, and what to do about it."""


@app.command()
def grids(
    name: str = typer.Argument("", help="A grid, such as e4m3@128; none lists the known ones."),
) -> None:
    """List the grids, or state the rules of one."""
    from halfulp.grids import SHOWN, grid

    console = Console()
    if not name:
        name_column = Column("name", no_wrap=True)  # to be copied
        others = ("bits", "mantissa", "smallest normal", "largest", "bytes a weight", "scale")
        table = Table(name_column, *others)
        for known in SHOWN:
            g = grid(known)
            table.add_row(
                known,
                str(g.bits),
                str(g.mantissa),
                "-" if g.emin is None or g.integer else f"{g.smallest_normal:.3g}",
                "-" if g.largest is None else f"{g.largest:.4g}",
                f"{g.bytes_per_weight:g}",
                "fixed" if g.scaling is None else f"{g.scaling.rule} / {g.scaling.size or g.scaling.per}",
            )
        console.print(table)
        return
    g = grid(name)
    console.print(str(g), highlight=False, markup=False)
    for rule, text in g.rules.items():
        console.print(f"  {rule + ':':12}{text}", highlight=False, markup=False)
    if g.emin is not None and g.bits <= 8:
        values = g.values()
        shown = values[values >= 0]
        line = ", ".join(f"{v:g}" for v in shown[:12]) + (" ..." if len(shown) > 12 else "")
        console.print(
            f"  {'codes:':12}{len(values)} values; from zero up {line}", highlight=False, markup=False
        )


@app.command(
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    }
)
def audit(
    context: typer.Context,
    script: Path = typer.Argument(..., help="A training script, unmodified; its own arguments follow."),
    grids: str = typer.Option(
        "", help=f"Grids, separated by commas; default {','.join(AUDITED)}, as far as they fit the weights."
    ),
    every: int = typer.Option(1, help="Audit each n-th step."),
    sample: float = typer.Option(1.0, help="Audit this share of every tensor's tiles."),
    decay: bool = typer.Option(False, help="Audit weight decay and gradient part apart as well."),
    expected: bool = typer.Option(
        False, help="Follow the never-moved share that stochastic rounding would have; doubles the cost."
    ),
    scores: str = typer.Option(
        "", help="Sum what `halfulp allocate` ranks tiles by: a grid and its steps, such as e5m2:1-600."
    ),
    tile: int = typer.Option(
        768, help="With --scores: weights of a tile; with the model's width, a tile is one token's embedding."
    ),
    out: Path | None = typer.Option(None, help="The trace's folder; default runs/NAME."),
    resume: bool = typer.Option(
        False, help="Go on with a trace; steps that it holds are not recorded again."
    ),
    live: bool = typer.Option(False, help="Show what is being lost while the script runs."),
) -> None:
    """Run a training script and record what each grid would throw away."""
    from halfulp.audit import verdict
    from halfulp.audit.recorder import Audit
    from halfulp.audit.script import run_script
    from halfulp.report.live import LiveView
    from halfulp.trace import Trace, free_folder, newest_folder

    usual = Path("runs") / script.stem
    folder = out if out is not None else newest_folder(usual) if resume else free_folder(usual)
    view = LiveView()
    recorder = Audit(
        None,
        [g.strip() for g in grids.split(",") if g.strip()] if grids else AUDITED,
        out=folder,
        unfit="raise" if grids else "drop",
        every=every,
        sample=None if sample == 1.0 else sample,
        decay=decay,
        expected_never_moved=expected,
        scores=_scores(scores, tile) if scores else None,
        resume=resume,
        listeners=[view] if live else [],
        describe={"script": script.name, "arguments": list(context.args)},
    )
    with view if live else nullcontext():
        code = run_script(script, context.args, recorder)
    console = Console(stderr=True)
    place = recorder.out  # absolute: the script may have changed the folder
    if recorder.writes and place is not None and (place / "manifest.json").exists():
        console.rule("halfulp")
        for line in verdict.lines(Trace.open(place)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        said = f"\nThe trace is in {folder}. A page of it: halfulp report {folder}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(code)


def _scores(text: str, tile: int) -> tuple[str, int, int, int]:
    """A grid and a window of steps, as they are written on the command line."""
    found = re.fullmatch(r"(.+):(\d+)-(\d+)", text)
    if found is None:
        raise UsageError(f"--scores takes a grid and its steps, such as e5m2:1-600, not {text!r}.")
    return found[1], int(found[2]), int(found[3]), tile


@app.command()
def allocate(
    trace: Path = typer.Argument(..., help="A trace that was recorded with --scores."),
    budget: str = typer.Option(..., help="A share of all masters, such as 10%, or bytes."),
    score: str = typer.Option("P", help="F, L, C, G, U, W, T, P, or random."),
    seed: int = typer.Option(0, help="Of a random mask."),
    shuffle: int | None = typer.Option(
        None, help="A control: then move the tiles to random places of their tensors, by this seed."
    ),
    output: Path = typer.Option(Path("mask.safetensors"), "--output", "-o", help="The mask."),
) -> None:
    """Choose the tiles that get an fp32 master, within an exact budget."""
    from halfulp import masks

    share = re.fullmatch(r"(\d+(?:\.\d*)?)%", budget)
    if share is None and not budget.isdigit():
        raise UsageError(f"--budget takes a share such as 10%, or bytes, not {budget!r}.")
    mask = masks.allocate(trace, float(share[1]) / 100 if share else int(budget), score, seed=seed)
    mask = mask if shuffle is None else mask.shuffled(shuffle)
    mask.save(output)
    table = Table(Column("tensor", no_wrap=True), "tiles", "of", "bytes of masters")
    for name, tiles in mask.tiles.items():
        table.add_row(
            Text(shown(name)), f"{int(tiles.sum()):,}", f"{len(tiles):,}", f"{mask.payload(name):,}"
        )
    Console().print(table)
    typer.echo(
        f"{mask.payload_bytes:,} of {mask.budget:,} bytes ({mask.payload_bytes / mask.blanket_bytes:.4%} of "
        f"{mask.blanket_bytes:,}), by score {mask.score}, "
        f"in tiles of {mask.tile}: {output}"
    )


@app.command()
def compare(
    reference: Path = typer.Argument(..., help="The trace whose forecast is tested."),
    measured: Path = typer.Argument(..., help="The trace of the run on the grid."),
    grid: str = typer.Option("", help="A grid of both traces; default: all that they share."),
    scope: str = typer.Option("all", help="all, all-2d, core, a group, or a tensor's name."),
    warmup: int = typer.Option(0, help="Steps left out at the start."),
) -> None:
    """Set a forecast beside an outcome."""
    from halfulp.audit.outcome import compare_traces
    from halfulp.trace import Trace

    for line in compare_traces(Trace.open(reference), Trace.open(measured), grid or None, scope, warmup):
        Console().print(line, highlight=False, markup=False, soft_wrap=True)


@app.command()
def data(
    name: str = typer.Argument("", help="A data set: find it, download it if needed; none lists them all."),
) -> None:
    """List the data sets and whether they are what they should be, or get one."""
    from halfulp.data import listing

    if name:
        listing.one(name, Console())
    else:
        Console().print(listing.table())


def main() -> None:
    """The entry point: a halfulp error is one clear line and an exit code, not a traceback."""
    try:
        app()
    except HalfulpError as error:
        typer.echo(f"halfulp: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
