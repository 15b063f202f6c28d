"""Data sets by name and SHA-256.

A name stands for bytes: ``find("tinyshakespeare.txt")`` gives a file with exactly the digest in
``datasets.tsv`` or raises. It is looked for in the folder ``$HALFULP_DATA``, then in the cache, and is
downloaded into the cache last of all, where its origin is public. Wherever it is found it is hashed, so
a file that changed under its name cannot enter a result; one that is wrong is refused, never skipped
in favour of the next place, because the next place would hide the mistake.

A download goes to a file of its own and is renamed when its digest is right: whatever goes wrong, nothing
half-written has the name.

Two data sets are the user's own and have no published digest (OpenWebText as nanoGPT tokenises it).
They are taken as they are; a study records the digest that it ran on.

>>> DIGESTS["tinyshakespeare.txt"][:16]
'86c4e6aa9db7c042'
"""

from __future__ import annotations

import csv
import hashlib
import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Literal

from halfulp.errors import TamperingError, UsageError

FOLDER = "HALFULP_DATA"
"""The environment variable that names a folder with data sets; it decides where, never what."""
CHUNK = 1 << 20
TIMEOUT_SECONDS = 60

State = Literal["ok", "no digest known", "wrong size", "wrong digest"]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One line of the table: what a name stands for, and where it comes from."""

    name: str
    bytes: int | None
    sha256: str | None
    """None for what every user makes for himself; such a file is not checked."""
    url: str | None
    """Where anybody may download exactly these bytes; None if there is no such place."""
    origin: str
    licence: str


def _table() -> Mapping[str, DataSet]:
    text = resources.files(__package__).joinpath("datasets.tsv").read_text("utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    found = [
        DataSet(
            name=row["name"],
            bytes=int(row["bytes"]) if row["bytes"] else None,
            sha256=row["sha256"] or None,
            url=row["url"] or None,
            origin=row["origin"],
            licence=row["licence"],
        )
        for row in rows
    ]
    return MappingProxyType({d.name: d for d in found})


DATASETS: Mapping[str, DataSet] = _table()
DIGESTS: Mapping[str, str] = MappingProxyType({d.name: d.sha256 for d in DATASETS.values() if d.sha256})


def find(name: str) -> Path:
    """The file of a data set: in ``$HALFULP_DATA``, in the cache, or downloaded; always verified."""
    data = dataset(name)
    path = located(data)
    if path is None:
        return download(data, cache_folder())
    verify(data, path)
    return path


def dataset(name: str) -> DataSet:
    """A line of the table by name."""
    if name not in DATASETS:
        raise UsageError(f"there is no data set {name!r}; known: {', '.join(DATASETS)}.")
    return DATASETS[name]


def located(data: DataSet) -> Path | None:
    """Where a file of that name is, right or wrong."""
    given = os.environ.get(FOLDER)
    places = [Path(given).expanduser()] if given else []
    return next((p / data.name for p in (*places, cache_folder()) if (p / data.name).is_file()), None)


def cache_folder() -> Path:
    """Where downloads are kept: ``halfulp/data`` in the user's cache folder."""
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "halfulp" / "data"


# ---- verifying --------------------------------------------------------------------------------------


def state(data: DataSet, path: Path) -> State:
    """Whether a file has the bytes that its name stands for."""
    if data.sha256 is None:
        return "no digest known"
    if data.bytes is not None and path.stat().st_size != data.bytes:
        return "wrong size"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "ok" if digest == data.sha256 else "wrong digest"


def verify(data: DataSet, path: Path) -> None:
    """Refuse a file that is not what its name stands for."""
    found = state(data, path)
    if found in ("wrong size", "wrong digest"):
        raise TamperingError(
            f"{path} is not the data set {data.name!r} ({found}): expected {data.bytes:,} bytes with SHA-256 "
            f"{data.sha256}, found {path.stat().st_size:,} bytes. Remove the file, or take it from its "
            f"origin again: {data.url or data.origin}."
        )


# ---- downloading ------------------------------------------------------------------------------------


def download(data: DataSet, folder: Path) -> Path:
    """Fetch a data set into a folder and verify it before it gets its name."""
    if data.url is None or data.sha256 is None:
        raise UsageError(
            f"the data set {data.name!r} was not found, and there is no address to download it from. It "
            f"comes from: {data.origin}. Put it at ${FOLDER}/{data.name}."
        )
    target = folder / data.name
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(data.url, timeout=TIMEOUT_SECONDS) as source, aside.open("wb") as file:
            digest, size = _copy(source, file, data.bytes)
        if digest != data.sha256:
            raise TamperingError(
                f"what {data.url} gave is not the data set {data.name!r}: expected SHA-256 {data.sha256}, "
                f"found {digest} over {size:,} bytes. Nothing was kept."
            )
        os.replace(aside, target)
    except (OSError, HTTPException) as error:  # urllib's own errors are of the first kind
        raise UsageError(
            f"the data set {data.name!r} could not be downloaded from {data.url}: {error}. Nothing was kept; "
            f"try again, or put the file at ${FOLDER}/{data.name}."
        ) from None
    finally:
        aside.unlink(missing_ok=True)
    return target


def _copy(source: BinaryIO, file: BinaryIO, expected: int | None) -> tuple[str, int]:
    """Copy a stream; its digest and size. One that is longer than it should be is not followed."""
    hashed, size = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        hashed.update(chunk)
        size += file.write(chunk)
        if expected is not None and size > expected:
            break
    file.flush()
    os.fsync(file.fileno())
    return hashed.hexdigest(), size
