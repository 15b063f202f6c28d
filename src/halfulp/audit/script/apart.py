"""Call a script's function so that its number comes back and nothing else: no state of it, no file.

:func:`in_fork` calls it in a forked process. Whatever the function changes there, such as counters of early
stopping, iterators and lists, ends with that process. Before the call, everything that a fork shares with its
parent is cut: files that can be written, pipes and sockets lead nowhere, and files that are read get a
position of their own. OpenMP's threads do not survive a fork, so they are ended before it; both processes
make new ones, as many as before, so that losses are the same to the bit.

Where this process cannot be forked (:func:`can_fork`), :func:`in_place` calls the function here, compares its
module's variables and its object's fields with what they were, and puts them back if they changed.

In both, what the function writes through ``open``, ``torch.save`` or safetensors is dropped, and what else
would change a file is refused (:func:`nothing_written`).
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import inspect
import io
import os
import select
import signal
import stat
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from torch.utils.data import DataLoader, dataloader

from halfulp.audit.ranks import world

REFUSED = frozenset((
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
    "os.chown", "os.utime", "shutil.rmtree", "shutil.move", "subprocess.Popen", "os.system", "os.exec",
    "os.posix_spawn", "sqlite3.connect",
))  # fmt: skip
"""Audit events of what would change a file, a folder or a database."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATIENCE, LONGER = 60.0, 20.0
"""A repeated call may take this many seconds, and this many times as long as one before."""
MOST = 4000
"""Most bytes of an answer: a pipe takes as many at once."""


class ApartError(Exception):
    """Error raised when a function could not be called apart; its text says why."""


def can_fork() -> bool:
    """Return True if a fork of this process can evaluate a model: Linux, no accelerator, one rank."""
    busy = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
    xpu = getattr(torch, "xpu", None)
    busy = busy or (xpu is not None and xpu.is_initialized())
    return sys.platform == "linux" and not busy and world() == 1


# ---- in a forked process ----


def in_fork(function: Callable[[], float], limit: float) -> tuple[float, float]:
    """Return the number that a function gives in a forked process, and the processor time of that.

    Args:
        function: The function.
        limit: Seconds after which it is ended: a fork has none of its parent's threads to wait for.

    Raises:
        ApartError: If it gives none.
    """
    reading_end, writing_end = os.pipe()
    threads_end = _end_openmp_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of other threads, which it does without
        child = os.fork()
    if child == 0:
        _reply_and_exit(function, writing_end, threads_end)
    reply, used = None, 0.0
    try:
        os.close(writing_end)
        poll = select.poll()
        poll.register(reading_end, select.POLLIN)
        if poll.poll(limit * 1000):
            reply = os.read(reading_end, MOST).decode(errors="replace")
    finally:
        os.close(reading_end)
        os.kill(child, signal.SIGKILL)  # it has answered, or is late
        with contextlib.suppress(ChildProcessError):  # where the script ignores SIGCHLD
            usage = os.wait4(child, 0)[2]
            used = usage.ru_utime + usage.ru_stime
    if reply is None:
        raise ApartError(f"in a forked process it did not end within {limit:.0f} s")
    if not reply.startswith("="):
        raise ApartError(reply[1:] or "the process forked for it died")
    return float.fromhex(reply[1:]), used


def _reply_and_exit(function: Callable[[], float], writing_end: int, threads_end: bool) -> NoReturn:
    """Call the function in the forked process, write its number to the pipe, and end the process."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _cut_descriptors(writing_end)
        _leave_workers()
        if not threads_end:
            torch.set_num_threads(1)
        with nothing_written():
            reply = f"={function().hex()}"
    except BaseException as error:  # whatever it is: this process ends here
        reply = f"!{type(error).__name__}: {error}"
    try:
        os.write(writing_end, reply.encode(errors="replace")[:MOST])
    finally:
        os._exit(0)


def _cut_descriptors(kept: int) -> None:
    """Have no open file of this process share anything with the parent."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (int(name) for name in os.listdir("/proc/self/fd")):
        if fd not in (kept, nowhere):
            with contextlib.suppress(OSError):  # the listing's own, closed by now
                _cut(fd, nowhere)


def _cut(fd: int, nowhere: int) -> None:
    import fcntl

    readable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    if readable and stat.S_ISREG(os.fstat(fd).st_mode):
        with contextlib.suppress(OSError):
            own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
            os.lseek(own, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, fd)
            os.close(own)
            return
    os.dup2(nowhere, fd)


def _leave_workers() -> None:
    """Have loaders of batches start workers of their own: those that they have serve the parent."""
    kind = dataloader._MultiProcessingDataLoaderIter
    shut, begin, process = kind._shutdown_workers, DataLoader.__iter__, os.getpid()

    def theirs(batches: Any) -> bool:
        return any(worker._parent_pid != process for worker in getattr(batches, "_workers", ()))

    def shut_own(batches: Any) -> None:
        if not theirs(batches):
            shut(batches)
        elif batches._worker_pids_set:  # which torch knows by the identity of what is dropped
            torch._C._remove_worker_pids(id(batches))
            batches._worker_pids_set = False

    def begin_own(loader: DataLoader[Any]) -> Any:
        if theirs(loader._iterator):  # persistent_workers=
            loader._iterator = None
        return begin(loader)

    kind._shutdown_workers = shut_own  # type: ignore[assignment, method-assign]  # this process ends soon
    DataLoader.__iter__ = begin_own  # type: ignore[method-assign]  # the same


def _end_openmp_threads() -> bool:
    """End this thread's threads of GNU OpenMP, which come back when they are needed; whether that worked.

    Other OpenMP libraries, and OpenBLAS, see to a fork themselves.
    """
    with open("/proc/self/maps") as maps:
        places = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libgomp" in line}
    try:
        return all(ctypes.CDLL(place).omp_pause_resource_all(2) == 0 for place in sorted(places))
    except (OSError, AttributeError):  # GCC before 9
        return False


# ---- in this process ----


def in_place(function: functools.partial[Any], number: Callable[[Any], float]) -> tuple[float, float]:
    """Return the number of a function's result, called in this process, and the processor time of that.

    Raises:
        ApartError: If it changed variables; they are what they were.
    """
    kept, began = Variables(function), time.process_time()
    try:
        with nothing_written(), _silent():
            result = number(function())
    finally:
        changed = kept.put_back()
    if changed:
        raise ApartError(f"it changes {', '.join(changed[:10])}, which were put back")
    return result, time.process_time() - began


class Variables:
    """The plain variables that a function could change: of its module, its closure and its objects."""

    def __init__(self, function: functools.partial[Any]) -> None:
        inner = inspect.unwrap(function.func)
        objects = [*function.args[:1], getattr(inner, "__self__", None)]
        inner = getattr(inner, "__func__", inner)
        variables = getattr(inner, "__globals__", {})
        self._spaces: list[tuple[str, dict[str, Any]]] = [("", variables)]
        own = [(name, x) for name, x in variables.items() if not name.startswith("__")]  # not the importer's
        named = [*own, *(("self", x) for x in objects)]
        for name, x in named:
            fields = getattr(x, "__dict__", None)
            if isinstance(fields, dict) and not isinstance(x, type | types.ModuleType | types.FunctionType):
                self._spaces.append((f"{name}.", fields))
        self._cells = [
            (name, cell) for name, cell in zip(
                getattr(getattr(inner, "__code__", None), "co_freevars", ()),
                getattr(inner, "__closure__", None) or (), strict=True,
            ) if _filled(cell)
        ]  # fmt: skip
        self._were = [{k: _copy(v) for k, v in space.items()} for _, space in self._spaces]
        self._contents = [_copy(cell.cell_contents) for _, cell in self._cells]

    def put_back(self) -> list[str]:
        """Restore what changed and return the names of it."""
        changed = []
        for (prefix, space), were in zip(self._spaces, self._were, strict=True):
            for name, copied in were.items():
                if copied is not None and not copied.same(space.get(name, self)):
                    changed.append(prefix + name)
                    space[name] = copied.restored()
        for (name, cell), copied in zip(self._cells, self._contents, strict=True):
            if copied is not None and not copied.same(cell.cell_contents):
                changed.append(name)
                cell.cell_contents = copied.restored()
        return changed


class _Copy:
    """A plain value: a number or text, or a list, dictionary or set with the same elements as now."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.elements = value.copy() if isinstance(value, list | dict | set) else None

    def same(self, now: Any) -> bool:
        if now is not self.value:
            return self.elements is None and type(now) is type(self.value) and bool(now == self.value)
        if self.elements is None:
            return True
        mine, its = (list(x.items()) if isinstance(x, dict) else list(x) for x in (self.elements, self.value))
        flat = [[y for x in each for y in (x if isinstance(x, tuple) else (x,))] for each in (mine, its)]
        return len(flat[0]) == len(flat[1]) and all(
            a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)
            for a, b in zip(*flat, strict=True)
        )

    def restored(self) -> Any:
        if isinstance(self.value, list):
            self.value[:] = self.elements or []
        elif self.elements is not None:
            self.value.clear()
            self.value.update(self.elements)
        return self.value


PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _copy(value: Any) -> _Copy | None:
    return _Copy(value) if isinstance(value, (*PLAIN, list, dict, set)) else None


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# ---- files ----


class _Guard:
    """Refuse what would change files, in one thread of one process while it is entered."""

    def __init__(self) -> None:
        self.where: tuple[int, int] | None = None
        sys.addaudithook(self._refuse)

    def here(self) -> bool:
        return self.where == (os.getpid(), threading.get_ident())

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.where is None or not self.here():
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
        if event in REFUSED or (writes and arguments[0] != os.devnull):
            raise PermissionError(f"it changes files ({event} of {str(arguments[:1])[1:-2]})")


@functools.cache
def _guard() -> _Guard:
    return _Guard()  # an audit hook cannot be removed: one for all calls


@contextlib.contextmanager
def nothing_written() -> Iterator[None]:
    """Drop what this thread writes to files that it opens inside, and refuse other changes of files."""
    guard, plain = _guard(), builtins.open
    writer, serialize = torch._C.PyTorchFileWriter, safetensors.serialize_file

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if guard.here() and not isinstance(file, int) and set(mode) & set("wax+"):
            file, mode = os.devnull, mode.replace("x", "w")
        return plain(file, mode, *args, **kwargs)

    def written(to: Any, *args: Any, **kwargs: Any) -> Any:
        return writer(io.BytesIO() if guard.here() and isinstance(to, str) else to, *args, **kwargs)

    def serialized(*args: Any, **kwargs: Any) -> None:
        if not guard.here():
            serialize(*args, **kwargs)

    replaced: list[tuple[Any, str, Any]] = [
        (builtins, "open", opened), (io, "open", opened), (torch._C, "PyTorchFileWriter", written),
        *((m, "serialize_file", serialized) for m in (safetensors, safetensors.numpy, safetensors.torch)),
    ]  # fmt: skip
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in replaced]
    guard.where = os.getpid(), threading.get_ident()
    try:
        for holder, name, value in replaced:
            setattr(holder, name, value)
        yield
    finally:
        guard.where = None
        for holder, name, value in before:
            setattr(holder, name, value)
