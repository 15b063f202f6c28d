"""The CPU kernels: C++ (``*.cpp`` here), loaded and called.

A call is a plain struct of addresses and numbers (``calls.h``); :func:`run` gives ranges of tiles to threads.
Results depend neither on how many there are nor on the target, which is chosen when the library is loaded.
``HALFULP_NATIVE`` names another (``v4``, ``v3``, ``v2``; ``base`` where there is only one), or says ``off``:
then, as where no library can be built or loaded, the NumPy reference serves.

Threads follow ``torch.get_num_threads()``. Between two torch operations the workers of its OpenMP team do not
sleep: they spin, each on a core, for a few milliseconds, and threads of ours would gain nothing beside them
(measured: 1.0x from a second thread on two cores). So a kernel is given to the team itself, by the entry
point that compiled ``#pragma omp parallel`` blocks call (2.0x). Plain threads do the work where torch has no
such team (another OpenMP, macOS), and in a forked child, which has the parent's teams but not their threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
import tempfile
from contextlib import suppress
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.kernels.native import build

GRAIN = 32  # tiles, about 25,000 coordinates: less is not worth a thread
FLOATS, BFLOATS, CODES, SHORTS, CHARS, DOUBLES = range(6)
STORED = {
    torch.float32: FLOATS, torch.bfloat16: BFLOATS, torch.uint8: CODES, torch.int16: SHORTS,
    torch.int8: CHARS, torch.float64: DOUBLES, None: FLOATS,
}  # fmt: skip
"""The library's name for the type in which a tensor is stored."""
OF_ARRAY = {np.dtype("f4"): FLOATS, np.dtype("u2"): BFLOATS, np.dtype("f8"): DOUBLES}
"""The same for flat arrays, in which bfloat16 values are bit patterns: see ``plan.flat_of``."""


def _structures(text: str) -> dict[str, Any]:
    """Make the twins of the structs of ``calls.h``: what is passed is said there, once."""
    types = {"int32_t": c_int32, "int64_t": c_int64, "uint32_t": c_uint32}
    structs: dict[str, Any] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\};", re.sub(r"//.*", "", text), re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for member in body.split(";")[:-1]:
            kind, names = member.replace("const ", "").strip().split(maxsplit=1)
            for one in names.split(","):
                of = c_void_p if "*" in kind + one else structs.get(kind) or types[kind]
                two = one.endswith("[2]") and of is not c_void_p
                fields.append((re.findall(r"\w+", one)[0], of * 2 if two else of))
        nested = [field for field, of in fields if of in structs.values()]
        structs[name] = type(name, (Structure,), {"_anonymous_": nested, "_fields_": fields})
    return structs


_HEADER = (build.HERE / "calls.h").read_text()
STRUCTURES = _structures(_HEADER)
CALLS: dict[str, Any] = {name: STRUCTURES[of] for name, of in re.findall(r"X\((\w+), (\w+)\)", _HEADER)}
"""The structs that kernels are called with, by the name of the kernel."""


def columns(row: str) -> dict[str, int]:
    """Return where the members of a struct of 64-bit words are in a row of a table of them."""
    return {name: i for i, (name, _) in enumerate(STRUCTURES[row]._fields_)}


# ---- the library ---------------------------------------------------------------------------------------


class Library(NamedTuple):
    """The loaded library, its kernels by name, and the target in use."""

    opened: Any
    kernels: dict[str, Any]
    target: int
    name: str


MISSING = (
    "halfulp: the NumPy reference does the work of the CPU kernels, with the same results and 20 to 200 "
    "times slower, because their library cannot be {what}: {why}. To mend it, install a C++ compiler or `pip "
    "install ziglang`, then start again."
)


@cache
def library() -> Library | None:
    """Load the kernels, which are compiled first where the sources have changed; None if that cannot be."""
    wanted = os.environ.get("HALFULP_NATIVE", "")
    if wanted == "off":
        return None
    what = "built"
    try:
        file = _file()
        what = "loaded"
        opened = ctypes.CDLL(str(file))
    except OSError as error:
        logging.getLogger("halfulp").warning(MISSING.format(what=what, why=error))
        return None
    opened.halfulp_target.restype = ctypes.c_char_p
    names: list[str] = []
    while (name := opened.halfulp_target(len(names))) is not None:
        names.append(name.decode())
    usable = [i for i, name in enumerate(names) if opened.halfulp_runs(i) and wanted in ("", name)]
    if not usable:
        here = [name for i, name in enumerate(names) if opened.halfulp_runs(i)]
        raise UsageError(f"HALFULP_NATIVE={wanted}: this processor runs {', '.join(here)}; or say off.")
    kernels = {kernel: getattr(opened, f"halfulp_{kernel}") for kernel in CALLS}
    for kernel, call in CALLS.items():
        kernels[kernel].argtypes = (ctypes.c_int, POINTER(Team), *[c_int64] * 3, POINTER(call))
        kernels[kernel].restype = None
    return Library(opened, kernels, usable[0], names[usable[0]])


def _file() -> Path:
    """Find the library in the package, or in a folder of the user's where the package cannot be written."""
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # never raises
    folders = [Path(__file__).parent / "built", Path(own) / "halfulp" / "native"]
    name = build.library_name()
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    writable = [folder for folder in folders if _writable(folder)]
    if not writable:
        raise OSError(
            f"neither {folders[0]} nor {folders[1]} can be written (set XDG_CACHE_HOME to a folder that can)"
        )
    if build.compiler() is not None:
        print("halfulp: compiling its kernels, once; this takes about a minute.", file=sys.stderr)
    return build.build(writable[0])


def _writable(folder: Path) -> bool:
    """Return True if files can be made in a folder, by making one: a file system may be read-only."""
    if not folder.is_absolute():  # "~" of a user without a home
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def described() -> str:
    """Describe the code that does the work on the CPU."""
    loaded = library()
    return "NumPy reference (no compiled kernels)" if loaded is None else f"C++ kernels for {loaded.name}"


# ---- threads -------------------------------------------------------------------------------------------

_forked = False


def _leave_parent() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parent)


class Team(Structure):
    """The entry points of torch's OpenMP; zeros: plain threads."""

    _fields_ = [(name, c_void_p) for name in ("parallel", "number", "threads")]  # ctypes wants it


ALONE = Team()


@cache
def torchs_team() -> Team:
    """Find torch's OpenMP, if it has one."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return ALONE
    functions = [_of_torch(name) for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")]
    return Team(*functions) if all(functions) else ALONE


def _of_torch(name: str) -> Any:
    """Find a function of the library that torch's CPU operations are in; None if it is not there."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        with suppress(OSError, AttributeError):
            return ctypes.cast(getattr(ctypes.CDLL(str(path)), name), c_void_p)
    return None


# ---- square roots --------------------------------------------------------------------------------------

ROUNDED = 0
ROOT_MODE = 0x140102  # of MKL: high accuracy, subnormal numbers kept, no errors raised


@cache
def torchs_root() -> int | None:
    """Return the address of the function that makes torch's square roots on this machine.

    torch asks MKL for them where it has MKL, whose roots are not the rounded ones (about a sixth of them
    differ, in the last bit) and depend on the processor. Elsewhere they are rounded, and no function is
    needed: ROUNDED. None if they are made in another way.
    """
    patterns = np.arange(0, 0x7F800000, 104_729, dtype=np.int32)  # of every size, subnormal ones too
    x = patterns.view(np.float32)
    roots = torch.from_numpy(x).sqrt().numpy()
    if np.array_equal(roots, np.sqrt(x)):
        return ROUNDED
    place = _of_torch("vmsSqrt")
    if place is None:
        return None
    root = ctypes.CFUNCTYPE(None, c_int32, c_void_p, c_void_p, c_int64)(place.value)
    own = np.empty_like(x)
    for i in range(0, x.size, 64):
        root(min(64, x.size - i), x[i:].ctypes.data, own[i:].ctypes.data, ROOT_MODE)
    return int(place.value) if np.array_equal(roots, own) else None


def at(x: Any) -> int | None:
    """Return the address of an array; None for one that is empty or not there."""
    return None if x is None or not x.size else int(x.ctypes.data)


def call_of(kernel: str, **members: Any) -> Any:
    """Make the struct that a kernel is called with.

    Args:
        kernel: Its name.
        members: Members by name; arrays stand for their addresses, and live as long as the struct.
    """
    struct = CALLS[kernel](**{k: at(x) if isinstance(x, np.ndarray) else x for k, x in members.items()})
    struct.members = members
    return struct


def run(kernel: str, count: int, call: Any, grain: int = GRAIN, first: int = 0) -> None:
    """Run the tiles [first, count) of a call."""
    loaded = library()
    assert loaded is not None
    if first >= count:
        return
    threads = min(torch.get_num_threads(), max(count // grain, 1))
    team = ALONE if _forked or threads == 1 else torchs_team()
    loaded.kernels[kernel](loaded.target, byref(team), first, count, threads, byref(call))
