"""Files of earlier releases still open, and files of this one are what they say: bound, checked, no more."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from fixtures.make_format_1 import CASES, GRIDS, answers, model, train, written_back

import halfulp as hu
from halfulp import documents, files, tensors
from halfulp.trace import MOST_ROWS
from halfulp.writeback import load, save

FIRST, SECOND = (Path(__file__).parent / "fixtures" / f"format_{n}" for n in (1, 2))
OPTIONS: dict[str, Any] = {"scores": ("e4m3", 1, 4), "keep": True, "expected_never_moved": True}


def record(folder: Path, steps: int = 5, *, grids: list[str] = GRIDS, **options: Any) -> Path:
    """A trace like that of the fixtures, by the code of today."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    settings = {"part_steps": 2, "describe": {"note": "five steps"}, **OPTIONS, **options}
    with hu.Audit(optimizer, grids, model=net, out=folder, **settings) as audit:
        train(net, optimizer, steps, audit)
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("second") / "trace")


@pytest.fixture
def second(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "second"))


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIRST / "trace", tmp_path / "first"))


# ---- earlier releases --------------------------------------------------------------------------------


def test_a_trace_of_format_1(tmp_path: Path) -> None:
    """Its numbers are those that the release that wrote it gave; its weights can be replayed."""
    trace = hu.Trace.open(FIRST / "trace")
    assert answers(trace) == json.loads((FIRST / "answers.json").read_text())
    again = hu.replay(trace, GRIDS, tmp_path / "replayed")
    assert again.manifest["format"] == 4
    assert again.frozen("bf16").tolist() == trace.frozen("bf16").tolist()


def test_a_mask_of_format_1() -> None:
    mask = hu.Mask.load(FIRST / "mask.safetensors")
    same = hu.allocate(FIRST / "trace", 0.75)
    assert (mask.sizes, mask.score, mask.budget) == (same.sizes, same.score, same.budget)
    assert all(torch.equal(mask.tiles[name], same.tiles[name]) for name in same.tiles)


def loaded(case: str, how: str) -> tuple[hu.WriteBack, torch.nn.Module]:
    """A write-back that took up the state of a case, from a file or a dictionary."""
    opt, net = written_back(case)
    saved = torch.load(FIRST / f"{case}.pt", weights_only=True)
    net.load_state_dict(saved["model"], strict=CASES[case][2] != "packed")
    if how == "file":
        load(opt, FIRST / f"{case}.safetensors")
    else:
        opt.load_state_dict(saved["opt"])
    return opt, net


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_version_1(case: str) -> None:
    """A file and a dictionary give the same state, and training goes on with it."""
    (one, net), (other, _) = loaded(case, "file"), loaded(case, "dictionary")
    a, b = one.state_dict(), other.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert one.steps == 3
    for number, entry in a["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, b["state"][number][name]), (number, name)
    assert json.loads(a["param_groups"][0]["halfulp"])["version"] == 2
    train(net, one, 1)


def test_recording_goes_on_with_a_trace_of_format_1(first: Path) -> None:
    """It becomes one of today's, with the parts that it had; cut off anywhere, it is one or the other."""
    before = hu.Trace.open(first)
    old = before.table()
    record(first, 7, resume=True)
    trace = hu.Trace.open(first)
    assert trace.manifest["format"] == 4
    assert trace.steps.tolist() == list(range(1, 8))
    assert trace.table().filter(pl.col("step") <= 5).equals(old)
    assert not list(first.rglob("state.safetensors"))


def test_a_trace_of_format_2(tmp_path: Path) -> None:
    """It says what it said, and a recording goes on with it: then the trace is of format 4, not its parts."""
    folder = Path(shutil.copytree(SECOND / "trace", tmp_path / "trace"))
    assert answers(hu.Trace.open(folder)) == json.loads((SECOND / "answers.json").read_text())
    old = hu.Trace.open(folder).table()
    record(folder, 7, resume=True)
    trace = hu.Trace.open(folder)
    assert trace.manifest["format"] == 4
    assert trace.table().filter(pl.col("step") <= 5).equals(old)
    formats = [json.loads((part / "part.json").read_text())["format"] for part in trace.parts]
    assert formats == [2, 2, 2, 4]
    assert trace.rehearsals == []
    assert len(trace.gain("bf16")) == len(trace.cosine("bf16")) == 2  # only the steps since then say it
    with pytest.raises(hu.UsageError, match="rehearse=None"):
        record(folder, 8, resume=True, rehearse="e5m2")


def test_format_2_knows_nothing_of_rehearsals(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SECOND / "trace", tmp_path / "trace"))
    told = {"specs": ["e5m2"], "grids": ["e5m2"], "policies": ["rne"], "bounds": ["point"], "pull": 30.0}
    resealed(folder / "manifest.json", lambda m: m["options"].update(rehearse=told))
    with pytest.raises(hu.CorruptionError, match="rehearse"):
        hu.Trace.open(folder)


class StopError(Exception):
    """What the hook raises."""


def test_taking_up_format_1_can_be_cut_off_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(hu.Trace.open(FIRST / "trace"))
    for k in range(1000):
        folder = Path(shutil.copytree(FIRST / "trace", tmp_path / str(k)))
        left = [k]

        def hook(operation: str, path: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise StopError

        with monkeypatch.context() as patch:
            patch.setattr(files, "hook", hook)
            try:
                record(folder, 5, resume=True)
            except StopError:
                pass
            else:
                break
        assert answers(hu.Trace.open(folder)) == expected
        shutil.rmtree(folder)
    assert k > 10


# ---- what format 2 binds -----------------------------------------------------------------------------


def resealed(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A document with something changed and its digest made right, as somebody might on purpose."""
    document = json.loads(file.read_text())
    del document["sha256"]
    change(document)
    file.write_bytes(documents.sealed(document))


def copy_last(folder: Path) -> None:
    shutil.copytree(folder / "parts" / "000002", folder / "parts" / "000003")
    shutil.copy(folder / "state" / "000002.safetensors", folder / "state" / "000003.safetensors")


def foreign_part(folder: Path) -> None:
    other = record(folder.with_name("other"))
    for part in ("parts/000001",):
        shutil.rmtree(folder / part)
        shutil.copytree(other / part, folder / part)


def swap_parts(folder: Path) -> None:
    a, b, c = folder / "parts" / "000000", folder / "parts" / "000001", folder / "aside"
    a.rename(c), b.rename(a), c.rename(b)


REARRANGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the last part again": (copy_last, "number is 2, expected 3"),
    "a part of another run": (foreign_part, "its trace is"),
    "parts swapped": (swap_parts, "number is 1, expected 0"),
    "the manifest of another run": (
        lambda f: shutil.copy(record(f.with_name("other")) / "manifest.json", f / "manifest.json"),
        "its trace is",
    ),
    "grids swapped, digest made right": (
        lambda f: resealed(f / "manifest.json", lambda m: m["grids"].reverse()),
        "its grids is",
    ),
    "a grid more": (lambda f: resealed(f / "manifest.json", lambda m: m["grids"].append("e5m2")), "grids is"),
    "a tensor less": (lambda f: resealed(f / "manifest.json", lambda m: m["tensors"].pop()), "4 tensors"),
    "another group": (
        lambda f: resealed(f / "manifest.json", lambda m: m["tensors"][0].update(group="core")),
        "tensors that are not those of the manifest",
    ),
    "a part's digest changed": (
        lambda f: resealed(f / "parts/000000/part.json", lambda d: d.update(last_step=3)),
        "its before is",
    ),
}


@pytest.mark.parametrize("what", REARRANGED)
def test_what_does_not_fit_together(second: Path, what: str) -> None:
    change, said = REARRANGED[what]
    change(second)
    with pytest.raises(hu.HalfulpError, match=said) as caught:
        hu.Trace.open(second)
    assert caught.value.exit_code == 3


SCHEMA: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a grid that is none": lambda m: m.update(grids=["bf16", "bf17"]),
    "a grid twice": lambda m: m.update(grids=["bf16", "bf16"]),
    "no grid": lambda m: m.update(grids=[]),
    "every 0": lambda m: m.update(every=0),
    "every 1.5": lambda m: m.update(every=1.5),
    "every true": lambda m: m.update(every=True),
    "a missing option": lambda m: m["options"].pop("keep"),
    "an option of another type": lambda m: m["options"].update(never_moved=1),
    "a share above 1": lambda m: m["options"].update(sample=2.0),
    "a tensor id of 2**29": lambda m: m["tensors"][3].update(id=2**29),
    "a name twice": lambda m: m["tensors"][1].update(name=m["tensors"][0]["name"]),
    "a size that is not the shape's": lambda m: m["tensors"][0].update(numel=63),
    "more recorded than there is": lambda m: m["tensors"][0].update(recorded=65),
    "a negative shape": lambda m: m["tensors"][0].update(shape=[-8, -8]),
    "an unknown dtype": lambda m: m["tensors"][0].update(dtype="float128"),
    "stored on nothing": lambda m: m["tensors"][0].update(stored="paper"),
    "a group that is a list": lambda m: m["tensors"][0].update(group=[]),
    "an optimizer that is text": lambda m: m.update(optimizers=["AdamW"]),
}


@pytest.mark.parametrize("what", SCHEMA)
def test_manifests_that_cannot_be(first: Path, second: Path, what: str) -> None:
    """Refused in both formats, also where the digest was made right."""
    resealed(second / "manifest.json", SCHEMA[what])
    manifest = json.loads((first / "manifest.json").read_text())
    SCHEMA[what](manifest)
    (first / "manifest.json").write_text(json.dumps(manifest))
    for folder in (first, second):
        with pytest.raises(hu.CorruptionError, match=r"manifest\.json"):
            hu.Trace.open(folder)


def test_one_bit_in_a_checkpoint(tmp_path: Path) -> None:
    """In every tensor, ours and the optimizer's, of a file and of a dictionary."""
    opt, net = written_back("kahan")
    train(net, opt, 2)
    save(opt, tmp_path / "state")
    state = copy.deepcopy(opt.state_dict())
    content = (tmp_path / "state").read_bytes()
    for number, entry in state["state"].items():
        for name, value in entry.items():
            damaged = copy.deepcopy(state)
            damaged["state"][number][name].reshape(-1).view(torch.uint8)[-1] ^= 0x40
            with pytest.raises(hu.TamperingError, match="not what was saved"):
                opt.load_state_dict(damaged)
            at = content.index(bytes(tensors.raw(value)))
            end = at + tensors.raw(value).nbytes - 1
            (tmp_path / "state").write_bytes(
                content[:end] + bytes([content[end] ^ 0x40]) + content[end + 1 :]
            )
            with pytest.raises(hu.TamperingError, match="not what was written"):
                load(opt, tmp_path / "state")
    line = json.loads(state["param_groups"][0]["halfulp"])
    state["param_groups"][0]["halfulp"] = json.dumps({**line, "step": 7})
    with pytest.raises(hu.TamperingError, match="the step was changed"):
        opt.load_state_dict(state)
    state["param_groups"][0]["halfulp"] = json.dumps(line)
    state["param_groups"][0]["lr"] = 0.5  # a setting is the user's to change
    opt.load_state_dict(state)
    assert opt.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("tiles", "sizes", "budget", "said"),
    [
        (torch.ones(2, dtype=torch.bool), 1000, 3999, "above its budget of 3,999"),
        (torch.ones(2), 1000, 4000, "expected 2 booleans"),
        (torch.ones(1, dtype=torch.bool), 1000, 4000, "expected 2 booleans"),
        (torch.ones(2, dtype=torch.bool), 1000, -1, "whole number"),
    ],
)
def test_masks_that_cannot_be(
    tmp_path: Path, tiles: torch.Tensor, sizes: int, budget: int, said: str
) -> None:
    told = {"format": 2, "score": "P", "budget": budget, "sizes": {"w": sizes}, "tile": 768}
    files.put(tmp_path / "mask", tensors.content({"w": tiles}, {"halfulp.mask": json.dumps(told)}))
    with pytest.raises(hu.CorruptionError, match=said):
        hu.Mask.load(tmp_path / "mask")
    if budget >= 0:
        with pytest.raises(hu.UsageError, match=said):
            hu.Mask(tiles={"w": tiles}, sizes={"w": sizes}, score="P", budget=budget).save(tmp_path / "x")


def test_a_byte_that_is_no_boolean(tmp_path: Path) -> None:
    content = bytearray((FIRST / "mask.safetensors").read_bytes())
    content[-1] = 255
    (tmp_path / "mask").write_bytes(content)
    with pytest.raises(hu.CorruptionError, match="neither true nor false"):
        hu.Mask.load(tmp_path / "mask")


# ---- what is not a file of ours ----------------------------------------------------------------------


def unlinked(file: Path, make: Callable[[Path], Any]) -> None:
    file.unlink()
    make(file)


STRANGE: dict[str, Callable[[Path], Any]] = {
    "a link to an endless device": lambda f: f.symlink_to("/dev/zero"),
    "a link to itself": lambda f: f.symlink_to(f),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("name", ["manifest.json", "parts/000001/grids.parquet", "parts/000002/part.json",
                                  "state/000002.safetensors", "parts/000000/kept.safetensors"])  # fmt: skip
def test_only_plain_files_are_read(second: Path, what: str, name: str) -> None:
    unlinked(second / name, STRANGE[what])
    with pytest.raises(hu.CorruptionError, match=r"not a plain file|is missing"):
        hu.Trace.open(second)
    for read in (hu.Mask.load, lambda f: load(written_back("rne")[0], f)):
        with pytest.raises(hu.CorruptionError, match=r"not a plain file|is missing|safetensors"):
            read(second / name)


def test_what_may_not_be_read(second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's refusals are errors of ours, with their own exit code."""
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(".parquet"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(hu.HalfulpError, match=r"grids\.parquet cannot be read: Permission denied") as caught:
        hu.Trace.open(second)
    assert caught.value.exit_code == 4
    monkeypatch.undo()
    shutil.rmtree(second / "parts")
    with pytest.raises(hu.CorruptionError, match="parts is missing"):
        hu.Trace.open(second)


BOMBS = """
import resource, sys
import halfulp as hu
from fixtures.make_format_1 import written_back
from halfulp.writeback import load
opt = written_back("rne")[0]
hu.Trace.open({recorded!r}).table()
for line in sys.stdin:
    kind, path = line.strip().split(" ", 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        if kind == "trace":
            trace = hu.Trace.open(path)
            trace.steps, trace.frozen("bf16"), trace.table()
        elif kind == "mask":
            hu.Mask.load(path)
        else:
            load(opt, path)
        print("believed", 0, path)
    except hu.HalfulpError as error:
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        print(type(error).__name__, grown, path)
"""


def header(told: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text + data


def many_rows(folder: Path) -> str:
    """A table of many equal rows in few bytes, with every digest right: 13 million in a part of two steps."""
    table = folder / "parts" / "000000" / "run.parquet"
    pl.select(step=pl.repeat(1, 3 * MOST_ROWS + 1), loss=pl.repeat(0.5, 3 * MOST_ROWS + 1)).write_parquet(
        table
    )
    assert table.stat().st_size < 1 << 20
    return str(folder)


def many_rows_first(folder: Path) -> str:
    many_rows(folder)
    digests = folder / "parts" / "000000" / "digests.json"
    told = json.loads(digests.read_text())
    told["run.parquet"] = files.sha256(folder / "parts" / "000000" / "run.parquet")
    digests.write_text(json.dumps(told))
    return str(folder)


def many_rows_second(folder: Path) -> str:
    many_rows(folder)
    table = folder / "parts" / "000000" / "run.parquet"
    before = None
    for part in sorted((folder / "parts").iterdir()):

        def change(told: dict[str, Any], before: str | None = before, part: Path = part) -> None:
            told["before"] = before
            if part.name == "000000":
                told["files"]["run.parquet"].update(bytes=table.stat().st_size, sha256=files.sha256(table))

        resealed(part / "part.json", change)
        before = json.loads((part / "part.json").read_text())["sha256"]
    return str(folder)


def test_bombs(first: Path, second: Path, recorded: Path, tmp_path: Path) -> None:
    """Small files that ask for much memory get none of it."""
    one = {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}
    made = {
        "long header": (1 << 60).to_bytes(8, "little") + b"{}",
        "large tensor": header({"w": one}),
        "huge shape": header({"w": {"dtype": "U8", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 0]}}),
        "overlap": header({n: {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]} for n in "ab"}, bytes(9)),
        "deep": (10**5).to_bytes(8, "little") + b"[" * 10**5,
    }
    bombs = [("trace", many_rows_first(first)), ("trace", many_rows_second(second))]
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
        bombs += [("mask", str(tmp_path / name)), ("checkpoint", str(tmp_path / name))]
    place = os.pathsep.join([str(Path(hu.__file__).parent.parent), str(Path(__file__).parent)])
    lines = subprocess.run(
        [sys.executable, "-c", BOMBS.format(recorded=str(recorded))], text=True, timeout=250, check=True,
        input="".join(f"{kind} {path}\n" for kind, path in bombs), stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": place},
    ).stdout.splitlines()  # fmt: skip
    assert len(lines) == len(bombs)
    for line in lines:
        kind, grown, path = line.split(" ", 2)
        assert kind == "CorruptionError", path
        assert int(grown) < 100, path  # megabytes; the rows would take 200
