"""Load a study from its source: a registered module, or a file of the user's own.

A registered study is a module of this package, sealed with it. A user's study is *one file*: its bytes are
digested and copied into the study's folder, and workers and validators run the copy, after its digest was
checked. Nothing beside the file is put on the import path, so that code which is not sealed is not imported
by accident.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from halfulp import canonical, documents, files, plugins
from halfulp.errors import CorruptionError, UsageError
from halfulp.study.declaration import read_known
from halfulp.study.protocol import Json, Study

T = TypeVar("T")

REGISTRY: dict[str, str] = {
    name: module for plugin in plugins.installed() for name, module in plugin.STUDIES.items()
}
"""The studies that come with halfulp: by name, the module whose ``STUDY`` it is. A module is imported when
its study is asked for, so the engine knows none of them, and listing them costs nothing."""


@dataclass(frozen=True)
class Source:
    """A study and where it came from; `folder` is what relative names of data files refer to."""

    study: Study
    registered: str | None = None
    content: bytes | None = None
    attribute: str = ""
    name: str = ""
    folder: Path | None = None

    @property
    def module(self) -> str:
        """The module of this package that holds a registered study; empty for a study of the user's own."""
        return REGISTRY.get(self.registered or "", "")

    @property
    def identity(self) -> dict[str, Json]:
        """The entry of the seal."""
        if self.content is None:
            return {"registered": self.registered}
        return {"file": self.name, "attribute": self.attribute, "sha256": canonical.sha256(self.content)}


def load(reference: str) -> Source:
    """Load a study.

    Args:
        reference: The name of a study that comes with halfulp, ``file.py`` or ``file.py:attribute``.

    Returns:
        The study and where it came from.

    Raises:
        UsageError: If there is no such study, or the file cannot be read.
    """
    if reference in REGISTRY:
        return _registered(reference)
    name, _, attribute = reference.partition(":")
    path = Path(name)
    if path.suffix != ".py":
        known = ", ".join(sorted(REGISTRY)) or "none"
        raise UsageError(
            f"There is no study {reference[:120]!a}; known: {known}; or give a file.py of your own."
        )
    try:
        content = files.read(path, documents.MOST_BYTES, follow=True)
    except CorruptionError as error:
        raise UsageError(f"The study file cannot be read: {error}") from None
    return _from_file(content, path.name, attribute, path.resolve().parent)


def load_sealed(identity: dict[str, Json], copy: Path, folder: Path | None = None) -> Source:
    """Load the study that a seal names: from the registry, or from the checked copy in its folder."""
    if "registered" in identity:
        return _registered(identity["registered"])
    content = read_known(copy, identity["sha256"], "the study file that was sealed")
    allow_former_names(content)
    return _from_file(content, identity["file"], identity["attribute"], folder)


def allow_former_names(content: bytes) -> None:
    """Let a file that was sealed or closed import modules of plug-ins by the names they had at that time."""
    text = content.decode(errors="replace")
    for plugin in plugins.installed():
        for old, new in plugin.FORMER.items():
            if re.search(rf"\b{old.rpartition('.')[2]}\b", text):
                for name in {old, *re.findall(rf"\b{re.escape(old)}(?:\.\w+)*", text)}:
                    with suppress(ModuleNotFoundError):  # an attribute, or a word in a comment
                        module = importlib.import_module(new + name.removeprefix(old))
                        sys.modules.setdefault(name, module)


def _registered(name: str) -> Source:
    if name not in REGISTRY:
        raise UsageError(f"This halfulp has no study {name[:120]!a}; known: {', '.join(sorted(REGISTRY))}.")
    try:
        study = getattr(importlib.import_module(REGISTRY[name]), "STUDY", None)
    except ImportError as error:
        raise UsageError(f"Study {name} cannot be loaded: {error}.") from error
    if not isinstance(study, Study):
        raise UsageError(f"{REGISTRY[name]} has no STUDY.")
    return Source(study, registered=name)


def _from_file(content: bytes, name: str, attribute: str, folder: Path | None) -> Source:
    attribute, study = find(module(content, name), name, attribute, Study, ("study", "STUDY"))
    return Source(study, content=content, attribute=attribute, name=name, folder=folder)


def find(
    loaded: ModuleType, file: str, attribute: str, kind: type[T], usual: tuple[str, ...]
) -> tuple[str, T]:
    """Find an object of a kind, by its attribute's name or by the usual ones."""
    for name in (attribute,) if attribute else usual:
        value = getattr(loaded, name, None)
        if isinstance(value, kind):
            return name, value
    raise UsageError(f"{file} defines no {kind.__name__} called {attribute or ' or '.join(usual)}.")


def module(content: bytes, name: str) -> ModuleType:
    """Make a module of these very bytes (a second look at the file might find others)."""
    full = f"halfulp_file_{canonical.sha256(content)[:16]}"
    if full in sys.modules:
        return sys.modules[full]
    loader = _Bytes(content, name)
    spec = importlib.util.spec_from_loader(full, loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[full] = loaded  # dataclasses look their module up while it is being made
    try:
        loader.exec_module(loaded)
    except (Exception, SystemExit) as error:  # a file that ends the process has not been validated by it
        del sys.modules[full]
        raise UsageError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    return loaded


class _Bytes(importlib.abc.SourceLoader):
    def __init__(self, content: bytes, name: str) -> None:
        self.content, self.name = content, name

    def get_filename(self, fullname: str) -> str:
        return self.name

    def get_data(self, path: str) -> bytes:
        return self.content
