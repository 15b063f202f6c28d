"""``halfulp audit``."""

from __future__ import annotations

import re
import shlex
import signal
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halfulp.cli.audit_ending import Ending
from halfulp.cli.console import NAMES, print_plain
from halfulp.cli.entry import Command
from halfulp.cli.option_groups import JSON, FailOptions, Program, is_given, listed, option
from halfulp.deprecation import CALIBRATION
from halfulp.errors import UsageError
from halfulp.outputs import check_output
from halfulp.text import plain, tell

if TYPE_CHECKING:
    from halfulp.audit.rehearsal.specs import Rehearse
    from halfulp.audit.session import Audit
    from halfulp.report.live import LiveView

RECORD, REHEARSE, WATCH = "What is recorded", "Runs on other formats", "While it runs"
"""The groups of ``--help-all``."""


class ScriptCommand(Command):
    """A command whose own options end at the script, ``-m MODULE`` or ``--run COMMAND``.

    All that follows belongs to that program.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the arguments of halfulp from those of the script."""
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
        rest = ctx.args = args[at:]
        known = {o for p in self.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
        late = dict.fromkeys(o for a in rest if (o := a.partition("=")[0]) in known)
        if late and "--" not in args[:at]:
            begin, script = plain(" ".join(args[:at])), plain(args[at - 1])
            tell(
                f"halfulp: {', '.join(late)}: passed to {script}, like everything after its name."
                f" Options for halfulp go before it: halfulp {ctx.info_name} {' '.join(late)} ... {begin}"
            )
        return rest


def usual_folder(program: Program, command: str, arguments: list[str]) -> Path:
    """Return the usual folder of a program's traces; a launcher's is that of its script."""
    launched = (Path(a).stem for a in arguments if a.endswith(".py"))
    return Path("runs") / (program.stem or next(launched, Path(command).stem))


@dataclass(frozen=True)
class RecordOptions:
    """The trace: which steps, grids and measures it holds."""

    grids: Annotated[
        str | None, option(f"Grids, separated by commas; default bf16,fp16,e5m2,e4m3@128. {NAMES}")
    ] = None
    out: Annotated[Path | None, option("The trace's folder; default runs/NAME.")] = None
    every: Annotated[int, option("Audit each n-th step.")] = 1
    states: Annotated[bool, option("Follow moments and copies (EMA) of weights as well.", "--states")] = False
    sample: Annotated[float, option("Audit this share of every tensor's tiles.", panel=RECORD)] = 1.0
    decay: Annotated[
        bool, option("Audit weight decay and gradient part apart as well.", "--decay", panel=RECORD)
    ] = False
    expected: Annotated[
        bool,
        option(
            "Follow the never-moved share that stochastic rounding would have; doubles the cost.",
            "--expected", panel=RECORD,
        ),
    ] = False  # fmt: skip
    scores: Annotated[
        str,
        option(
            "Sum what `halfulp allocate` ranks tiles by: a grid and its steps, such as e5m2:1-600.",
            panel=RECORD,
        ),
    ] = ""
    tile: Annotated[
        int,
        option(
            "With --scores: weights of a tile; with the model's width, a tile is one token's embedding.",
            panel=RECORD,
        ),
    ] = 768
    resume: Annotated[
        bool,
        option("Go on with a trace; steps that it holds are not recorded again.", "--resume", panel=RECORD),
    ] = False
    first_step: Annotated[
        int | None,
        option(
            "The number of the script's first step; default 1, or with --resume what its optimizer counted.",
            panel=RECORD,
        ),
    ] = None

    def folder(self, usual: Path) -> Path:
        """Choose the folder of the trace."""
        from halfulp.trace import newest_folder
        from halfulp.trace.writer import check_free

        if self.out is not None:
            check_free(self.out, self.resume)
            return self.out
        return newest_folder(usual) if self.resume else usual

    def options(self, rehearse: Rehearse | None) -> dict[str, Any]:
        """Return the arguments of `Audit`. The bounds of a rehearsal come from the audit of its grid."""
        from halfulp.audit.settings import AUDITED
        from halfulp.numbers.grids import grid

        chosen = list(AUDITED) if self.grids is None else listed(self.grids)
        there = {grid(name).name for name in chosen}
        lower = dict.fromkeys(r.grid.name for r in (rehearse.each if rehearse else ()))
        return {
            "grids": [*chosen, *(name for name in lower if name not in there)],
            "unfit": "drop" if self.grids is None else "raise",
            "every": self.every,
            "sample": None if self.sample == 1.0 else self.sample,
            "decay": self.decay,
            "states": "find" if self.states else False,
            "expected_never_moved": self.expected,
            "scores": _scores(self.scores, self.tile) if self.scores else None,
        }


@dataclass(frozen=True)
class RehearseOptions:
    """Runs on other formats, rehearsed beside this one."""

    rehearse: Annotated[str, option("Formats whose cost in loss to forecast, such as e4m3@128,bf16:sr.")] = ""
    evaluate: Annotated[
        str, option("The script's own evaluation: FUNCTION, or FUNCTION:KEY of its result.")
    ] = ""
    weights: Annotated[
        bool, option("Write the rehearsed weights at the end, into OUT/as_if.", panel=REHEARSE)
    ] = True
    calibration: Annotated[Path | None, option("Gone: `halfulp pilot` takes its place.", panel=REHEARSE)] = (
        None
    )


@dataclass(frozen=True)
class WatchOptions:
    """The terminal while the script runs."""

    live: Annotated[bool, option("Show what is being lost while the script runs.", "--live")] = False
    steps: Annotated[
        int | None,
        option(
            "With --live: the number of the script's last step, for an estimate of the end.", min=1,
            panel=WATCH,
        ),
    ] = None  # fmt: skip
    alert: Annotated[
        str,
        option(
            "Warn when a tensor loses more than a share for some steps in a row, such as 95%:20.", panel=WATCH
        ),
    ] = ""
    stop: Annotated[
        bool, option("With --alert: end the script then, with exit code 1.", "--stop", panel=WATCH)
    ] = False
    verbose: Annotated[
        bool, option("At the end, print everything that is known of every grid.", "--verbose", panel=WATCH)
    ] = False

    def alerts(self) -> list[Any]:
        """Make the alert if one is requested."""
        from halfulp.audit.sinks.alerts import Alert

        parts = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%:([0-9]+)", self.alert)
        if self.stop and not self.alert:
            raise UsageError("--stop goes with --alert, such as --alert 95%:20.")
        if self.alert and parts is None:
            raise UsageError(
                f"--alert takes a share and a number of steps, such as 95%:20, not {self.alert!r}."
            )
        return [] if parts is None else [Alert(float(parts[1]) / 100, int(parts[2]), self.stop)]


def audit(
    context: typer.Context,
    program: Program,
    *,
    command: Annotated[
        str, option("A launcher instead, such as torchrun: audit all its processes.", "--run")
    ] = "",
    record: RecordOptions,
    rehearsing: RehearseOptions,
    watch: WatchOptions,
    fail: FailOptions,
    require: Annotated[Path | None, option("Terms that must hold, those of hu.require: a TOML file.")] = None,
    as_json: JSON = False,
) -> None:
    """Run a training script, a module or a command, and record what each grid would lose."""
    from halfulp.audit.rehearsal.specs import Rehearse

    if not program.stem and not command:
        raise UsageError(
            "nothing to audit: give a training script, -m and a module, or --run and a command. See --help."
        )
    _check(context, record)
    ending = Ending.of(fail, require, as_json, record.grids is not None)
    folder = record.folder(usual_folder(program, command, context.args))
    rehearse = Rehearse(listed(rehearsing.rehearse)) if rehearsing.rehearse else None
    options = record.options(rehearse)
    if command:
        _check_launched(context)
        _launch([command, *context.args], options, folder, numbered=record.out is None)
    else:
        options |= {
            "rehearse": rehearse, "out": folder, "resume": record.resume,
            "exists": "number" if record.out is None else "raise",
            "first_step": record.first_step,
            "describe": {"script": program.label, "arguments": list(context.args)},
        }  # fmt: skip
        _run(context.args, program, options, rehearsing, watch, ending)


def _check(context: typer.Context, record: RecordOptions) -> None:
    """Refuse options that say nothing, or that need another one."""
    for name in ("alert", "evaluate", "rehearse", "scores"):
        if is_given(context, name) and not context.params[name]:
            raise UsageError(f"--{name} is empty: give it a value, or leave it out.")
    if is_given(context, "steps") and not context.params["live"]:
        raise UsageError("--steps is for the estimate of --live: add that, or leave it out.")
    if is_given(context, "tile") and not record.scores:
        raise UsageError("--tile goes with --scores: give a grid and its steps, such as --scores e5m2:1-600.")
    if record.out is not None:
        check_output(record.out)


def _check_launched(context: typer.Context) -> None:
    """Raise UsageError for options that work only with a single script."""
    alone = (
        "resume", "first_step", "live", "rehearse", "evaluate", "calibration", "alert", "stop", "require",
        "fail_above", "fail_stuck", "as_json", "verbose",
    )  # fmt: skip
    refused = [
        f"--{name.removeprefix('as_').replace('_', '-')}"
        for name in alone
        if (value := context.params[name]) not in (None, "") and value is not False
    ]
    if refused:
        raise UsageError(
            f"{', '.join(refused)}: for one script; with --run there may be many processes. Leave it "
            "out, or audit the script itself: halfulp audit SCRIPT."
        )


def _launch(command: list[str], options: dict[str, Any], folder: Path, *, numbered: bool) -> None:
    """Run a launcher whose processes are audited."""
    from halfulp.audit.script.children import launch
    from halfulp.audit.session import Audit
    from halfulp.trace import free_folder

    Audit(None, **options)  # what it refuses is refused here, before anything runs
    code = launch(command, options, free_folder(folder) if numbered else folder)
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    raise typer.Exit(code if code >= 0 else 128 - code)


def _run(
    arguments: list[str],
    program: Program,
    options: dict[str, Any],
    rehearsing: RehearseOptions,
    watch: WatchOptions,
    ending: Ending,
) -> None:
    """Run a script or module in this process."""
    from halfulp.audit.script.own_evaluation import OwnEvaluation
    from halfulp.audit.script.runner import run_script, save_rehearsed
    from halfulp.audit.session import Audit
    from halfulp.report.live import LiveView

    folder = options["out"]
    view = LiveView(steps=watch.steps)
    own = OwnEvaluation.of(rehearsing.evaluate) if rehearsing.evaluate else None
    if rehearsing.calibration is not None:
        tell(f"halfulp: --calibration is not used. {CALIBRATION}")
    recorder = Audit(None, **options, listeners=[*([view] if watch.live else []), *watch.alerts()])

    def say() -> None:
        if not ending.as_json:
            _say(recorder, view, folder, verbose=watch.verbose)

    with view if watch.live else nullcontext():
        try:
            code = run_script(program.script, arguments, recorder, say, program.module, own, ending)
        except UsageError:  # that no step was recorded: none was let through
            if not ending.broken:
                raise
            code = 1
    saved = save_rehearsed(recorder) if rehearsing.weights else None
    say()
    if saved is not None:
        many = len(recorder.rehearsals)
        said = f"{many} rehearsal{'s' * (many != 1)} at step {recorder.step}, {', '.join(recorder.bounds)}"
        loads = "safetensors.torch.load_file gives what model.load_state_dict takes."
        place = folder.with_name(saved.parent.name) / saved.name
        tell(plain(f"Rehearsed weights ({said}) are in {place}: {loads}"))
    if code < 0:
        raise KeyboardInterrupt
    raise typer.Exit(ending.say(recorder, code))


def _say(recorder: Audit, view: LiveView, folder: Path, *, verbose: bool) -> None:
    """Close the live view and print the verdict."""
    from halfulp.report.live import Aside
    from halfulp.trace import Trace
    from halfulp.verdicts.answer import verdict, whence

    view.close()
    console = Aside()
    place = recorder.out  # absolute: the script may have changed the folder
    if not recorder.writes or place is None:
        return
    folder = folder.with_name(place.name)  # as it was given, and numbered if it was taken
    there = not recorder.lost and (place / "manifest.json").exists()
    if not there and recorder.trouble is not None:
        tell(plain(f"halfulp: there is no verdict: {folder} no longer holds the trace of this run."))
    elif there:
        command = f"halfulp report {shlex.quote(str(folder))}"
        trace = Trace.open(place)
        answer = verdict(trace, recorder.trouble, page=command)
        with suppress(OSError, ValueError):  # that nobody can hear it changes nothing of the run
            console.rule("halfulp")
            print_plain(console, *answer.text(verbose=verbose).split("\n"))
            print_plain(console, "", whence(trace, folder))


def _scores(text: str, tile: int) -> tuple[str, int, int, int]:
    """Parse a grid and a window of steps."""
    parts = re.fullmatch(r"(.+):([0-9]+)-([0-9]+)", text)
    if parts is None:
        raise UsageError(f"--scores takes a grid and its steps, such as e5m2:1-600, not {text!r}.")
    return parts[1], int(parts[2]), int(parts[3]), tile
