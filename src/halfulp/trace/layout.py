"""The layout of a trace's folder, and the names in it that a recording may take for its own.

A recording removes what a crash left of an earlier one. But the folder is its user's, who may keep models in
a folder ``state``, too: only names that halfulp gives are taken for its own, and where there is no manifest
only what a process leaves that ends before it has written one. A link may have come with a folder from
elsewhere and point anywhere, so none is followed out of a trace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfulp import files
from halfulp.errors import CorruptionError

MANIFEST, LOCK, TROUBLE = "manifest.json", ".lock", "trouble.json"
PARTS, STATES, SHARDS, ROLES = FOLDERS = ("parts", "state", "shards", "roles")
STATE_NAME = re.compile(r"[0-9]{6,}\.safetensors")
_LEFT = {
    "": re.compile(rf"{files.ASIDE}|\.manifest\.json\.[0-9]+"),  # the latter by halfulp 0.1
    PARTS: re.compile(rf"{files.ASIDE}|\.[0-9]{{6,}}(\.[0-9]+)?"),  # a part that is to go; and by 0.1
    STATES: re.compile(files.ASIDE),
    SHARDS: re.compile(files.ASIDE),
}
"""Temporary files that a crash leaves behind, by folder."""


def left(path: Path) -> list[Path]:
    """List the temporary files that a crash left in a trace."""
    return sorted(p for name, ours in _LEFT.items() for p in _entries(path / name) if ours.fullmatch(p.name))


def foreign(path: Path) -> Path | None:
    """Return the first entry of a folder without a manifest that no interrupted recording leaves behind.

    None means that there is no such entry, so a recording may begin there.
    """
    if not path.is_dir():
        return path
    for entry in sorted(_entries(path)):
        if entry.name in FOLDERS and entry.is_dir() and not entry.is_symlink():
            ours = _LEFT.get(entry.name)
            for inner in sorted(_entries(entry)):
                if ours is None or not ours.fullmatch(inner.name):
                    return inner
        elif entry.name != LOCK and not _LEFT[""].fullmatch(entry.name):
            return entry
    return None


def check_folders(path: Path) -> None:
    """Refuse a trace of which a folder is a link."""
    try:
        for name in FOLDERS:
            check_no_link(path / name)
        for role in _entries(path / ROLES):
            check_no_link(role)
    except OSError as error:
        raise files.refused_reading(path, error) from error


def check_no_link(folder: Path) -> None:
    """Refuse a link in the place of a folder."""
    if folder.is_symlink():
        raise CorruptionError(
            f"{folder} is a symbolic link, expected a folder: nothing inside a trace is a link. If it is "
            "yours, put what it points to in its place."
        )


def owner(path: Path, run: Mapping[str, Any]) -> Path | None:
    """Return the trace that contains the trace of a tracked state; None for a trace of its own."""
    return path.parent.parent if "role" in run and path.parent.name == ROLES else None


def roles(path: Path) -> list[Path]:
    """Return the folders of the roles of a trace."""
    return sorted(p for p in _entries(path / ROLES) if p.is_dir())


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def free_folder(path: Path) -> Path:
    """Return a folder that is not taken: this one, or ``path-2``, ``path-3`` beside it."""
    return _beside(path)[-1]


def newest_folder(path: Path) -> Path:
    """Return the last of these that is taken; the first if none is."""
    return _beside(path)[-2:][0]


def _beside(path: Path) -> list[Path]:
    """Return the folder and the numbered ones made because it was taken, up to the first free one."""
    folders = [path]
    while folders[-1].exists():
        folders.append(path.with_name(f"{path.name}-{len(folders) + 1}"))
    return folders
