"""Runs decoder studies that are killed again and again, and whole; prints what came of it as JSON.

    python decoder_kill.py FOLDER OPERATIONS STUDY[:whole] ...

Every run is a fork, so that this process starts no thread. It kills itself before an operation on the disk
whose number is drawn anew each time, from 1 to OPERATIONS. `template-challenge` takes its evidence from the
others, which are named before it. One that is ``whole`` is not killed.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from decoder_cells import write_corpora
from forks import killed
from study.samples import quick_identity, tree

from halfulp.study import engine, loading, provenance

EVIDENCE = {
    "template-challenge": {
        "archive": "neox-transfer", "references": "source-amortized", "outcomes": "source-amortized",
    }
}  # fmt: skip


def made_up_text(folder: Path) -> None:
    """Studies find the text of `write_corpora` under the names of real ones."""
    place = write_corpora(folder)
    provenance.locate = lambda name, beside: place / name
    provenance.data.verify = lambda *given: None


def run(name: str, out: Path, **options: Any) -> dict[str, Any]:
    """A registered study at the smallest scale, in this process; evidence is of the studies in ``whole``."""
    whole = out.parent.with_name("whole")
    evidence = {key: whole / study for key, study in EVIDENCE.get(name, {}).items()}
    given = {"executor": "inline", "evidence": evidence, **options}
    return engine.run(loading.load(name), "smoke", out, **given)


def killed_at(operation: int, name: str, out: Path) -> bool:
    return killed(lambda event: run(name, out), operation)


def main(folder: Path, most: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    quick_identity()
    made_up_text(folder)
    whole, broken = folder / "whole", folder / "broken"
    drawn = random.Random(17)
    found = {}
    for name, _, once in (given.partition(":") for given in names):
        assert not killed_at(0, name, whole / name)
        label = json.loads((whole / name / "result.json").read_text())["label"]
        runs = 1
        while not once and killed_at(drawn.randint(1, most), name, broken / name):
            runs += 1
            assert runs < 400, "no progress"
        found[name] = {"runs": runs, "label": label}
        found[name]["same"] = bool(once) or tree(broken / name) == tree(whole / name)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
