"""How an audit writes its trace: part by part, and never at the expense of the training.

A part is written when it has enough steps or rows, or when enough time has passed. If the disk refuses, the
audit says so once and steps aside: the run is not its to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import polars as pl
import torch

from halfulp.audit import manifest
from halfulp.audit.beginning import Beginning
from halfulp.audit.ranks import world
from halfulp.audit.rows import Row, tables
from halfulp.audit.watched import Watched
from halfulp.canonical import LARGEST
from halfulp.errors import HalfulpError
from halfulp.files import is_anothers
from halfulp.text import tell
from halfulp.trace import MOST_ROWS, TraceWriter
from halfulp.trace.reading import SCHEMAS
from halfulp.trace.schema import LOSSES, REHEARSED, check_id

WRITING_SHARE = 0.01
"""Parts are written less often than every ``part_seconds`` if that took more than this share of the time."""
PART_ROWS = MOST_ROWS // 2
"""A part is written when its largest table has this many rows, however few steps those are."""


class Writing(Beginning):
    """The part of an audit that makes what was recorded durable."""

    decay: bool
    part_steps: int
    part_seconds: float
    describe: dict[str, Any]
    roles: Any
    trouble: str | None
    _rows: list[Row]
    _losses: dict[int, list[float]]
    _kept: dict[str, list[torch.Tensor]]
    _opened: float
    """When the part at hand was begun."""
    _writing: float
    """Seconds that the last one took."""
    _unwritten: int

    def _loss(self, step: int) -> float:
        told = self._losses.get(step)
        return sum(told) / len(told) if told else math.nan

    def _commit_if_due(self) -> None:
        enough = max(self.part_seconds, self._writing / WRITING_SHARE)
        late = time.monotonic() - self._opened > enough and world() == 1
        each = len(self.grids) if self.rehearsing is None else max(len(self.grids), self.rehearsing.each)
        most = min(self.part_steps, PART_ROWS // (each * max(1, len(self.watched))))
        if late or self._unwritten >= max(1, most):
            self.commit()

    def commit(self) -> None:
        """Write what was recorded since the last part; where tensors are sharded, all ranks call it."""
        self._unwritten = 0
        if self._writer is not None:
            self._written(self._writer.check)
        if self._shards is not None and self._touched > self._shards.step:
            if self._writer is None:
                self._written(check_id, self._shards.out, self._shards.trace)
            self._written(self._shards.save, self._touched, self._state_of)
        self._commit_part()
        if self._shards is not None and self._writer is not None:
            self._written(self._shards.clear)

    def _commit_part(self) -> None:
        self._opened = time.monotonic()
        rows, kept = self._rows, self._kept
        losses = {row.step: self._loss(row.step) for row in rows}
        self._rows, self._losses, self._kept = [], {}, {}
        extra = {} if self.rehearsing is None else {REHEARSED: self.rehearsing.table()}
        evaluated = [row[0] for row in self._evaluated]
        if not any((rows, *evaluated)) or self._writer is None or self.trouble is not None:
            return  # an evaluation before the first step waits for it
        if evaluated:
            extra[LOSSES] = pl.DataFrame(self._evaluated, schema=SCHEMAS[LOSSES], orient="row")
            self._evaluated = []
        self._hold_count()
        state = {**self._loaded, **self.attributed.state()}  # of tensors that have not come up again, too
        if self.rehearsing is not None:
            state.update(self.rehearsing.state())
        if self._shards is not None:
            state.update(self._shards.name())
        for w in self.watched.values():
            state.update({} if w.sharded else self._state_of(w))
        start = time.monotonic()
        made, weights = tables(rows, losses, len(self.grids)), {n: torch.stack(v) for n, v in kept.items()}
        last = rows[-1].step if rows else evaluated[-1]
        self._written(self._writer.commit, {**made, **extra}, state, weights, last_step=last)
        self._writing = time.monotonic() - start

    def _state_of(self, w: Watched) -> dict[str, torch.Tensor]:
        """What a resumed audit needs of a tensor: of the shard on this rank, or of all of it."""
        return {**w.state(), **({} if self.rehearsing is None else self.rehearsing.state_of(w))}

    def _written(self, write: Callable[..., None], *what: Any, **options: Any) -> None:
        """Write to the trace; if that fails, step aside: the training is not the audit's to stop."""
        if self.trouble is not None:
            return
        try:
            write(*what, **options)
        except (HalfulpError, OSError) as error:
            if is_anothers(error):
                raise
            self._step_aside(f"the trace {self.out} could not be written at step {self.step}: {error}")

    @property
    def lost(self) -> bool:
        """Whether the folder of the trace was moved, removed or taken by another recording in mid-run."""
        return isinstance(self._writer, TraceWriter) and self._writer.lost

    def _step_aside(self, why: str, advice: str = "") -> None:
        last = "The" if self._writer is None else f"It ends at step {self._writer.last_step}; the"
        self.trouble = f"{why} {last} run went on without it.{advice and ' '}{advice}"
        tell(f"halfulp: {self.trouble}")
        if self._writer is not None:
            self._writer.note_trouble(self.trouble)
        self._rows, self._losses, self._kept = [], {}, {}

    def _manifest(self) -> dict[str, Any]:
        options = {
            "sample": self.sample,
            "decay": self.decay,
            "never_moved": self.never_moved,
            "expected_never_moved": self.expected,
            "keep": self.keep,
            "scores": None if self.scores is None else self.scores.told(),
            "rehearse": None if self.rehearsing is None else self.rehearsing.asked.told(),
            "seed": self.seed if abs(self.seed) <= LARGEST else str(self.seed),
        }
        if self.roles is not None:
            options["roles"] = self.roles.told()
        return manifest.begun(self.grids, self.every, options, self.describe)
