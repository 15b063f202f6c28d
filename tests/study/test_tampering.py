"""A finished study cannot be changed unnoticed: any byte, any file; and the damaged file is named."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
from study.samples import SMALL, invoke, run, study_file, tree

from halfulp import canonical
from halfulp.errors import CorruptionError, TamperingError
from halfulp.study import ledger
from halfulp.study.store import Store, pack
from halfulp.study.validate import validate

pytestmark = pytest.mark.usefixtures("quick")


def names(out: Path) -> list[str]:
    return sorted(tree(out, ledger=True))


def refused(out: Path, name: str) -> None:
    """Validation fails as damaged, and says which file."""
    with pytest.raises(CorruptionError) as raised:
        validate(out)
    assert raised.value.exit_code == 3
    assert name in str(raised.value)


def test_the_untouched_study_is_valid(finished: Path) -> None:
    page = validate(finished)
    assert (page.exit_code, page.label) == (0, "close")
    assert len(names(finished)) == 13


def test_every_byte_of_every_file(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    flipped = 0
    for name in names(out):
        path = out / name
        content = path.read_bytes()
        with open(path, "rb+", buffering=0) as file:
            for i, byte in enumerate(content):
                file.seek(i)
                file.write(bytes([byte ^ (1 << i % 8)]))
                with pytest.raises(CorruptionError) as raised:
                    validate(out)
                assert name in str(raised.value)
                assert raised.value.exit_code == 3
                file.seek(i)
                file.write(bytes([byte]))
                flipped += 1
    assert flipped > 5000
    assert validate(out).exit_code == 0


def test_deleted_truncated_emptied_extended(finished: Path, tmp_path: Path) -> None:
    for name in names(finished):
        content = (finished / name).read_bytes()
        changes: list[bytes | None] = [
            None,
            b"",
            content[:-1],
            content[: len(content) // 2],
            content + b"\n",
            content * 2,
        ]
        if name == "ledger.jsonl":  # and at every end of a line
            lines = content.splitlines(keepends=True)
            changes += [b"".join(lines[:n]) for n in range(len(lines))]
            changes += [b"".join(lines[:n] + lines[n + 1 :]) for n in range(len(lines))]
            changes += [
                b"".join([*lines[:n], lines[n + 1], lines[n], *lines[n + 2 :]]) for n in range(len(lines) - 1)
            ]
        for change in changes:
            out = tmp_path / "out"
            shutil.copytree(finished, out)
            if change is None:
                (out / name).unlink()
            else:
                (out / name).write_bytes(change)
            refused(out, name)
            shutil.rmtree(out)


def test_swapped(finished: Path, tmp_path: Path) -> None:
    every = names(finished)
    for first, second in zip(every, every[1:] + every[:1], strict=True):
        out = tmp_path / "out"
        shutil.copytree(finished, out)
        content = (out / first).read_bytes(), (out / second).read_bytes()
        if content[0] == content[1]:
            continue
        (out / first).write_bytes(content[1])
        (out / second).write_bytes(content[0])
        with pytest.raises(CorruptionError) as raised:
            validate(out)
        assert first in str(raised.value) or second in str(raised.value)
        shutil.rmtree(out)


def test_added_and_duplicated(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in names(finished):
        for copy in (
            name + ".copy",
            str(Path(name).with_name("copy-of-" + Path(name).name)),
            "extra/" + name,
        ):
            shutil.copytree(finished, out)
            (out / copy).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(out / name, out / copy)
            refused(out, copy)
            shutil.rmtree(out)
    for extra in ("records/new.json", ".hidden", "notes.txt", "result.json.bak", "ro-crate-metadata.json"):
        shutil.copytree(finished, out)
        (out / extra).write_text("{}")
        with pytest.raises(CorruptionError):
            validate(out)
        shutil.rmtree(out)
    shutil.copytree(finished, out)
    (out / "records" / "empty").mkdir()
    refused(out, "records/empty")


def test_what_does_not_belong_to_an_open_study(finished: Path, tmp_path: Path) -> None:
    """A file of no event's is named; a result is told as the end of a ledger that is missing."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    lines = (out / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    assert b'"event":"closed"' in lines[-1]
    (out / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(CorruptionError, match="it was shortened, or the run was stopped at its last step"):
        validate(out)
    (out / "result.json").unlink()
    (out / "notes.txt").write_text("{}")
    with pytest.raises(CorruptionError, match=r"notes\.txt does not belong to the study"):
        validate(out)


def test_links_are_not_files(finished: Path, tmp_path: Path) -> None:
    for name in names(finished):
        out = tmp_path / "out"
        shutil.copytree(finished, out)
        (out / name).unlink()
        (out / name).symlink_to(finished / name)
        refused(out, name)
        shutil.rmtree(out)


def test_what_lies_in_work_of_a_closed_study(finished: Path, tmp_path: Path) -> None:
    """A run that was killed as it closed leaves what the engine puts there; anything else is named."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    ours = ("lock", "stop", "sealing.json", ".part-12-3", "logs/worker-12-0.log", "checkpoints/outcome/arm-1")
    for name in ours:
        (out / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "work" / name).write_text("1")
    (out / "work/checkpoints/forecast").mkdir()
    assert validate(out).exit_code == 0
    for name in ("anything", ".part-x", "logs/a.log", "checkpoints/outcome/arm-9", "checkpoints/arm-1"):
        (out / "work" / name).write_text("x")
        refused(out, f"work/{name}")
        (out / "work" / name).unlink()
    (out / "work/empty").mkdir()
    refused(out, "work/empty")
    (out / "work/empty").rmdir()
    assert run(study_file(tmp_path), out, "smoke")["label"] == "close"
    assert not (out / "work").exists()


# ---- forgeries: the chain itself is made anew ----


def rechained(out: Path, events: list[dict[str, Any]]) -> None:
    """Write a ledger whose digests are all right."""
    lines, previous = [], ""
    for n, event in enumerate(events):
        body = {key: value for key, value in event.items() if key != "digest"} | {
            "n": n,
            "previous": previous,
        }
        body["digest"] = previous = canonical.digest(body)
        lines.append(canonical.dumps(body) + b"\n")
    (out / "ledger.jsonl").write_bytes(b"".join(lines))


def events(out: Path) -> list[dict[str, Any]]:
    return [dict(event) for event in ledger.read(out / "ledger.jsonl").events]


def test_dropping_any_record_never_passes_even_rechained(finished: Path, tmp_path: Path) -> None:
    for record in sorted((finished / "records").rglob("*.json")):
        out = tmp_path / "out"
        shutil.copytree(finished, out)
        stage, cell = record.parent.name, record.stem
        (out / record.relative_to(finished)).unlink()
        shutil.rmtree(out / "attached" / stage / cell)
        rechained(out, [e for e in events(out) if (e.get("stage"), e.get("cell")) != (stage, cell)])
        with pytest.raises(CorruptionError):
            validate(out)
        shutil.rmtree(out)


def test_an_outcome_before_the_prediction_was_sealed_never_passes(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    told = events(out)
    sealed = next(e for e in told if e["event"] == "stage-sealed")
    told.remove(sealed)
    last = max(i for i, e in enumerate(told) if e["event"] == "finished")
    told.insert(last + 1, sealed | {"at": told[last]["at"]})  # he moves its time as well
    rechained(out, told)
    with pytest.raises(TamperingError, match="stage forecast was not sealed"):
        validate(out)


@pytest.mark.parametrize("kind", ["finished", "started", "sealed", "closed"])
def test_events_that_cannot_be(finished: Path, tmp_path: Path, kind: str) -> None:
    """One left out, or twice in the chain."""
    for twice in (False, True):
        out = tmp_path / f"out-{twice}"
        shutil.copytree(finished, out)
        told = events(out)
        chosen = next(e for e in told if e["event"] == kind)
        if twice:
            told.insert(told.index(chosen) + 1, chosen)
        else:
            told.remove(chosen)
        rechained(out, told)
        if twice and kind == "started":  # a cell that was interrupted and started again
            assert validate(out).exit_code == 0
            continue
        with pytest.raises(CorruptionError):
            validate(out)


def test_a_result_that_does_not_follow_from_the_records(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    store = Store(out)
    result = canonical.loads(store.result_file.read_bytes(), "result")
    for forged in (
        result | {"label": "not close"},
        result | {"estimands": {"error": result["estimands"]["error"] | {"arm-1": 0.01}}},
        result | {"gates": [result["gates"][0] | {"passed": False}]},
        result | {"scientific_result": True},
        result | {"estimands": result["estimands"] | {"accuracy": {"all": 0.99}}},
        result | {"estimands": {"errors": result["estimands"]["error"]}},
    ):
        content = canonical.dumps(forged)
        store.result_file.write_bytes(content)
        told = events(out)
        for event in told:
            if "result" in event:
                event["result"] = canonical.sha256(content)
            if "label" in event:
                event["label"] = forged["label"]
        rechained(out, told)
        with pytest.raises(TamperingError, match="does not follow from the records"):
            validate(out)
        if set(forged["estimands"]) != {"error"}:
            known = "does not declare accuracy" if "accuracy" in forged["estimands"] else "declares error"
            said = f"its estimands are not those of the protocol, which {known}."
            with pytest.raises(TamperingError, match=said):
                validate(out, code=False)


def test_a_hand_made_record_passed_off_as_run(tmp_path: Path) -> None:
    """The record and the ledger both say that it was made by hand; changing one of them is seen."""
    from halfulp.study import engine, loading

    path, out = study_file(tmp_path), tmp_path / "out"
    broken = study_file(tmp_path, SMALL.replace("done = int", "assert cell.name != 'arm-2'\n    done = int"))
    with pytest.raises(engine.FailedError):
        run(broken, out)
    engine.recover(out, "outcome/arm-2", {"value": 0.2, "said": 0.2}, "typed in")
    engine.run(loading.load(str(path)), "small", out, executor="inline")
    assert validate(out).label.startswith("not promoted: recovered records (outcome/arm-2)")
    told = events(out)
    event = next(e for e in told if e["event"] == "recovered")
    event["event"] = "finished"
    del event["reason"]
    rechained(out, told)
    with pytest.raises(TamperingError, match=r"arm-2\.json"):
        validate(out)


def test_a_wholly_resealed_forgery_fails_the_outside_digest(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new study with another threshold is a valid study, but not the expected one."""
    forged = tmp_path / "out"
    run(study_file(tmp_path, SMALL.replace("0.15", "0.05")), forged, "smoke")
    assert validate(forged).label == "not close"
    real = ledger.read(finished / "ledger.jsonl")
    for digest in (real.seal, real.head):
        assert validate(finished, expect=digest).exit_code == 0
        with pytest.raises(TamperingError, match="not the expected study"):
            validate(forged, expect=digest)
        code, _, error = invoke(capsys, "study", "validate", str(forged), "--expect", digest)
        assert code == 3
        assert "not the expected study" in error


def test_the_seal_alone_does_not_vouch_for_records(finished: Path) -> None:
    real = ledger.read(finished / "ledger.jsonl")
    assert any(
        "the seal came before them" in line for line in validate(finished, expect=real.seal).not_checked
    )
    assert not any("outside digest" in line for line in validate(finished, expect=real.head).not_checked)


def test_the_command_line_exits_with_3_and_names_the_file(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    path = out / "records" / "outcome" / "arm-1.json"
    path.write_bytes(path.read_bytes().replace(b"0.1", b"0.2"))
    code, _, error = invoke(capsys, "study", "validate", str(out))
    assert code == 3
    assert "records/outcome/arm-1.json" in error
    code, text, _ = invoke(capsys, "study", "validate", str(finished))
    assert code == 0
    assert "label: close (not a scientific result)" in text


def test_compressed_files_are_what_they_hold(finished: Path, tmp_path: Path) -> None:
    """What a cell attached may be compressed after the end; every byte of it is still held."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    plain = {p: p.read_bytes() for p in (out / "attached").rglob("*") if p.is_file()}
    assert pack(out) == len(plain) > 0
    assert pack(out) == 0
    packed = [p for p in (out / "attached").rglob("*") if p.is_file()]
    assert {p.with_suffix("") if p.suffix == ".xz" else p for p in packed} == set(plain)
    assert validate(out).exit_code == 0
    for path in packed:
        content = path.read_bytes()
        for i in range(len(content)):
            path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
            refused(out, path.name)
        other = lzma.compress(b"another file")
        for damaged in (content[:-1], content + b"\0", content + content, other, b""):
            path.write_bytes(damaged)
            refused(out, path.name)
        path.write_bytes(content)
    path.with_suffix("").write_bytes(plain[path.with_suffix("")])  # both forms: one of them belongs to nobody
    refused(out, path.name)
