"""``Pipeline``: tensors that a source brings go through a meter and rehearsals into a trace.

    source -> watchlist -> meter       -> sink (trace, memory), newest (listeners)
                        -> rehearsals

An audit of optimizer steps has one, an audit of casts has one, and so has each of the states that are tracked
beside the weights. The source says when tensors are set aside and when their change is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from halfulp.audit.meter.counts import Meter, Rows
from halfulp.audit.meter.rows import Array, Row
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.ranks import rank, world
from halfulp.audit.rehearsal.rehearsals import Rehearsals
from halfulp.audit.settings import Measure, Recording
from halfulp.audit.sinks import manifest
from halfulp.audit.sinks.newest import Newest
from halfulp.audit.sinks.trace_sink import TraceSink
from halfulp.audit.sources.watchlist import Namer, Watchlist
from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.trace import Memory


class Pipeline:
    """Compose a watchlist, a meter, rehearsals and a trace.

    Args:
        grids: The grids that are measured.
        out: Where the trace goes: a folder, memory, or nowhere.
        every: Audit each n-th step.
        measure: What is measured.
        recording: How the trace is recorded.
        meter: Counts what changes.
        untrained: Whether tensors without gradients are watched as well.
        rehearsing: The runs that are rehearsed on the same changes.
    """

    def __init__(
        self,
        grids: Sequence[Grid],
        out: Path | Memory | None,
        *,
        every: int,
        measure: Measure,
        recording: Recording,
        meter: Meter,
        untrained: bool = False,
        rehearsing: Rehearsals | None = None,
    ) -> None:
        measure.check_grids(grids)
        self.every, self.meter, self.rehearsing = every, meter, rehearsing
        self.watchlist = Watchlist(
            grids,
            measure,
            untrained=untrained,
            whole=measure.scored is not None,
            folder=recording.resume and not isinstance(out, Path),
        )
        self.sink = TraceSink(out, recording, rehearsing)
        if rehearsing is not None:
            self.sink.states.append(rehearsing.state)
        described = recording.describe or {}
        tells_zero = described.get("proposals") == "known"
        self.newest = Newest(self.watchlist, recording.listeners, tells_zero=tells_zero)
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

    def open(self, options: dict[str, Any]) -> bool:
        """Open the trace, with options in its manifest beside those of the measure; whether it goes on."""
        recording, listed = self.sink.recording, self.watchlist

        def made() -> dict[str, Any]:
            told = {**self.measure.to_json(), "keep": False, **options}  # weights are no longer kept
            return manifest.begun(listed.grids, self.every, told, recording.describe or {})

        keep_fit = listed.keep_fit if self.measure.unfit == "drop" else None
        begun = self.sink.open(made, keep_fit, codes=self.rehearsing is not None)
        if begun is None:
            return False
        listed.resumed = bool(self.sink.skip_until)
        self.meter.expected = begun["options"]["expected_never_moved"]
        followed = {name: begun["options"][name] for name in ("never_moved", "expected_never_moved")}
        listed.measure = replace(self.measure, **followed)
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
        rehearsed = self.rehearsing is not None and self.sink.has_parts
        last = self.rehearsing.begun if rehearsed and self.rehearsing else self.sink.last_held(self.every)
        return last + 1

    # ---- which steps ----

    def regular(self, step: int) -> bool:
        """Return True if a step is one of those that are audited, or was before a resumed trace ended."""
        unheard = self.given_up or not self.newest.listeners
        if self.sink.trouble is not None and unheard and world() == 1:
            return False  # nobody would hear of it; ranks that share a tensor go on together
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
        measure, loaded = self.measure, self.sink.loaded
        self.sink.share(new, self._followed)
        for w in new:
            w.follow(
                moved=measure.never_moved,
                stay=measure.expected_never_moved,
                scores=None if measure.scored is None else measure.scored.tile,
                saved=loaded,
            )
            if self.rehearsing is not None and self.rehearsing.wants(w.name, w.tensor) and optimizers:
                self.rehearsing.take_up(w, *optimizers[w.tensor], loaded)
        known = len(self.meter.batches)
        self.meter.join(new)
        if self.rehearsing is not None:
            self.rehearsing.join(self.meter.batches[known:])
        self.sink.list_tensors(
            self.watched.values(),
            grids=[g.name for g in self.watchlist.grids],
            optimizers=described(),
            options={
                "never_moved": measure.never_moved,
                "expected_never_moved": measure.expected_never_moved,
            },
        )

    def _followed(self, w: Watched) -> bool:
        rehearsed = self.rehearsing is not None and self.rehearsing.wants(w.name, w.tensor)
        return rehearsed or self.measure.never_moved

    def leave_out(self, p: torch.Tensor) -> None:
        """Look at a tensor no longer."""
        self.meter.leave(self.watchlist.leave_out(p))

    def unaltered(self, watched: list[Watched]) -> list[Watched]:
        """Return those that are what they were; if not all are, nothing is recorded from here on."""
        altered = [  # w.altered, spelled out: of many small tensors, a call for each takes longer
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
        self.sink.write_manifest()
        step = self.sink.step
        rows = [*takewhile(lambda r: r.step == step, reversed(self.sink.rows))][::-1]
        self.newest.take(rows, self.sink.loss(step))

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
