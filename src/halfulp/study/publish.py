"""Publish a closed study as one archive that is validated elsewhere.

The archive holds, beside the study's own files, ``statement.json`` (an in-toto Statement v1: the digest of
every file, and the seal, result and label) and, if a key was given, ``statement.dsse.json`` (the statement,
signed). Both follow from the folder, and the archive stores its members uncompressed, in order and without
times, so that the same study always makes the same bytes. Older archives hold a description of their files,
too, ``ro-crate-metadata.json``, which the statement covers.

A signature is a DSSE envelope (v1) around the statement; keys are ed25519 in PEM (extra ``sign``).
``openssl genpkey -algorithm ed25519 -out key.pem`` makes a key, ``openssl pkey -in key.pem -pubout`` its
public half. What is signed is not the payload alone but its DSSE encoding, which includes the type, so
that a signature cannot be taken for one of something else.
"""

from __future__ import annotations

import base64
import errno
import importlib
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
from typing import IO, Any

from halfulp import canonical, files
from halfulp.errors import CorruptionError, DiskError, TamperingError, UsageError
from halfulp.study import ledger
from halfulp.study.declaration import MOST_BYTES, check
from halfulp.study.declaration import STATEMENT as STATEMENT_SHAPE
from halfulp.study.evidence import open_closed
from halfulp.study.protocol import Json
from halfulp.study.store import ENVELOPE, EXPORTED, STATEMENT, Store

PREDICATE = "urn:halfulp:study-result:v1"
PAYLOAD = "application/vnd.in-toto+json"
MOST_KEY = 1 << 20
ARCHIVED_FILES = 200_000
ARCHIVED_BYTES = 8 << 30
TIME = (1980, 1, 1, 0, 0, 0)  # the first that the format knows


def export(folder: Path, target: Path, *, key: Path | None = None) -> str:
    """Write the archive of a closed study, which the caller has validated.

    Args:
        folder: The folder of the study.
        target: The archive to write.
        key: A private key to sign the statement with; without one it is not signed.

    Returns:
        The SHA-256 digest of the archive.

    Raises:
        UsageError: If the study is not closed.
    """
    store = open_closed(folder).store
    members = {name: files.read(folder / name) for name in sorted(store.present() - set(EXPORTED))}
    members[STATEMENT] = canonical.dumps(statement(store, members))
    if key is not None:
        members[ENVELOPE] = canonical.dumps(envelope(members[STATEMENT], key))
    content = _zip(members)
    files.put(target, content)
    return canonical.sha256(content)


def statement(store: Store, members: Mapping[str, bytes]) -> dict[str, Json]:
    """Make the in-toto statement about the files of a study or of an archive."""
    events = ledger.read(store.ledger_file)
    result = store.read_result(events)
    names = sorted(set(members) - {STATEMENT, ENVELOPE})
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": canonical.sha256(members[name])}} for name in names],
        "predicateType": PREDICATE,
        "predicate": {
            "study": result["study"], "scale": result["scale"], "seal": events.seal, "closed": events.head,
            "gates": {gate["name"]: gate["passed"] for gate in result["gates"]}, "label": result["label"],
            "scientificResult": result["scientific_result"],
        },
    }  # fmt: skip


def check_statement(folder: Path, public_key: Path | None) -> str:
    """Check what an archive says of itself; return in words what was found."""
    store = Store(folder)
    present = store.present()
    if STATEMENT not in present:
        raise CorruptionError(
            f"{folder / STATEMENT} is missing: only an archive of `halfulp study export` has a statement."
        )
    most = dict.fromkeys(EXPORTED, MOST_BYTES)  # the others were held against what names them
    members = {name: files.read(folder / name, most.get(name)) for name in sorted(present)}
    stated = canonical.loads(members[STATEMENT], folder / STATEMENT)
    check(stated, STATEMENT_SHAPE, str(folder / STATEMENT))
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
        identity = verify(content, members[STATEMENT], public_key, folder / ENVELOPE)
        return f"the statement about all files is signed by the given key ({identity})"
    return "the statement about all files is theirs" + (
        "; its signature was NOT checked (--public-key)" if ENVELOPE in present else "; it is not signed"
    )


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
    """Unpack an archive in a folder of its own, for a while."""
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
    if len(entries) > ARCHIVED_FILES or sum(entry.file_size for entry in entries) > ARCHIVED_BYTES:
        raise CorruptionError(f"{path} holds more than {ARCHIVED_FILES} files or {ARCHIVED_BYTES} bytes.")
    seen: set[str] = set()
    left = ARCHIVED_BYTES
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
            raise CorruptionError(f"An archive holds more than {ARCHIVED_BYTES} bytes.")
        return content


# ---- the signature ----


def envelope(payload: bytes, key: Path) -> dict[str, Json]:
    """Sign a payload."""
    private = _load_key(key, "load_pem_private_key", "Ed25519PrivateKey", password=None)
    signature = base64.b64encode(private.sign(_encoded(payload))).decode()
    return {
        "payloadType": PAYLOAD,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [{"keyid": _key_id(private.public_key()), "sig": signature}],
    }


def verify(content: Json, payload: bytes, key: Path, where: Path) -> str:
    """Return the id of the key, if the envelope holds this payload and a signature of it by that key."""
    public = _load_key(key, "load_pem_public_key", "Ed25519PublicKey")
    try:
        signed = base64.b64decode(content["payload"], validate=True)
        signatures = [base64.b64decode(s["sig"], validate=True) for s in content["signatures"]]
        kind = content["payloadType"]
    except (KeyError, TypeError, ValueError):  # of base64, or text that is not ASCII
        raise TamperingError(f"{where} is not a DSSE envelope.") from None
    if kind != PAYLOAD or signed != payload:
        raise TamperingError(f"{where} signs something else than the statement beside it.")
    invalid = importlib.import_module("cryptography.exceptions").InvalidSignature
    for signature in signatures:
        try:
            public.verify(signature, _encoded(payload))
        except invalid:
            continue
        return _key_id(public)
    raise TamperingError(f"{where} has no valid signature by the key {key}.")


def _encoded(payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)


def _key_id(public: Any) -> str:
    return canonical.sha256(public.public_bytes_raw())


def _load_key(path: Path, loader: str, kind: str, **options: Any) -> Any:
    try:
        serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
        ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError:
        raise UsageError("Signatures need the cryptography package: pip install 'halfulp[sign]'.") from None
    try:
        key = getattr(serialization, loader)(files.read(path, MOST_KEY, follow=True), **options)
    except CorruptionError as error:
        raise UsageError(f"The key cannot be read: {error}") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"The key {path} is not a PEM key that can be used: {error}.") from None
    if not isinstance(key, getattr(ed25519, kind)):
        raise UsageError(f"The key {path} is not an ed25519 key.")
    return key
