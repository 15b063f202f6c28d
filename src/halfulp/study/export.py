"""One archive with everything that is needed to validate a closed study elsewhere.

Beside the study's own files it holds ``ro-crate-metadata.json`` (RO-Crate 1.1: what these files are),
``statement.json`` (an in-toto Statement v1: the digest of every file, and the seal, result and label that
they amount to), and, if a key was given, ``statement.dsse.json`` (the statement, signed). All three follow
from the folder and the chosen licence, and the archive stores its members uncompressed, in order and
without times, so that the same study always makes the same bytes.
"""

from __future__ import annotations

import errno
import io
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from halfulp import canonical, files
from halfulp.errors import CorruptionError, DiskError, TamperingError
from halfulp.study import ledger, shape, signing
from halfulp.study.protocol import Json
from halfulp.study.reading import open_closed
from halfulp.study.store import Store

CRATE, STATEMENT, ENVELOPE = "ro-crate-metadata.json", "statement.json", "statement.dsse.json"
EXPORTED = (CRATE, STATEMENT, ENVELOPE)
PREDICATE = "urn:halfulp:study-result:v1"
MOST_FILES = 200_000
MOST_BYTES = 8 << 30
TIME = (1980, 1, 1, 0, 0, 0)  # the first that the format knows


def export(folder: Path, target: Path, *, key: Path | None = None, licence: str = "") -> str:
    """Write the archive of a closed study; gives its digest. The study is to be validated before."""
    store = open_closed(folder).store
    members = {name: files.read(folder / name) for name in sorted(store.present() - set(EXPORTED))}
    members[CRATE] = canonical.dumps(crate(store, members, licence))
    members[STATEMENT] = canonical.dumps(statement(store, members))
    if key is not None:
        members[ENVELOPE] = canonical.dumps(signing.envelope(members[STATEMENT], key))
    content = _zip(members)
    files.put(target, content)
    return canonical.sha256(content)


def statement(store: Store, members: Mapping[str, bytes]) -> dict[str, Json]:
    """The in-toto statement about a study's files, the crate's description included."""
    events = ledger.read(store.ledger_file)
    result = store.read_result(events)
    names = sorted(set(members) - {STATEMENT, ENVELOPE})
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": canonical.sha256(members[name])}} for name in names],
        "predicateType": PREDICATE,
        "predicate": {
            "study": result["study"],
            "scale": result["scale"],
            "seal": events.seal,
            "closed": events.head,
            "gates": {gate["name"]: gate["passed"] for gate in result["gates"]},
            "label": result["label"],
            "scientificResult": result["scientific_result"],
        },
    }


def crate(store: Store, members: Mapping[str, bytes], licence: str) -> dict[str, Json]:
    """The RO-Crate description: the root data set, every file with its size and digest."""
    events = ledger.read(store.ledger_file)
    assert events.closed is not None
    protocol = store.read_protocol(store.read_seal(events.seal)).content
    name = f"{protocol['study']} ({protocol['scale']})"
    parts = [
        {
            "@id": member,
            "@type": "File",
            "contentSize": str(len(content)),
            "encodingFormat": _FORMATS.get(PurePosixPath(member).suffix, "application/octet-stream"),
            "sha256": canonical.sha256(content),
        }
        for member, content in sorted(members.items())
    ]
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Study {name}",
        "description": f"{protocol['question']} Units: {protocol['units']}. Label: {events.closed['label']}",
        "datePublished": events.closed["at"],
        "license": {"@id": licence} if licence else "No licence was stated.",
        "identifier": f"sha256:{events.head}",
        "hasPart": [{"@id": part["@id"]} for part in parts],
    }
    about = {
        "@id": CRATE,
        "@type": "CreativeWork",
        "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
        "about": {"@id": "./"},
    }
    terms = [{"@id": licence, "@type": "CreativeWork", "name": licence}] if licence else []
    return {"@context": "https://w3id.org/ro/crate/1.1/context", "@graph": [about, root, *terms, *parts]}


_FORMATS = {".json": "application/json", ".jsonl": "application/jsonl", ".py": "text/x-python"}


def check_statement(folder: Path, public_key: Path | None) -> str:
    """Check what an archive says of itself; what was found, in words."""
    store = Store(folder)
    present = store.present()
    if STATEMENT not in present:
        raise CorruptionError(f"{folder / STATEMENT} is missing.")
    most = dict.fromkeys(EXPORTED, shape.MOST_BYTES)  # the others were held against what names them
    members = {name: files.read(folder / name, most.get(name)) for name in sorted(present)}
    stated = canonical.loads(members[STATEMENT], folder / STATEMENT)
    shape.check(stated, shape.STATEMENT, str(folder / STATEMENT))
    expected = statement(store, members)
    if stated != expected:
        subjects = {s["name"]: s["digest"] for s in stated["subject"]}
        wrong = [s["name"] for s in expected["subject"] if subjects.get(s["name"]) != s["digest"]]
        wrong += sorted(set(subjects) - present)
        named = folder / wrong[0] if wrong else folder / STATEMENT
        raise TamperingError(f"{named} is not what {STATEMENT} states.")
    if public_key is not None:
        if ENVELOPE not in present:
            raise TamperingError(f"{folder / ENVELOPE} is missing: the study is not signed.")
        content = canonical.loads(members[ENVELOPE], folder / ENVELOPE)
        identity = signing.verify(content, members[STATEMENT], public_key, folder / ENVELOPE)
        return f"the statement about all files is signed by the given key ({identity})"
    return "the statement about all files is theirs" + (
        "; its signature was NOT checked (--public-key)" if ENVELOPE in present else "; it is not signed"
    )


# ---- archives ---------------------------------------------------------------------------------------


def _zip(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(members.items()):
            entry = zipfile.ZipInfo(name, TIME)
            entry.create_system = 3  # Unix, wherever it is written
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(entry, content)
    return buffer.getvalue()


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The content of an archive in a folder of its own, for a while."""
    with tempfile.TemporaryDirectory(prefix="halfulp-") as place:
        folder = Path(place) / path.stem
        folder.mkdir()
        with files.opened(path, follow=True) as file:  # of a pipe, nobody knows when it begins
            try:
                with zipfile.ZipFile(file) as archive:
                    _unpack(archive, folder, path)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                    raise DiskError(f"{path} cannot be unpacked in {place}: {error.strerror}.") from None
                raise CorruptionError(f"{path} is damaged or not an archive: {error}.") from None
            except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, ArithmeticError, LookupError,
                    zlib.error, struct.error) as error:  # fmt: skip
                raise CorruptionError(f"{path} is damaged or not an archive: {error}.") from None
        yield folder


def _unpack(archive: zipfile.ZipFile, folder: Path, path: Path) -> None:
    entries = archive.infolist()
    if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > MOST_BYTES:
        raise CorruptionError(f"{path} holds more than {MOST_FILES} files or {MOST_BYTES} bytes.")
    seen: set[str] = set()
    left = MOST_BYTES
    for entry in entries:
        name = PurePosixPath(entry.filename)
        mode = entry.external_attr >> 16
        plain = entry.filename == str(name) and not name.is_absolute() and ".." not in name.parts
        if not plain or any(c in entry.filename for c in "\\:\0") or (mode and not stat.S_ISREG(mode)):
            raise CorruptionError(
                f"{path} holds {entry.filename[:200]!a}, which is not a plain file inside it."
            )
        if entry.filename.lower() in seen:
            raise CorruptionError(f"{path} holds {entry.filename[:200]!a} twice.")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CorruptionError(f"{path} holds {entry.filename[:200]!a} in a form that is not read.")
        seen.add(entry.filename.lower())
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as source, open(target, "wb") as sink:
            shutil.copyfileobj(_Limited(source, left), sink)
        left -= target.stat().st_size


class _Limited:
    """Reads no more than was promised, whatever an archive says about its sizes."""

    def __init__(self, source: IO[bytes], most: int) -> None:
        self.source, self.left = source, most

    def read(self, size: int = -1) -> bytes:
        content = self.source.read(size)
        self.left -= len(content)
        if self.left < 0:
            raise CorruptionError(f"An archive holds more than {MOST_BYTES} bytes.")
        return content
