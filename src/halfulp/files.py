"""Every change that halfulp makes to a disk, and every bounded reading of it, goes through here.

Two patterns cover all of it. A whole file appears at once: its content is written aside in the study's
``work`` folder, made durable, and renamed into place. The ledger alone grows, by appending. A process may
die before or after any single operation; what it leaves is then either the old state or the new one, or a
last line of the ledger that is cut short.

`hook` is called before each operation with its name and path. It does nothing; tests put in its place
one that counts, kills the process, or raises the errors of a full or read-only disk.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from halfulp.errors import CorruptionError, DiskError, UsageError

CAN_LOCK = importlib.util.find_spec("fcntl") is not None  # Windows: studies are read and validated, not run
SYNCING = 16  # files synchronised at the same time
_counter = itertools.count()


def _nothing(operation: str, path: Path) -> None:
    return


hook = _nothing


@contextlib.contextmanager
def _told(operation: str, *paths: Path) -> Iterator[None]:
    """Tell the hook, and let an error of the operating system say what failed and what to do."""
    try:
        for path in paths:
            hook(operation, path)
        yield
    except OSError as error:
        reason = {
            errno.ENOSPC: "the disk is full; free some room",
            errno.EDQUOT: "the disk quota is used up; free some room",
            errno.EROFS: "the folder is read-only; choose another with --out or make it writable",
            errno.EACCES: "the folder may not be written; choose another with --out or allow it",
        }.get(error.errno or 0, error.strerror or str(error))
        raise DiskError(
            f"Cannot {operation} {paths[0]}: {reason}. Nothing that was recorded is lost; run again to go on."
        ) from error


def make_folder(path: Path) -> None:
    """A folder and its parents; those that exist already are fine."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with _told("mkdir", path), contextlib.suppress(FileExistsError):
        os.mkdir(path)


def put(path: Path, content: bytes, aside: Path, *, durable: bool = True) -> None:
    """Replace or create one file; it appears whole."""
    put_all([(path, content)], aside, durable=durable)


def put_all(items: Sequence[tuple[Path, bytes]], aside: Path, *, durable: bool = True) -> None:
    """Create files; each appears whole, and is on the disk when this returns, if `durable`.

    Those of one call are synchronised at the same time, because a journalling file system then commits
    them together: thirty files cost little more than one.
    """
    make_folder(aside)
    parts = [aside / f"part-{os.getpid()}-{next(_counter)}" for _ in items]
    for part, (_, content) in zip(parts, items, strict=True):
        with _told("write", part):
            part.write_bytes(content)
    if durable:
        _sync(parts)
    for part, (path, _) in zip(parts, items, strict=True):
        make_folder(path.parent)
        with _told("rename", path):
            os.replace(part, path)
    if durable:
        _sync(sorted({path.parent for path, _ in items}))


def _sync(paths: Sequence[Path]) -> None:
    """Make files, or the names in folders, durable."""
    with _told("fsync", *paths):
        if len(paths) == 1:
            _fsync(paths[0])
        else:
            with ThreadPoolExecutor(min(len(paths), SYNCING)) as pool:
                list(pool.map(_fsync, paths))


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, content: bytes, *, durable: bool) -> None:
    """Add to the end of a file; a write that the disk refuses half-way is taken back."""
    new = not path.exists()
    with _told("write", path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(handle).st_size
        try:
            with _told("write", path):
                left = memoryview(content)
                while left:
                    left = left[os.write(handle, left) :]
        except DiskError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, before)
            raise
        if durable:
            with _told("fsync", path):
                os.fsync(handle)
    finally:
        os.close(handle)
    if new:
        _sync([path.parent])


def cut(path: Path, size: int) -> None:
    """Shorten a file."""
    with _told("truncate", path), open(path, "rb+") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with _told("unlink", path):
        path.unlink(missing_ok=True)


def remove_any(path: Path) -> None:
    """Remove a file, a link, or a folder with what is in it."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        remove(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder and what is in it; symbolic links are removed, not followed."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for entry in sorted(folder.iterdir()):
        remove_any(entry)
    with _told("rmdir", folder):
        folder.rmdir()


def read(path: Path) -> bytes:
    """The content of a regular file; a link, a folder or a missing file is named as damage."""
    try:
        if path.is_symlink() or not path.is_file():
            what = "is not a plain file" if path.is_symlink() or path.exists() else "is missing"
            raise CorruptionError(f"{path} {what}.")
        return path.read_bytes()
    except OSError as error:
        raise CorruptionError(f"{path} cannot be read: {error.strerror}.") from None


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a study's lock: one process at a time; another is told who holds it.

    The lock is the kernel's (flock), so it goes with the process that held it, however that one ended.
    The file may be removed by its holder; whoever locked a file that is no longer there tries again.
    """
    if not CAN_LOCK:
        raise UsageError("Studies are run on systems with flock (Linux, macOS); here they can only be read.")
    import fcntl

    for tries in itertools.count(1):
        make_folder(path.parent)
        with _told("lock", path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if tries < 3:  # somebody may just be looking who holds it
                    time.sleep(0.05)
                    continue
                raise UsageError(
                    f"{path.parent.parent} is in use by process {_holder(handle)}. Wait until it ends, or "
                    "stop it; then run again."
                ) from None
            if not _is(handle, path):
                continue
            with _told("write", path):
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield
            return
        finally:
            os.close(handle)


def holder(path: Path) -> str | None:
    """The process that holds a lock now, if one does."""
    if not CAN_LOCK:
        return None
    import fcntl

    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(handle)
    finally:
        os.close(handle)
    return None


def _holder(handle: int) -> str:
    text = os.pread(handle, 20, 0).decode("ascii", "replace")
    return text if text.isdigit() else "unknown"


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
