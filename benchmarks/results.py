"""Run the committed studies again, in an order that knows what stands on what: `make results`.

Every study is sealed and run by `halfulp study run` in a folder of its own under ``--out``; one that is
finished is left alone, one that was interrupted goes on. A study that takes evidence is given the folder made
here, or the committed one. At the end the records are held against those in `results/studies`: how many are
equal to the last bit, and which label each has. Run it from a clean checkout, so that seals name a commit.
``--pack`` compresses the files that cells attached, which is how long studies are committed.

    python benchmarks/results.py [NAME-SCALE ...] [--out FOLDER] [--workers 1] [--list | --compare | --pack]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from halfulp import canonical
from halfulp.study.store import pack

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "results" / "studies"
COURSE = "native-schedule-shift-recovered"
RECOVERED = "cosine-restart-161803"
"""The folder of the paper's own course, and the cell of it whose record is made by hand."""


@dataclass(frozen=True)
class Result:
    """A study at a scale, and the folders that it takes evidence from."""

    study: str
    scale: str
    evidence: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.study}-{self.scale}"


CONTROLLED = (
    "testbed", "emulator", "finite-size", "phase-diagram", "midpoint", "ce-transfer", "two-layer", "margin",
    "theory", "phase-edge", "char-gpt",
)  # fmt: skip
SMALL = (
    "cnn", "nearest-10k", "dqt-int3", "native-coupled-sr", "native-schedule-shift", "packed-systems",
    "eco-systems", "tile-screen", "mask-reuse", "leverage-primary", "depth-17", "gpt2-pareto", "whole-tensor",
    "policy-3k", "modern-transfer", "source-amortized", "neox-transfer", "gain-rate", "prospective-modern",
    "matched-10k",
)  # fmt: skip


MEDIUM = (
    "cnn", "modern-transfer", "source-amortized", "neox-transfer", "leverage-primary", "gpt2-pareto",
    "depth-17", "whole-tensor", "tile-screen", "mask-reuse", "native-schedule-shift", "matched-10k",
)  # fmt: skip


def _built(scale: str) -> Iterator[Result]:
    """Yield the studies that take evidence from others of a scale; each follows what it stands on."""
    yield Result("saliency-challenge", scale, {"leverage": f"leverage-primary-{scale}"})
    if scale != "medium":  # prospective-modern is as long as it has to be at small
        yield Result("eco-comparator", scale, {"prospective": f"prospective-modern-{scale}"})
    source = f"source-amortized-{scale}"
    evidence = {"archive": f"neox-transfer-{scale}", "references": source, "outcomes": source}
    yield Result("template-challenge", scale, evidence)


ORDER = (
    *(Result(name, "paper") for name in CONTROLLED),
    *(Result(name, "small") for name in SMALL),
    Result("native-schedule-shift", "recovered"),
    *_built("small"),
    *(Result(name, "medium") for name in MEDIUM),
    *_built("medium"),
)


def chosen(names: list[str]) -> list[Result]:
    """Return the named results, or all, in order."""
    known = {result.folder: result for result in ORDER}
    for name in names:
        if name not in known:
            raise SystemExit(f"There is no result {name[:80]!a}; --list shows them.")
    return [result for result in ORDER if not names or result.folder in names]


def closed(folder: Path) -> bool:
    """Return True if a study came to its end there."""
    return (folder / "result.json").exists() and not (folder / "work").exists()


def run(result: Result, out: Path, workers: int) -> str:
    """Run a study to its end, and return what came of it in a word."""
    folder = out / result.folder
    if result.folder == COURSE:
        return course(out, workers)
    if closed(folder):
        return "there"
    command = ["study", "run", result.study, "--scale", result.scale, "--out", str(folder)]
    for name, other in result.evidence.items():
        place = out / other if closed(out / other) else COMMITTED / other
        if not closed(place):
            return f"not run: {other} is missing"
        command += ["--evidence", f"{name}={place}"]
    command += ["--workers", str(workers)] if workers else []
    code = subprocess.run([sys.executable, "-m", "halfulp", *command], check=False).returncode
    if code in (130, 143):
        raise SystemExit(code)
    return "run" if code == 0 else f"failed with exit code {code}"


def halfulp(*arguments: str) -> subprocess.Popen[bytes]:
    """Start halfulp with these arguments."""
    return subprocess.Popen([sys.executable, "-m", "halfulp", *arguments])


def course(out: Path, workers: int) -> str:
    """Take the paper's own course of `native-schedule-shift`: five cells as they ran, the sixth by hand.

    The run is stopped when its forecast is sealed; the sixth record, which is that of a whole run, is put in
    by hand; the rest runs. The registered label is then inconclusive, and the analysis after the fact has
    a label of its own.
    """
    folder, whole = out / COURSE, out / "native-schedule-shift-small"
    whole = whole if closed(whole) else COMMITTED / whole.name
    if closed(folder):
        return "there"
    run = ["study", "run", "native-schedule-shift", "--scale", "small", "--out", str(folder)]
    run += ["--workers", str(workers or 1)]
    first = halfulp(*run)
    while first.poll() is None and not (folder / "seals" / "forecast.json").exists():
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    first.wait()
    record = out / f"{RECOVERED}.json"
    told = whole / "records" / "outcome" / f"{RECOVERED}.json"
    record.write_bytes(canonical.dumps(canonical.loads(told.read_bytes(), told)["outcome"]))
    why = "the paper's course: the sixth cell's record was put together after its process had ended"
    analysis = out / "after.py"
    analysis.write_text("from halfulp.paper.studies.native_schedule_shift import RETROSPECTIVE\n")
    for arguments in (
        ["study", "recover", str(folder), f"outcome/{RECOVERED}", "--record", str(record), "--reason", why],
        run,
        ["study", "retrospect", str(folder), str(analysis), "--to", str(out / f"{COURSE}-after")],
    ):
        if code := halfulp(*arguments).wait():
            return f"failed with exit code {code}"
    record.unlink()
    analysis.unlink()
    return "run"


def outcomes(folder: Path) -> dict[str, object]:
    """Return what every cell gave back, by stage and cell."""
    return {
        str(path.relative_to(folder / "records")): canonical.loads(path.read_bytes(), path)["outcome"]
        for path in sorted((folder / "records").rglob("*.json"))
    }


def compared(result: Result, out: Path) -> str:
    """Return a line: label, and how many records are those that are committed."""
    mine, other = out / result.folder, COMMITTED / result.folder
    if not closed(mine):
        return f"{result.folder}: not finished"
    label = canonical.loads((mine / "result.json").read_bytes(), mine)["label"]
    if not closed(other):
        return f"{result.folder}: {label} (nothing committed to hold it against)"
    before = canonical.loads((other / "result.json").read_bytes(), other)["label"]
    new, old = outcomes(mine), outcomes(other)
    same = sum(old.get(cell) == outcome for cell, outcome in new.items())
    change = "the same label" if label == before else f"committed: {before}"
    return f"{result.folder}: {label} ({change}); {same} of {len(new)} records equal"


def main() -> None:
    """Run what is asked for, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="folders, as cnn-small; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "studies")
    parser.add_argument("--workers", type=int, default=0, help="cells at a time; 0: one a core")
    parser.add_argument("--list", action="store_true", help="only print the order")
    parser.add_argument("--compare", action="store_true", help="only compare what is there")
    parser.add_argument("--pack", action="store_true", help="only compress what is finished there")
    given = parser.parse_args()
    failed = False
    for result in chosen(given.names):
        if given.list:
            print(result.folder, *(f"{name}={other}" for name, other in result.evidence.items()))
            continue
        if given.pack:
            if closed(given.out / result.folder):
                print(f"{result.folder}: {pack(given.out / result.folder)} files compressed")
            continue
        if not given.compare:
            word = run(result, given.out, given.workers)
            failed |= word not in ("there", "run")
            print(f"{result.folder}: {word}", flush=True)
        if not given.compare or (given.out / result.folder).exists():
            print(compared(result, given.out), flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
