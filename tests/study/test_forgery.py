"""Files of a study that a stranger made: digests right, content wrong. Only halfulp's own errors come out.

The mutations are drawn with fixed seeds. A forger here knows the formats and computes every digest anew, so
that what is left to refuse him is the shape and the sense of what he wrote.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import bytewise, places
from study.forging import chain, events, forge, load, only_ours, writable
from study.samples import LATE, invoke, run, study_file, tree

from halfulp import canonical
from halfulp.errors import CorruptionError, DiskError, TamperingError
from halfulp.study import evidence, ledger, publish
from halfulp.study import validate as validation
from halfulp.study.store import Store
from halfulp.study.validate import validate

pytestmark = pytest.mark.usefixtures("quick")


def restore(out: Path, finished: Path) -> None:
    """Every JSON file as it was."""
    for name in ("ledger.jsonl", *FILES):
        (out / name).write_bytes((finished / name).read_bytes())


# ---- a forger who computes every digest anew ----


def look(out: Path) -> None:
    """Everything that reads a study."""
    opened = evidence.open_study(out)
    page = validate(out)
    validate(out, code=False)
    if page.exit_code:
        raise CorruptionError(page.problems[0])
    assert opened.result is not None
    publish.export(out, out.with_suffix(".zip"))


FILES = (
    "protocol.json", "seal.json", "records/forecast/all.json", "records/outcome/arm-1.json",
    "seals/forecast.json", "seals/outcome.json", "result.json",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_forged_file_is_refused_and_by_us(out: Path, finished: Path, name: str) -> None:
    """What is believed all the same is what nothing else contradicts: prose, and facts of another machine."""
    rng = random.Random(f"forged {name}")
    whole, believed = load(finished / name), set()
    for _ in range(120):
        restore(out, finished)
        value = writable(whole, rng)
        if value == whole:
            continue
        forge(out, name, value)
        if not only_ours(out, look):
            believed |= {str(p[0]) for p in places(value) if p and value.get(p[0]) != whole.get(p[0])}
            believed |= set(whole) - set(value)
    free = {  # the seal's facts about a machine; the code that ran is compared, not believed
        "seal.json": {"environment", "git", "code"},
        "protocol.json": set(), "result.json": set(),
    }  # fmt: skip
    assert believed <= free.get(name, set()), believed


def test_forged_events_are_refused_and_by_us(out: Path, finished: Path) -> None:
    rng = random.Random("forged events")
    told = events(finished)
    believed = []
    for _ in range(400):
        restore(out, finished)
        forged = copy.deepcopy(told)
        at = rng.randrange(len(forged))
        how = rng.randrange(5)
        if how == 0:
            forged.insert(at, copy.deepcopy(rng.choice(told)))
        elif how == 1:
            del forged[at]
        else:
            forged[at] = writable(forged[at], rng)
        if forged == told:
            continue
        chain(out, forged, renumber=how < 2)
        if not only_ours(out, look):
            believed += [
                (new.get("event"), key) for old, new in zip(told, forged, strict=False)
                for key in new if new[key] != old.get(key) and key not in ("n", "previous", "digest")
            ] if len(forged) == len(told) else ["a cell begun twice"]  # fmt: skip
    # which process it was, and when (as long as time goes on), nothing else knows
    assert all(
        b == "a cell begun twice" or b[1] in ("process", "at") or b[0] == "failed" for b in believed
    ), believed


@pytest.mark.parametrize(
    "field", ["process", "stage", "cell", "record", "at", "seal", "result", "label", "n"]
)
@pytest.mark.parametrize("value", [5, {}, None, [], "", True], ids=str)
def test_an_event_with_a_field_of_another_kind(
    out: Path, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for n, event in enumerate(events(out)):
        if field in event and event[field] != value:
            told = events(out)
            told[n][field] = value
            kept = (out / "ledger.jsonl").read_bytes()
            chain(out, told)
            for command in ("validate", "report", "status") if value != "" else ("validate", "report"):
                code, _, error = invoke(capsys, "study", command, str(out))
                assert (code, "ledger.jsonl" in error) == (3, True), (event["event"], error)
            (out / "ledger.jsonl").write_bytes(kept)


DEEP = b"[" * 200_000 + b"]" * 200_000


def test_deep_json_anywhere(
    out: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nested: Any = 0
    for _ in range(99):
        nested = [nested]
    for name in ("ledger.jsonl", *FILES):
        for content in (DEEP, b'{"a":' * 100_000 + b"1" + b"}" * 100_000):
            restore(out, finished)
            if name == "ledger.jsonl":
                (out / name).write_bytes(content + b"\n")
            else:
                forge(out, name, content)
            assert only_ours(out, look)
    restore(out, finished)
    forge(out, "result.json", {"a": nested})
    assert only_ours(out, look)
    (tmp_path / "deep.json").write_bytes(DEEP)
    arguments = (
        "recover",
        str(finished),
        "outcome/arm-1",
        "--record",
        str(tmp_path / "deep.json"),
        "--reason",
        "x",
    )
    assert invoke(capsys, "study", *arguments)[0] == 3


def test_mutated_bytes_of_every_file(out: Path, finished: Path) -> None:
    """Nobody computed a digest anew: then nothing at all is believed."""
    rng = random.Random("bytes")
    for name in sorted(tree(finished, ledger=True)):
        content = (finished / name).read_bytes()
        for _ in range(25):
            changed = bytewise(content, rng)
            if changed == content:
                continue
            (out / name).write_bytes(changed)
            assert only_ours(out, look), name
        (out / name).write_bytes(content)
    look(out)


def test_mutated_archives(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random("archives")
    whole = tmp_path / "whole.zip"
    publish.export(finished, whole)
    content, path = whole.read_bytes(), tmp_path / "changed.zip"
    seen = set()

    def read(path: Path) -> None:
        with publish.unpacked(path) as folder:
            look(folder)

    for _ in range(300):
        changed = bytearray(content)
        tail = len(content) - 1500  # the directory, where offsets, sizes and names are
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(tail, len(content)) if rng.random() < 0.7 else rng.randrange(len(content))
            changed[at : at + rng.choice((0, 1, 4))] = rng.choice(
                (rng.randbytes(4), b"\xff\xff\xff\xff", b"\0", b"/")
            )
        path.write_bytes(bytes(changed))
        seen.add(only_ours(path, read))
    assert seen == {True, False}  # dates and the like of an archive's directory are nobody's business
    for _ in range(80):
        with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as sink:
            for member in source.namelist():
                kept = source.read(member)
                if member == "statement.json":
                    kept = stated = canonical.dumps(writable(canonical.loads(kept, member), rng))
                sink.writestr(member, kept)
        with zipfile.ZipFile(whole) as source:
            assert only_ours(path, read) or stated == source.read("statement.json")
    for junk in (b"", b"PK", b"PK\x05\x06" + bytes(18), content[: len(content) // 2], DEEP):
        path.write_bytes(junk)
        assert invoke(capsys, "study", "validate", str(path))[0] == 3


def test_forged_analyses(finished: Path, tmp_path: Path) -> None:

    to = tmp_path / "late"
    evidence.retrospect(finished, LATE.encode(), "late.py", to)
    rng = random.Random("analyses")
    for name in (evidence.DECLARATION, evidence.RESULT):
        content = (to / name).read_bytes()
        for _ in range(40):
            value = writable(canonical.loads(content, name), rng)
            (to / name).write_bytes(canonical.dumps(value))
            if canonical.dumps(value) != content:
                assert only_ours(to, lambda to: evidence.check_retrospective(to, finished))
        (to / name).write_bytes(content)


# ---- what the system refuses ----


@pytest.mark.parametrize(
    "name", ["ledger.jsonl", "seal.json", "records/forecast/all.json", "records/outcome", "."]
)
def test_files_that_cannot_be_read(out: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, who reads everything: so the refusal is made."""
    real_open, real_iter, hidden = os.open, Path.iterdir, out / name

    def refuse(real: Any, path: Path, *rest: Any) -> Any:
        if path == hidden:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", functools.partial(refuse, real_open))
    monkeypatch.setattr(Path, "iterdir", lambda path: refuse(real_iter, path))
    with pytest.raises(DiskError, match="cannot be read"):
        validate(out)


def test_files_far_too_large_are_not_read(out: Path, tmp_path: Path) -> None:
    """4 TiB of nothing in the place of any file, those of an archive and of an analysis among them."""

    publish.export(out, tmp_path / "a.zip")
    analysis = tmp_path / "analysis"
    evidence.retrospect(out, LATE.encode(), "late.py", analysis)
    with publish.unpacked(tmp_path / "a.zip") as folder:
        looks: list[tuple[Path, Callable[[], object]]] = [
            (folder, lambda: validate(folder)),
            (folder, lambda: validate(folder, code=False)),
            (analysis, lambda: evidence.check_retrospective(analysis, out)),
        ]
        for place, look in looks:
            look()
            for path in sorted(p for p in place.rglob("*") if p.is_file()):
                content = path.read_bytes()
                os.truncate(path, 1 << 42)
                with pytest.raises(CorruptionError, match="bytes"):
                    look()
                path.write_bytes(content)
            look()


def test_a_full_disk_in_report_and_export(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from halfulp import files

    def full(operation: str, path: Path) -> None:
        if operation == "write":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "hook", full)
    for arguments in (
        ("report", str(out), "-o", str(tmp_path / "p.html")),
        ("export", str(out), str(tmp_path / "a.zip")),
    ):
        code, _, error = invoke(capsys, "study", *arguments)
        assert code == DiskError.exit_code == 4
        assert "the disk is full" in error
    assert not list(tmp_path.glob("*.html")) + list(tmp_path.glob("*.zip")) + list(tmp_path.glob(".*"))
    real = shutil.copyfileobj
    monkeypatch.setattr(files, "hook", lambda operation, path: None)
    publish.export(out, tmp_path / "a.zip")
    monkeypatch.setattr(shutil, "copyfileobj", lambda *a: full("write", out))
    assert invoke(capsys, "study", "validate", str(tmp_path / "a.zip"))[0] == 4
    assert real is not shutil.copyfileobj


# ---- time ----


def test_time_does_not_run_backwards(out: Path) -> None:
    told = events(out)
    for n in range(1, len(told)):
        forged = copy.deepcopy(told)
        forged[n]["at"] = "1999-12-31T23:59:59.999+00:00"
        chain(out, forged)
        with pytest.raises(CorruptionError, match="is before that of the event ahead of it"):
            validate(out)
    for wrong in (
        "2026-11-16",
        "2026-02-31T00:00:00.000+00:00",
        "2026-11-16T00:00:00.000Z",
        told[0]["at"] + "\n",
    ):
        forged = copy.deepcopy(told)
        forged[0]["at"] = wrong
        chain(out, forged)
        with pytest.raises(CorruptionError, match="must be a time"):
            validate(out)


def test_a_clock_that_is_set_back_while_a_study_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last time is written again, never a smaller one."""
    import datetime

    ticks = iter(range(1000))

    class Backwards(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return datetime.datetime(2026, 1, 1, tzinfo=tz) - datetime.timedelta(hours=next(ticks))

    monkeypatch.setattr(ledger.datetime, "datetime", Backwards)
    run(study_file(tmp_path), tmp_path / "out")
    monkeypatch.undo()
    assert {event["at"] for event in events(tmp_path / "out")} == {"2026-01-01T00:00:00.000+00:00"}


# ---- what counts as rounding -----------------------------------------------------------------------


def stated(estimands: dict[str, Any], value: Any = 2.0, passed: bool = True) -> dict[str, Any]:
    gate = {"name": "g", "estimand": "e", "value": value, "passed": passed}
    return {"label": "yes", "estimands": {"e": estimands}, "gates": [gate]}


def test_results_that_differ_by_rounding(tmp_path: Path) -> None:
    """On other code or hardware, a last digit of the largest value; by the sealed code, nothing."""
    store, units = Store(tmp_path), {"u": 1.0, "v": -2.0, "w": None, "x": 0.0}
    same = functools.partial(validation._same_result, store, stated(units))
    for moved in (False, True):
        assert same(stated(units), moved=moved) == 0
    near = {"u": 1.0 + 1.5e-10, "v": -2.0, "w": None, "x": 1.5e-10}
    assert same(stated(near), moved=True) == 2
    assert same(stated(units | {"x": 2.0 * validation.ROUNDING}), moved=True) == 1  # as much as may be
    assert same(stated(units, 2.0 + 1.5e-10), moved=True) == 0
    for other in (
        stated(near | {"u": 1.0 + 3e-10}),
        stated(near | {"w": 0.0}),
        stated({"u": 1.0}),
        stated(units, 2.0 + 3e-10),
        stated(units, None),
        stated(units, passed=False),
        stated(units) | {"label": "no"},
    ):
        with pytest.raises(validation.RecomputationError, match="does not follow from the records"):
            same(other, moved=True)
    for other in (stated(near), stated(units, 2.0 + 1.5e-10)):
        with pytest.raises(TamperingError, match="by the sealed code"):
            same(other, moved=False)


def test_without_code_nothing_may_differ_by_rounding(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates follow from the estimands that are stated, on any machine."""
    seen = []
    monkeypatch.setattr(validation, "_same_result", lambda *_, moved: seen.append(moved) or 0)
    validate(out, code=False)
    assert seen == [False]
