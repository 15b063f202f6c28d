"""Find the parts of this package that may be absent: they bring studies and commands of their own.

Nothing imports a plug-in; it is looked up by name, here and nowhere else. Why not entry points? They exist
only where the package was installed, and name what was there at that time; this also works in a source tree,
and in one from which the folder was deleted.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import typer

NAMES = ("halfulp.paper.plugin",)


class Plugin(Protocol):
    """The interface of a plug-in module.

    A module may also define ``effort(config)``, the effort of a cell, and ``gpus()``, operations per second
    by GPU; `halfulp study plan` uses both.
    """

    STUDIES: Mapping[str, str]
    """Modules that define each ``STUDY``, by name of the study."""
    FORMER: Mapping[str, str]
    """Current names of modules and packages by former name, which files of closed studies still import."""

    def register(self, app: typer.Typer) -> None:
        """Add its commands to the command line."""


def installed() -> list[Plugin]:
    """Import the installed plug-ins; one that cannot be imported is an error."""
    plugins = []
    for name in NAMES:
        try:
            plugins.append(cast(Plugin, importlib.import_module(name)))
        except ModuleNotFoundError as error:
            if error.name not in (name, name.rpartition(".")[0]):
                raise
    return plugins
