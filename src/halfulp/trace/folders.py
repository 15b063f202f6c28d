"""Folders for traces: one that is free, the newest that is taken; and what nobody may write into them."""

from __future__ import annotations

import os
from pathlib import Path

from halfulp.errors import UsageError

OWN = ("manifest.json", "trouble.json", ".lock", "parts", "state", "shards")
"""What a trace is made of; other files may lie beside it, as a page of it does."""


def free_folder(path: Path) -> Path:
    """A folder that is not taken: this one, or ``path-2``, ``path-3`` beside it."""
    return _beside(path)[-1]


def newest_folder(path: Path) -> Path:
    """The last of these that is taken; the first if none is."""
    return _beside(path)[-2:][0]


def _beside(path: Path) -> list[Path]:
    """The folder and those that were made beside it because it was taken, up to the first that is free."""
    found = [path]
    while found[-1].exists():
        found.append(path.with_name(f"{path.name}-{len(found) + 1}"))
    return found


def check_output(path: Path) -> None:
    """Refuse to write in the place of a file of a trace, or among them: the trace would be gone."""
    place = Path(os.path.realpath(path))
    for folder in place.parents:
        if os.path.lexists(folder / "manifest.json") and os.path.isdir(folder / "parts"):
            if place.relative_to(folder).parts[0] in OWN:
                raise UsageError(
                    f"{path} belongs to the trace {folder}: choose another place for the output."
                )
            return
