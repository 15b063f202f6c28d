"""Writing a trace: one process at a time, part after part, each of which appears whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from halfulp import canonical, documents, files, tensors
from halfulp.errors import CorruptionError, DiskError, HalfulpError, UsageError
from halfulp.text import tell
from halfulp.trace import columns, layout
from halfulp.trace.columns import Columns
from halfulp.trace.layout import FOLDERS, LOCK, MANIFEST, PARTS, STATE_NAME, STATES, TROUBLE
from halfulp.trace.reader import Trace
from halfulp.trace.resuming import STEP, Resumed, clear
from halfulp.trace.schema import (
    COLUMNS,
    DOCUMENT,
    FORMAT,
    LOSSES,
    MOST_ROWS,
    OWNER,
    PART_KIND,
    TROUBLE_KIND,
    Entry,
    check_owner,
    inventory_digest,
    read_manifest,
    state_file,
)

UNLOCKABLE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Error numbers raised by file systems without locks."""
HELD = "its lock is not the one that is held"


class TraceWriter:
    """A writer that appends parts to a trace folder and holds its lock until it is closed."""

    def __init__(self, path: Path, manifest: dict[str, Any], *, resume: bool = False) -> None:
        self.path = path
        self.last_step, self.count = 0, 0
        self.resumed: Resumed | None = None
        self.lost = False
        """True once the folder was found to be missing or to belong to another recording."""
        self._closed = False
        self._before: str | None = None
        self._owner = _owner_id(path, manifest["run"])
        self._above = _missing_above(path)
        """The folders above it that are made with it, and go with it if nothing is recorded."""
        check_free(path, resume)
        self._lock = _held(path)
        try:
            check_free(path, resume)  # it may have been taken meanwhile
            if (path / MANIFEST).exists():
                self._take_up(manifest)
            else:
                new = {"format": FORMAT, "lost": "code", "id": secrets.token_hex(16)}
                self.manifest = {**manifest, **new}
                self.manifest.pop(documents.DIGEST, None)
                if self._owner is not None:
                    self.manifest[OWNER] = self._owner
                files.make_folder(path / PARTS)
                self._put_manifest()
            self._clear()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):  # of looking at what is there; the rest names its own
                raise files.refused_reading(path, error) from error
            raise

    def _take_up(self, settings: Mapping[str, Any]) -> None:
        trace = Trace.open(self.path)
        if (version := trace.manifest["format"]) != FORMAT:
            raise UsageError(
                f"cannot resume {self.path}: it has trace format {version}, and recordings go on in format "
                f"{FORMAT}. It can be read as before; record what follows into another folder."
            )
        check_same(self.path, trace.manifest, settings)
        if self._owner is not None:
            check_owner(self.path, trace.manifest, self._owner)
        self.manifest = trace.manifest
        if self._owner is not None and OWNER not in self.manifest:  # of a halfulp that did not say it yet
            self.manifest[OWNER] = self._owner
            self.write_manifest()
        self.resumed = Resumed.of(trace)
        self.last_step, self.count = self.resumed.last_step, self.resumed.count
        self._before = trace.documents[self.count - 1].digest if self.count else None

    def _clear(self) -> None:
        """Remove what a crash left: files aside, states that no part names, and a note of old trouble.

        The shards of steps that are recorded again go too, or a rank might lag behind and seem not to.
        What has another name than halfulp gives is not its own, and stays.
        """
        for stale in layout.left(self.path):
            files.remove_any(stale)
        named = 0 if self.resumed is None else len(self.resumed.trace.documents)
        needed = [state_file(self.path, i) for i in range(max(0, self.count - 1), named)]
        for stale in (self.path / STATES).glob("*.safetensors"):
            if STATE_NAME.fullmatch(stale.name) and stale not in needed:
                files.remove(stale)
        step = 0 if self.resumed is None else self.resumed.shards[0]
        clear(self.path, lambda later: later > step)
        files.remove(self.path / TROUBLE)

    def check(self) -> None:
        """Refuse to go on where the folder was moved or removed.

        Writing there again would leave parts without a manifest, or among those of another recording that has
        taken the place.
        """
        if self._closed:
            return
        try:
            there = (self.path / MANIFEST).exists()
        except OSError as error:
            raise files.refused_reading(self.path, error) from error
        if not there or (self._lock is not None and self._lock.lost):
            self.lost = True
            raise _gone(self.path, HELD if there else "its manifest.json is not there")

    def write_manifest(self) -> None:
        """Write the manifest, after checking that the folder is still ours."""
        self.check()
        self._put_manifest()

    def _put_manifest(self) -> None:
        files.put(self.path / MANIFEST, documents.sealed(self.manifest))

    def commit(self, tables: dict[str, Columns], state: dict[str, torch.Tensor], *, last_step: int) -> None:
        """Make the steps since the last part durable."""
        for name, frame in tables.items():
            if len(frame) > MOST_ROWS:
                raise UsageError(
                    f"a part of a trace has at most {MOST_ROWS:,} rows a table; {name} has {len(frame):,}."
                )
        self.check()
        self._cut()
        place = state_file(self.path, self.count)
        followed = _Measured(tensors.content(state, seal=False))
        try:
            files.put(place, followed)
            self.check()  # a large state takes its time
            self._put(tables, followed.entry())
        finally:
            if self.lost:
                pass  # nothing there is ours
            elif self._part(self.count).is_dir():  # it is there, though perhaps not yet on the disk
                self.count += 1
                self.last_step = last_step
            else:
                with contextlib.suppress(OSError):
                    place.unlink(missing_ok=True)
        states = 2 if STEP in state else 1  # only these can be resumed from
        if self.count > states:
            files.remove(state_file(self.path, self.count - 1 - states))

    def _cut(self) -> None:
        """Remove the part after the one that this recording continues from."""
        if self._part(self.count).is_dir():
            gone = self._part(self.count).with_name(f".{self.count:06d}")
            files.rename(self._part(self.count), gone)
            files.remove_tree(gone)

    def _put(self, tables: Mapping[str, Columns], state: Entry) -> None:
        content = _Measured(tensors.content(columns.packed(tables), seal=False))
        digest: list[str] = []

        def document() -> Iterator[bytes]:  # drawn last, when the tables are written and measured
            stated = self._document(tables, content.entry(), state)
            digest.append(canonical.digest(stated))
            yield documents.sealed(stated)

        files.put_folder(self._part(self.count), {COLUMNS: content, DOCUMENT: document()})
        self._before = digest[0]

    def _document(self, tables: Mapping[str, Columns], content: Entry, state: Entry) -> dict[str, Any]:
        """Return a part's document; :class:`halfulp.trace.schema.Parts` reads it."""
        steps = _ends(tables)
        document = {
            "kind": PART_KIND,
            "format": FORMAT,
            "trace": self.manifest["id"],
            "number": self.count,
            "before": self._before,
            "grids": self.manifest["grids"],
            "tensors": len(self.manifest["tensors"]),
            "inventory": inventory_digest(self.manifest["tensors"]),
            "first_step": steps[0],
            "last_step": steps[1],
            "files": {COLUMNS: content.to_json()},
            "state": state.to_json(),
            "rows": {name: len(table) for name, table in tables.items()},
        }
        rehearsed = self.manifest["options"].get("rehearse")
        return {**document, "rehearse": rehearsed} if rehearsed else document

    def _part(self, number: int) -> Path:
        return self.path / PARTS / f"{number:06d}"

    def discard_if_empty(self) -> bool:
        """Leave nothing behind if there is no part, not even one that is to be recorded again."""
        empty = self.count == 0 and not self._part(0).is_dir()
        if empty:
            with contextlib.suppress(OSError, DiskError):  # somebody put something there, or it is read-only
                clear(self.path, lambda _: True)
                (self.path / MANIFEST).unlink(missing_ok=True)
                (self.path / LOCK).unlink(missing_ok=True)
                for folder in (*(self.path / name for name in FOLDERS), self.path, *self._above):
                    with contextlib.suppress(FileNotFoundError):
                        folder.rmdir()
        return empty

    def load_state(self) -> dict[str, torch.Tensor]:
        """Return the state that this recording continues from."""
        return {} if self.resumed is None else self.resumed.load_state()

    def note_trouble(self, what: str) -> None:
        """Leave a note of why the recording stopped, if the disk still takes one."""
        note = {"kind": TROUBLE_KIND, "format": FORMAT, "what": what, "last_step": self.last_step}
        with contextlib.suppress(HalfulpError, MemoryError):
            self.check()
            files.put(self.path / TROUBLE, documents.sealed(note))

    def close(self) -> None:
        """Let go of the folder."""
        self._closed = True
        if self._lock is not None:
            self._lock.release(remove=True)


class _Measured:
    """Pieces of a file, whose bytes and digest are known when they have been drawn."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks, self._size, self._digest = chunks, 0, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for chunk in self._chunks:
            self._size += memoryview(chunk).nbytes
            self._digest.update(chunk)
            yield chunk

    def entry(self) -> Entry:
        return Entry(sha256=self._digest.hexdigest(), size=self._size)


def _ends(tables: Mapping[str, Columns]) -> tuple[int, int]:
    """Return the first and the last step of a part; of one without steps, those of its evaluations."""
    steps = tables["run"]["step"] if len(tables["run"]) else tables[LOSSES]["step"].clip(1)
    return int(steps[0]), int(steps[-1])


def _held(path: Path) -> files.Lock | None:
    """Return the lock of a trace folder; none where the system has no locks."""
    if not files.CAN_LOCK:
        return None
    try:
        return files.hold(path / LOCK, path)
    except DiskError as error:
        if getattr(error.__cause__, "errno", None) not in UNLOCKABLE:
            raise
        tell(f"halfulp: {path} is on a file system without locks: record into it once at a time.")
        return None


def _owner_id(path: Path, run: Mapping[str, Any]) -> str | None:
    """Return the id of the trace that a role is to lie in, which must be there still."""
    owner = layout.owner(path, run)
    if owner is None:
        return None
    if files.lost(owner / LOCK):
        raise _gone(owner, HELD)
    owner_id = read_manifest(owner / MANIFEST).get("id")
    return None if owner_id is None else str(owner_id)


def _gone(path: Path, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path} is no longer the folder that this recording began: {why}. It was moved or removed, or "
        "another recording took its place; leave it where it is until the run is over."
    )


def _missing_above(path: Path) -> list[Path]:
    try:
        return [folder for folder in path.parents if not folder.exists()]
    except OSError as error:
        raise files.refused_reading(path, error) from error


def check_free(path: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, before anything in it is touched.

    Raises:
        UsageError: If it does.
        DiskError: If it cannot be looked at.
    """
    try:
        if (path / MANIFEST).exists():
            if not resume:
                raise UsageError(
                    f"{path} holds a trace already. Choose another folder, remove it, or go on with it "
                    "(`--resume`; in Python `resume=True`)."
                )
        elif path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file, expected a new or empty folder. Choose another name.")
        elif path.exists() and (other := layout.foreign(path)) is not None:
            raise UsageError(
                f"{path} is not an empty folder and holds no trace: {other} is there, but no manifest.json. "
                "Choose another folder."
            )
    except OSError as error:
        raise files.refused_reading(path, error) from error


def check_same(path: Path | str, manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to continue a trace with settings other than those that it was begun with."""
    pairs = [(key, manifest[key], settings[key]) for key in ("grids", "every")]
    pairs += [(key, manifest["options"].get(key), value) for key, value in settings["options"].items()]
    for key, old, new in pairs:
        if old != new:
            raise UsageError(f"cannot resume {path}: it was recorded with {key}={old!r}, not {new!r}.")
