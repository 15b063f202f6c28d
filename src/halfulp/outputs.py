"""Where a command may not put its output: in the place of what traces and studies are made of."""

from __future__ import annotations

import os
from pathlib import Path

from halfulp.errors import UsageError

TRACE = ("manifest.json", "trouble.json", ".lock", "parts", "state", "shards", "roles")
"""What a trace is made of; other files may lie beside it, as a page of it does."""
STUDY = ("protocol.json", "seal.json")
"""What every study has; nothing that was not sealed or recorded may lie beside it."""


def check_output(path: Path) -> None:
    """Refuse to write in the place of a file of a trace, or among them, or into the folder of a study: the
    trace would be gone, and the study not valid."""
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
            return
