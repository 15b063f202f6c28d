"""The errors that halfulp raises on purpose.

One root, few kinds. A message says what is wrong, where, what was expected, what was
found and what to do about it. Command-line exit codes follow the kind: 1 is left to gates and
validations that failed.
"""

from __future__ import annotations

from halfulp.text import plain


class HalfulpError(Exception):
    """Something the caller can put right: the root of every error that halfulp raises on purpose.

    >>> import halfulp as hu
    >>> try:
    ...     hu.grid("e4m3@3x")
    ... except hu.HalfulpError as error:
    ...     print(error)
    the factor in grid 'e4m3@3x' must be a positive number, not '3x'.
    """

    exit_code = 2

    def __str__(self) -> str:
        """Return the message, with names from files escaped so that they cannot control a terminal."""
        return "\n".join(plain(line) for line in super().__str__().split("\n"))


class UsageError(HalfulpError, ValueError):
    """An argument, name or combination that has no meaning; also a ``ValueError``.

    >>> issubclass(UsageError, ValueError), UsageError.exit_code
    (True, 2)
    """


class MissingError(HalfulpError, ImportError):
    """A library that only some of halfulp needs, and that is not installed."""


class CorruptionError(HalfulpError):
    """A file or state that is damaged, truncated or of another kind.

    >>> import halfulp as hu
    >>> try:
    ...     hu.Trace.open("runs/of another machine")
    ... except hu.CorruptionError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    runs/of another machine is not a trace: there is no such folder...
    """

    exit_code = 3


class TamperingError(CorruptionError):
    """A file or state whose digest is not the one recorded for it."""


class VersionError(HalfulpError):
    """A file or state written by a version that this one cannot read."""

    exit_code = 3


class DiskError(HalfulpError):
    """The operating system refused: a full disk, a read-only folder, a file that may not be read."""

    exit_code = 4


RESTORE = "Nothing was repaired: take it from a copy, or make it again."
"""What to do about a file that is not what was written."""
