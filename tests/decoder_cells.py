"""Cells of decoder studies in this process, on a text that is made up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from halfulp.study import Outcomes, Study

LETTERS = "".join(chr(i) for i in range(33, 98))  # 65, as many as Shakespeare's


class Stopped(BaseException):
    """What the engine raises out of ``save`` when a cell is to stop."""


class Here:
    """A cell in this process: data from a folder, a checkpoint in memory, one stop after some saves."""

    def __init__(self, config: Any, folder: Path, name: str = "cell", stop_after: int | None = None) -> None:
        self.config, self.folder, self.name = json.loads(json.dumps(config)), folder, name
        self.saved: bytes | None = None
        self.left = stop_after
        self.records: dict[str, dict[str, Any]] = {}
        self.files: Files = {}
        self.attached: dict[str, bytes] = {}
        self.closed: dict[str, Outcomes] = {}

    def evidence(self, name: str) -> Outcomes:
        return self.closed[name]

    def data(self, name: str) -> Path:
        return self.folder / name

    def read(self, stage: str, cell: str) -> Mapping[str, Any]:
        return self.records[stage][cell]

    def save(self, state: bytes) -> None:
        self.saved = state
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.left = None
                raise Stopped

    def load(self) -> bytes | None:
        return self.saved

    def progress(self, done: float, total: float) -> None:
        assert 0 < done <= total

    def read_bytes(self, stage: str, cell: str, name: str) -> bytes:
        return self.files[stage][cell][name]

    def attach(self, name: str, content: bytes) -> None:
        assert name not in self.attached
        self.attached[name] = content


def write_corpora(made: Path) -> Path:
    """A text with an alphabet of 65, and the same as bytes and as token files."""
    drawn = np.random.default_rng(0)
    text = LETTERS + "".join(LETTERS[i] for i in np.minimum(drawn.geometric(0.1, 6000), 65) - 1)
    (made / "tinyshakespeare.txt").write_text(text)
    (made / "held-out.txt").write_text(text[:500])
    for name in ("train.bin", "val.bin"):
        (np.frombuffer(text.encode(), dtype=np.uint8) - 33).astype(np.uint16).tofile(made / name)
    return made


Records = dict[str, dict[str, Any]]
Files = dict[str, dict[str, dict[str, bytes]]]


def run_outcomes(study: Study, folder: Path, evidence: Mapping[str, Outcomes] | None = None) -> Outcomes:
    """The records of all stages at the smallest scale, as a study's functions are given them."""
    return outcomes(*run_with_files(study, folder, evidence), evidence)


def outcomes(records: Records, files: Files, evidence: Mapping[str, Outcomes] | None = None) -> Outcomes:
    """Records with their files."""

    def attached(stage: str, cell: str, name: str) -> bytes:
        return files[stage][cell][name]

    return Outcomes(records, attached=attached, evidence=evidence or {})


def run_with_files(
    study: Study, folder: Path, evidence: Mapping[str, Outcomes] | None = None
) -> tuple[Records, Files]:
    """The same, with what was attached to each."""
    records: Records = {}
    files: Files = {}
    for stage in study.stages:
        records[stage.name], files[stage.name] = {}, {}
        for cell in study.cells("smoke", stage.name):
            here = Here(cell.config, folder, cell.name)
            here.records = {name: records[name] for name in stage.reads}
            here.files = {name: files[name] for name in stage.reads}
            here.closed = dict(evidence or {})
            records[stage.name][cell.name] = json.loads(json.dumps(stage.run(here), allow_nan=False))
            files[stage.name][cell.name] = here.attached
    return records, files
