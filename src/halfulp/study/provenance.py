"""Identify what the numbers of a study depend on: its code, its data and its machine; compare with a seal.

The code of a study is its own file and every file of this package that its numbers can depend on: those that
it imports, and theirs. Imports are read from the source (`ast`), so lazy ones inside functions count and
nothing is run. Importing ``halfulp.numbers.grids`` makes a study depend on that module, not on what the
package's ``__init__`` happens to import as well; ``import halfulp``, or a name that ``__init__`` defines,
does. Imports for type checkers alone are left out. Of the engine, every study depends on what makes
a record and turns records into a label (`ENGINE`), and on nothing else: reports and figures change looks,
which is no study's business. A package's tables go with its ``__init__``. (Seals of the first release hold
every file of the package as code.)
"""

from __future__ import annotations

import ast
import importlib.metadata
import io
import platform
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from halfulp import canonical, data, deprecation
from halfulp.errors import UsageError
from halfulp.study.declaration import changes
from halfulp.study.loading import Source
from halfulp.study.protocol import Json
from halfulp.version import __version__

PACKAGE = Path(__file__).parent.parent
ROOT = "halfulp"
ENGINE = tuple(f"halfulp.study.{name}" for name in ("declaration", "evidence", "gates", "protocol", "worker"))
LOOKS = {"drawing", "panels", "report"}
"""Modules and packages, wherever they are, that show numbers: no number depends on them."""
SETTLED_NS = 2_000_000_000
"""How long a file must have been left alone for its times to tell of every later change (FAT: 2 s)."""
LIBRARIES = ("torch", "numpy", "numba")


# ---- the files behind a study ----


def closure(content: bytes | None, module: str) -> set[Path]:
    """Find the files behind a study: from the bytes of its own file, or the module of this package."""
    paths: dict[str, Path] = {}
    waiting = [*ENGINE, *([module] if content is None else _imported(content, ""))]
    while waiting:
        name = deprecation.new_path(waiting.pop())
        path = _file(name)
        engine = f"{name}.".startswith("halfulp.study.") and name not in ENGINE
        if path is None or name in paths or engine or not LOOKS.isdisjoint(name.split(".")[1:]):
            continue
        paths[name] = path
        if name not in ENGINE:
            waiting += _imports(path, name if path.name == "__init__.py" else name.rpartition(".")[0])
    tables = {
        beside
        for path in paths.values()
        if path.name == "__init__.py" and path.parent != PACKAGE
        for beside in path.parent.iterdir()
        if beside.is_file() and beside.suffix not in (".py", ".pyc", ".nbi", ".nbc")
    }
    return {*paths.values(), *tables, PACKAGE / "canonical.py"}


@cache
def _file(name: str) -> Path | None:
    """Find the file of a module of this package; None if there is no such module."""
    if name != ROOT and not name.startswith(f"{ROOT}."):
        return None
    path = PACKAGE.joinpath(*name.split(".")[1:])
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return file
    return None


@cache
def _imports(path: Path, package: str) -> tuple[str, ...]:
    return tuple(_imported(path.read_bytes(), package, lazy=path == PACKAGE / "__init__.py"))


def _imported(content: bytes, package: str, lazy: bool = False) -> Iterator[str]:
    """Yield the modules of this package that a source imports, anywhere in it.

    With ``lazy``, those for type checkers as well: the package itself imports its names when they are used.
    """
    tree = ast.parse(content)
    for node in ast.walk(tree) if lazy else _walk(tree.body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                if not alias.asname and alias.name.startswith(f"{ROOT}."):
                    yield ROOT  # the name that is bound is the package's
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                below = f"{base}.{alias.name}"
                yield below if _file(below) else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield every node, but for the bodies of ``if TYPE_CHECKING``."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _walk(node.orelse)
        else:
            yield from _walk(ast.iter_child_nodes(node))


# ---- what a seal holds of code, data and machine ----


def as_sealed(sealed: Mapping[str, Json], source: Source) -> dict[str, Json]:
    """Return the code as it is now, in the form of a seal."""
    return code(source) if "noted" in sealed else whole_code(source)


def code(source: Source) -> dict[str, Json]:
    """Return the digest of each file that the study can depend on, and how the study is found."""
    files = closure(source.content, source.module)
    package = {path.relative_to(PACKAGE).as_posix(): canonical.sha256_file(path) for path in sorted(files)}
    return {"package": package, "study": source.identity}


def noted(behind: Mapping[str, Json]) -> dict[str, Json]:
    """Return the package's version, and its files that no number of the study depends on."""
    others = {name: digest for name, digest in _package().items() if name not in behind["package"]}
    return {"version": __version__, "files": others}


def whole_code(source: Source) -> dict[str, Json]:
    """Return what the first release sealed: every file of the package, and its version."""
    return {"version": __version__, "package": _package(), "study": source.identity}


def _package() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): canonical.sha256_file(path)
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
        and path.suffix not in (".pyc", ".nbi", ".nbc")
    }  # fmt: skip


def environment() -> dict[str, Json]:
    """Return what may change a number without changing a file: interpreter, libraries, processor."""
    versions = {}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):  # numba is there for the paper's studies
            versions[name] = importlib.metadata.version(name)
    model, features = _processor()
    gpus = _gpus()
    settings = {"gpus": gpus, "gpu_settings": gpu_settings()} if gpus else {}
    return settings | {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": versions,
        "platform": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}".strip(),
        "cpu": model,
        "cpu_features": " ".join(features),
    }


@cache
def _gpus() -> list[str]:
    """Return the GPUs that torch sees, each with its driver; none where torch is not there."""
    try:
        import torch
    except ImportError:
        return []
    driver = ""
    with suppress(OSError):
        driver = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    return [f"{torch.cuda.get_device_name(i)}; {driver}" for i in range(torch.cuda.device_count())]


def gpu_settings() -> dict[str, str]:
    """Return the versions behind a GPU's numbers, and what every worker sets (`worker.settle_gpus`)."""
    import torch

    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's
    return {
        "cuda": str(torch.version.cuda), "cudnn": str(cudnn), "tf32": "off", "deterministic": "on",
    }  # fmt: skip


@cache
def _processor() -> tuple[str, list[str]]:
    """Return the processor's model, and its vector instructions where the system lists them."""
    lines: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            lines.setdefault(key.strip(), value.strip())
    flags = lines.get("flags", lines.get("Features", "")).split()
    vector = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "i8mm", "sse", "ssse", "sve")
    return lines.get("model name") or platform.processor(), sorted(f for f in flags if f.startswith(vector))


def locate(name: str, folder: Path | None) -> Path:
    """Find a data set, unverified: one that halfulp knows by name, or a file beside the study file."""
    if name in data.DATASETS:
        known = data.dataset(name)
        return data.located(known) or data.download(known, data.cache_folder())
    plain = Path(name)
    if plain.is_absolute() or ".." in plain.parts:
        raise UsageError(
            f"The data file {name[:120]!a} must be named relative to the study file, without '..'."
        )
    if folder is None:
        raise UsageError(
            f"The data file {name[:120]!a} lies beside the study file, whose place is not known here: "
            "give the study file."
        )
    path = folder / plain
    if not path.is_file():
        raise UsageError(f"The data file {path} of the study is missing.")
    return path


def hash_data(
    names: Iterable[str], folder: Path | None, hashed: Mapping[str, Json] | None = None
) -> dict[str, dict[str, Json]]:
    """Return size, digest and mark of data sets.

    The mark is what the file system says of the file that was hashed. A process that finds the same mark has
    the same file in front of it and need not read all of it again. There is none of a file that changed
    while it was read, or so shortly before that its times might not show a further change.

    Args:
        names: The names of the data sets.
        folder: The folder of the study file.
        hashed: What another process of this run was told by this function.

    Raises:
        UsageError: If a data set is not here or cannot be read.
        TamperingError: If a file is not the data set that its name stands for.
    """
    return {name: _hash_one(name, locate(name, folder), (hashed or {}).get(name)) for name in names}


def _hash_one(name: str, path: Path, known: Mapping[str, Json] | None) -> dict[str, Json]:
    try:
        before, changed = _mark(path)
        if known and known["mark"] == before:
            return dict(known)
        settled = time.time_ns() - changed > SETTLED_NS
        size, digest = path.stat().st_size, canonical.sha256_file(path)
        mark = before if settled and before == _mark(path)[0] else ""
    except OSError as error:
        raise UsageError(f"The data file {path} cannot be read: {error.strerror}.") from None
    if name in data.DATASETS:
        data.verify(data.dataset(name), path, digest)
    return {"bytes": size, "sha256": digest, "mark": mark}


def _mark(path: Path) -> tuple[str, int]:
    """Return what tells a file from any other, and from itself once it changes; and when it last did."""
    status = path.stat()
    times = status.st_mtime_ns, status.st_ctime_ns  # the second cannot be set by hand
    return f"{path.resolve()} {status.st_ino} {status.st_size} {times[0]} {times[1]}", max(times)


def git_state(path: Path) -> dict[str, Json] | None:
    """Return the commit that a path is at, and whether it differs from that; None outside of git."""
    folder = path if path.is_dir() else path.parent

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=60
        )

    try:
        commit = git("rev-parse", "HEAD")
        if commit.returncode != 0 or git("check-ignore", "-q", str(path)).returncode == 0:
            return None
        dirty = bool(git("status", "--porcelain", "--", str(path)).stdout.strip())
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"commit": commit.stdout.strip(), "dirty": dirty}


def sealed_commit(seal: Mapping[str, Json]) -> str:
    """Return the commit that a seal names for the code of halfulp; none where it was dirty, or in no tree."""
    state = seal["git"]["package"]
    return "" if state is None or state["dirty"] else str(state["commit"])


def not_of_commit(seal: Mapping[str, Json]) -> list[str] | None:
    """List the sealed files that are not those of the seal's commit; None where that is not known here."""
    done = subprocess.run(
        ["git", "-C", str(PACKAGE), "archive", "--format=tar", sealed_commit(seal)], capture_output=True
    )
    if done.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        there = {
            member.name: canonical.sha256(file.read())
            for member in tar if member.isfile() and (file := tar.extractfile(member)) is not None
        }  # fmt: skip
    return [name for name, digest in seal["code"]["package"].items() if there.get(name) != digest]


def compare(sealed: dict[str, Json], now: dict[str, Json]) -> dict[str, list[str]]:
    """Return what changed since the seal, by part; parts that did not change are left out."""
    changed = {part: list(changes(sealed[part], now[part], part)) for part in ("code", "data", "environment")}
    return {part: lines for part, lines in changed.items() if lines}


def listed(lines: list[str], most: int = 20) -> str:
    """Indent lines for a message; the first ones if there are many."""
    more = [f"  ... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([f"  {line}" for line in lines[:most]] + more)


def code_digest(seal: Mapping[str, Json]) -> str:
    """Return the digest of the code, which records hold."""
    return canonical.digest(seal["code"])


def version(seal: Mapping[str, Json]) -> str:
    """Return the version of halfulp that sealed."""
    return str(seal["noted"]["version"] if "noted" in seal else seal["code"]["version"])
