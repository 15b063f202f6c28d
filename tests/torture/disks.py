"""Disks that are full, read-only or beyond a quota, a clock that goes backwards, two users with one cache.

Every writer writes onto a small file system in memory that has room for some of what it needs. It either
says that the disk is full, or (an audit, whose training must not be harmed) is refused before the first step
or trains on to the same weights.
What it leaves is read: nothing, what was there before, or what is whole, never half of it. Then there is
room, the same is written again, and must be what a disk with room would have got.

Mounting needs root; without it these trials are not made, and so not in the table.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import halfulp as hu
from halfulp import files
from halfulp.kernels.native import build
from torture import Clock, Effort, Trial

PAGE_BYTES = 4096
DISK_BYTES = 4 << 20


class Disk:
    """A file system of some megabytes, of which a ballast leaves so much free."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir(parents=True)
        asked = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "halfulp-torture", str(place)]
        self.mounted = subprocess.run(asked, capture_output=True, check=False).returncode == 0
        self.ballast = place / "ballast"
        self.out = place / "out"

    def used(self) -> int:
        found = os.statvfs(self.place)
        return (found.f_blocks - found.f_bfree) * PAGE_BYTES

    def leave(self, pages: int) -> None:
        """Make everything else be in use."""
        self.ballast.write_bytes(bytes(DISK_BYTES - self.used() - pages * PAGE_BYTES))

    def free(self) -> None:
        self.ballast.unlink(missing_ok=True)

    def empty(self) -> None:
        self.free()
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        asked = ["mount", "-o", "remount,{}", str(self.place)]
        subprocess.run([a.format("ro") for a in asked], check=True)
        try:
            yield
        finally:
            subprocess.run([a.format("rw") for a in asked], check=True)

    def end(self) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.place)], check=True)


class HarmedError(Exception):
    """A training that is not what it is without an audit."""


@dataclass
class Writer:
    """What writes, and how what it leaves is read; ``read`` of a whole one is one and the same value."""

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    half: Callable[[Any], bool] = lambda found: False
    """Whether what is read, and differs from the whole, is fine: the old file, a trace's first parts."""
    silent: bool = False
    """Nothing is raised once it has begun: a training goes on."""


# ---- writers ----


def audited(out: Path | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 70), torch.nn.Tanh(), torch.nn.Linear(70, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    more: dict[str, Any] = {"scores": ("e4m3@128", 1, 6), "part_steps": 3, "resume": True}
    watch = contextlib.nullcontext()
    if out is not None:
        watch = hu.Audit(optimizer, ["bf16", "e4m3@128"], model=model, out=out / "trace", **more)
    audit = contextlib.ExitStack()
    audit.enter_context(watch)  # it may be refused before anything was trained
    try:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 12)).square().mean().backward()
            optimizer.step()
        audit.close()
    except hu.HalfulpError as error:
        raise HarmedError(error) from error
    return [p.detach() for p in model.parameters()]


def _traces() -> Writer:
    plain = audited(None)

    def write(out: Path) -> None:
        if not all(torch.equal(a, b) for a, b in zip(audited(out), plain, strict=True)):
            raise HarmedError

    def read(out: Path) -> Any:
        trace = hu.Trace.open(out / "trace")
        return trace.table().to_polars().write_csv() if trace.parts else ""

    return Writer("an audit's trace", write, read, lambda found: True, silent=True)


def _saved(place: Path) -> Iterator[Writer]:
    """One file each: a checkpoint, a mask, a change, a page; where there was another, that one stays."""
    from halfulp.report.document import write as write_page
    from halfulp.report.page import page
    from halfulp.writeback import save

    model = torch.nn.Linear(64, 64)
    opt = hu.WriteBack(torch.optim.AdamW(model.parameters()), "e4m3@128", "kahan", model=model)
    model(torch.ones(2, 64)).sum().backward()
    opt.step()
    audited(place)
    held = {"w": torch.zeros(3000)}
    sync = hu.Sync(held)
    held["w"][::2] = 1.0
    change, html = sync.take(), page([place / "trace"])
    mask = hu.allocate(hu.Trace.open(place / "trace"), 0.5)
    saved: dict[str, Callable[[Path], object]] = {
        "a checkpoint of a write-back": lambda path: save(opt, path),
        "a mask": mask.save,
        "a change": change.save,
        "a page": lambda path: write_page(html, path),
    }
    for name, to in saved.items():

        def write(out: Path, to: Callable[[Path], object] = to) -> None:
            if not (out / "it").exists():
                with contextlib.suppress(OSError):
                    (out / "it").write_bytes(b"old")
            to(out / "it")

        yield Writer(name, write, lambda out: (out / "it").read_bytes(), lambda found: found in (b"old", b""))


def _study(place: Path) -> Writer:
    from study.samples import run, study_file, tree

    from halfulp.study.validate import validate

    path = study_file(place)

    def read(out: Path) -> Any:
        code = validate(out / "study").exit_code
        return tree(out / "study") if code == 0 else code

    return Writer("a study", lambda out: run(path, out / "study"), read, lambda found: found == 1)


def _corpus(place: Path, patch: pytest.MonkeyPatch) -> Writer:
    from data import small_corpus

    from halfulp.data import prose

    mirror = small_corpus.small(place, patch)

    def read(out: Path) -> Any:
        there = [name for name in prose.names() if (out / name).is_file()]
        if set(prose.missing(out)) & set(there):
            raise HarmedError
        return there

    return Writer(
        "`data build`", lambda out: prose.build(out, str(mirror), lambda _: None), read, lambda found: True
    )


def _pilot() -> Writer:
    from pilots.pilot_run import Small, counted

    from halfulp.pilots.pilot import Pilot

    told: dict[str, Any] = {}

    def write(out: Path) -> None:
        torch.manual_seed(5)
        told["last"] = (
            Pilot(Small, ("e4m3@128",), updates=6, budget=2.0, cost=counted, out=out).run().to_json()
        )

    return Writer(
        "a pilot", write, lambda out: (out / "pilot.json").is_file() and told["last"], lambda _: True
    )


@contextlib.contextmanager
def writers(place: Path) -> Iterator[list[Writer]]:
    from study.samples import quick_identity

    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        quick_identity(patch)
        yield [
            _traces(),
            *_saved(place / "saved"),
            _study(place / "study"),
            _corpus(place / "corpus", patch),
            _pilot(),
        ]


# ---- trials ----


def refused(writer: Writer, out: Path, word: str, whole: Any = None) -> str:
    """Write where that may fail: what is wrong with how it ends, if anything is."""
    try:
        writer.write(out)
        if not writer.silent and (whole is None or writer.read(out) != whole):
            return "it says nothing"
    except hu.HalfulpError as error:
        if error.exit_code != 4 or word not in str(error):
            return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def left(writer: Writer, out: Path, whole: Any) -> str:
    """What is wrong with what is there, if anything is."""
    try:
        found = writer.read(out)
    except (hu.HalfulpError, FileNotFoundError):
        return ""
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "" if found == whole or writer.half(found) else "half of it is believed"


def full(writer: Writer, disk: Disk, most: int) -> Trial:
    """Room for no page, for one, for two ... of what it takes."""
    clock = Clock()
    disk.empty()
    before = disk.used()
    writer.write(disk.out)
    whole, takes = writer.read(disk.out), (disk.used() - before) // PAGE_BYTES + 4
    tried = lost = 0
    for pages in sorted({takes * i // most for i in range(most)}):
        disk.empty()
        disk.leave(pages)
        wrong = [refused(writer, disk.out, "disk is full", whole), left(writer, disk.out, whole)]
        disk.free()
        with contextlib.suppress(FileNotFoundError):
            writer.write(disk.out)
        wrong.append("" if writer.read(disk.out) == whole else "not what a disk with room gets")
        tried += 1
        lost += any(wrong)
        for words in filter(None, wrong):
            print(f"lost: {writer.name}, {pages} of {takes} pages free: {words}", flush=True)
    note = f"room for 0 to {takes - 1} pages of 4 KiB"
    return Trial("Disk", f"full: {writer.name}", tried, lost, clock(), note)


def unwritable(chosen: list[Writer], disk: Disk) -> Iterator[Trial]:
    """A file system that was mounted for reading; a quota that is used up at every operation."""
    clock, lost = Clock(), 0
    for writer in chosen:
        disk.empty()
        with disk.read_only():
            wrong = refused(writer, disk.out, "read-only")
        lost += bool(wrong)
        if wrong:
            print(f"lost: {writer.name}, read-only: {wrong}", flush=True)
    yield Trial("Disk", "read-only: every writer", len(chosen), lost, clock())

    def quota(operation: str, path: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    lost = 0
    for writer in chosen:
        disk.empty()
        with mock.patch.object(files, "hook", quota):
            wrong = refused(writer, disk.out, "quota")
        lost += bool(wrong)
        if wrong:
            print(f"lost: {writer.name}, quota: {wrong}", flush=True)
    yield Trial("Disk", "a quota that is used up: every writer", len(chosen), lost, clock())


def clocks(effort: Effort) -> Iterator[Trial]:
    """Every time that a study notes is an hour before the last one: it runs, closes and validates."""
    from study.samples import quick_identity, run, study_file, tree

    from halfulp.study.validate import validate

    clock, place = Clock(), effort.folder / "clock"
    path = study_file(place)
    hours = iter(range(10**6))

    class Backwards(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Backwards:
            return cls.fromtimestamp(2e9 - 3600 * next(hours), tz)

    with pytest.MonkeyPatch.context() as patch:
        quick_identity(patch)
        run(path, place / "whole")
        with mock.patch("datetime.datetime", Backwards):
            run(path, place / "back")
            code = validate(place / "back").exit_code
        lost = int(tree(place / "back") != tree(place / "whole")) + code
    yield Trial("Disk", "a clock that goes backwards, under a study", next(hours), lost, clock())


USER = """
import sys
from halfulp.kernels import native
native.library()
print(native.described(), native._file() if native.library() else "")
"""


def users(effort: Effort) -> Iterator[Trial]:
    """A package that nobody may write, and a cache of one user: he builds the kernels there, another user
    takes them; of another version the other gets the reference, which says so, or a cache of his own.

    Root without the right to overlook permissions stands for a user; who owns a folder decides which one."""
    clock, place = Clock(), effort.folder / "users"
    shutil.copytree(
        Path(hu.__file__).parent, place / "src" / "halfulp", ignore=shutil.ignore_patterns("built", "__py*")
    )
    cache, own = place / "cache", place / "own"
    mine = cache / "halfulp" / "native"
    mine.mkdir(parents=True)
    for kept in (build.HERE / "built").glob("*.o"):  # what is compiled already; the library is linked anew
        shutil.copy(kept, mine)

    def belongs(folder: Path, user: int) -> None:
        subprocess.run(["chown", "-R", f"{user}:{user}", str(folder)], check=True)
        subprocess.run(["chmod", "-R", "a+rX,go-w", str(folder)], check=True)

    def said(home: Path) -> tuple[str, str]:
        subprocess.run(["chmod", "-R", "a-w", str(place / "src")], check=True)
        env = {**os.environ, "XDG_CACHE_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(place / "src")}
        barred = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-c", USER]
        done = subprocess.run(barred, capture_output=True, text=True, env=env, cwd="/", check=False)
        return done.stdout, done.stderr

    wrong = []
    first, words = said(cache)
    wrong += [f"the first user: {first} {words}"] * (str(mine) not in first)
    shutil.copytree(mine, own / "halfulp" / "native")
    belongs(cache, 4001)
    second, words = said(cache)
    wrong += [f"the second user: {second} {words}"] * (second != first or "compiling" in words)
    source = place / "src" / "halfulp" / "kernels" / "native" / "core.cpp"
    source.chmod(0o644)
    source.write_text(source.read_text() + "// another version\n")
    other, words = said(cache)
    wrong += [f"another version: {other} {words}"] * ("NumPy" not in other or "cannot be built" not in words)
    other, words = said(own)
    wrong += [f"a cache of his own: {other} {words}"] * (str(own) not in other)
    for told in wrong:
        print(f"lost: two users: {told}", flush=True)
    yield Trial("Disk", "two users, one cache, a package that neither may write", 4, len(wrong), clock())


def trials(effort: Effort) -> Iterator[Trial]:
    torch.set_num_threads(1)
    if effort.wants("clock"):
        yield from clocks(effort)
    if os.geteuid() != 0:
        print("full disks and other users need root: not tried", flush=True)
        return
    if effort.wants("users") and shutil.which("setpriv"):
        yield from users(effort)
    disk = Disk(effort.folder / "disk")
    try:
        if not disk.mounted:
            print("no file system could be mounted: full disks are not tried", flush=True)
            return
        with writers(effort.folder / "writers") as made:
            for writer in made:
                if effort.wants(f"full: {writer.name}"):
                    yield full(writer, disk, effort.of(12, 200))
            if effort.wants("unwritable"):
                yield from unwritable(made, disk)
    finally:
        disk.end()
