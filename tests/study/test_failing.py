"""A run whose cells fail, that is stopped, or that is helped by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from study.samples import SMALL, invoke, quick_identity, run, study_file, tree

from halfulp import canonical
from halfulp.errors import UsageError
from halfulp.study import engine, ledger, loading
from halfulp.study.store import Store
from halfulp.study.validate import validate

# ---- failing and trying again ----

FLAKY = SMALL.replace(
    "done = int",
    'import pathlib, os\n    marks = pathlib.Path(os.environ["MARKS"])\n'
    "    if cell.name == 'arm-2' and len(list(marks.iterdir())) < int(os.environ['FAILURES']):\n"
    "        (marks / str(len(list(marks.iterdir())))).touch()\n        BREAK\n    done = int",
)


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "marks"
    folder.mkdir()
    monkeypatch.setenv("MARKS", str(folder))
    return folder


def kinds(out: Path, cell: str) -> list[str]:
    return [e["event"] for e in ledger.read(out / "ledger.jsonl").events if e.get("cell") == cell]


def test_retries_are_those_of_the_protocol(
    tmp_path: Path, quick: None, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILURES", "3")
    text = FLAKY.replace("BREAK", "raise OSError('no luck')").replace(
        'name="small",', 'name="small", retries=1,'
    )
    path, out = study_file(tmp_path, text), tmp_path / "out"
    with pytest.raises(engine.FailedError, match="no luck"):
        run(path, out)
    assert kinds(out, "arm-2") == ["started", "failed", "retried", "failed"]
    run(path, out)
    assert kinds(out, "arm-2")[4:] == ["retried", "failed", "retried", "finished"]
    page = validate(out)
    assert page.exit_code == 0
    assert any("3 failed attempts" in line for line in page.authenticated)


def test_a_killed_worker_is_a_failed_attempt(
    tmp_path: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL, as for want of memory: without retries the run stops, and running again completes."""
    monkeypatch.setenv("FAILURES", "1")
    text = FLAKY.replace("BREAK", "print('last words', flush=True); os.kill(os.getpid(), 9)")
    path, out = study_file(tmp_path, text), tmp_path / "out"
    with pytest.raises(engine.FailedError, match=r"killed by signal 9 \(SIGKILL\)") as raised:
        run(path, out, executor="local", workers=1)
    assert "last words" in str(raised.value)
    assert kinds(out, "arm-2") == ["started", "failed"]
    assert kinds(out, "arm-1") == ["started", "finished"]
    run(path, out, executor="local", workers=1)
    assert kinds(out, "arm-2") == ["started", "failed", "retried", "finished"]
    assert kinds(out, "arm-1") == ["started", "finished"]
    assert validate(out).exit_code == 0


# ---- records made by hand ----


@pytest.fixture
def stuck(tmp_path: Path, quick: None) -> tuple[Path, Path]:
    """A study one of whose cells cannot leave a record."""
    path = study_file(tmp_path, SMALL.replace("done = int", "assert cell.name != 'arm-2'\n    done = int"))
    with pytest.raises(engine.FailedError):
        run(path, tmp_path / "out")
    return path, tmp_path / "out"


def test_a_recovered_record_is_marked_for_ever_and_never_promoted(
    stuck: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = stuck
    by_hand = tmp_path / "by_hand.json"
    by_hand.write_text('{"value": 0.2, "said": 0.2}')
    arguments = (
        "study",
        "recover",
        str(out),
        "arm-2",
        "--record",
        str(by_hand),
        "--reason",
        "node\x1b[2J died",
    )
    assert invoke(capsys, *arguments)[0] == 0
    assert invoke(capsys, *arguments)[0] == 2  # once
    result = run(path, out)
    assert result["label"] == "not promoted: recovered records (outcome/arm-2)"
    assert [gate["passed"] for gate in result["gates"]] == [True]
    assert not result["scientific_result"]
    record = canonical.loads(Store(out).record_file("outcome", "arm-2").read_bytes(), "r")
    assert (record["origin"], record["reason"]) == ("recovered", "node\\x1b[2J died")
    assert not record["scientific_result"]
    page = validate(out)
    assert (page.exit_code, page.label) == (0, result["label"])
    _, text, _ = invoke(capsys, "study", "validate", str(out), "--replay", "arm-2")
    assert "was not run again: its record was made by hand" in text


def test_a_protocol_may_declare_the_label_of_a_recovered_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the letter, sealed, recomputed by the validator, and still no scientific result."""
    quick_identity(monkeypatch)
    text = SMALL.replace("rules=(", 'rules=(Rule(label="inconclusive", recovered=True, says="By hand."),')
    fails = text.replace("    done = int", '    assert cell.name != "arm-2"\n    done = int')
    path = study_file(tmp_path, fails)
    out = tmp_path / "out"
    with pytest.raises(engine.FailedError):
        run(path, out)
    engine.recover(out, "arm-2", {"value": 0.2, "said": 0.2}, "the node died")
    result = run(path, out)
    assert (result["label"], result["says"], result["scientific_result"]) == (
        "inconclusive",
        "By hand.",
        False,
    )
    assert result["not_promoted"] == ["recovered records (outcome/arm-2)"]
    assert validate(out).label == "inconclusive"
    assert run(study_file(tmp_path / "whole", text), tmp_path / "whole-out")["label"] == "close"


def test_what_cannot_be_recovered(stuck: tuple[Path, Path], tmp_path: Path) -> None:
    path, out = stuck
    outcome = {"value": 0.2, "said": 0.2}
    for cell, words in (("arm-1", "has a record"), ("arm-9", "no cell"), ("../x", "no cell")):
        with pytest.raises(UsageError, match=words):
            engine.recover(out, cell, outcome, "because")
    with pytest.raises(UsageError, match="reason"):
        engine.recover(out, "arm-2", outcome, " ")
    fresh = tmp_path / "fresh"
    engine.seal(loading.load(str(path)), "small", fresh)
    with pytest.raises(UsageError, match="stage forecast is not sealed yet"):
        engine.recover(fresh, "arm-2", outcome, "because")


# ---- one process at a time, and Ctrl-C ----

SAVED = "cell.save(str(step + 1).encode())"


def held(until: Path) -> str:
    """The sample study, whose cells go on saving their first step until a file is there."""
    wait = f"while not os.path.exists({str(until)!r}): time.sleep(0.05); {SAVED}"
    return SMALL.replace(SAVED, f"{SAVED}\n        import os, time\n        {wait}")


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "halfulp", "study", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(path: Path) -> None:
    limit = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.02)


def test_a_second_process_is_told_and_ctrl_c_is_safe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While one process runs: another is refused by name. Then Ctrl-C: cells stop where they saved."""
    out, go_on = tmp_path / "out", tmp_path / "go"
    path = study_file(tmp_path, held(go_on))
    with started("run", str(path), "--out", str(out), "--workers", "1") as first:
        wait_for(out / "work" / "checkpoints" / "outcome" / "arm-1")
        code, _, error = invoke(capsys, "study", "run", str(path), "--out", str(out))
        assert code == 2
        assert f"in use by process {first.pid}" in error
        assert f"process {first.pid} is running it" in invoke(capsys, "study", "validate", str(out))[1]
        first.send_signal(signal.SIGINT)
        _, error = first.communicate(timeout=300)
        assert first.returncode == 130
    assert "stopping" in error
    assert "run again to go on" in error
    assert (out / "work" / "checkpoints" / "outcome" / "arm-1").exists()
    assert "outcome (outcome): 0 of 3 cells" in invoke(capsys, "study", "status", str(out))[1]
    go_on.touch()
    assert invoke(capsys, "study", "run", str(path), "--out", str(out), "--workers", "1")[0] == 0
    run(path, tmp_path / "whole")
    assert tree(out) == tree(tmp_path / "whole")


def test_sigterm_is_told_from_ctrl_c(tmp_path: Path) -> None:
    """A cluster's signal does what Ctrl-C does; the exit code says which it was."""
    out = tmp_path / "out"
    path = study_file(tmp_path, held(tmp_path / "go"))
    with started("run", str(path), "--out", str(out), "--workers", "1") as first:
        wait_for(out / "work" / "checkpoints" / "outcome" / "arm-1")
        first.send_signal(signal.SIGTERM)
        _, error = first.communicate(timeout=300)
    assert first.returncode == 128 + signal.SIGTERM == 143
    assert "run again to go on" in error


def test_a_second_ctrl_c_ends_at_once_and_leaves_no_worker(tmp_path: Path) -> None:
    path = study_file(tmp_path, SMALL.replace(SAVED, f"import time; time.sleep(9999); {SAVED}"))
    out = tmp_path / "out"
    with started("run", str(path), "--out", str(out), "--workers", "1") as first:
        wait_for(out / "seals" / "forecast.json")
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
        while not (found := children.read_text().split()):
            assert first.poll() is None
            time.sleep(0.02)
        worker = int(found[0])
        first.send_signal(signal.SIGINT)
        wait_for(out / "work" / "stop")
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=300)
    assert first.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_process_identity_is_in_the_ledger(tmp_path: Path, quick: None) -> None:
    run(study_file(tmp_path), tmp_path / "out")
    events: list[dict[str, Any]] = ledger.read(tmp_path / "out" / "ledger.jsonl").events
    for event in events:
        if event["event"] in ("sealed", "finished", "stage-sealed", "validated", "closed"):
            assert event["process"]["pid"] == os.getpid()
            assert len(event["process"]["nonce"]) == 16
            if sys.platform == "linux":
                assert event["process"]["start"] > 0
                assert len(event["process"]["boot"]) == 36
