"""What is believed of a trace: parts and manifests that belong together, plain files, possible rows."""

from __future__ import annotations

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
from fixtures.make_format_1 import model, train, written_back
from format_traces import FIRST, bound_anew, record, resealed

import halfulp as hu
from halfulp import files, tensors
from halfulp.errors import TamperingError
from halfulp.trace import MOST_ROWS
from halfulp.writeback import load


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("second") / "trace")


@pytest.fixture
def second(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "second"))


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIRST / "trace", tmp_path / "first"))


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
@pytest.mark.parametrize("name", ["manifest.json", "parts/000001/tables.safetensors",
                                  "parts/000002/part.json", "state/000002.safetensors"])  # fmt: skip
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
        if str(path).endswith("tables.safetensors"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(
        hu.HalfulpError, match=r"tables\.safetensors cannot be read: Permission denied"
    ) as caught:
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
[hu.Trace.open(path).table() for path in {warm!r}]
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


def many_rows_first(folder: Path) -> str:
    """A table of many equal rows in few bytes, with every digest right: 13 million in a part of two steps."""
    table = folder / "parts" / "000000" / "run.parquet"
    pl.select(step=pl.repeat(1, 3 * MOST_ROWS + 1), loss=pl.repeat(0.5, 3 * MOST_ROWS + 1)).write_parquet(
        table
    )
    assert table.stat().st_size < 1 << 20
    digests = folder / "parts" / "000000" / "digests.json"
    told = json.loads(digests.read_text())
    told["run.parquet"] = files.sha256(table)
    digests.write_text(json.dumps(told))
    return str(folder)


def many_rows_second(folder: Path) -> str:
    """Columns that ask for more than the file has."""
    table = folder / "parts" / "000000" / "tables.safetensors"
    many = {"dtype": "I64", "shape": [1 << 40], "data_offsets": [0, 1 << 43]}
    table.write_bytes(header({f"run/{name}": many for name in ("step", "loss")}))
    bound_anew(folder)
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
    place = os.pathsep.join([str(Path(hu.__file__).parent.parent), str(Path(__file__).parents[1])])
    code = BOMBS.format(warm=[str(recorded), str(FIRST / "trace")])
    lines = subprocess.run(
        [sys.executable, "-c", code], text=True, timeout=250, check=True,
        input="".join(f"{kind} {path}\n" for kind, path in bombs), stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": place},
    ).stdout.splitlines()  # fmt: skip
    assert len(lines) == len(bombs)
    for line in lines:
        kind, grown, path = line.split(" ", 2)
        assert kind == "CorruptionError", path
        assert int(grown) < 100, path  # megabytes; the rows would take 200


def first_row(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda column: torch.cat([torch.tensor([value], dtype=column.dtype), column[1:]])


def rewritten(file: Path, table: str, column: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a column in the file of a part."""
    found, name = tensors.read(file)[0], f"{table}/{column}"
    made = change(found[name] if found[name].is_floating_point() else found[name].long())
    file.write_bytes(b"".join(tensors.content({**found, name: made}, seal=False)))


IMPOSSIBLE: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "fewer steps": ("run", "step", lambda c: c[:1], "run: the columns of one table must be equally long"),
    "a step in halves": ("run", "step", lambda c: c / 2, "run/step has dtype torch.float32"),
    "unknown tensors": ("tensors", "tensor", lambda c: c + 1000, "tensor is from 1000 to 1003"),
    "an unknown tensor": ("grids", "tensor", first_row(-1), "tensor is from -1 to 3, expected 0 to 3"),
    "an unknown grid": ("grids", "grid", first_row(9), "grid is from 0 to 9, expected 0 to "),
    "a table": (
        "grids",
        "frozen",
        lambda c: c[:, None],
        "grids: the columns of one table must be equally long",
    ),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_rows_of_what_is_not_there(second: Path, what: str) -> None:
    """Also where the digests were made right: nothing is looked up that the manifest does not list."""
    table, column, change, said = IMPOSSIBLE[what]
    file = second / "parts" / "000001" / "tables.safetensors"
    rewritten(file, table, column, change)
    bound_anew(second)
    trace = hu.Trace.open(second)  # rows are looked at when they are first read
    with pytest.raises(hu.CorruptionError, match=said) as caught:
        [trace.scan(name) for name in ("grids", "tensors", "run")]
    assert str(file) in str(caught.value)
    assert not isinstance(caught.value, TamperingError)


def test_rows_that_are_not_numbers(second: Path) -> None:
    """A run may give them: its loss and its learning rates are its own."""
    for table, column in (("run", "loss"), ("tensors", "lr"), ("tensors", "weight_sq"), ("grids", "arrived")):
        file = second / "parts" / "000001" / "tables.safetensors"
        rewritten(file, table, column, lambda c: c * float("nan"))
    bound_anew(second)
    assert len(hu.Trace.open(second).table()) == len(hu.Trace.open(second).scan())


def test_rehearsals_and_losses_are_looked_at_too(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with hu.Audit(optimizer, "bf16", model=net, out=tmp_path / "run", rehearse="bf16", part_steps=2) as audit:
        train(net, optimizer, 4, audit)
        audit.evaluate(lambda: 1.0)
    whole = hu.Trace.open(tmp_path / "run")
    assert all(len(whole.scan(name)) for name in ("rehearsals", "losses"))
    for table, column, value in (
        ("rehearsals", "rehearsal", 1), ("rehearsals", "bound", -1),
        ("losses", "rehearsal", -2), ("losses", "bound", 3),
    ):  # fmt: skip
        folder = Path(shutil.copytree(tmp_path / "run", tmp_path / f"{table}-{column}"))
        file = max(folder.glob("parts/*/tables.safetensors"))
        rewritten(file, table, column, first_row(value))
        bound_anew(folder)
        with pytest.raises(hu.CorruptionError, match=rf"{table}: {column} is from"):
            hu.Trace.open(folder).scan(table)
