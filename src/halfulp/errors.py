"""The errors that halfulp raises on purpose.

One root, few kinds. A message says what is wrong, where, what was expected, what was
found and what to do about it. Command-line exit codes follow the kind.
"""

from __future__ import annotations


class HalfulpError(Exception):
    """Something the caller can put right."""

    exit_code = 2


class UsageError(HalfulpError, ValueError):
    """An argument, name or combination that has no meaning."""


class CorruptionError(HalfulpError):
    """A file or state that is damaged, truncated or of another kind."""

    exit_code = 3


class TamperingError(CorruptionError):
    """A file or state whose digest is not the one recorded for it."""


class VersionError(HalfulpError):
    """A file or state written by a version that this one cannot read."""

    exit_code = 3
