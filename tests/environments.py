"""The wheel, and environments that have it and not the source."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent


def said(command: list[str], folder: Path, timeout: float = 1200, **place: str) -> str:
    """What a command prints. Nothing of this process's Python reaches it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "PYTEST"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, **place},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def wheel(folder: Path) -> Path:
    """Build it, from the sources of this repository."""
    pinned = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    said(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)],
        folder,
        **pinned,
    )
    (made,) = folder.glob("halfulp-*.whl")
    return made


def thin(folder: Path, package: Path) -> Path:
    """An environment with the wheel, and with everything else that is installed here. Quick to make."""
    said([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    python = folder / "bin" / "python"
    inside = Path(
        said([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        str(package),
    ]
    said(command, folder)
    # A line in a .pth file adds a folder without reading the .pth files there: the source stays away.
    (inside / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def empty(folder: Path, package: Path, *extras: str) -> Path:
    """An environment with nothing but the wheel and what it asks for, at the versions that we test."""
    if not folder.exists():
        said([sys.executable, "-m", "venv", str(folder)], folder.parent)
    what = f"halfulp[{','.join(extras)}] @ {package.as_uri()}" if extras else str(package)
    pinned = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    said([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", what], folder, timeout=3000, **pinned)
    return folder / "bin"
