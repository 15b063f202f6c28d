"""Cells without an engine: what a cell function needs, and an interruption at a chosen checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halfulp.study.protocol import Study

Records = dict[str, dict[str, Any]]


class InterruptedCellError(Exception):
    """The process died after writing a checkpoint."""


class Alone:
    """A `Running` in memory. ``dies_after``: raise at that checkpoint, counted from one."""

    def __init__(
        self, name: str, config: Mapping[str, Any], records: Records, dies_after: int = 0,
        data: Mapping[str, Path] | None = None,
    ) -> None:  # fmt: skip
        self.name, self.config, self.records, self._data = name, config, records, data or {}
        self.dies_after, self.saved, self.state = dies_after, 0, None

    def read(self, stage: str, cell: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.records[stage][cell]
        return found

    def read_bytes(self, stage: str, cell: str, name: str) -> bytes:
        raise NotImplementedError

    def attach(self, name: str, content: bytes) -> None:
        raise NotImplementedError

    def data(self, name: str) -> Path:
        return self._data[name]

    def save(self, state: bytes) -> None:
        self.state, self.saved = state, self.saved + 1
        if self.saved == self.dies_after:
            raise InterruptedCellError

    def load(self) -> bytes | None:
        return self.state

    def progress(self, done: float, total: float) -> None:
        assert 0 < done <= total


def run_cell(run: Callable[[Any], Mapping[str, Any]], cell: Alone) -> dict[str, Any]:
    """What the cell leaves, as it is after a trip through JSON."""
    found: dict[str, Any] = json.loads(json.dumps(run(cell), allow_nan=False))
    return found


def run_study(study: Study, scale: str) -> Records:
    """Every stage in order, without an engine."""
    records: Records = {}
    for stage in study.stages:
        records[stage.name] = {
            cell.name: run_cell(stage.run, Alone(cell.name, cell.config, records))
            for cell in study.cells(scale, stage.name)
        }
    return records
