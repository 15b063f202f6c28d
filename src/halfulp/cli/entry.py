"""The entry point: exit codes, interrupts and closed pipes.

Exit codes: 0 done; 1 a gate or validation failed; 2 usage; 3 corrupted input; 4 a system error, or a bug in
halfulp. A script under ``audit`` keeps its own exit code; an interrupt ends the process by its signal.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from halfulp.errors import DiskError, HalfulpError
from halfulp.outputs import envelope
from halfulp.text import plain, tell
from halfulp.version import __version__


class _Ended(BaseException):
    """An interrupt or a closed pipe on its way past typer, for which both are exit code 1 or 130."""


class Command(TyperCommand):
    """A command whose errors are JSON where ``--json`` is given, errors of its own arguments included."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, of which the first wrong one raises."""
        known = any("--json" in p.opts for p in self.params)
        with _errors_as_json(ctx, known and "--json" in args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _errors_as_json(ctx, ctx.params.get("as_json", False)):
            return super().invoke(ctx)


@contextmanager
def _errors_as_json(ctx: Any, wanted: bool) -> Iterator[None]:
    """Print an error as JSON, if requested, and re-raise it."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        if wanted:
            names: list[str] = []
            while ctx.parent is not None:
                names, ctx = [ctx.info_name, *names], ctx.parent
            said, code = _described(error)
            sys.stdout.write(f"{envelope(' '.join(names), None, code, said)}\n")
        raise


def _described(error: Exception) -> tuple[str, int]:
    """Return what is said of an error, and its exit code."""
    if isinstance(error, HalfulpError):
        return str(error), error.exit_code
    if isinstance(error, OSError):
        where = "" if error.filename is None else f" at {error.filename}"
        return plain(f"the system refused{where}: {error.strerror or error}."), DiskError.exit_code
    if (worded := getattr(error, "format_message", None)) is not None:  # typer's, of arguments
        return plain(worded()), HalfulpError.exit_code
    return (
        f"this is a fault of halfulp's ({__version__}), not yours. Please report it to the project, "
        "with the lines above and the command.",
        DiskError.exit_code,
    )


class Commands(TyperGroup):
    """The group of all commands."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; let an interrupt or a closed pipe end it with its own exit code."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _Ended from error


def run(app: typer.Typer) -> None:
    """Run the command line; errors that users can fix give one clear line and an exit code, not a traceback.

    Characters that the terminal's encoding lacks are escaped, as Python does by itself on the error stream.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except _Ended as ended:
        if isinstance(ended.__cause__, BrokenPipeError):
            with suppress(OSError):  # what is still in the buffer has nowhere to go
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _fail("whoever read the output has closed it.", DiskError.exit_code)
        # The interpreter ends by the signal, after exit handlers; it need not say where it was interrupted.
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt from None
    except Exception as error:
        if not isinstance(error, HalfulpError | OSError):
            traceback.print_exc()
        _fail(*_described(error))


def _fail(said: str, code: int) -> NoReturn:
    tell(f"halfulp: {said}")
    sys.exit(code)
