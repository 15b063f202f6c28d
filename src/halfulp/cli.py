"""The command line.

Exit codes: 0 done; 1 a gate or validation failed; 2 usage; 3 corrupted input; 4 the system refused, or a
fault of halfulp's. A script under ``audit`` keeps its own; an interrupt ends by its signal.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
import traceback
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from halfulp.audit import commands as audit_commands
from halfulp.errors import DiskError, HalfulpError, UsageError
from halfulp.outputs import check_output
from halfulp.report import commands as report_commands
from halfulp.stored import commands as stored_commands
from halfulp.study.commands import app as study_app
from halfulp.text import plain, shown, tell
from halfulp.version import __version__

AUDITED = ("bf16", "fp16", "e5m2", "e4m3@128")


class _Ended(BaseException):
    """An interrupt or a closed pipe on its way past typer, for which both are exit code 1 or 130."""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _Ended from error


class _Script(TyperCommand):
    """Where the script, ``-m MODULE`` or ``--run COMMAND`` begins, halfulp's own options end: all that
    follows is its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {o: p.is_flag for p in self.params for o in p.opts if hasattr(p, "is_flag")}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            last = args[at].startswith("-m") or args[at] == "--run"
            at += 1 if flags.get(args[at], True) else 2
            if last:
                break
        else:
            at += 2 if args[at : at + 1] == ["--"] else 1
        super().parse_args(ctx, args[:at])
        ctx.args = args[at:]
        return args[at:]


app = typer.Typer(
    name="halfulp",
    cls=_Commands,
    help="Which weight updates a number format throws away, and what to do about it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(study_app)
report_commands.register(app)
audit_commands.register(app)
stored_commands.register(app)


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


@app.command(cls=_Script)
def audit(
    context: typer.Context,
    script: Path | None = typer.Argument(
        None,
        help="A training script, unmodified; all that follows is its own.",
        metavar="SCRIPT [ARGS]...",
        show_default=False,
    ),
    module: str = typer.Option(
        "", "-m", help="Instead of a script, a module, as by `python -m`; all that follows is its own."
    ),
    command: str = typer.Option(
        "",
        "--run",
        help="Instead of a script, a command such as torchrun; every Python process under it is audited.",
    ),
    grids: str | None = typer.Option(
        None, help=f"Grids, separated by commas; default {','.join(AUDITED)}, as far as they fit the weights."
    ),
    every: int = typer.Option(1, help="Audit each n-th step."),
    sample: float = typer.Option(1.0, help="Audit this share of every tensor's tiles."),
    decay: bool = typer.Option(False, help="Audit weight decay and gradient part apart as well."),
    states: bool = typer.Option(
        False,
        help="Follow what accumulates beside the weights: moments, and copies (EMA) where they are found.",
    ),
    expected: bool = typer.Option(
        False, help="Follow the never-moved share that stochastic rounding would have; doubles the cost."
    ),
    scores: str = typer.Option(
        "", help="Sum what `halfulp allocate` ranks tiles by: a grid and its steps, such as e5m2:1-600."
    ),
    tile: int = typer.Option(
        768, help="With --scores: weights of a tile; with the model's width, a tile is one token's embedding."
    ),
    rehearse: str = typer.Option(
        "",
        help="Grids, with policies, to rehearse: e4m3@128,bf16:sr. What they would cost, in loss; their "
        "weights are written at the end.",
    ),
    evaluate: str = typer.Option(
        "",
        help="The script's own evaluation, as FUNCTION, or FUNCTION:KEY of what it gives; whenever it is "
        "called, its loss is recorded, and that of every rehearsal.",
    ),
    weights: bool = typer.Option(True, help="Write the rehearsed weights at the end, into OUT/as_if."),
    calibration: Path | None = typer.Option(
        None, help="What `halfulp calibrate` wrote: corrects the losses of rehearsals."
    ),
    out: Path | None = typer.Option(None, help="The trace's folder; default runs/NAME."),
    resume: bool = typer.Option(
        False, help="Go on with a trace; steps that it holds are not recorded again."
    ),
    first_step: int | None = typer.Option(
        None,
        help="The number of the script's first step; default 1, or with --resume what its optimizer counted.",
    ),
    live: bool = typer.Option(False, help="Show what is being lost while the script runs."),
    alert: str = typer.Option(
        "", help="Warn when a tensor loses more than a share for some steps in a row, such as 95%:20."
    ),
    stop: bool = typer.Option(False, help="With --alert: end the script then, with exit code 1."),
) -> None:
    """Run a training script, a module or a command, and record what each grid would throw away."""
    from halfulp.audit.calibration import Calibration
    from halfulp.audit.children import launch
    from halfulp.audit.own_evaluation import OwnEvaluation
    from halfulp.audit.recorder import Audit
    from halfulp.audit.rehearsal import Rehearse
    from halfulp.audit.script import run_script, save_rehearsed
    from halfulp.audit.verdict import verdict
    from halfulp.grids import grid
    from halfulp.report.live import Aside, LiveView
    from halfulp.trace import Trace, free_folder, newest_folder

    given = {name for name in context.params if _is_given(context, name)}
    for name in sorted(given & {"scores", "rehearse", "evaluate", "alert"}):
        if not context.params[name]:
            raise UsageError(f"--{name} is empty: say what, or leave it out.")
    if "tile" in given and not scores:
        raise UsageError("--tile is the size of tiles that are scored: say of which grid with --scores.")
    if script is None and not module and not command:
        raise UsageError(
            "nothing to audit: give a training script, -m and a module, or --run and a command. See --help."
        )
    if out is not None:
        check_output(out)
    usual = Path("runs") / (script.stem if script is not None else module or Path(command).stem)
    folder = out if out is not None else newest_folder(usual) if resume else free_folder(usual)
    asked = Rehearse(_listed(rehearse)) if rehearse else None
    chosen = list(AUDITED) if grids is None else _listed(grids)
    there = {grid(name).name for name in chosen}
    lower = dict.fromkeys(r.grid.name for r in (asked.each if asked else ()))  # bounds are those of the audit
    options: dict[str, Any] = {
        "grids": [*chosen, *(name for name in lower if name not in there)],
        "unfit": "drop" if grids is None else "raise",
        "every": every,
        "sample": None if sample == 1.0 else sample,
        "decay": decay,
        "states": "find" if states else False,
        "expected_never_moved": expected,
        "scores": _scores(scores, tile) if scores else None,
    }
    if command:
        alone: dict[str, Any] = {
            "--resume": resume, "--first-step": first_step, "--live": live, "--rehearse": rehearse,
            "--evaluate": evaluate, "--calibration": calibration, "--alert": alert, "--stop": stop,
        }  # fmt: skip
        if refused := [
            name for name, value in alone.items() if value not in (None, "") and value is not False
        ]:
            raise UsageError(
                f"{', '.join(refused)}: for one script; with --run there may be many processes. Leave it "
                "out, or audit the script itself: halfulp audit SCRIPT."
            )
        Audit(None, **options)  # what it refuses is refused here, before anything runs
        code = launch([command, *context.args], options, folder)
        if code == -signal.SIGINT:
            raise KeyboardInterrupt
        raise typer.Exit(code if code >= 0 else 128 - code)
    view = LiveView()
    own = OwnEvaluation.of(evaluate) if evaluate else None
    known = None if calibration is None else Calibration.load(calibration)
    recorder = Audit(
        None,
        **options,
        rehearse=asked,
        out=folder,
        exists="raise",
        resume=resume,
        first_step=first_step,
        listeners=[*([view] if live else []), *_alerts(alert, stop)],
        describe={
            "script": f"-m {module}" if script is None else script.name, "arguments": list(context.args)
        },
    )  # fmt: skip

    def say() -> None:
        """The verdict; the view is taken away first."""
        view.close()
        console = Aside()
        place = recorder.out  # absolute: the script may have changed the folder
        if not recorder.writes or place is None:
            return
        there = not recorder.lost and (place / "manifest.json").exists()
        if not there and recorder.trouble is not None:
            tell(plain(f"halfulp: there is no verdict: {folder} no longer holds the trace of this run."))
        elif there:
            found = verdict(Trace.open(place), recorder.trouble, calibration=known)
            with suppress(OSError, ValueError):  # that nobody can hear it changes nothing of the run
                console.rule("halfulp")
                _tell(console, *found.lines)
                command = f"halfulp report {shlex.quote(str(folder))}"
                _tell(console, "", f"The trace is in {folder}. A page of it: {command}")

    with view if live else nullcontext():
        code = run_script(script, context.args, recorder, say, module, own)
    saved = save_rehearsed(recorder) if weights else None
    say()
    if saved is not None:
        said = f"{len(recorder.rehearsals)} rehearsals at step {recorder.step}, {', '.join(recorder.bounds)}"
        loads = "safetensors.torch.load_file gives what model.load_state_dict takes."
        tell(plain(f"Rehearsed weights ({said}) are in {folder / 'as_if'}: {loads}"))
    if code < 0:
        raise KeyboardInterrupt
    raise typer.Exit(code)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _listed(text: str) -> list[str]:
    """Names separated by commas; commas between brackets are part of a name.

    >>> _listed("bf16, bf16:eco(rounding=nearest,decay_exact=True)")
    ['bf16', 'bf16:eco(rounding=nearest,decay_exact=True)']
    """
    if re.search("[()]", re.sub(r"\([^()]*\)", "", text)):
        raise UsageError(f"{text!r} has a bracket that is not closed, or not opened.")
    found = re.findall(r"(?:[^,()]|\([^()]*\))+", text)
    return [name.strip() for name in found if name.strip()]


def _tell(console: Console, *lines: str) -> None:
    """Lines as they are, harmless whatever names are in them."""
    for line in lines:
        console.print(plain(line), highlight=False, markup=False, soft_wrap=True)


def _alerts(text: str, stop: bool) -> list[Any]:
    """A share and a number of steps, as they are written on the command line."""
    from halfulp.audit.alerts import Alert

    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%:([0-9]+)", text)
    if stop and not text:
        raise UsageError("--stop ends a script at an alert: say at which, such as --alert 95%:20.")
    if text and found is None:
        raise UsageError(f"--alert takes a share and a number of steps, such as 95%:20, not {text!r}.")
    return [] if found is None else [Alert(float(found[1]) / 100, int(found[2]), stop)]


def _scores(text: str, tile: int) -> tuple[str, int, int, int]:
    """A grid and a window of steps, as they are written on the command line."""
    found = re.fullmatch(r"(.+):([0-9]+)-([0-9]+)", text)
    if found is None:
        raise UsageError(f"--scores takes a grid and its steps, such as e5m2:1-600, not {text!r}.")
    return found[1], int(found[2]), int(found[3]), tile


@app.command()
def allocate(
    trace: Path = typer.Argument(..., help="A trace that was recorded with --scores."),
    budget: str = typer.Option(..., help="A share of all masters, such as 10%, or bytes."),
    score: str = typer.Option("P", help="F, L, C, G, U, W, T, P, R (or R:SPEC) of a rehearsal, or random."),
    keep: Path | None = typer.Option(None, help="A mask whose tiles come first: the second round of R."),
    seed: int = typer.Option(0, help="Of a random mask."),
    shuffle: int | None = typer.Option(
        None, help="A control: then move the tiles to random places of their tensors, by this seed."
    ),
    output: Path = typer.Option(Path("mask.safetensors"), "--output", "-o", help="The mask."),
) -> None:
    """Choose the tiles that get an fp32 master, within an exact budget; and what to expect of that."""
    from halfulp import masks
    from halfulp.report import recoveries

    check_output(output)
    kept = None if keep is None else masks.Mask.load(keep)
    mask = masks.allocate(trace, _budget(budget), score, seed=seed, keep=kept)
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
        f"{mask.blanket_bytes:,}), by score {mask.score}, in tiles of {mask.tile}: {plain(str(output))}"
    )
    for line in recoveries.of_mask(mask, trace):
        typer.echo(plain(line))


def _budget(text: str) -> float | int:
    """A share or a number of bytes, as they are written on the command line."""
    found = re.fullmatch(r"(0|[1-9][0-9]*)(\.[0-9]+)?(%?)", text)
    if found is None or (found[2] and not found[3]):
        raise UsageError(f"--budget takes a share such as 10% or 2.5%, or bytes such as 4096, not {text!r}.")
    return float(text.rstrip("%")) / 100 if found[3] else int(text)


@app.command()
def demo(
    quick: bool = typer.Option(False, help="A smaller model and fewer steps: half a minute."),
    out: Path | None = typer.Option(None, "-o", "--out", help="The folder; default runs/demo."),
    browse: bool = typer.Option(True, "--open/--no-open", help="Open the page when there is a screen."),
) -> None:
    """The whole story on this machine's CPU: audit, forecast, and the runs that it was for."""
    from halfulp import demo as story

    raise typer.Exit(story.run(Console(), size=story.QUICK if quick else story.FULL, out=out, browse=browse))


@app.command()
def selftest(
    device: str = typer.Option("cpu", help="cpu or cuda."),
    matrices: int = typer.Option(10, min=0, help="Millions of weights to time a step of; 0: no benchmark."),
) -> None:
    """Compare every kernel with the reference on this machine, time a step, and print one page to post."""
    from halfulp import selftest as test

    raise typer.Exit(0 if test.run(device, matrices, typer.echo) else 1)


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
    """The entry point: what can be put right is one clear line and an exit code, not a traceback.

    What a terminal's encoding does not have is escaped, as Python does on the error stream by itself.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except HalfulpError as error:
        _fail(str(error), error.exit_code)
    except _Ended as ended:
        if isinstance(ended.__cause__, BrokenPipeError):
            with suppress(OSError):  # what is still in the buffer has nowhere to go
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _fail("whoever read the output has closed it.", DiskError.exit_code)
        # The interpreter ends by the signal, after exit handlers; it need not say where it was interrupted.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt from None
    except OSError as error:
        where = "" if error.filename is None else f" at {error.filename}"
        _fail(plain(f"the system refused{where}: {error.strerror or error}."), DiskError.exit_code)
    except Exception:
        traceback.print_exc()
        _fail(
            f"this is a fault of halfulp's ({__version__}), not yours. Please report it to the project, "
            "with the lines above and the command.",
            DiskError.exit_code,
        )


def _fail(said: str, code: int) -> NoReturn:
    typer.echo(f"halfulp: {said}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
