"""What a seal fixes: the protocol, the code, the data and the environment, each by its digest.

The code is every file of this package that the study can depend on (`closure`) and, for a study of the user's
own, his study file. A study that was sealed refuses to go on when any of them differs, and says which. The
other files of the package are noted with their digests, and so is the state of a git tree, flagged when it is
dirty; they decide nothing. (Seals of the first release hold every file as code, and are compared so.)
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import halfulp
from halfulp import canonical
from halfulp.errors import TamperingError, UsageError
from halfulp.study.closure import PACKAGE, closure
from halfulp.study.declaration import FORMAT, Protocol, changes
from halfulp.study.loading import Source
from halfulp.study.protocol import Json

LIBRARIES = ("torch", "numpy", "numba")


def make(
    source: Source, protocol: Protocol, evidence: Mapping[str, Json], *, whole: bool = False
) -> dict[str, Json]:
    """The content of seal.json for a study as it is now; `whole`: as the first release wrote it."""
    behind = None if whole else code(source)
    return {
        "format": FORMAT,
        "study": protocol.study,
        "scale": protocol.scale,
        "protocol": protocol.digest,
        "code": whole_code(source) if behind is None else behind,
        "data": {name: data_identity(name, source.folder) for name in protocol.data},
        "environment": environment(),
        "git": {
            "package": git_state(PACKAGE),
            "study": git_state(source.folder / source.name) if source.folder else None,
        },
        **({"noted": noted(behind)} if behind is not None else {}),
        **({"evidence": dict(evidence)} if protocol.evidence else {}),
    }


def as_sealed(sealed: Mapping[str, Json], source: Source) -> dict[str, Json]:
    """The code as it is now, in the form of a seal."""
    return code(source) if "noted" in sealed else whole_code(source)


def code(source: Source) -> dict[str, Json]:
    """The digest of each file that the study can depend on, and how the study is found."""
    files = closure(source.content, source.module)
    package = {path.relative_to(PACKAGE).as_posix(): canonical.sha256_file(path) for path in sorted(files)}
    return {"package": package, "study": source.identity}


def noted(behind: Mapping[str, Json]) -> dict[str, Json]:
    """The package's version, and its files that no number of the study depends on."""
    others = {name: digest for name, digest in _package().items() if name not in behind["package"]}
    return {"version": halfulp.__version__, "files": others}


def whole_code(source: Source) -> dict[str, Json]:
    """What the first release sealed: every file of the package, and its version."""
    return {"version": halfulp.__version__, "package": _package(), "study": source.identity}


def _package() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).as_posix(): canonical.sha256_file(path)
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
        and path.suffix not in (".pyc", ".nbi", ".nbc")
    }  # fmt: skip


def environment() -> dict[str, Json]:
    """What may change a number without changing a file: interpreter, libraries, platform, processor."""
    from llvmlite import binding

    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    features = sorted(name for name, has in binding.get_host_cpu_features().items() if has)
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": versions,
        "platform": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}".strip(),
        "cpu": str(binding.get_host_cpu_name()),
        "cpu_features": " ".join(features),
    }


def locate(name: str, folder: Path | None) -> Path:
    """The file of a data set: one that halfulp knows by name, or one beside the study file."""
    from halfulp import data

    if name in data.DATASETS:
        return data.find(name)
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


def data_identity(name: str, folder: Path | None) -> dict[str, Json]:
    """Size and digest of a data set."""
    path = locate(name, folder)
    try:
        return {"bytes": path.stat().st_size, "sha256": canonical.sha256_file(path)}
    except OSError as error:
        raise UsageError(f"The data file {path} cannot be read: {error.strerror}.") from None


def git_state(path: Path) -> dict[str, Json] | None:
    """The commit that a path is at, and whether what is under it differs; None outside of git."""
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


def compare(sealed: dict[str, Json], now: dict[str, Json]) -> dict[str, list[str]]:
    """What changed since the seal, by part; parts that did not change are left out."""
    found = {part: list(changes(sealed[part], now[part], part)) for part in ("code", "data", "environment")}
    return {part: lines for part, lines in found.items() if lines}


def refuse_changes(
    out: Path, sealed: dict[str, Json], sealed_protocol: Protocol, now: dict[str, Json], protocol: Protocol
) -> dict[str, list[str]]:
    """Raise if protocol, data or study file are not the sealed ones; give back what else changed."""
    found = compare(sealed, now)
    fatal = list(changes(sealed_protocol.content, protocol.content, "protocol")) + found.pop("data", [])
    own = [line for line in found.get("code", []) if line.startswith("code.study")]
    if fatal or own:
        raise TamperingError(
            f"{out} was sealed with another study than this one; changed since:\n{listed(fatal + own)}\n"
            "A sealed study does not change. Put it back, or seal the new one in a folder of its own (--out)."
        )
    return found


def listed(lines: list[str], most: int = 20) -> str:
    """Lines of a list, the first ones if there are many."""
    more = [f"  ... and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([f"  {line}" for line in lines[:most]] + more)


def code_digest(seal: Mapping[str, Json]) -> str:
    """The digest that records hold."""
    return canonical.digest(seal["code"])


def version(seal: Mapping[str, Json]) -> str:
    """The version of halfulp that sealed."""
    return str(seal["noted"]["version"] if "noted" in seal else seal["code"]["version"])


def facts(seal: Mapping[str, Json]) -> Iterator[str]:
    """The seal in a few lines."""
    env = seal["environment"]
    code = seal["code"]
    yield f"code         halfulp {version(seal)}, {len(code['package'])} files, sha256 {code_digest(seal)}"
    for name, one in seal.get("evidence", {}).items():
        yield f"evidence     {name}: {one['study']} ({one['scale']}), closed sha256 {one['closed']}"
    for part, state in seal["git"].items():
        if state is not None:
            yield f"git          {part}: {state['commit'][:12]}{', DIRTY' if state['dirty'] else ''}"
    for name, identity in seal["data"].items():
        yield f"data         {name}, {identity['bytes']} bytes, sha256 {identity['sha256']}"
    libraries = ", ".join(f"{k} {v}" for k, v in env["libraries"].items() if v)
    yield f"environment  {env['python']}, {libraries}, {env['platform']}, {env['cpu']}"
