"""Check where commands may write, and format their results as JSON.

``--json`` prints one object on one line, the last one of standard output: the same envelope for every
command, around a result of its own. ``docs/reference/json.md`` describes both.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfulp.errors import UsageError
from halfulp.version import __version__

SCHEMA = "halfulp/1"
"""The version of the envelope and of all results; a key that changes its meaning makes it the next one."""

TRACE = ("manifest.json", "trouble.json", ".lock", "parts", "state", "shards", "roles")
"""Files and folders of a trace; other files, such as its report page, may lie beside them."""
STUDY = ("protocol.json", "seal.json")
"""Files of every study; only sealed or recorded files may lie beside them."""


def check_output(path: Path, *kinds: str) -> None:
    """Refuse to overwrite files of a trace, or to write into a trace or the folder of a study.

    With `kinds` (suffixes), refuse to overwrite a file of any other kind: a slip of the keyboard, such as a
    page written over a checkpoint, must not cost anybody a file.
    """
    place = Path(os.path.realpath(path))
    for folder in place.parents:
        if all(os.path.lexists(folder / name) for name in STUDY):
            raise UsageError(
                f"{path} is in the folder of the study {folder}, which holds nothing but what was sealed and "
                "recorded: choose another place for the output."
            )
        if os.path.lexists(folder / "manifest.json") and os.path.isdir(folder / "parts"):
            if place.relative_to(folder).parts[0] in TRACE:
                raise UsageError(
                    f"{path} belongs to the trace {folder}: choose another place for the output."
                )
            break
    if kinds and place.is_file() and place.suffix.lower() not in kinds:
        raise UsageError(
            f"{path} exists, and is no {kinds[0]} file that could be replaced: choose another name for the "
            "output, or move the file away."
        )


def envelope(command: str, result: Mapping[str, Any] | None, code: int = 0, reason: str = "done") -> str:
    """Return what ``--json`` prints: one line of JSON, in which a number that is not finite is null.

    Args:
        command: The command's name, such as ``"study status"``.
        result: The command's own result; None if it failed before there was one.
        code: The exit code.
        reason: Why that is the exit code, in words.

    >>> print(envelope("check", {"share": math.nan}).partition(', "command"')[2])
    : "check", "exit": {"code": 0, "reason": "done"}, "result": {"share": null}}
    """
    answer = {
        "schema": SCHEMA, "halfulp": __version__, "command": command,
        "exit": {"code": code, "reason": reason}, "result": result,
    }  # fmt: skip
    return json.dumps(finite(answer), allow_nan=False)


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON has none."""
    if isinstance(value, Mapping):
        return {key: finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
