"""Whatever happens to the disk or the process: nothing recorded is lost, and running again completes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from study.samples import quick_identity, run, study_file, tree, validate

from halfulp import files
from halfulp.errors import CorruptionError, DiskError, HalfulpError, UsageError


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory if there is one: what is tested is the order of operations, not the disk."""
    shared = Path("/dev/shm")
    place = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="halfulp-test-") as folder:
        yield Path(folder)


def test_a_kill_at_every_single_operation_is_harmless(memory: Path) -> None:
    """A fork kills itself before its k-th write, fsync, rename, mkdir ..., for every k; see kill.py."""
    script = Path(__file__).with_name("kill.py")
    here = [str(script.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, here))
    done = subprocess.run(
        [sys.executable, str(script), str(memory)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["every operation"]["operations"] > 100
    assert found["every operation"]["differing"] == []
    assert found["in batches"]["operations"] > 100
    assert found["in batches"]["differing"] == []
    assert found["again and again"]["runs"] > 3
    assert found["again and again"]["same"]
    assert found["sealing"]["operations"] > 30
    assert found["sealing"]["differing"] == []
    assert found["torn ledger"]["cuts"] > 80
    assert found["torn ledger"]["differing"] == []


def error_of(path: Path, out: Path) -> HalfulpError | None:
    try:
        run(path, out)
    except HalfulpError as error:
        return error
    return None


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only")])
def test_a_disk_that_refuses_any_one_operation(
    memory: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    """The k-th operation fails, for every k: a clear error, and running again gives the same study."""
    quick_identity(monkeypatch)
    path = study_file(memory)
    run(path, memory / "whole")
    expected = tree(memory / "whole")
    out = memory / "out"
    k, refused = 0, 0
    while True:
        k += 1
        counter = iter(range(1, 10**6))

        def hook(operation: str, where: Path, k: int = k, counter: Iterator[int] = counter) -> None:
            if next(counter) == k:
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(files, "hook", hook)
        shutil.rmtree(out, ignore_errors=True)
        raised = error_of(path, out)
        if raised is None:
            break
        assert words in str(raised)
        assert raised.exit_code == 4
        refused += 1
        monkeypatch.setattr(files, "hook", files._nothing)
        run(path, out)
        assert tree(out) == expected
    assert refused > 100


def test_a_full_disk_stays_full_then_has_room(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write fails from some point on, as a full disk does; half of an append is taken back."""
    quick_identity(monkeypatch)
    path, out = study_file(memory), memory / "out"

    def full(operation: str, where: Path) -> None:
        if operation == "write" and (out / "seals" / "forecast.json").exists():
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files, "hook", full)
    for _ in range(2):
        with pytest.raises(HalfulpError, match="disk is full"):
            run(path, out)
    assert validate_is_incomplete(out)
    monkeypatch.setattr(files, "hook", files._nothing)
    run(path, out)
    assert validate(out).exit_code == 0


def validate_is_incomplete(out: Path) -> bool:
    page = validate(out)
    return page.exit_code == 1 and "incomplete" in page.problems[0]


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    files.append(path, b"one\n", durable=True)
    real = os.write

    def short(handle: int, content: bytes) -> int:
        if len(content) < 8:
            raise OSError(errno.ENOSPC, "full")
        return real(handle, content[: len(content) // 2])

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(DiskError, match="full"):
        files.append(path, b"a line of some length\n", durable=True)
    assert path.read_bytes() == b"one\n"


def test_a_damaged_checkpoint_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfulp.study import engine, loading

    quick_identity(monkeypatch)
    path, out = study_file(tmp_path), tmp_path / "out"
    run(path, tmp_path / "whole")
    engine.seal(loading.load(str(path)), "small", out)
    for damage in (b"", b"99", b"0" * 64 + b"2"):
        files.put(out / "work" / "checkpoints" / "outcome" / "arm-1", damage, out / "work")
    run(path, out)
    assert tree(out) == tree(tmp_path / "whole")


# ---- the lock ----


def test_the_lock_says_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "study" / "work" / "lock"
    with files.lock(path):
        assert files.holder(path) == str(os.getpid())
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"), files.lock(path):
            pass
    assert files.holder(path) is None
    with files.lock(path):  # and it goes with its holder
        pass


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the holder closes its study and removes the file."""
    import fcntl

    path = tmp_path / "study" / "work" / "lock"
    real, calls = fcntl.flock, []

    def flock(handle: int, operation: int) -> None:
        if not calls:
            path.unlink()
        calls.append(operation)
        real(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with files.lock(path):
        assert len(calls) == 2
        assert path.read_text() == str(os.getpid())


def test_reading_names_what_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name, words in (("link", "not a plain file"), ("missing", "missing"), (".", "not a plain file")):
        with pytest.raises(CorruptionError, match=words):
            files.read(tmp_path / name)
