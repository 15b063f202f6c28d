"""Mutated inputs for every reader: an error of halfulp's own or an answer, within a second and some memory.

Mutants are functions of their number, so a crasher is found again; the bytes of each go to
``tests/fixtures/crashers``, where tests/test_torture.py reads them ever after. One that ends the process
(a library that aborts) leaves itself and its number in the temporary folder.
"""

from __future__ import annotations

import random
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import halfulp as hu
from torture import Clock, Effort, Trial
from torture.readers import Reader, readers

CRASHERS = Path(__file__).parent.parent / "fixtures" / "crashers"
SECOND = 1.0
GROWTH_BYTES = 1 << 30  # of the whole process, over all mutants of a reader


def outcome(reader: Reader, target: Path) -> Exception | None:
    """What reading it ends in."""
    try:
        reader.read(target)
    except Exception as error:
        return error
    return None


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
        (folder / "number").write_text(str(i))  # of the mutant that is there, should it end this process
        began = time.perf_counter()
        error = outcome(reader, target)
        took = time.perf_counter() - began
        if took > SECOND:  # on a busy machine that may be others' time: once more, by the processor's
            began = time.process_time()
            outcome(reader, target)
            took = time.process_time() - began
        longest = max(longest, took)
        slow += took > SECOND
        refused += isinstance(error, hu.HalfulpError)
        if error is not None and not isinstance(error, hu.HalfulpError):  # what we look for
            crashed += 1
            CRASHERS.mkdir(exist_ok=True)
            print(f"crash: {reader.name}/{i} {file.name}: {type(error).__name__}: {error}", flush=True)
            (CRASHERS / f"{reader.name.replace(' ', '-')}-{i}-{file.name}").write_bytes(mutant)
        file.write_bytes(originals[file])
        if reader.keeps and error is None and (after := outcome(reader, target)) is not None:
            crashed += 1  # what was taken spoiled the reader
            print(f"spoiled: {reader.name}/{i} {file.name}: {type(after).__name__}: {after}", flush=True)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    told = f"{refused / count:.1%} refused; the longest {longest * 1000:.0f} ms; memory +{grown >> 20} MiB"
    return Trial("Fuzz", reader.name, count, crashed + slow + (grown > GROWTH_BYTES), clock(), told)


def trials(effort: Effort) -> Iterator[Trial]:
    torch.set_num_threads(1)
    for reader in readers(effort.folder):
        if effort.wants(reader.name):
            count = effort.of(500 * reader.often, 100_000)
            yield attack(reader, count, effort.folder / reader.name)
