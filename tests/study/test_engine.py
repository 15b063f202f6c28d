"""Sealing, running, going on, failing, recovering: what the engine allows and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from study.samples import SMALL, run, study_file, tree

from halfulp import canonical, files
from halfulp.errors import CorruptionError, DiskError, TamperingError, UsageError
from halfulp.study import engine, ledger, loading, provenance
from halfulp.study import validate as validation
from halfulp.study.executor import Inline, Opening
from halfulp.study.store import Store
from halfulp.study.validate import validate
from halfulp.study.worker import open_session

WITH_DATA = SMALL.replace('name="small",', 'name="small", data=("table.csv",),').replace(
    "done = int", 'assert cell.data("table.csv").read_text() == "1,2\\n"\n    done = int'
)


# ---- the seal ----

CHANGES = {
    "a seed": ('"seeds": [1, 2, 3]', '"seeds": [1, 2, 4]', "protocol.stages.outcome.cells.arm-4: added"),
    "an arm less": ('"seeds": [1, 2, 3]', '"seeds": [1, 2]', "protocol.stages.outcome.cells.arm-3: gone"),
    "a threshold": ("threshold=0.15", "threshold=0.16", "protocol.gates.close.threshold: was 0.15, now 0.16"),
    "a comparison": ('comparison="<="', 'comparison="<"', "protocol.gates.close.comparison"),
    "a label": ('label="not close"', 'label="close enough"', "protocol.rules"),
    "a config": ('"small": {"forecast": 0.2', '"small": {"forecast": 0.3', "protocol.config.forecast"),
    "what is not claimed": ('("anything",)', '("anything", "more")', "protocol.not_claimed"),
    "code only": ("/ 10, ", "/ 5, ", "code.study.sha256"),
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_seal_is_refused_and_named(
    tmp_path: Path, quick: None, change: str, stopped: bool
) -> None:
    """Right after sealing, and with predictions made."""
    old, new, words = CHANGES[change]
    assert SMALL.count(old) == 1
    out = tmp_path / "out"
    if stopped:
        broken = SMALL.replace("done = int", "assert cell.name != 'arm-2'\n    done = int")
        with pytest.raises(engine.FailedError):
            run(study_file(tmp_path, broken), out)
        changed = broken.replace(old, new)
    else:
        engine.seal(loading.load(str(study_file(tmp_path))), "small", out)
        changed = SMALL.replace(old, new)
    before = tree(out, ledger=True)
    with pytest.raises(TamperingError) as raised:
        run(study_file(tmp_path, changed), out)
    assert words in str(raised.value)
    with pytest.raises(TamperingError):  # a deviation does not help: it is for code and machines
        run(study_file(tmp_path, changed), out, deviation="I want to")
    assert tree(out, ledger=True) == before


def test_a_change_of_data_is_refused(tmp_path: Path, quick: None) -> None:
    path, out = study_file(tmp_path, WITH_DATA), tmp_path / "out"
    with pytest.raises(UsageError, match=r"table\.csv of the study is missing"):
        engine.seal(loading.load(str(path)), "small", out)
    (tmp_path / "table.csv").write_text("1,2\n")
    engine.seal(loading.load(str(path)), "small", out)
    (tmp_path / "table.csv").write_text("1,3\n")
    with pytest.raises(TamperingError, match=r"data\.table\.csv\.sha256: was"):
        run(path, out)
    (tmp_path / "table.csv").write_text("1,2\n")
    assert run(path, out)["label"] == "close"


def test_data_changed_behind_the_engines_back_is_seen_by_the_cell(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = study_file(tmp_path, WITH_DATA), tmp_path / "out"
    (tmp_path / "table.csv").write_text("1,2\n")
    seal = engine.seal(loading.load(str(path)), "small", out)
    (tmp_path / "table.csv").write_text("1,3\n")
    session = Opening(out, seal, "", tmp_path, 1).session()
    with pytest.raises(TamperingError, match="is not the data set"):
        session.data("table.csv")
    with pytest.raises(UsageError, match="declares no data set"):
        session.data("other.csv")


def test_data_is_hashed_once_a_run(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that runs the study, and not again where cells run; a young file by each of them."""
    path, out, young = study_file(tmp_path, WITH_DATA), tmp_path / "out", tmp_path / "young"
    (tmp_path / "table.csv").write_text("1,2\n")
    hashed: list[Path] = []
    real = canonical.sha256_file

    def noted(path: Path) -> str:
        hashed.append(path)
        return real(path)

    monkeypatch.setattr(canonical, "sha256_file", noted)
    run(path, young)
    assert hashed == [tmp_path / "table.csv"] * 2
    monkeypatch.setattr(provenance, "SETTLED_NS", -1)
    hashed.clear()
    run(path, out)
    assert hashed == [tmp_path / "table.csv"]
    monkeypatch.setattr(validation, "Local", lambda opening, workers: Inline(opening))
    assert validate(out, replay=[], data_folder=tmp_path).exit_code == 0
    assert hashed == [tmp_path / "table.csv"] * 2


def test_a_worker_is_told_what_was_hashed(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "SETTLED_NS", -1)
    path, out = study_file(tmp_path, WITH_DATA), tmp_path / "out"
    (tmp_path / "table.csv").write_text("1,2\n")
    seal = engine.seal(loading.load(str(path)), "small", out)
    hashed = provenance.hash_data(["table.csv"], tmp_path)
    asked = canonical.dumps(Opening(out, seal, "", tmp_path, 1, hashed=hashed).message())
    monkeypatch.setattr(canonical, "sha256_file", None)
    assert open_session(canonical.parse(asked)).data("table.csv") == tmp_path / "table.csv"


def test_a_change_that_keeps_size_and_time_is_seen_all_the_same(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "SETTLED_NS", -1)
    path, out, table = study_file(tmp_path, WITH_DATA), tmp_path / "out", tmp_path / "table.csv"
    table.write_text("1,2\n")
    seal = engine.seal(loading.load(str(path)), "small", out)
    hashed = provenance.hash_data(["table.csv"], tmp_path)
    before = table.stat()
    table.write_text("1,3\n")
    os.utime(table, ns=(before.st_atime_ns, before.st_mtime_ns))
    session = Opening(out, seal, "", tmp_path, 1, hashed=hashed).session()
    with pytest.raises(TamperingError, match="is not the data set"):
        session.data("table.csv")


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret"])
def test_data_files_stay_beside_the_study(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="relative to the study file"):
        provenance.locate(name, tmp_path)


def test_other_code_or_machine_needs_a_recorded_deviation(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    engine.seal(loading.load(str(path)), "small", out)
    real = provenance.environment()
    monkeypatch.setattr(provenance, "environment", lambda: real | {"cpu": "another"})
    with pytest.raises(TamperingError, match=r"(?s)environment\.cpu: was .*--deviation"):
        run(path, out)
    result = run(path, out, deviation="the machine broke")
    assert result["label"] == "not promoted: deviations from the seal (1)"
    assert not result["scientific_result"]
    page = validate(out)
    assert page.exit_code == 0
    assert any("the machine broke" in line for line in page.authenticated)
    assert run(path, out, deviation="the machine broke") == result  # the same command, once more
    with pytest.raises(UsageError, match="nothing is left that could deviate"):
        run(path, out, deviation="another reason")


def test_other_package_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    engine.seal(loading.load(str(path)), "small", out)
    real = provenance.code(loading.load(str(path)))
    assert "study/gates.py" in real["package"]
    assert "study/engine.py" not in real["package"]  # it writes, and computes nothing
    assert not any("__pycache__" in name for name in real["package"])
    other = real["package"] | {"study/engine.py": "0" * 64}
    monkeypatch.setattr(provenance, "code", lambda source: real | {"package": other})
    with pytest.raises(TamperingError, match=r"code\.package\.study/engine\.py"):
        run(path, out)
    run(path, out, deviation="a fix")
    assert validate(out).exit_code == 0
    record = Store(out).record_file("outcome", "arm-1").read_bytes()
    assert canonical.loads(record, "r")["code"] == canonical.digest(
        real | {"package": other}
    )  # what really ran


def test_the_seal_flags_a_dirty_tree(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *arguments], check=True, capture_output=True)

    path = study_file(tmp_path)
    assert provenance.git_state(path) is None
    git("init")
    git("add", path.name)
    git("commit", "-m", "one")
    clean = provenance.git_state(path)
    assert clean is not None
    assert not clean["dirty"]
    path.write_text(SMALL + "\n")
    assert provenance.git_state(path) == clean | {"dirty": True}


def test_a_folder_that_holds_something_else_is_not_used(tmp_path: Path, quick: None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        run(study_file(tmp_path), out)
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]


def everything(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


OWN = {
    "work": {"work/thesis/main.tex": "a whole thesis"},
    "a lock": {"work/lock": "of the back door: 4711"},
    "a plan": {"work/sealing.json": "{'when': 'tomorrow'}"},
    "another's plan": {"work/sealing.json": '{"notes.txt":{"bytes":1,"sha256":"x"}}', "notes.txt": "x"},
    "evidence": {"evidence/notes.txt": "seen on Monday", "evidence/coin-smoke/seal.json": "{}"},
    "a study file": {"study.py": "print('mine')\n"},
    "a protocol": {"protocol.json": "{}"},
    "a seal": {"seal.json": "{}"},
    "half a ledger": {"ledger.jsonl": '{"at":"noon"'},
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("study", ["file", "two-layer"])
def test_nothing_of_somebody_elses_is_touched(tmp_path: Path, quick: None, name: str, study: str) -> None:
    """Files with the very names that a study gives its own, in a folder in which none was sealed."""
    out = tmp_path / "out"
    for path, text in OWN[name].items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text)
    before = everything(out)
    source = loading.load(str(study_file(tmp_path)) if study == "file" else study)
    for attempt in (engine.seal, engine.run):
        with pytest.raises(UsageError, match=r"holds no study, but .*Nothing was touched"):
            attempt(source, "small" if study == "file" else "smoke", out)
        assert everything(out) == before


def test_a_ledger_of_somebody_elses_is_not_cut(tmp_path: Path, quick: None) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "ledger.jsonl").write_text("one\ntwo, and no end")
    with pytest.raises(CorruptionError, match="line 1, is damaged"):
        run(study_file(tmp_path), out)
    assert everything(out) == {"ledger.jsonl": b"one\ntwo, and no end"}


def test_what_is_put_into_an_interrupted_sealing_stays(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own files are known by their digests: one that was edited is no longer its own."""
    path, out = study_file(tmp_path), tmp_path / "out"

    def full(operation: str, where: Path) -> None:
        if where.name == "ledger.jsonl":
            raise OSError(28, "full")

    monkeypatch.setattr(files, "hook", full)
    with pytest.raises(DiskError):
        run(path, out)
    monkeypatch.setattr(files, "hook", files._nothing)
    assert sorted(p.name for p in out.iterdir()) == ["protocol.json", "seal.json", "study.py", "work"]
    for name in ("study.py", "evidence/notes.txt", "work/notes.txt", "notes.txt"):
        kept = everything(out)
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        with pytest.raises(UsageError, match=f"holds no study, but {name}"):
            run(path, out)
        assert (out / name).read_text() == "mine"
        (out / name).unlink()
        if name in kept:
            (out / name).write_bytes(kept[name])
        if name.startswith("evidence/"):
            (out / "evidence").rmdir()
    assert run(path, out)["label"] == "close"


def test_what_is_put_into_a_study_stays(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it is open, and when it is closed: the run refuses, and removes nothing but its own. A result is
    given all the same if only the work of the study, which is over, has something in it."""
    path, out = study_file(tmp_path), tmp_path / "out"
    source = loading.load(str(path))
    engine.seal(source, "small", out)
    own = ("work/thesis/main.tex", "records/notes.txt", "attached/outcome/notes/a.txt", "seals/notes.txt")
    for closed in (False, True):
        for name in own:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text("mine")
            if closed and name.startswith("work/"):
                assert run(path, out)["label"] == "close"
                assert f"{name} does not belong to the study; move it away." in capsys.readouterr().err
            else:
                with pytest.raises(CorruptionError, match=f"{name} does not belong to the study"):
                    run(path, out)
            assert (out / name).read_text() == "mine"
            (out / name).unlink()
            for folder in (out / name).parents:
                if not any(folder.iterdir()):
                    folder.rmdir()
        if not closed:
            (out / "records/outcome").mkdir(parents=True)
            (out / "records/outcome/arm-1.json").write_text("half")  # this is what an interrupted run leaves
        run(path, out)
        assert not (out / "work").exists()


def test_what_comes_into_work_while_a_study_closes(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some file manager's own: the result is given, and the file left."""
    path, out = study_file(tmp_path), tmp_path / "out"
    closes = engine._close

    def close(study: engine.OpenStudy) -> None:
        closes(study)
        (out / "work/.DS_Store").write_bytes(b"x")

    monkeypatch.setattr(engine, "_close", close)
    assert run(path, out)["label"] == "close"
    assert "work/.DS_Store does not belong to the study; move it away.\n" in capsys.readouterr().err
    assert (out / "work/.DS_Store").exists()


def test_two_runs_leave_the_same_bytes(tmp_path: Path, quick: None) -> None:
    path = study_file(tmp_path)
    first = run(path, tmp_path / "a")
    assert run(path, tmp_path / "b") == first
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert run(path, tmp_path / "a") == first  # closed: nothing happens
    text = Store(tmp_path / "a").record_file("outcome", "arm-1").read_bytes()
    record = canonical.loads(text, "r")
    assert record["scientific_result"]
    assert record["origin"] == "run"
    assert record["config"] == {"seed": 1}
    assert not {"at", "pid", "process", "host"} & set(record)


def test_smoke_is_never_a_scientific_result(tmp_path: Path, quick: None) -> None:
    result = run(study_file(tmp_path), tmp_path / "out", "smoke")
    assert not result["scientific_result"]
    record = Store(tmp_path / "out").record_file("outcome", "arm-1").read_bytes()
    assert not canonical.loads(record, "r")["scientific_result"]


# ---- predictions first ----


def test_an_outcome_cell_without_the_prediction_seal_is_refused(tmp_path: Path, quick: None) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    seal = engine.seal(loading.load(str(path)), "small", out)
    session = Opening(out, seal, "", tmp_path, 1).session()
    for seals_ in ({}, {"forecast": "0" * 64}):
        answer = session.run("outcome", "arm-1", seals_)
        assert answer["answer"] == "refused"
        assert "prediction stage forecast is not sealed" in answer["error"]
    run(path, out)
    right = ledger.read(out / "ledger.jsonl").stages
    assert session.run("outcome", "arm-1", right)["answer"] == "finished"
    for wrong in ({}, {"forecast": "0" * 64}):
        assert session.run("outcome", "arm-1", wrong)["answer"] == "refused"
    assert session.run("outcome", "arm-9", right)["answer"] == "refused"


def test_the_worker_process_refuses_it_too(tmp_path: Path) -> None:
    """Typed into the worker by hand, over its own pipe."""
    path, out = study_file(tmp_path), tmp_path / "out"
    source = loading.load(str(path))
    seal = engine.seal(source, "small", out)
    code = provenance.code_digest({"code": provenance.code(source)})
    opening = Opening(out, seal, code, tmp_path, 1).message()
    job = {"do": "run", "stage": "outcome", "cell": "arm-1", "seals": {}}
    early = {"do": "run", "stage": "forecast", "cell": "all", "seals": {}}
    wrong = opening | {"code": "0" * 64}
    lines = b"".join(canonical.dumps(m) + b"\n" for m in (early, wrong, opening, job, early))
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "halfulp.study.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert worker.stdin is not None
    assert worker.stdout is not None
    with worker:
        worker.stdin.write(lines)
        worker.stdin.flush()
        answers = [canonical.loads(worker.stdout.readline()[:-1], "pipe") for _ in range(5)]
    assert [a["answer"] for a in answers] == ["refused", "refused", "ready", "refused", "finished"]
    assert "No study is open" in answers[0]["error"]
    assert "not the one that runs the study" in answers[1]["error"]
    assert "is not sealed" in answers[3]["error"]
    assert worker.returncode == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('cell.read("outcome", "arm-1")', "does not declare that it reads"),
        ('cell.read("forecast", "none")', "has no cell"),
        ('cell.read("forecast", "../../x")', "has no cell"),
        ('cell.read_bytes("forecast", "all", "none")', "attached no file"),
        ('cell.attach("../up", b"")', "not plain"),
        ('cell.data("secret")', "declares no data set"),
        ("1 / 0", "ZeroDivisionError"),
        ("return 3", "a mapping, not a int"),
        ('return {"a": float("nan")}', "nan is not JSON"),
        ('return {"a": "x" * (64 << 20)}', "at most 67,108,864 bytes of JSON, not 67,108,872. Attach"),
    ],
)
def test_what_a_cell_may_not_do(tmp_path: Path, quick: None, call: str, words: str) -> None:
    text = SMALL.replace("done = int(", f"{call}\n    done = int(")
    with pytest.raises(engine.FailedError) as raised:
        run(study_file(tmp_path, text), tmp_path / "out")
    assert words in str(raised.value)
    event = ledger.read(tmp_path / "out" / "ledger.jsonl").events[-1]
    assert event["event"] == "failed"
    assert words in event["error"]


def test_an_earlier_record_changed_on_disk_is_not_read(tmp_path: Path, quick: None) -> None:
    path, out = study_file(tmp_path), tmp_path / "out"
    run(path, out)
    store = Store(out)
    session = Opening(out, ledger.read(store.ledger_file).seal, "", tmp_path, 1).session()
    right = ledger.read(store.ledger_file).stages
    record = store.record_file("forecast", "all")
    record.write_bytes(record.read_bytes().replace(b"0.2", b"0.3"))
    answer = session.run("outcome", "arm-1", right)
    assert answer["answer"] == "failed"
    assert "TamperingError" in answer["error"]
