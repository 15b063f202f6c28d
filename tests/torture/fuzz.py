"""Mutated inputs for every reader: an error of halfulp's own or an answer, within a second and some memory.

Mutants are functions of their number, so a crasher is found again; the bytes of each go to
``tests/fixtures/crashers``, where tests/test_torture.py reads them ever after.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutations
import torch
from fixtures.make_format_1 import make, written_back
from study_samples import SMALL, quick_identity, run, study_file

import halfulp as hu
from halfulp import canonical
from halfulp.study import export
from halfulp.study.validate import validate
from halfulp.writeback import load
from torture import Clock, Effort, Trial

CRASHERS = Path(__file__).parent.parent / "fixtures" / "crashers"
SECOND = 1.0  # of processor time, so that a busy machine does not count
GROWTH_BYTES = 1 << 30  # of the whole process, over all mutants of a reader


@dataclass
class Reader:
    """What is read, where, and how: of a folder one file is damaged at a time."""

    name: str
    place: Path
    read: Callable[[Path], Any]
    mutate: Callable[[bytes, random.Random], bytes] = mutations.bytewise
    often: int = 1  # how many times as many as of the slowest


def tensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file: its bytes, its header, or the text in its metadata."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    texts = [k for k, v in header.get("__metadata__", {}).items() if v.startswith(("{", "["))]
    how = rng.random()
    if how < 0.5:
        return mutations.bytewise(content, rng)
    if how < 0.75 or not texts:
        header = mutations.edit(header, rng)
    else:
        key = rng.choice(texts)
        header["__metadata__"][key] = json.dumps(mutations.edit(json.loads(header["__metadata__"][key]), rng))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def documents(content: bytes, rng: random.Random) -> bytes:
    """JSON by its structure, or anything by its bytes."""
    try:
        return mutations.edit_text(content, rng) if rng.random() < 0.6 else mutations.bytewise(content, rng)
    except (ValueError, IndexError):  # not JSON, or a lone value
        return mutations.bytewise(content, rng)


def every_number(path: Path) -> Any:
    trace = hu.Trace.open(path)
    return [trace.frozen(grid).sum() for grid in trace.grids], trace.table(), hu.verdict(trace).lines


def name_of_a_grid(path: Path) -> Any:
    return hu.grid(path.read_bytes().decode("utf-8", "replace"))


def archive(path: Path) -> Any:
    with export.unpacked(path) as folder:
        return validate(folder, code=False)


def readers(folder: Path) -> list[Reader]:
    """One of each format, written here and now, and those of earlier releases."""
    today = folder / "today"
    today.mkdir()
    make(today)
    quick_identity()
    run(study_file(today, SMALL), today / "study", "smoke")
    export.export(today / "study", today / "study.zip")
    weights = {"w": torch.zeros(300, dtype=torch.bfloat16)}
    sync = hu.Sync(weights)
    weights["w"][::7] = 1.0
    sync.take().save(today / "change.safetensors")
    (today / "grid.txt").write_text("e4m3@128")
    (today / "document.json").write_bytes(canonical.dumps({"a": [1, 2.5, None, {"b": "c" * 20}], "d": True}))
    opt, net = written_back("kahan")
    net.load_state_dict(torch.load(today / "kahan.pt", weights_only=True)["model"])
    fixtures = Path(__file__).parent.parent / "fixtures"
    return [
        Reader("a trace", today / "trace", every_number, documents),
        Reader("a trace of format 2", fixtures / "format_2" / "trace", every_number, documents),
        Reader("a trace of format 1", fixtures / "format_1" / "trace", every_number, documents),
        Reader("a mask", today / "mask.safetensors", hu.Mask.load, tensors, 5),
        Reader(
            "a checkpoint of a write-back", today / "kahan.safetensors", lambda p: load(opt, p), tensors, 2
        ),
        Reader("a change", today / "change.safetensors", hu.Change.load, tensors, 5),
        Reader("a study's folder", today / "study", lambda p: validate(p, code=False), documents),
        Reader("a study's archive", today / "study.zip", archive),
        Reader("anybody's checkpoint", today / "rne.safetensors", lambda p: hu.check(p, lr=1e-3), tensors, 2),
        Reader("a canonical document", today / "document.json", _document, documents, 20),
        Reader("a grid's name", today / "grid.txt", name_of_a_grid, mutations.bytewise, 20),
    ]


def _document(path: Path) -> Any:
    return canonical.loads(path.read_bytes(), path)


def attack(reader: Reader, count: int, folder: Path) -> Trial:
    """Damage, read, put back, again and again."""
    clock = Clock()
    folder.mkdir(parents=True)
    if reader.place.is_dir():
        target = Path(shutil.copytree(reader.place, folder / "it"))
        listed = sorted(p for p in target.rglob("*") if p.is_file())
    else:
        target = Path(shutil.copy(reader.place, folder / reader.place.name))
        listed = [target]
    reader.read(target)  # whole, it is read
    originals = {file: file.read_bytes() for file in listed}
    listed = [file for file in listed if originals[file]]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    refused = crashed = slow = 0
    longest = 0.0
    for i in range(count):
        rng = random.Random(f"{reader.name}/{i}")
        file = rng.choice(listed)
        mutant = reader.mutate(originals[file], rng)
        file.write_bytes(mutant)
        began = time.process_time()
        try:
            reader.read(target)
        except hu.HalfulpError:
            refused += 1
        except Exception as error:  # anything else is what we look for
            crashed += 1
            CRASHERS.mkdir(exist_ok=True)
            print(f"crash: {reader.name}/{i} {file.name}: {type(error).__name__}: {error}", flush=True)
            (CRASHERS / f"{reader.name.replace(' ', '-')}-{i}-{file.name}").write_bytes(mutant)
        took = time.process_time() - began
        longest = max(longest, took)
        slow += took > SECOND
        file.write_bytes(originals[file])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    told = f"{refused / count:.1%} refused; the longest {longest * 1000:.0f} ms; memory +{grown >> 20} MiB"
    return Trial("Fuzz", reader.name, count, crashed + slow + (grown > GROWTH_BYTES), clock(), told)


def trials(effort: Effort) -> Iterator[Trial]:
    torch.set_num_threads(1)
    for reader in readers(effort.folder):
        if effort.wants(reader.name):
            count = effort.of(500 * reader.often, 100_000)
            yield attack(reader, count, effort.folder / reader.name)
