"""Kills a study at every single operation on the disk, and goes on with it; prints what came of it as JSON.

The imports are paid for once: every trial is a fork of this process, which the test starts on its own so that
no thread is running.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from forks import killed
from study.samples import SMALL, quick_identity, run, study_file, tree

from halfulp.study import engine, ledger, loading
from halfulp.study.executor import Inline

EVIDENCE = 'evidence=(Evidence(name="first", study="small", records=("outcome/*",)),),'
LATER = SMALL.replace("import Cell, ", "import Cell, Evidence, ").replace(
    'name="small",', f'name="later", {EVIDENCE}'
)


def killed_at(operation: int, path: Path, out: Path) -> bool:
    return killed(lambda event: run(path, out), operation)


def every_operation(path: Path, out: Path, expected: dict[str, str]) -> dict[str, object]:
    differing = []
    operation = 0
    while True:
        operation += 1
        shutil.rmtree(out, ignore_errors=True)
        if not killed_at(operation, path, out):
            break
        run(path, out)
        if tree(out) != expected or (out / "work").exists():
            differing.append(operation)
    return {"operations": operation - 1, "differing": differing}


def in_batches(path: Path, out: Path, expected: dict[str, str]) -> dict[str, object]:
    """The same, with all records of a stage committed together, as worker processes' are."""
    Inline.capacity, Inline.patience = 3, 3600.0
    found = every_operation(path, out, expected)
    Inline.capacity, Inline.patience = 1, 0.0
    return found


def again_and_again(path: Path, out: Path, expected: dict[str, str], every: int) -> dict[str, object]:
    """Killed after so many operations, each time, until it is done."""
    shutil.rmtree(out, ignore_errors=True)
    runs = 1
    while killed_at(every, path, out):
        runs += 1
        assert runs < 200, "no progress"
    return {"runs": runs, "same": tree(out) == expected}


def sealing(folder: Path, out: Path, whole: Path) -> dict[str, object]:
    """Killed at every operation of sealing; then the study, edited meanwhile, is sealed there instead."""
    evidence = {"first": whole}
    before = loading.load(str(study_file(folder, LATER, "later.py")))
    edited = loading.load(str(study_file(folder, LATER + "# edited\n", "edited.py")))
    engine.seal(edited, "small", folder / "sealed", evidence=evidence)
    expected, differing, operation = tree(folder / "sealed"), [], 0
    while True:
        operation += 1
        shutil.rmtree(out, ignore_errors=True)
        if not killed(lambda event: engine.seal(before, "small", out, evidence=evidence), operation):
            break
        sealed = ledger.begun(out / "ledger.jsonl")
        engine.seal(before if sealed else edited, "small", out, evidence=evidence)
        if not sealed and tree(out) != expected:
            differing.append(operation)
    return {"operations": operation - 1, "differing": differing}


def torn_ledger(path: Path, out: Path, whole: Path, expected: dict[str, str]) -> dict[str, object]:
    """The ledger cut inside its last lines, at every byte of them, and here and there before."""
    content = (whole / "ledger.jsonl").read_bytes()
    last = len(content) - len(content.splitlines()[-1]) - 1
    first = content.index(b"\n") + 1  # before that, nothing but the seal can exist
    cuts = sorted({*range(first, last, 97), *range(last, len(content), 7)})
    differing = []
    for cut in cuts:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        (out / "ledger.jsonl").write_bytes(content[:cut])
        run(path, out)
        if tree(out) != expected:
            differing.append(cut)
    return {"cuts": len(cuts), "differing": differing}


def main(folder: Path) -> None:
    quick_identity()
    path = study_file(folder)
    whole, out = folder / "whole", folder / "out"
    run(path, whole)
    expected = tree(whole)
    tasks: dict[str, Callable[[], dict[str, object]]] = {
        "every operation": lambda: every_operation(path, out, expected),
        "in batches": lambda: in_batches(path, out, expected),
        "again and again": lambda: again_and_again(path, out, expected, 30),
        "sealing": lambda: sealing(folder, out, whole),
        "torn ledger": lambda: torn_ledger(path, out, whole, expected),
    }
    print(json.dumps({name: task() for name, task in tasks.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
