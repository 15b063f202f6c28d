"""Compile the library of the CPU kernels.

Any C++17 compiler with GCC's vectors does it: the machine's, or where there is none that of the ``ziglang``
wheel. This file imports nothing of the package, because the build of the package runs it too.

A library is named by the digest of everything that it is made from, and so are the objects that it is linked
from. What is found under its name is right; after a change only what is affected is compiled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17", "-O2", "-fwrapv", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
ONCE = ("core", "counting")
"""Units that are compiled once; every other one is compiled for every target."""

VECTORISED = ("audit", "scaled", "score")
"""Units whose loops are left to the compiler."""


def targets() -> dict[str, list[str]]:
    """Return the targets of this machine's architecture, and what a compiler is told of each."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return {name: [f"-march=x86-64-{name}"] for name in ("v4", "v3", "v2")}
    return {"base": []}


def compiler() -> list[str] | None:
    """Choose a compiler: ``CXX``, one on the PATH, that of the ``ziglang`` wheel, or None.

    On Windows those on the PATH are passed over: MSVC has none of GCC's vectors, and what MinGW links needs
    libraries that a user does not have.
    """
    candidates: tuple[str, ...] = ("c++", "g++", "clang++") if sys.platform != "win32" else ()
    for name in (os.environ.get("CXX", ""), *candidates):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return None


def library_name() -> str:
    """Return the file name of the library that the sources make."""
    files = sorted(p for p in HERE.iterdir() if p.suffix in (".h", ".cpp") or p.name == "build.py")
    content = b"\0".join([platform.machine().encode(), *(p.read_bytes() for p in files)])
    suffix = "dll" if sys.platform == "win32" else "so"
    return f"halfulp-{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"


def build(folder: Path) -> Path:
    """Compile the library into a folder, unless it is there.

    Args:
        folder: Where it goes, and the objects that it is linked from.

    Returns:
        The library.

    Raises:
        OSError: If there is no compiler, it refuses, or the folder cannot be written.
    """
    library = folder / library_name()
    if library.exists():
        return library
    chosen = compiler()
    if chosen is None:
        raise OSError("no C++ compiler on the PATH, and no ziglang in this Python")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if library.exists():  # another process was first
            return library
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda unit: _compiled(chosen, folder, *unit), _units(chosen)))
        _written(chosen, ["-shared", *map(str, objects), *_LINKED], library)
        for old in folder.glob("*-*.*"):
            if old not in (library, *objects):
                old.unlink(missing_ok=True)
    return library


_LINKED = {"win32": [], "linux": ["-pthread", "-s"]}.get(sys.platform, ["-pthread"])
"""Flags of the linker; ``-s`` leaves the names out, which are most of what zig writes."""


def _units(chosen: list[str]) -> Iterator[tuple[Path, str, list[str]]]:
    """List what to compile: a source, the name of its object, flags. The longest come first."""
    sources = sorted(HERE.glob("*.cpp"), key=lambda p: -p.stat().st_size)
    for target, flags in targets().items():
        if "ziglang" in chosen:  # which spells it otherwise
            flags = [flag.replace("x86-64-", "x86_64_") for flag in flags]
        for source in sources:
            if source.stem not in ONCE:
                more = ["-O3"] if source.stem in VECTORISED else []
                yield source, f"{source.stem}.{target}", [*flags, *more, f"-DHALFULP_TARGET={target}"]
    for name in ONCE:
        yield HERE / f"{name}.cpp", name, []


def _compiled(chosen: list[str], folder: Path, source: Path, name: str, flags: list[str]) -> Path:
    headers = b"".join(p.read_bytes() for p in sorted(HERE.glob("*.h")))
    command = [*chosen, *FLAGS, *flags]
    digest = hashlib.sha256("\0".join(command).encode() + headers + source.read_bytes()).hexdigest()[:16]
    object_file = folder / f"{name}-{digest}.o"
    if not object_file.exists():
        _written(chosen, [*FLAGS, *flags, "-c", str(source)], object_file)
    return object_file


def _written(chosen: list[str], arguments: list[str], out: Path) -> None:
    """Run the compiler; what it makes appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        result = Path(folder) / out.name
        done = subprocess.run([*chosen, *arguments, "-o", str(result)], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(chosen)} cannot compile {out.stem}:\n{done.stderr[-3000:]}")
        result.replace(out)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; where files cannot be locked, several do the same work."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(build(HERE / "built"))
