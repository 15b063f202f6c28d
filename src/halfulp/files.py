"""Make every change to a disk, and every bounded read, in one place.

There are two patterns. A file or folder appears whole: its content is written under another name, made
durable, and renamed into place. Only the ledger of a study grows, by appending. If the process dies before or
after any single operation, it leaves the old state or the new one, or a last line of the ledger that is cut
short.

`hook` is called before each operation with its name and path. It does nothing; tests replace it by one that
counts, kills the process, or raises the errors of a full or read-only disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import itertools
import os
import shutil
import stat
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, cast

from halfulp.errors import RESTORE, CorruptionError, DiskError, HalfulpError, TamperingError, UsageError

CAN_LOCK = importlib.util.find_spec("fcntl") is not None  # Windows: studies are read and validated, not run
SYNCING = 16  # files synchronised at the same time
PART = ".part-"  # the first characters of the names of files and folders that are not yet in place
ASIDE = r"\.part-[0-9]+-[0-9]+"  # a pattern of their whole names
_counter = itertools.count()


def _nothing(operation: str, path: Path) -> None:
    return


hook = _nothing


@contextlib.contextmanager
def _hooked(operation: str, *paths: Path) -> Iterator[None]:
    """Call the hook, and re-raise errors of the operating system with what failed and what to do."""
    with _named(operation, paths[0]):
        for path in paths:
            hook(operation, path)
        yield


def is_anothers(error: BaseException) -> bool:
    """Return True if an error comes from neither the disk nor halfulp and must not be caught.

    A signal handler may raise TimeoutError, for example, which is an OSError without a number.
    """
    return isinstance(error, OSError) and error.errno is None


_SAID = {"mkdir": "create", "rename": "replace", "fsync": "write", "unlink": "delete", "rmdir": "delete"}
"""System calls, in words for people."""


@contextlib.contextmanager
def _named(operation: str, path: Path) -> Iterator[None]:
    """Re-raise errors of the operating system with what failed and what to do."""
    try:
        yield
    except OSError as error:
        if is_anothers(error):
            raise
        reason = {
            errno.ENOSPC: "the disk is full; free some space",
            errno.EDQUOT: "the disk quota is used up; free some space",
            errno.EROFS: "the folder is read-only; choose another with --out or make it writable",
            errno.EEXIST: "it exists and is no folder; choose another with --out or move it away",
            errno.EACCES: "no permission to write; choose another folder with --out or permit it",
        }.get(error.errno or 0, error.strerror or str(error))
        raise DiskError(
            f"Cannot {_SAID.get(operation, operation)} {path}: {reason}. "
            "Existing files are unchanged. Fix this, then run the command again to continue."
        ) from error


def path_of(given: object, what: str) -> Path:
    """Return the path that a caller gave for something; refuse anything that is not one."""
    if not isinstance(given, str | Path) or "\0" in str(given) or not str(given):
        raise UsageError(f"{given!r:.60} is not the path of {what}.")
    return Path(given)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist."""
    with _named("mkdir", path):
        there = path.is_dir()
    if there:
        return
    make_folder(path.parent)
    with _hooked("mkdir", path):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not path.is_dir():
                raise


Content = bytes | Iterable[bytes | memoryview]
"""The content of a file, whole or in chunks."""


def put(path: Path, content: Content, aside: Path | None = None, *, durable: bool = True) -> None:
    """Replace or create one file; it appears whole. It is written in `aside` first, or beside its place."""
    put_all([(path, content)], aside, durable=durable)


def put_all(
    items: Sequence[tuple[Path, Content]], aside: Path | None = None, *, durable: bool = True
) -> None:
    """Create files; each appears whole, and is on the disk when this returns, if `durable`.

    The files of one call are synchronised at the same time, because a journalling file system then commits
    them together: thirty files cost little more than one. If this fails, the temporary files are removed.
    A regular file is replaced. Anything else is refused: a folder, a device, a pipe, and a symbolic link,
    which may have come with a folder from elsewhere and point anywhere.
    """
    for path, _ in items:
        _check_replaceable(path)
    parts = [(path.parent if aside is None else aside) / _part() for path, _ in items]
    try:
        for part, (_, content) in zip(parts, items, strict=True):
            make_folder(part.parent)
            _write(part, content)
        if durable:
            _sync(parts)
        for part, (path, _) in zip(parts, items, strict=True):
            make_folder(path.parent)
            with _hooked("rename", path):
                os.replace(part, path)
    except BaseException:
        for part in parts:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        raise
    if durable:
        _sync(sorted({path.parent for path, _ in items}))


def _check_replaceable(path: Path) -> None:
    try:
        kind = os.lstat(path).st_mode
    except OSError:  # nothing is there, or the writing will say why not
        return
    if not stat.S_ISREG(kind):
        what = "a symbolic link" if stat.S_ISLNK(kind) else "a folder" if stat.S_ISDIR(kind) else "no file"
        raise UsageError(f"{path} is {what}, expected a regular file or nothing there. Choose another name.")


def put_folder(path: Path, items: Mapping[str, Content]) -> None:
    """Create a folder of files; it appears whole, by a rename, and is on the disk when this returns."""
    aside = path.parent / _part()
    try:
        make_folder(aside)
        for name, content in items.items():
            _write(aside / name, content)
        _sync([*(aside / name for name in items), aside])
        with _hooked("rename", path):
            os.rename(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _sync([path.parent])


def _part() -> str:
    return f"{PART}{os.getpid()}-{next(_counter)}"


def _write(path: Path, content: Content) -> None:
    with _hooked("write", path), open(path, "wb", buffering=0) as file:
        for piece in (content,) if isinstance(content, bytes) else content:
            left = memoryview(piece).cast("B")
            while left:
                left = left[file.write(left) :]


def _sync(paths: Sequence[Path]) -> None:
    """Make files, or the names in folders, durable."""
    with _hooked("fsync", *paths):
        if len(paths) == 1:
            _fsync(paths[0])
        else:
            try:
                with ThreadPoolExecutor(min(len(paths), SYNCING)) as pool:
                    list(pool.map(_fsync, paths))
            except RuntimeError:  # the interpreter is ending, and starts no more threads
                for path in paths:
                    _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, content: bytes, *, durable: bool) -> None:
    """Add to the end of a file; a write that the disk refuses half-way is taken back."""
    new = not path.exists()
    with _hooked("write", path):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(handle).st_size
        try:
            with _hooked("write", path):
                left = memoryview(content)
                while left:
                    left = left[os.write(handle, left) :]
        except DiskError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, before)
            raise
        if durable:
            with _hooked("fsync", path):
                os.fsync(handle)
    finally:
        os.close(handle)
    if new:
        _sync([path.parent])


def cut(path: Path, size: int) -> None:
    """Shorten a file."""
    with _hooked("truncate", path), open(path, "rb+") as file:
        file.truncate(size)
        os.fsync(file.fileno())


def rename(path: Path, to: Path) -> None:
    """Give a file or a folder another name in the same folder; it is on the disk when this returns."""
    with _hooked("rename", path):
        os.rename(path, to)
    _sync([path.parent])


def remove(path: Path) -> None:
    """Remove a file if it exists."""
    with _hooked("unlink", path):
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
    with _hooked("rmdir", folder):
        folder.rmdir()


@contextlib.contextmanager
def opened(path: Path, *, follow: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file for reading; a device, a pipe, a folder or a missing file is reported as damage.

    So is a link, unless ``follow`` is set: set it for a file that the user named, not for files in a folder
    that came from elsewhere. Opening never blocks, not even on a pipe.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    flags |= getattr(os, "O_BINARY", 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    try:
        if not follow and not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
            raise CorruptionError(f"{path} is not a plain file.")
        with os.fdopen(os.open(path, flags), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CorruptionError(f"{path} is not a plain file.")
            yield cast(BinaryIO, file)
    except HalfulpError:  # one of the caller's, about something else
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptionError(f"{path} is missing: there is no such file.") from None
    except (IsADirectoryError, ValueError):  # a name with a zero byte is a ValueError
        raise CorruptionError(f"{path} is not a plain file.") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise CorruptionError(f"{path} is not a plain file.") from None
        raise refused_reading(path, error) from error


def refused_reading(path: Path, error: OSError) -> DiskError:
    """Return the error for a file or folder that the system does not let us read."""
    return DiskError(f"{path} cannot be read: {error.strerror or error}.")


def read(path: Path, most: int | None = None, *, follow: bool = False) -> bytes:
    """Return the content of a regular file, of no more than `most` bytes; see :func:`opened`."""
    with opened(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise CorruptionError(f"{path} has {size:,} bytes; at most {most:,} are expected there.")
        chunks = [b""]
        while size > 0 and (piece := file.read(size)):
            chunks.append(piece)
            size -= len(piece)
        return b"".join(chunks)


def sha256(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a regular file. If the size is not the expected one, nothing is read."""
    with opened(path) as file:
        actual = os.fstat(file.fileno()).st_size
        if size is not None and actual != size:
            raise TamperingError(
                f"{path} is not what was written: it has {actual:,} bytes, but {size:,} were written. "
                f"{RESTORE}"
            )
        return hashlib.file_digest(cast(RawIOBase, file), "sha256").hexdigest()


class Lock:
    """A lock that is held until it is released or its process ends."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle
        _held.add(self)

    def release(self, *, remove: bool = False) -> None:
        """Release the lock, and with ``remove`` its file too. Releasing it twice does nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            if remove:
                with contextlib.suppress(OSError, DiskError):
                    if _is(handle, self.path):  # else it is another's by now
                        self.path.unlink()
            os.close(handle)

    @property
    def lost(self) -> bool:
        """True if it is held on a file that is no longer at its path."""
        return self._handle >= 0 and not _is(self._handle, self.path)

    def __del__(self) -> None:
        self.release()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
"""Locks of this process. A fork closes its copies, so that it does not hold them after its parent."""


def lost(path: Path) -> bool:
    """Return True if this process holds a lock on a file that is no longer at a path."""
    return any(held.path == path and held.lost for held in list(_held))


def _let_go() -> None:
    for held in list(_held):
        held.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a study's lock; raise an error that names the process that holds it already."""
    if not CAN_LOCK:
        raise UsageError("Studies are run on systems with flock (Linux, macOS); here they can only be read.")
    held = hold(path, path.parent.parent)
    try:
        yield
    finally:
        held.release()


def hold(path: Path, what: Path) -> Lock:
    """Lock a file in a folder; raise an error that names the process that holds the lock already.

    The lock is the kernel's (flock), so it ends with its process, however that ends. The holder may remove
    the file; a process that locked a file that is no longer there tries again.
    """
    import fcntl

    for tries in itertools.count(1):
        make_folder(path.parent)
        with _hooked("lock", path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        held = Lock(path, handle)
        try:
            with _hooked("lock", path):
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    busy = True
                else:
                    busy = False
            if busy and tries >= 3:  # before that, somebody may just be looking who holds it
                raise UsageError(
                    f"{what} is in use by process {_holder(handle)}. Wait until it ends, or "
                    "stop it; then run again."
                )
            if not busy and _is(handle, path):
                with _hooked("write", path):
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, str(os.getpid()).encode(), 0)
                return held
        except BaseException:
            held.release()
            raise
        held.release()
        if busy:
            time.sleep(0.05)
    raise AssertionError("not reached")


def holder(path: Path) -> str | None:
    """Return the process that holds a lock now, or None."""
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
    with _named("lock", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False
