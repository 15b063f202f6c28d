"""Keep the results of a pilot in a file, so that an interrupted pilot repeats no finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halfulp import documents, files
from halfulp.errors import UsageError, VersionError
from halfulp.version import __version__

KIND, FORMAT, NAME = "halfulp.pilot", 2, "pilot.json"
Json = Any


class Results:
    """Results by name; with a folder, each is on disk before the next run begins.

    Args:
        folder: Where ``pilot.json`` is kept; None keeps nothing.
        asked: The settings of the pilot. A folder with the results of other settings is refused.

    Raises:
        UsageError: If the folder has the results of other settings.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Json]) -> None:
        self.folder, self.settings = folder, dict(settings)
        self.results: dict[str, Json] = {}
        if folder is None or not (folder / NAME).exists():
            return
        where = folder / NAME
        document = documents.parsed(files.read(where, documents.MOST_BYTES, follow=True), where, "a pilot")
        documents.check_digest(document, where)
        if (document.get("kind"), document.get("format")) != (KIND, FORMAT):
            raise VersionError(f"{where} is not a pilot of format {FORMAT}, which this halfulp reads.")
        if document["asked"] != self.settings:
            other = [
                k
                for k in {**document["asked"], **self.settings}
                if document["asked"].get(k) != self.settings.get(k)
            ]
            raise UsageError(
                f"{folder} holds a pilot that was asked something else ({', '.join(sorted(other))} differ). "
                "Ask the same to go on with it, or choose another folder."
            )
        self.results = dict(document["found"])

    def once(self, name: str, make: Callable[[], Json]) -> Json:
        """Return an existing result, or compute and save it."""
        if name not in self.results:
            self.results[name] = make()
            self._write()
        return self.results[name]

    def _write(self) -> None:
        if self.folder is not None:
            document = {"kind": KIND, "format": FORMAT, "halfulp": __version__, "asked": self.settings}
            files.put(self.folder / NAME, documents.sealed({**document, "found": self.results}))
