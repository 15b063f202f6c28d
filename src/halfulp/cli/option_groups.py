"""Define groups of options as dataclasses, and parse the arguments of commands.

A command with many options takes groups of them: frozen dataclasses whose fields are annotated like typer's
arguments. Typer itself knows only plain parameters, so `grouped` shows it those.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from halfulp.errors import UsageError
from halfulp.text import count, shown


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer every field of the dataclasses that a command takes as a parameter of its own.

    A command of which an option is hidden in a panel (see `option`) gets ``--help-all`` as well.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}

    def add(name: str, annotation: Any, default: Any) -> None:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    for p in inspect.signature(command, eval_str=True).parameters.values():
        if not is_dataclass(p.annotation):
            add(p.name, p.annotation, p.default)
            continue
        assert isinstance(p.annotation, type)
        groups[p.name] = p.annotation
        hints = get_type_hints(p.annotation, include_extras=True)
        for field in fields(p.annotation):
            add(field.name, hints[field.name], p.empty if field.default is MISSING else field.default)
    settings = [setting for p in parameters for setting in get_args(p.annotation)[1:]]
    if any(setting.rich_help_panel for setting in settings):
        add("help_all", HELP_ALL, default=False)

    def call(**given: Any) -> None:
        given.pop("help_all", None)
        instances = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **instances)

    call.__name__, call.__doc__, call.__module__ = command.__name__, command.__doc__, command.__module__
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect asks for
    return call


def reveal(command: Any) -> None:
    """Let the help of a command show the options that it leaves out."""
    for parameter in command.params:
        parameter.hidden = False


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        reveal(context.command)
        typer.echo(context.get_help())
        raise typer.Exit


HELP_ALL = Annotated[
    bool,
    typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options and exit."),
]
"""The option of a command whose help leaves options out."""


def is_given(context: typer.Context, name: str) -> bool:
    """Return True if an option was given on the command line, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def listed(text: str) -> list[str]:
    """Split names at commas; commas between brackets are part of a name.

    >>> listed("bf16, bf16:eco(rounding=nearest,decay_exact=True)")
    ['bf16', 'bf16:eco(rounding=nearest,decay_exact=True)']
    """
    if re.search("[()]", re.sub(r"\([^()]*\)", "", text)):
        raise UsageError(f"{text!r} has a bracket that is not closed, or not opened.")
    names = re.findall(r"(?:[^,()]|\([^()]*\))+", text)
    return [name.strip() for name in names if name.strip()]


def number(text: str) -> float | None:
    """Parse a number; return None if the text is not a number.

    >>> number("1e-3"), number("runs/measured")
    (0.001, None)
    """
    try:
        return float(text)
    except ValueError:
        return None


def share(text: str, option: str, most: float = 1.0) -> float:
    """Parse a share of at most ``most``.

    >>> share("50%", "--fail-above"), share("1.5", "--budget", most=10)
    (0.5, 1.5)
    """
    parts = re.fullmatch(r"([0-9]+(\.[0-9]+)?)(%?)", text.strip())
    value = float(parts[1]) / (100 if parts[3] else 1) if parts else math.inf
    if value > most:
        raise UsageError(f"{option} takes a share such as 50% or 0.5, not {text!r}.")
    return value


def option(help: str, *names: str, panel: str = "", **settings: Any) -> Any:  # as typer calls it
    """Describe an option; one with a panel is hidden, and ``--help-all`` lists it in that panel."""
    if panel:
        settings |= {"hidden": True, "rich_help_panel": panel}
    return typer.Option(*names, help=help, **settings)


@dataclass(frozen=True)
class Program:
    """The training program to run: a script or a module."""

    script: Annotated[
        Path | None,
        typer.Argument(
            help="A training script, unmodified; all that follows is its own.", metavar="SCRIPT [ARGS]...",
            show_default=False,
        ),
    ] = None  # fmt: skip
    module: Annotated[str, option("A module instead, as by `python -m`.", "-m")] = ""

    @property
    def label(self) -> str:
        """The name of the program in the trace."""
        return f"-m {self.module}" if self.script is None else self.script.name

    @property
    def stem(self) -> str:
        """The name of the program in the name of a folder; empty if there is none."""
        return self.module if self.script is None else self.script.stem


CHECKPOINT = typer.Argument(
    help="A folder of a checkpoint, or its index, .safetensors, .bin, .pt or .gguf file."
)
"""The argument of a command that reads stored weights: text, as an empty path would be this folder."""
JSON = Annotated[bool, option("Print one JSON object, on one line.", "--json")]
"""The option of every command whose output a program might read; see :func:`halfulp.outputs.envelope`."""


@dataclass(frozen=True)
class FailOptions:
    """The conditions for exit code 1."""

    fail_above: Annotated[str | None, option("Exit with 1 if more is lost or stays put, such as 50%.")] = None
    fail_stuck: Annotated[bool, option("Exit with 1 if a whole tensor does not move.", "--fail-stuck")] = (
        False
    )

    @property
    def most(self) -> float | None:
        """The share of ``--fail-above``; None without it."""
        return None if self.fail_above is None else share(self.fail_above, "--fail-above")

    def reason(self, share: float, what: str, stuck: Sequence[str], still: str) -> str | None:
        """Return the reason why a command fails; None if it does not.

        Args:
            share: The share that ``--fail-above`` judges; NaN fails.
            what: The text after the number: what it is a share of.
            stuck: The tensors that ``--fail-stuck`` judges.
            still: The text after their number: what they did.
        """
        most = self.most
        if most is not None and not share <= most:
            said = "nothing is finite" if share != share else f"{share:.2%} {what}, more than {most:.4g}"
            return f"{said} (--fail-above)"
        if self.fail_stuck and stuck:
            return f"{count(len(stuck), 'whole tensor')} {still}, such as {shown(stuck[0])} (--fail-stuck)"
        return None
