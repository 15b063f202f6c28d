"""Writing a trace: one process at a time, readable meanwhile, and never in the way of the training."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp import files, tensors
from halfulp.audit.script.runner import run_script
from halfulp.audit.sinks.manifest import begun
from halfulp.errors import DiskError
from halfulp.trace import Trace, TraceWriter

HOLDER = """
import sys, time, torch
import halfulp as hu
from test_writing import run
run(sys.argv[1], int(sys.argv[2]), pause=float(sys.argv[3]), part_steps=1, resume=True)
"""


def run(
    out: Any, steps: int = 6, *, pause: float = 0.0, audited: bool = True, **options: Any
) -> tuple[Any, Any]:
    """A small training under an audit; the audit and the weights at the end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {"part_steps": 2, "scores": ("bf16", 1, 10**6), **options}
    audit = hu.Audit(optimizer, ["bf16"], model=model, out=out, **settings) if audited else None
    if audit is not None:
        audit.start()
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 6), 0.1 * step)).square().mean().backward()
        optimizer.step()
        if pause:
            print(step, flush=True)
            time.sleep(pause)
    if audit is not None:
        audit.stop()
    return audit, [p.detach().clone() for p in model.parameters()]


def in_another_process(folder: Path, steps: int, pause: float) -> subprocess.Popen[str]:
    place = os.pathsep.join(
        [str(Path(hu.__file__).parent.parent), str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    )
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(steps), str(pause)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": place},
    )  # fmt: skip


# ---- one writer, any readers -------------------------------------------------------------------------


@pytest.mark.skipif(not files.CAN_LOCK, reason="needs flock")
def test_one_writer_and_any_readers(tmp_path: Path) -> None:
    """A trace is whole whenever it is read; a second writer is told who writes; a kill frees the folder."""
    folder = tmp_path / "trace"
    with in_another_process(folder, 10**6, 0.02) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            writer.stdout.readline()
        before = sorted(p.name for p in folder.iterdir())
        with pytest.raises(hu.UsageError, match=f"trace is in use by process {writer.pid}"):
            run(folder, resume=True)
        assert sorted(p.name for p in folder.iterdir()) == before
        lengths = [len(Trace.open(folder).frozen("bf16"))]
        until = time.monotonic() + 300
        # At least sixty readings, and more until somebody was writing: the writer's pace is the machine's.
        while len(lengths) < 60 or (lengths[-1] <= lengths[0] + 20 and time.monotonic() < until):
            trace = Trace.open(folder)
            lengths.append(len(trace.frozen("bf16")))
            assert len(trace.scores()) == 2
        assert lengths == sorted(lengths)
        assert lengths[-1] > lengths[0] + 20
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    last = Trace.open(folder).last_step
    run(folder, last + 3, resume=True)
    assert Trace.open(folder).last_step == last + 3
    assert not (folder / ".lock").exists()


@pytest.mark.skipif(not files.CAN_LOCK, reason="needs flock")
def test_two_audits_of_one_process(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    first = hu.Audit(optimizer, "bf16", out=tmp_path / "trace")
    first.start()
    with pytest.raises(hu.UsageError, match=f"trace is in use by process {os.getpid()}"):
        run(tmp_path / "trace", resume=True)
    first.stop()
    assert first.discard_if_empty()
    run(tmp_path / "trace")


@pytest.mark.skipif(not files.CAN_LOCK or not hasattr(os, "fork"), reason="needs flock and fork")
def test_a_fork_does_not_hold_a_lock(tmp_path: Path) -> None:
    """A worker that outlives its parent must not keep the folder."""
    held = files.hold(tmp_path / "lock", tmp_path)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    assert files.holder(tmp_path / "lock") == str(os.getpid())
    held.release()
    assert files.holder(tmp_path / "lock") is None  # although the child still lives
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    for end in (*ready, *go):
        os.close(end)


# ---- a disk that does not take it --------------------------------------------------------------------


class Full:
    """A disk that refuses its operations from some number on: one of them, or all that follow."""

    def __init__(self, first: int, count: int, code: int) -> None:
        self.first, self.last, self.code, self.seen = first, first + count, code, 0

    def __call__(self, operation: str, path: Path) -> None:
        self.seen += 1
        if self.first <= self.seen < self.last and operation != "unlink":
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("count", [1, 10**9])
def test_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Whichever operation the disk refuses, for want of room or because it is broken: the weights are those
    of a run without an audit, and the trace is whole as far as it goes, says why it ends, and has nothing
    half written beside it."""
    _, expected = run(None, audited=False)
    whole = run(tmp_path / "whole")[0]
    assert whole.trouble is None
    assert Trace.open(tmp_path / "whole").trouble is None
    stepped_aside = 0
    for k in range(1, 1000):
        folder, disk = tmp_path / f"{k}", Full(k, count, (errno.ENOSPC, errno.EIO)[k % 2])
        monkeypatch.setattr(files, "hook", disk)
        try:
            audit, weights = run(folder)
        except DiskError:  # before the first step
            assert not stepped_aside
            continue
        finally:
            monkeypatch.setattr(files, "hook", lambda *_: None)
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
        said = capsys.readouterr().err
        if audit.trouble is None:
            if disk.seen < k:
                break
            continue  # the refused one was a removal, which is let pass
        stepped_aside += 1
        assert said == f"halfulp: {audit.trouble}\n"
        assert not audit.pipeline.sink.rows
        trace = Trace.open(folder)
        assert trace.last_step in (0, 2, 4, 6)
        assert f"It ends at step {trace.last_step};" in audit.trouble
        assert trace.trouble == (audit.trouble if count == 1 else None)
        assert hu.verdict(trace, audit.trouble).lines[0] == f"INCOMPLETE: {audit.trouble}"
        assert (hu.verdict(trace).lines[0] == f"INCOMPLETE: {audit.trouble}") == (count == 1)
        assert not list(folder.rglob(".*"))
        assert not audit.discard_if_empty()
        run(folder, resume=True)
        assert "is taken for step 1." in capsys.readouterr().err or trace.last_step == 0
        assert Trace.open(folder).steps.tolist() == list(range(1, 7))
        assert Trace.open(folder).trouble is None
    assert stepped_aside > 10


@pytest.mark.parametrize("free", [0, 4, 9])
def test_a_script_is_not_blamed(
    free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs to its end with its own exit code, also where the trace cannot even be begun."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\np = torch.nn.Parameter(torch.ones(3))\no = torch.optim.SGD([p], lr=0.1)\n"
        "for _ in range(4):\n    p.sum().backward(); o.step()\nprint('done')\nraise SystemExit(5)\n"
    )
    monkeypatch.setattr(files, "hook", Full(1 + free, 10**9, errno.ENOSPC))
    audit = hu.Audit(None, ["bf16"], out=tmp_path / "trace")
    assert run_script(script, [], audit, lambda: None) == 5
    out, err = capsys.readouterr()
    assert out == "done\n"
    assert err.count("the disk is full") == 1
    assert audit.step == 4
    assert not (tmp_path / "trace" / "parts" / "000000").exists()


def test_listeners_still_hear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what waits for the disk does not grow."""
    heard: list[int] = []
    disk = Full(10**9, 10**9, errno.ENOSPC)
    monkeypatch.setattr(files, "hook", disk)

    def listen(summary: dict[str, Any]) -> None:
        heard.append(summary["step"])
        disk.first = min(disk.first, disk.seen + 1)

    audit, _ = run(tmp_path / "trace", 9, listeners=[listen])
    assert audit.trouble is not None
    assert heard == list(range(1, 10))
    assert audit.pipeline.sink.rows == []


@pytest.mark.parametrize(
    "write",
    [
        lambda f: files.put(f, b"content"),
        lambda f: files.put_folder(f, {"a": b"1", "b": b"2"}),
        lambda f: hu.Mask(
            tiles={"w": torch.ones(1, dtype=torch.bool)}, sizes={"w": 3}, score="P", budget=12
        ).save(f),
        lambda f: files.put(f, tensors.content({"w": torch.ones(3)})),
    ],
)
def test_nothing_is_left_beside_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    """Whichever operation is refused: an error of ours, and the folder as it was, or with the whole file."""
    for k in range(1, 100):
        disk = Full(k, 10**9, errno.ENOSPC)
        monkeypatch.setattr(files, "hook", disk)
        try:
            write(tmp_path / f"{k}")
        except DiskError:
            pass
        else:
            assert (tmp_path / f"{k}").exists()
            break
    assert k > 2
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """A pipe (as a device), a folder and a link stay what they are; nothing is left beside them."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    found = sorted(os.listdir(tmp_path))
    for name in ("pipe", "folder", "link", "nowhere"):
        with pytest.raises(hu.UsageError, match="expected a regular file or nothing there"):
            files.put_all([(tmp_path / "file", b"new"), (tmp_path / name, b"new")])
    assert sorted(os.listdir(tmp_path)) == found
    assert (tmp_path / "file").read_bytes() == b"old"
    files.put(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("call", ["stat", "lstat", "scandir", "listdir"])
def test_looking_at_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """However often the system answered before: an error of ours, or a recording."""
    told = begun([hu.grid("bf16")], 1, {"sample": None}, {})
    real, refused = getattr(os, call), 0
    for k in range(100):
        left = iter(range(k))

        def limited(path: Any = ".", *args: Any, left: Any = left, **options: Any) -> Any:
            if str(path).startswith(str(tmp_path)) and next(left, None) is None:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return real(path, *args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, limited)
            try:
                TraceWriter(tmp_path / f"{k}" / "run", dict(told)).close()
            except DiskError as error:
                refused += os.strerror(errno.EIO) in str(error)
            else:
                break
    assert k < 99
    assert refused == k


# ---- whose files they are ----------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "state/model.safetensors",
        "state/000100.safetensors",
        "state/.part-mine",
        "shards/000000001.0.safetensors",
        "shards/model.safetensors",
        "parts/000000/tables.safetensors",
        "parts/.000000.notes",
        "parts/.git",
        "roles/notes.txt",
        "state",
        ".part-mine",
        "trouble.json",
    ],
)
def test_what_no_recording_left_is_kept(tmp_path: Path, name: str, resume: bool) -> None:
    """A folder that only looks like a trace that was begun, beside what one does leave: it is refused, by the
    first thing that is another's, and stays as it is."""
    folder = tmp_path / "run"
    (folder / "parts" / ".part-12-0").mkdir(parents=True)
    (folder / ".part-12-3").write_bytes(b"{")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"mine")
    before = contents(folder)
    with pytest.raises(hu.UsageError, match=r"is there, but no manifest\.json") as refused:
        run(folder, resume=resume)
    assert str(folder / Path(*Path(name).parts[:2])) in str(refused.value)
    assert contents(folder) == before


def test_what_a_crash_left_goes_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 4)
    ours = ("parts/.000002", "parts/.part-1-2", "state/.part-1-3", "state/000007.safetensors", ".part-1-4")
    others = (
        "state/model.safetensors",
        "parts/.notes",
        ".part-mine",
        "shards/mine.0.safetensors",
        "page.html",
    )
    (folder / "shards").mkdir()
    for name in (*ours, *others):
        (folder / name).write_bytes(b"x")
    run(folder, 6, resume=True)
    assert Trace.open(folder).last_step == 6
    assert [name for name in ours if (folder / name).exists()] == []
    assert [name for name in others if not (folder / name).exists()] == []


def test_an_empty_recording_leaves_no_shards_and_no_roles(tmp_path: Path) -> None:
    """Else the next one would find them, and take them for another's."""
    folder = tmp_path / "run"
    writer = TraceWriter(folder, begun([hu.grid("bf16")], 1, {"sample": None}, {}))
    (folder / "shards").mkdir()
    (folder / "shards" / "000000001.1.safetensors").write_bytes(b"")
    (folder / "roles").mkdir()
    writer.close()
    assert writer.discard_if_empty()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["parts", "parts/000000", "state", "shards", "roles", "roles/exp_avg"])
def test_a_folder_of_a_trace_is_no_link(tmp_path: Path, name: str) -> None:
    """It may point anywhere: nobody reads through it, and what lies there is not removed or written."""
    folder, victim = tmp_path / "run", tmp_path / "victim"
    run(folder, 4, states=True)
    shutil.rmtree(folder / name, ignore_errors=True)
    shutil.copytree(folder, victim)
    for left in ("000009.safetensors", "000000009.0.safetensors", ".part-1-2", ".000000"):
        (victim / left).write_bytes(b"mine")
    (folder / name).symlink_to(victim, target_is_directory=True)
    before = contents(victim)
    for reads in (Trace.open, lambda place: Trace.open(place, verify=False)):
        with pytest.raises(
            hu.CorruptionError, match=f"{folder / name} is a symbolic link, expected a folder"
        ):
            reads(folder)
    with pytest.raises(hu.CorruptionError, match="is a symbolic link"):
        run(folder, 6, resume=True, states=True)
    assert contents(victim) == before


@pytest.mark.parametrize("name", ["parts", "state", "shards", "roles"])
def test_nothing_begins_in_a_folder_with_a_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "victim", target_is_directory=True)
    with pytest.raises(hu.UsageError, match=f"{name} is there, but no manifest"):
        run(tmp_path / "run")
    assert contents(tmp_path / "victim") == {}
    (tmp_path / "run" / name).unlink()
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)  # which somebody named
    run(tmp_path / "link")
    assert Trace.open(tmp_path / "link").last_step == 6


# ---- a folder that goes while it is written ----------------------------------------------------------


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def replace(folder: Path) -> None:
    """What another process does: it moves the folder, and records there."""
    move(folder)
    run(folder, 4)


def forget(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def put_a_file_there(folder: Path) -> None:
    move(folder)
    folder.write_bytes(b"mine")


@pytest.mark.skipif(not files.CAN_LOCK, reason="needs flock")
@pytest.mark.parametrize("at", [0, 3, 5])
@pytest.mark.parametrize("go", [remove, move, replace, forget, put_a_file_there])
def test_a_folder_that_goes_in_mid_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], go: Callable[[Path], None], at: int
) -> None:
    """At once, before and after a part, and after the last: it is said once, the run is the one without an
    audit, what was recorded stays whole where it is, and nothing is written or removed in the old place."""
    _, expected = run(None, audited=False)
    folder, found = tmp_path / "run", list[Any]()

    def look() -> None:
        found.append(contents(folder) if folder.is_dir() else folder.exists())
        if folder.is_dir():
            found[-1].pop(".lock", None)  # its holder's, who removes it at the end

    def listen(summary: dict[str, Any]) -> None:
        if summary["step"] == at + 1:
            go(folder)
            look()

    audit, weights = run(folder, listeners=[listen])
    look()
    assert found[0] == found[1]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert audit.lost
    assert f"{folder} is no longer the folder that this recording began: its" in audit.trouble
    assert f"It ends at step {at // 2 * 2};" in audit.trouble
    assert capsys.readouterr().err == f"halfulp: {audit.trouble}\n"
    assert not audit.discard_if_empty()
    if go is replace:
        assert Trace.open(folder).last_step == 4
    if (tmp_path / "moved").exists():
        assert Trace.open(tmp_path / "moved").last_step == at // 2 * 2
        run(tmp_path / "moved", resume=True)
        assert Trace.open(tmp_path / "moved").last_step == 6


@pytest.mark.skipif(not files.CAN_LOCK, reason="needs flock")
def test_a_lock_of_another_is_not_removed(tmp_path: Path) -> None:
    mine = files.hold(tmp_path / "run" / "lock", tmp_path)
    assert not mine.lost
    (tmp_path / "run").rename(tmp_path / "moved")
    assert mine.lost
    other = files.hold(tmp_path / "run" / "lock", tmp_path)
    mine.release(remove=True)
    assert not mine.lost
    assert not other.lost
    other.release(remove=True)
    assert not (tmp_path / "run" / "lock").exists()


def test_a_folder_that_goes_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that belongs to it does not get among those of the recording that took the place."""
    folder, put = tmp_path / "run", files.put

    def slow(path: Path, *args: Any, **options: Any) -> None:
        put(path, *args, **options)
        if path == folder / "state" / "000001.safetensors":
            monkeypatch.setattr(files, "put", put)
            replace(folder)

    monkeypatch.setattr(files, "put", slow)
    audit, _ = run(folder)
    assert "It ends at step 2;" in audit.trouble
    assert [Trace.open(tmp_path / name).last_step for name in ("run", "moved")] == [4, 2]
