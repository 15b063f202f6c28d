"""The entry point: exit codes, interrupts and closed pipes.

Exit codes: 0 done; 1 a gate or validation failed; 2 usage; 3 corrupted input; 4 a system error, or a bug in
halfulp. A script under ``audit`` keeps its own exit code; an interrupt ends the process by its signal.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from halfulp.errors import DiskError, HalfulpError
from halfulp.text import plain, tell
from halfulp.version import __version__


class _Ended(BaseException):
    """An interrupt or a closed pipe on its way past typer, for which both are exit code 1 or 130."""


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
    tell(f"halfulp: {said}")
    sys.exit(code)
