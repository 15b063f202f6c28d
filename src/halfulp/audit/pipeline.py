"""``Pipeline``: tensors that a source brings go through a meter and rehearsals into a trace.

    source -> watchlist -> meter       -> sink (trace, memory), listeners
                        -> rehearsals

An audit of optimizer steps has one, an audit of casts has one, and so has each of the states that are tracked
beside the weights. The source says when tensors are set aside and when their change is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from halfulp.audit import arguments
from halfulp.audit.arguments import Grids
from halfulp.audit.meter.counts import Meter, Rows
from halfulp.audit.meter.rows import Array, Row
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.ranks import rank, world
from halfulp.audit.rehearsal.rehearsals import Rehearsals
from halfulp.audit.settings import Listener, Measure, Recording
from halfulp.audit.sinks import manifest
from halfulp.audit.sinks.newest import summary
from halfulp.audit.sinks.trace_sink import TraceSink
from halfulp.audit.sources.watchlist import Namer, Watchlist
from halfulp.errors import UsageError
from halfulp.text import shown, tell
from halfulp.trace import Memory


class Pipeline:
    """Compose a watchlist, a meter, rehearsals and a trace.

    Args:
        grids: The grids that are measured.
        out: Where the trace goes: a folder, memory, or nowhere.
        every: Audit each n-th step.
        measure: What is measured.
        recording: How the trace is recorded.
        meter: Counts what changes; by default all that is measured.
        untrained: Whether tensors without gradients are watched as well.
        rehearsing: The runs that are rehearsed on the same changes.

    Raises:
        UsageError: If an argument is not valid.
    """

    def __init__(
        self,
        grids: Grids,
        out: str | Path | Memory | None,
        *,
        every: int,
        measure: Measure,
        recording: Recording,
        meter: Meter | None = None,
        untrained: bool = False,
        rehearsing: Rehearsals | None = None,
    ) -> None:
        grids, out = arguments.grids_of(grids), arguments.folder_of(out)
        measure.check_grids(grids)
        self.every, self.rehearsing = arguments.count("every", every), rehearsing
        self.meter = meter or Meter(expected=measure.expected_never_moved)
        unsharded = None
        if measure.scored is not None:
            unsharded = "scores= is for whole tensors; this one is sharded."
        elif recording.resume and not isinstance(out, Path):
            unsharded = "resume= of a sharded tensor needs a folder: out=."
        self.watchlist = Watchlist(grids, measure, untrained=untrained, unsharded=unsharded)
        self.sink = TraceSink(out, recording, rehearsing)
        self.listeners: list[Listener] = list(recording.listeners)
        self.roles: Callable[[], dict[str, Any]] = dict
        """Summaries of what accumulates beside the weights, by name."""
        self._newest: tuple[Sequence[Row], float] = (), math.nan
        """The rows of the newest step, and its loss."""
        self._summary: dict[str, Any] = {}
        self.given_up = False
        """True once threads have stepped concurrently or a tensor was replaced; nothing is recorded or
        rehearsed from then on."""

    @property
    def measure(self) -> Measure:
        """Return what is measured: a resumed trace goes on as it was begun."""
        return self.watchlist.measure

    @property
    def watched(self) -> dict[torch.Tensor, Watched]:
        """Return the watched tensors, by identity."""
        return self.watchlist.watched

    @property
    def latest(self) -> dict[str, Any]:
        """Return a summary of the newest step; empty before the first."""
        rows, loss = self._newest
        if rows and self._summary.get("step") != rows[0].step:
            proposals = (self.sink.recording.describe or {}).get("proposals")
            self._summary = summary(rows, loss, self.watchlist, tells_zero=proposals == "known")
        return {**self._summary, "roles": self.roles()} if self._summary else {}

    def open(self, options: dict[str, Any]) -> bool:
        """Open the trace and return True if it is resumed.

        Args:
            options: What its manifest states beside the settings of the measurement.
        """
        recording, watchlist = self.sink.recording, self.watchlist

        def new() -> dict[str, Any]:
            stated = {**self.measure.to_json(), "keep": False, **options}  # weights are no longer kept
            return manifest.begun(watchlist.grids, self.every, stated, recording.describe or {})

        keep_fit = watchlist.keep_fit if self.measure.unfit == "drop" else None
        begun = self.sink.open(new, keep_fit)
        if begun is None:
            return False
        watchlist.resumed = bool(self.sink.skip_until)
        followed = {name: begun["options"][name] for name in ("never_moved", "expected_never_moved")}
        watchlist.measure = replace(self.measure, **followed)
        self.meter.expected = self.measure.expected_never_moved
        return True

    def check_gap(self) -> None:
        """Refuse to continue a trace that ends before the run does."""
        if self.rehearsing is not None and self.sink.has_parts:
            self.rehearsing.begin_at(self.sink.loaded)
        if self.first_missing <= self.sink.step:
            self.sink.close()  # this audit will not write: another may
            self.sink.refuse_gap(self.first_missing)

    @property
    def first_missing(self) -> int:
        """Return the first step that a resumed trace does not have."""
        if self.rehearsing is not None and self.sink.has_parts:
            return self.rehearsing.begun + 1
        periods = -(-self.sink.skip_until // self.every)  # between two due steps nothing is recorded
        return periods * self.every + 1

    # ---- which steps ----

    def regular(self, step: int) -> bool:
        """Return True if a step is one of those that are audited, or was before a resumed trace ended."""
        unheard = self.given_up or not self.listeners
        if self.sink.trouble is not None and unheard and world() == 1:
            return False  # ranks that share a tensor go on together
        return (step - 1) % self.every == 0

    def due(self, step: int) -> bool:
        """Return True if a step is to be recorded."""
        return step > self.sink.skip_until and self.regular(step)

    def rehearses(self, step: int) -> bool:
        """Return True if a step is still to be rehearsed: several optimizers may share the newest."""
        if self.given_up and world() == 1:
            return False
        return self.rehearsing is not None and step > self.rehearsing.begun

    def advance(self) -> None:
        """Go on to the next step."""
        self.sink.step += 1
        self.sink.unwritten += self.due(self.sink.step)
        self.watchlist.begun = self.watchlist.begun or self.due(self.sink.step)

    # ---- tensors ----

    def watch(
        self,
        key: object,
        tensors: list[torch.Tensor],
        name: Namer,
        optimizers: Mapping[torch.Tensor, tuple[torch.optim.Optimizer, dict[str, Any]]] | None = None,
        described: Callable[[], list[dict[str, Any]]] = list,
    ) -> list[Watched]:
        """Take up tensors that were not seen before, and return those that this rank looks at.

        Args:
            key: Whose tensors they are.
            tensors: All of them, as they are now.
            name: Names those that are new.
            optimizers: For rehearsals, the optimizer and group of each.
            described: Gives what the manifest says of their optimizers.
        """
        known = self.watchlist.known(key, tensors)
        if known is not None:
            return known
        try:
            new = self.watchlist.new_among(tensors)
            if new:
                self._take(self.watchlist.take(new, name(new), self.sink.listed()), optimizers, described)
        except UsageError as error:
            if not self.watchlist.begun:
                raise
            for p in tensors:
                if p in self.watched and self.watched[p].before is None:
                    self.leave_out(p)
            self.give_up(str(error))
        return self.watchlist.of(key, tensors)

    def _take(
        self,
        new: list[Watched],
        optimizers: Mapping[torch.Tensor, tuple[torch.optim.Optimizer, dict[str, Any]]] | None,
        described: Callable[[], list[dict[str, Any]]],
    ) -> None:
        if not new:
            return
        measure, rehearsing, sink = self.measure, self.rehearsing, self.sink
        rehearsed = {w for w in new if rehearsing is not None and rehearsing.wants(w.name, w.tensor)}
        sink.share(new, lambda w: measure.never_moved or w in rehearsed)
        for w in new:
            w.follow(
                moved=measure.never_moved,
                stay=measure.expected_never_moved,
                scores=None if measure.scored is None else measure.scored.tile,
                saved=sink.loaded,
            )
            if rehearsing is not None and w in rehearsed and optimizers:
                rehearsing.take_up(w, *optimizers[w.tensor], sink.loaded)
        joined = self.meter.join(new)
        if rehearsing is not None:
            rehearsing.join(joined)
        followed = {"never_moved": measure.never_moved, "expected_never_moved": measure.expected_never_moved}
        sink.list_tensors(
            self.watched.values(),
            grids=[g.name for g in self.watchlist.grids],
            optimizers=described(),
            options=followed,
        )

    def leave_out(self, p: torch.Tensor) -> None:
        """Look at a tensor no longer."""
        self.meter.leave(self.watchlist.leave_out(p))

    def unaltered(self, watched: list[Watched]) -> list[Watched]:
        """Return those that are what they were; if not all are, nothing is recorded from here on."""
        altered = [  # w.altered, spelled out: a call per tensor would take longer for many small ones
            w for w in watched if ((x := w.tensor).dtype, x.shape, x.device) != w.began_as and w.codes is None
        ]
        if not altered:
            return watched
        w = altered[0]
        was, now = (f"{str(d).removeprefix('torch.')} {list(n)} on {at}" for d, n, at in (w.began_as, w.kind))
        self.give_up(
            f"{w.name!r} was {was} when the audit began and is {now} now, so its steps cannot be compared.",
            "Audit what comes before such a change and what comes after it apart: audit.stop(), and another "
            "Audit with an out= of its own.",
        )
        for w in altered:
            self.leave_out(w.tensor)
        return [w for w in watched if w not in altered]

    # ---- rows ----

    def counted_here(self, seen: list[Watched]) -> list[Watched]:
        """Return those of the tensors in the step at hand that this rank counts: the first, all of them."""
        shards = [w for w in seen if w.sharded]
        if shards:
            self.sink.touched = self.sink.step
        return seen if rank() == 0 else shards

    def add(self, seen: Sequence[Watched], rates: Sequence[float], totals: Array) -> None:
        """Record what the step at hand did to tensors."""
        ids = [w.id for w in seen]
        self.sink.rows.append(Row(step=self.sink.step, ids=ids, rates=rates, numbers=totals))

    def measured(self, seen: list[Watched], rates: Sequence[float], rows: Rows) -> bool:
        """Sum rows over ranks and record them; whether this rank records."""
        totals = self.meter.total(seen, rows)
        if rank() == 0:
            self.add(seen, rates, totals)
        return rank() == 0

    def finish(self) -> None:
        """Write what the manifest says of the step that is over, and notify listeners."""
        sink = self.sink
        sink.write_manifest()
        first = len(sink.rows)
        while first and sink.rows[first - 1].step == sink.step:
            first -= 1
        rows, before = sink.rows[first:], self._newest[0]
        if rows and not (before and before[0].step == sink.step):  # of one step, the first time counts
            self._newest = rows, sink.loss(sink.step)
            for listener in list(self.listeners):
                self._notify(listener)

    def _notify(self, listener: Listener) -> None:
        """Call a listener with the newest step; one that raises is dropped, for the training goes on."""
        latest = self.latest
        try:
            listener(latest)
        except Exception as error:
            self.listeners[:] = [other for other in self.listeners if other is not listener]
            name = getattr(listener, "__qualname__", type(listener).__name__)
            why = shown(f"{type(error).__name__}: {error}", 300)
            tell(
                f"halfulp: the listener {name} raised at step {self.sink.step} and is not called again "
                f"({why}). The run and its audit go on. To end a run, raise SystemExit."
            )

    def commit_if_due(self) -> None:
        """Write a part if it is time."""
        grids = len(self.watchlist.grids)
        each = grids if self.rehearsing is None else max(grids, self.rehearsing.each)
        self.sink.commit_if_due(self.watched.values(), each)

    def commit(self) -> None:
        """Write what was recorded since the last part; where tensors are sharded, all ranks call it."""
        self.sink.commit(self.watched.values())

    def give_up(self, why: str, advice: str = "") -> None:
        """Record nothing from here on; what was recorded so far is kept."""
        if self.given_up:
            return
        if self.sink.trouble is None and self.sink.shards is None:
            self.finish()
            self.commit()
        self.given_up = True
        if self.sink.trouble is None:
            what = "the audit" if self.sink.out is None else f"the trace {self.sink.out}"
            self.sink.disable(f"{what} was given up after step {self.sink.step}: {why}", advice)
