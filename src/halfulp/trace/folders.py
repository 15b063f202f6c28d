"""Folders for traces: one that is free, the newest that is taken."""

from __future__ import annotations

from pathlib import Path


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
