"""``TraceSink``: write rows to a trace, part by part, and never at the expense of the training.

A part is written when it has enough steps or rows, or when enough time has passed. If the disk refuses, the
sink says so once and is disabled: the run is not its to stop.

The first rank writes. On the others a resumed recording reads the same trace: it must skip the same steps,
and go on with the codes of rehearsals and with what is followed of its shards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfulp.audit.meter.rows import Row, tables
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.ranks import rank, world
from halfulp.audit.rehearsal.rehearsals import Rehearsals
from halfulp.audit.settings import Recording
from halfulp.audit.sinks import shard_state
from halfulp.audit.sinks.shard_state import Shards
from halfulp.errors import HalfulpError, UsageError
from halfulp.files import is_anothers
from halfulp.text import tell
from halfulp.trace import MOST_ROWS, Memory, Trace, TraceWriter, free_folder
from halfulp.trace.columns import SCHEMAS, Columns
from halfulp.trace.resuming import Resumed, shards_of
from halfulp.trace.schema import LOSSES, check_id

WRITING_SHARE = 0.01
"""Parts are written less often than every ``part_seconds`` if that took more than this share of the time."""
PART_ROWS = MOST_ROWS // 2
"""A part is written when its largest table has this many rows, however few steps those are."""
FIRST = "first_step= (--first-step)"
State = dict[str, torch.Tensor]


class TraceSink:
    """Take the rows of steps, and make them durable in a folder or in memory.

    Args:
        out: The folder, a :class:`~halfulp.Memory`, or None to keep nothing.
        recording: How it is recorded.
        beside: The rehearsals that are recorded with it.
    """

    def __init__(
        self, out: Path | Memory | None, recording: Recording, beside: Rehearsals | None = None
    ) -> None:
        self.out = out if isinstance(out, Path) else None
        self.memory = out if isinstance(out, Memory) else None
        self.recording, self._beside = recording, beside
        self.step = 0 if recording.first_step is None else recording.first_step - 1
        """The newest step of the run."""
        self.states: list[Callable[[], State]] = [] if beside is None else [beside.state]
        """The functions that contribute to the state of every part."""
        self.writer: TraceWriter | Memory | None = None
        self.resumed: Resumed | None = None
        """The point from which a resumed recording continues; None if it is in memory."""
        self.skip_until = 0
        """The last step that a resumed trace holds."""
        self.loaded: State = {}
        """The part of its state that has not been claimed yet."""
        self.shards: Shards | None = None
        self.touched = 0
        """The last step that a shard took part in."""
        self.unwritten = 0
        """Steps that were due since the last part, the same on all ranks."""
        self._unwritten_manifest = False
        self.trouble: str | None = None
        """Why the trace ends before the run, if it does; the run itself continues."""
        self.rows: list[Row] = []
        self._losses: dict[int, list[float]] = {}
        self._evaluated: list[tuple[int, int, int, float]] = []
        """Evaluations that are not written yet: step, rehearsal, bound, loss; -1 for the run itself."""
        self._opened, self._writing = time.monotonic(), 0.0
        """The time at which the current part was begun, and the seconds that the last one took."""

    # ---- opening ----

    def open(
        self, manifest: Callable[[], dict[str, Any]], keep_fit: Callable[[Trace], None] | None
    ) -> dict[str, Any] | None:
        """Open the trace; return the manifest of one that is resumed, None for a new one.

        Args:
            manifest: Makes the manifest of a new one.
            keep_fit: Leaves out grids that a trace was begun without, if they may be left out.
        """
        self._opened = time.monotonic()
        resume = self.recording.resume
        if rank() == 0:
            if self.out is not None:
                self.out = self._free(self.out)
                if resume and keep_fit is not None and (self.out / "manifest.json").exists():
                    keep_fit(Trace.open(self.out))
                self.writer = TraceWriter(self.out, manifest(), resume=resume)
                self.resumed = self.writer.resumed
            elif self.memory is not None:
                self.writer = self.memory.begin(manifest())
        elif self.out is not None and resume:
            self.resumed = self._seen_from_here(self.out, keep_fit)
        begun = self._begun
        if begun is None or not (begun.count or (self.resumed is not None and self.resumed.cut)):
            return None
        self.skip_until = begun.last_step
        self.loaded = begun.load_state()
        self.touched = shards_of(self.loaded)[0] or self.skip_until
        return begun.manifest

    @property
    def _begun(self) -> TraceWriter | Memory | Resumed | None:
        """The trace that is resumed; on other ranks than the first, as it is seen from there."""
        return self.resumed if self.writer is None else self.writer

    def _free(self, out: Path) -> Path:
        """Return the folder for the trace: a notebook's cell that runs again gets another one."""
        how = self.recording
        if how.resume or how.exists == "raise" or not (out / "manifest.json").exists():
            return out
        free = free_folder(out)
        tell(f"halfulp: {out} holds a trace already; this one goes to {free}.")
        return free

    def _seen_from_here(self, out: Path, keep_fit: Callable[[Trace], None] | None) -> Resumed | None:
        """Return the trace that the first rank resumes, on another."""
        if not (out / "manifest.json").exists():
            if self.step and self._beside is not None:
                raise UsageError(
                    f"cannot resume {out}: rank {rank()} finds no trace there, but needs the codes of the "
                    "rehearsals. All ranks need to see one folder."
                )
            return None
        trace = Trace.open(out, verify=False)
        if not trace.recorded:
            return None
        if keep_fit is not None:
            keep_fit(trace)
        return Resumed.of(trace)

    @property
    def has_parts(self) -> bool:
        """True if the trace being continued has parts."""
        return self._begun is not None and bool(self._begun.count)

    def refuse_gap(self, missing: int) -> None:
        """Say that a run goes on after a step that the trace does not have."""
        raise UsageError(
            f"{self.out or 'this memory'} ends at step {missing - 1}, but this run goes on after step "
            f"{self.step}: step {missing} would be missing. Resume from an earlier checkpoint, or say which "
            f"step the first one is with {FIRST}."
        )

    # ---- tensors ----

    def listed(self) -> Sequence[dict[str, Any]]:
        """Return the tensors in the manifest."""
        return () if self._begun is None else self._begun.manifest["tensors"]

    def share(self, new: Sequence[Watched], followed: Callable[[Watched], bool]) -> None:
        """Meet the ranks that hold other shards, and take from a resumed trace what this one needs."""
        writer = self.writer if isinstance(self.writer, TraceWriter) else None
        writes = None if writer is None else (writer.path, writer.manifest["id"], self.skip_until)
        sharded = [w for w in new if w.sharded]
        self.shards = shard_state.agree(self.shards, writes, sharded, self.skip_until, self.loaded)
        if self.shards is not None:
            self.out = self.shards.out  # numbered, if it was taken
        if self.resumed is not None:
            shard_state.restore(self.loaded, self.resumed, new, followed)

    def list_tensors(self, watched: Iterable[Watched], **changed: Any) -> None:
        """State in the manifest which tensors are watched, and what else has changed."""
        if self.writer is None:
            return
        manifest = self.writer.manifest
        inventory = {w.id: w.inventory() for w in watched}
        for listed in manifest["tensors"]:  # parts are bound to what is listed, so that stays
            here = inventory.get(listed["id"], listed)
            for key in (k for k in listed if k != "device" and listed[k] != here[k]):
                raise UsageError(
                    f"cannot resume {self.out}: {listed['name']!r} has {key} {listed[key]!r} there, but "
                    f"{here[key]!r} here."
                )
            inventory[listed["id"]] = listed
        manifest["tensors"] = [inventory[i] for i in sorted(inventory)]
        self.state_in_manifest(changed)

    def state_in_manifest(self, changed: dict[str, Any]) -> None:
        """Put values into the manifest, those of dictionaries one by one; it is written with the step."""
        if self.writer is None:
            return
        for key, value in changed.items():
            if isinstance(value, dict):
                self.writer.manifest[key].update(value)
            else:
                self.writer.manifest[key] = value
        self._unwritten_manifest = True

    def write_manifest(self) -> None:
        """Write the manifest if something new is in it: once for all that the step at hand has changed."""
        if self._unwritten_manifest and self.writer is not None:
            self._unwritten_manifest = False
            self.guard(self.writer.write_manifest)

    # ---- rows ----

    def add_loss(self, losses: Iterable[torch.Tensor | float]) -> None:
        """Add to the losses of the step at hand; their mean is recorded."""
        self._losses.setdefault(self.step, []).extend(float(x) for x in losses)

    def set_loss(self, step: int, loss: float) -> None:
        """Set the loss of a step that is not written yet."""
        if any(row.step == step for row in self.rows):
            self._losses[step] = [loss]

    def loss(self, step: int) -> float:
        """Return the mean of the recorded losses of a step; NaN if there are none."""
        losses = self._losses.get(step)
        return sum(losses) / len(losses) if losses else math.nan

    def add_evaluation(self, rows: Sequence[tuple[int, int, float]]) -> None:
        """Take the losses of an evaluation: (rehearsal, bound, loss) each; a later one of a step counts."""
        new = {(self.step, *row[:2]) for row in rows}
        self._evaluated = [row for row in self._evaluated if row[:3] not in new]
        self._evaluated += [(self.step, *row) for row in rows]

    # ---- parts ----

    def commit_if_due(self, watched: Collection[Watched], each: int) -> None:
        """Write a part if it is time; ``each``: rows per tensor and step of the largest table."""
        enough = max(self.recording.part_seconds, self._writing / WRITING_SHARE)
        late = time.monotonic() - self._opened > enough and world() == 1
        most = min(self.recording.part_steps, PART_ROWS // (each * max(1, len(watched))))
        if late or self.unwritten >= max(1, most):
            self.commit(watched)

    def commit(self, watched: Collection[Watched]) -> None:
        """Write what was recorded since the last part; where tensors are sharded, all ranks call it."""
        self.unwritten = 0
        self.write_manifest()
        if self.writer is not None:
            self.guard(self.writer.check)
        if self.shards is not None and self.touched > self.shards.step:
            if self.writer is None:
                self.guard(check_id, self.shards.out, self.shards.trace)
            self.guard(self.shards.save, self.touched, self._state_of)
        self._commit_part(watched)
        if self.shards is not None and self.writer is not None:
            self.guard(self.shards.clear)

    def _commit_part(self, watched: Collection[Watched]) -> None:
        self._opened = time.monotonic()
        rows, losses = self.rows, {row.step: self.loss(row.step) for row in self.rows}
        self._drop()
        more = {} if self._beside is None else self._beside.tables()
        self.guard(self._write_part, rows, losses, more, watched)

    def _write_part(
        self,
        rows: list[Row],
        losses: dict[int, float],
        more: dict[str, Columns],
        watched: Collection[Watched],
    ) -> None:
        evaluated = [row[0] for row in self._evaluated]
        if not any((rows, *evaluated)) or self.writer is None:
            return  # an evaluation before the first step waits for it
        if evaluated:
            columns = zip(SCHEMAS[LOSSES].items(), zip(*self._evaluated, strict=True), strict=True)
            more[LOSSES] = Columns({name: np.array(column, dtype=kind) for (name, kind), column in columns})
            self._evaluated = []
        state = dict(self.loaded)  # of tensors that have not come up again, too
        for contribute in self.states:
            state.update(contribute())
        if self.shards is not None:
            state.update(self.shards.name())
        for w in watched:
            state.update({} if w.sharded else self._state_of(w))
        start = time.monotonic()
        measured = tables(rows, losses, len(self.writer.manifest["grids"]))
        last = rows[-1].step if rows else evaluated[-1]
        self.writer.commit({**measured, **more}, state, last_step=last)
        self._writing = time.monotonic() - start

    def _state_of(self, w: Watched) -> State:
        """Return what a resumed audit needs of a tensor: of the shard on this rank, or of all of it."""
        return w.state() | ({} if self._beside is None else self._beside.state_of(w))

    def _drop(self) -> None:
        self.rows, self._losses = [], {}

    # ---- trouble and the end ----

    def guard(self, write: Callable[..., None], *what: Any, **options: Any) -> None:
        """Write to the trace; if that fails, disable it: the training is not the audit's to stop."""
        if self.trouble is not None:
            return
        try:
            write(*what, **options)
        except (HalfulpError, OSError, MemoryError) as error:
            if is_anothers(error):
                raise
            why = "memory ran out." if isinstance(error, MemoryError) else str(error)
            self.disable(f"the trace {self.out} could not be written at step {self.step}: {why}")

    def disable(self, why: str, advice: str = "") -> None:
        """Record nothing from here on, and say why, once; what was written is kept."""
        last = "The" if self.writer is None else f"It ends at step {self.writer.last_step}; the"
        self.trouble = f"{why} {last} run went on without it.{advice and ' '}{advice}"
        tell(f"halfulp: {self.trouble}")
        if self.writer is not None:
            self.writer.note_trouble(self.trouble)
        self._drop()

    def begin(self, opening: Callable[[], object]) -> None:
        """Open the trace; if that fails, disable it but stay in step with the other ranks."""
        try:
            opening()
        except (HalfulpError, OSError) as error:
            if is_anothers(error):
                raise
            if self.writer is not None:
                self.writer.close()
            self.writer, self.resumed, self.loaded, self.skip_until = None, None, {}, 0
            self.disable(f"the trace {self.out} could not be begun: {error}")

    @property
    def lost(self) -> bool:
        """True if the trace's folder was moved, removed or taken by another recording during the run."""
        return isinstance(self.writer, TraceWriter) and self.writer.lost

    def close(self) -> None:
        """Let go of the folder."""
        if self.writer is not None:
            self.writer.close()

    def discard_if_empty(self) -> bool:
        """Remove the trace's folder if nothing was recorded into it; one that says why is kept."""
        return self.writer is not None and self.trouble is None and self.writer.discard_if_empty()
