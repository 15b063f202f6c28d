"""What a study takes from another, stages that gates decide on, and sealed arguments."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from study.forging import chain, events, forge, load, only_ours, writable
from study.samples import NEXT, SMALL, invoke, quick_identity, run, study_file, tree

from halfulp import canonical, files
from halfulp.errors import CorruptionError, HalfulpError, TamperingError, UsageError
from halfulp.study import (
    Evidence,
    engine,
    evidence,
    ledger,
    loading,
    publish,
)
from halfulp.study.validate import validate
from halfulp.study.worker import Session

NOT_WORTH = NEXT.replace("threshold=0.5", "threshold=5")


@pytest.fixture
def real_code() -> None:
    """Digests of the files of the package, not of one that stands for them."""


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_code" not in request.fixturenames:
        quick_identity(monkeypatch)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    run(study_file(tmp_path / "first"), tmp_path / "first" / "out")
    return tmp_path / "first" / "out"


def follow(tmp_path: Path, first: Path, text: str = NEXT, **options: Any) -> tuple[Path, dict[str, Any]]:
    out = tmp_path / "out"
    return out, run(study_file(tmp_path, text, "next.py"), out, evidence={"first": first}, **options)


# ---- evidence ----


def test_evidence_is_copied_and_the_study_stands_alone(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, result = follow(tmp_path, first)
    head = ledger.read(first / "ledger.jsonl").head
    shutil.rmtree(tmp_path / "first")
    assert (result["label"], result["says"]) == ("GO", "It goes on.")
    assert result["estimands"]["followed"] == {"arm-1": pytest.approx(0.2), "arm-2": pytest.approx(0.4)}
    assert load(out / "seal.json")["evidence"] == {
        "first": {"study": "small", "scale": "small", "closed": head, "label": "close", "promoted": True}
    }
    kept = sorted(p.relative_to(out / "evidence/first").as_posix() for p in (out / "evidence").rglob("*.*"))
    assert kept == [
        "attached/outcome/arm-1/trace.bin", "ledger.jsonl", "protocol.json", "records/outcome/arm-1.json",
        "records/outcome/arm-2.json", "records/outcome/arm-3.json", "result.json", "seal.json",
    ]  # fmt: skip
    assert validate(out, replay=["apart/all", "follow/arm-1"]).exit_code == 0
    code, text, _ = invoke(capsys, "study", "validate", str(out))
    assert (code, f"evidence first is of small (small), closed with {head}" in text) == (0, True)
    assert "label: GO\n       It goes on.\nvalid" in text
    publish.export(out, tmp_path / "a.zip")
    assert invoke(capsys, "study", "validate", str(tmp_path / "a.zip"))[0] == 0
    assert invoke(capsys, "report", str(out), "-o", str(tmp_path / "p.html"))[0] == 0
    assert f"digest>{head}" in (tmp_path / "p.html").read_text().replace('"', "").replace("class=", "")
    run(tmp_path / "next.py", out)  # sealed is sealed: nobody needs to point at it again


@pytest.mark.usefixtures("real_code")
def test_worker_processes_read_evidence_and_decide_for_themselves(tmp_path: Path) -> None:
    first = tmp_path / "first" / "out"
    run(study_file(tmp_path / "first"), first)
    out, _ = follow(tmp_path, first)
    path, other = tmp_path / "next.py", tmp_path / "other"
    run(path, other, evidence={"first": first}, executor="local", workers=1)
    assert tree(other) == tree(out)


@pytest.mark.parametrize(
    "name", ["records/outcome/arm-1.json", "result.json", "ledger.jsonl", "attached/outcome/arm-1/trace.bin"]
)
def test_forged_evidence_is_refused_when_it_is_sealed(
    tmp_path: Path, first: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (first / name).read_bytes()
    (first / name).write_bytes(
        content[:-2] + bytes([content[-2] ^ 1, content[-1]]) if len(content) > 1 else b"x"
    )
    path = study_file(tmp_path, NEXT, "next.py")
    for command in ("seal", "run"):
        code, _, error = invoke(
            capsys,
            "study",
            command,
            str(path),
            "--out",
            str(tmp_path / "out"),
            "--evidence",
            f"first={first}",
        )
        assert (code, Path(name).name in error) == (3, True), error


def test_forged_evidence_is_refused_when_it_is_read(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes changed, files gone or more of them; and a study whose digests were all made anew."""
    out, _ = follow(tmp_path, first)
    where = out / "evidence" / "first"
    for path in sorted(p for p in where.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for changed in (
            content[: len(content) // 2],
            content + b" ",
            bytes([content[0] ^ 1]) + content[1:],
            None,
        ):
            path.unlink()
            if changed is not None:
                path.write_bytes(changed)
            code, _, error = invoke(capsys, "study", "validate", str(out))
            assert (code, "evidence/first" in error) == (3, True), (path, error)
            path.write_bytes(content)
    (where / "records" / "more.json").write_text("{}")
    assert invoke(capsys, "study", "validate", str(out))[0] == 3
    (where / "records" / "more.json").unlink()
    assert validate(out).exit_code == 0
    record = load(where / "records/outcome/arm-1.json")
    record["outcome"]["value"] = 0.11
    content = canonical.dumps(record)
    (where / "records/outcome/arm-1.json").write_bytes(content)
    told = events(where)
    for event in told:
        if event.get("cell") == "arm-1" and "record" in event:
            event["record"] = canonical.sha256(content)
    chain(where, told)
    with pytest.raises(TamperingError, match="evidence"):
        validate(out)


def test_another_closed_study_is_not_the_evidence_that_was_sealed(tmp_path: Path, first: Path) -> None:
    """Valid in itself, but closed with another digest."""
    out, _ = follow(tmp_path, first)
    other = tmp_path / "second" / "out"
    run(study_file(tmp_path / "second"), other)
    for path in (out / "evidence" / "first").rglob("*.json*"):
        shutil.copy(other / path.relative_to(out / "evidence" / "first"), path)
    with pytest.raises(TamperingError, match="is not the evidence that was sealed: it closed with"):
        evidence.open_study(out)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"study": "other"}, "must be of study other (small)"),
        ({"scale": "smoke"}, "must be of study small (smoke)"),
        ({"records": ("nothing/*",)}, "uses 'nothing/*'"),
        ({"attached": ("outcome/*/nothing",)}, "uses 'outcome/*/nothing'"),
        ({"estimands": ("nothing",)}, "uses 'nothing'"),
    ],
)
def test_evidence_that_does_not_fit(
    tmp_path: Path, first: Path, change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = {
        "name": "first",
        "study": "small",
        "scale": "small",
        "records": ("outcome/*",),
        "attached": (),
        "estimands": (),
    }
    text = NEXT.replace(
        NEXT[NEXT.index("        Evidence(") : NEXT.index("    ),\n    stages=")],
        f"        Evidence(**{declared | change!r}),\n",
    )
    arguments = ("seal", str(study_file(tmp_path, text, "n.py")), "--out", str(tmp_path / "o"), "--evidence")
    code, _, error = invoke(capsys, "study", *arguments, f"first={first}")
    assert (code, said in error) == (2, True), error
    assert not (tmp_path / "o" / "ledger.jsonl").exists()


def test_evidence_must_be_given_closed_and_declared(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, opened = study_file(tmp_path, NEXT, "next.py"), tmp_path / "open"
    engine.seal(loading.load(str(tmp_path / "first" / "study_of_mine.py")), "small", opened)
    for given, said in (
        ((), "--evidence first=FOLDER"), (("first",), "takes NAME=FOLDER"),
        (("first=",), "takes NAME=FOLDER"), ((f"first={first}", f"first={first}"), "each name once"),
        ((f"other={first}",), "declares no evidence"), ((f"first={opened}",), "incomplete"),
        ((f"first={tmp_path / 'nowhere'}",), "not the folder of a study"),
    ):  # fmt: skip
        options = [word for one in given for word in ("--evidence", one)]
        code, _, error = invoke(capsys, "study", "seal", str(path), "--out", str(tmp_path / "o"), *options)
        assert (code, said in error) == (2, True), error
    with pytest.raises(UsageError, match="must say which records"):
        Evidence(name="x", study="small")
    out, _ = follow(tmp_path, first)
    other = tmp_path / "second" / "out"
    run(study_file(tmp_path / "second"), other)
    with pytest.raises(TamperingError, match="is not the evidence first that"):
        run(path, out, evidence={"first": other})


def test_evidence_that_was_not_promoted_promotes_nothing(tmp_path: Path) -> None:
    broken = study_file(
        tmp_path / "first", SMALL.replace("done = int", "assert cell.name != 'arm-3'\n    done = int")
    )
    first = tmp_path / "first" / "out"
    with pytest.raises(engine.FailedError):
        run(broken, first)
    engine.recover(first, "outcome/arm-3", {"value": 0.3, "said": 0.2}, "typed in")
    run(broken, first)
    text = NEXT.replace('assert first.label == "close"', "pass")
    out, result = follow(tmp_path, first, text)
    assert result["label"] == "not promoted: evidence that was not (first)"
    assert not result["scientific_result"]
    assert "says" not in result
    assert validate(out).exit_code == 0


def test_a_cell_sees_of_evidence_what_was_declared(tmp_path: Path, first: Path) -> None:
    for line, said in (
        ('cell.evidence("other")', "declares no evidence 'other'"),
        ('cell.evidence("first")["forecast"]', "no records of stage 'forecast'"),
        ('cell.evidence("first").attached("outcome", "arm-2", "trace.bin")', "does not declare that it uses"),
    ):
        text = NEXT.replace('first = cell.evidence("first")', f'{line}\n    first = cell.evidence("first")')
        with pytest.raises(engine.FailedError, match=said):
            follow(tmp_path, first, text)
        shutil.rmtree(tmp_path / "out")


def test_a_disk_that_refuses_any_operation_of_sealing(tmp_path: Path, first: Path) -> None:
    """Sealing that stopped half-way is done again from the start, evidence included."""
    source, out = loading.load(str(study_file(tmp_path, NEXT, "next.py"))), tmp_path / "out"
    engine.seal(source, "small", tmp_path / "whole", evidence={"first": first})
    expected, refused = tree(tmp_path / "whole"), 0
    for k in range(1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            left = iter(range(1, 10**6))

            def hook(operation: str, path: Path, left: Any = left, k: int = k) -> None:
                if next(left) == k:
                    raise OSError(28, "full")

            patch.setattr(files, "hook", hook)
            try:
                engine.seal(source, "small", out, evidence={"first": first})
            except HalfulpError:
                refused += 1
            else:
                break
        engine.seal(source, "small", out, evidence={"first": first})
        assert tree(out) == expected
        shutil.rmtree(out)
    assert refused > 40


def test_forgeries_of_evidence_and_decisions(tmp_path: Path, first: Path) -> None:
    """Random edits, every digest of the ledger made anew: errors of ours, and nothing false is believed."""
    out, _ = follow(tmp_path, first, NOT_WORTH)
    rng = random.Random("evidence and decisions")
    where = out / "evidence" / "first"
    kept = {path: path.read_bytes() for path in (*out.glob("*.json*"), *where.rglob("*.json*"))}
    believed = []
    for _ in range(300):
        at = out if rng.random() < 0.5 else where
        told = events(at)
        n = rng.randrange(len(told))
        forged = [*told[:n], writable(told[n], rng), *told[n + 1 :]]
        if rng.random() < 0.3:
            name = rng.choice(("seal.json", "protocol.json", "result.json"))
            forge(at, name, writable(load(at / name), rng))
        else:
            chain(at, forged)
        if at == out and not only_ours(out, validate_all):
            believed += [key for key in forged[n] if forged[n][key] != told[n].get(key)]
        elif at == where and (where / "ledger.jsonl").read_bytes() != kept[where / "ledger.jsonl"]:
            assert only_ours(out, validate_all)  # another digest than the sealed one
        for path, content in kept.items():
            path.write_bytes(content)
    assert set(believed) <= {"at", "process", "previous", "digest", "n"}, believed


def validate_all(out: Path) -> None:
    page = validate(out)
    if page.exit_code:
        raise CorruptionError(page.problems[0])


# ---- stages that gates decide on ----


def test_a_stage_whose_gate_failed_is_not_run_and_says_so(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = study_file(tmp_path, NOT_WORTH, "next.py"), tmp_path / "out"
    arguments = ("run", str(path), "--out", str(out), "--evidence", f"first={first}", "--executor", "inline")
    code, text, error = invoke(capsys, "study", *arguments)
    assert code == 0
    assert f"running study.py, code that {first} carries" in error
    assert "stage follow is not authorised (failed: worth): none of its cells runs" in error
    assert "stage follow was not authorised: none of its cells was run" in text
    assert "label   follow_not_authorised\n        It was not worth it." in text
    assert sorted(p.name for p in (out / "records").iterdir()) == ["apart", "prepare"]
    assert sorted(p.name for p in (out / "seals").iterdir()) == ["apart.json", "prepare.json"]
    decided = [(e["stage"], e["authorised"], e["gates"]) for e in events(out) if e["event"] == "decided"]
    assert decided == [("follow", False, {"worth": False}), ("report", False, {})]  # report reads follow
    assert not any(e.get("stage") in ("follow", "report") and "cell" in e for e in events(out))
    result = load(out / "result.json")
    assert result["estimands"]["followed"] == {}
    assert result["estimands"]["apart"] == {"all": 1}
    assert result["decisions"]["follow"] == {"authorised": False, "gates": {"worth": False}}
    for options in ((), ("--no-code",)):
        code, text, _ = invoke(capsys, "study", "validate", str(out), *options)
        assert code == (1 if options else 0)
        assert "stage follow was not authorised by its gates, and none of its cells ran" in text
    assert "follow (outcome): 0 of 2 cells, not authorised" in invoke(capsys, "study", "status", str(out))[1]
    assert invoke(capsys, "study", "report", str(out), "-o", str(tmp_path / "p.html"))[0] == 0
    page = (tmp_path / "p.html").read_text()
    assert "<dt>stage follow</dt><dd>not authorised (failed: worth); none of its cells was run</dd>" in page
    publish.export(out, tmp_path / "a.zip")
    assert invoke(capsys, "study", "validate", str(tmp_path / "a.zip"))[0] == 0


def test_a_decision_that_the_gates_did_not_make(tmp_path: Path, first: Path) -> None:
    """The ledger says otherwise than the records do, every digest made anew."""
    out, _ = follow(tmp_path, first, NOT_WORTH)
    told = events(out)
    for field, value, said in (
        ("authorised", True, "not that of its gates"),
        ("gates", {}, "not that of its gates"),
        ("gates", {"more": False}, "not that of its gates"),
        ("stage", "apart", "stage apart was not authorised"),
    ):
        forged = [dict(event) for event in told]
        next(e for e in forged if e["event"] == "decided")[field] = value
        chain(out, forged)
        with pytest.raises(CorruptionError, match=said):
            validate(out)
    chain(out, [e for e in told if e["event"] != "decided"], renumber=True)
    with pytest.raises(CorruptionError, match="was not sealed"):
        validate(out)
    shutil.rmtree(out)
    out, _ = follow(tmp_path, first)  # authorised; now it is told that it was not
    told = events(out)
    at = next(i for i, e in enumerate(told) if e["event"] == "decided")
    chain(out, [*told[:at], *told[at + 1 :]], renumber=True)
    with pytest.raises(CorruptionError, match="its stage was not authorised"):
        validate(out)
    chain(out, [*told[:at], told[at] | {"authorised": False, "gates": {"worth": False}}, *told[at + 1 :]])
    with pytest.raises(CorruptionError, match="was not authorised"):
        validate(out)


def test_a_stage_that_was_kept_from_running_by_a_lie(tmp_path: Path, first: Path) -> None:
    """All of the study is forged as if the gate had failed: the records say that it passed."""
    out, _ = follow(tmp_path, first, NOT_WORTH)
    protocol = load(out / "protocol.json")
    protocol["gates"][0]["threshold"] = 0.5
    forge(out, "protocol.json", protocol)
    digest = canonical.digest(protocol)
    for name in ("prepare", "apart"):
        forge(out, f"records/{name}/all.json", load(out / f"records/{name}/all.json") | {"protocol": digest})
    before, stages = "", {}
    for name in ("prepare", "apart"):
        sealed = load(out / f"seals/{name}.json") | {
            "seal": canonical.sha256((out / "seal.json").read_bytes()), "before": before,
        }  # fmt: skip
        forge(out, f"seals/{name}.json", sealed)
        before = stages[name] = canonical.digest(sealed)
    result = load(out / "result.json") | {"seal": sealed["seal"], "stages": stages}
    forge(out, "result.json", result)
    with pytest.raises(CorruptionError, match="the gates that decided on stage follow say otherwise"):
        validate(out)
    with pytest.raises(CorruptionError, match="the gates that decided on stage follow say otherwise"):
        validate(out, code=False)


def test_nobody_starts_a_cell_of_a_stage_that_is_not_authorised(tmp_path: Path, first: Path) -> None:
    """A worker that is told to finds the gates' decision itself; nor is a record put there by hand."""
    out, _ = follow(tmp_path, first, NOT_WORTH)
    sealed = ledger.read(out / "ledger.jsonl")
    session = Session(out, sealed.seal, "", None)
    answer = session.run("follow", "arm-1", sealed.stages)
    assert (answer["answer"], answer["error"]) == (
        "refused", "Cell follow/arm-1 may not start: its stage is not authorised.",
    )  # fmt: skip
    assert session.run("report", "all", sealed.stages)["answer"] == "refused"
    assert session.run("apart", "all", sealed.stages)["answer"] == "finished"
    opened = tmp_path / "open"
    engine.seal(loading.load(str(tmp_path / "next.py")), "small", opened, evidence={"first": first})
    with pytest.raises(UsageError, match="stage prepare is not sealed yet"):
        engine.recover(opened, "follow/arm-1", {}, "x")
    chain(out, [e for e in events(out) if e["event"] not in ("validated", "closed")])
    with pytest.raises(UsageError, match="its stage is not authorised"):
        engine.recover(out, "follow/arm-1", {}, "x")


def test_killed_around_a_decision(tmp_path: Path, first: Path) -> None:
    """The study is left after every event of its ledger, and goes on to the same end."""
    for text in (NEXT, NOT_WORTH):
        whole, _ = follow(tmp_path, first, text)
        expected, lines = tree(whole), (whole / "ledger.jsonl").read_bytes().splitlines(keepends=True)
        for n in range(1, len(lines)):
            (whole / "ledger.jsonl").write_bytes(b"".join(lines[:n]))
            run(tmp_path / "next.py", whole)
            assert tree(whole) == expected
        shutil.rmtree(whole)


# ---- arguments ----


def test_arguments_are_sealed_and_a_changed_one_is_refused(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = study_file(tmp_path, NEXT, "next.py"), tmp_path / "out"
    engine.seal(loading.load(str(path)), "small", out, evidence={"first": first})
    assert load(out / "protocol.json")["estimands"][0]["args"] == {"times": 10}
    study_file(tmp_path, NEXT.replace('"times": 10', '"times": 11'), "next.py")
    code, _, error = invoke(capsys, "study", "run", str(path), "--out", str(out), "--executor", "inline")
    assert code == 3
    assert "protocol.estimands.worst.args.times: was 10, now 11" in error


def test_what_was_sealed_is_what_is_computed_with(tmp_path: Path, first: Path) -> None:
    """Code that says another argument than the seal does not move a number; and it is told."""
    out, result = follow(tmp_path, first)
    estimand = loading.load(str(tmp_path / "next.py")).study.estimands[0]
    object.__setattr__(estimand, "args", {"times": 1000})
    try:
        page = validate(out)
    finally:
        object.__setattr__(estimand, "args", {"times": 10})
    assert page.problems == [
        "the sealed protocol is not what the code declares: estimands.worst.args.times: was 10, now 1000"
    ]
    assert result["estimands"]["worst"] == {"all": pytest.approx(1.0)}
