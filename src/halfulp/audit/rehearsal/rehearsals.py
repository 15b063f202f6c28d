"""Rehearsals: beside a high-precision run, the codes of the run that did not happen.

A forecast by projection says how many updates a grid would lose; it forgets at once what was lost. A
rehearsal remembers: it holds codes of its own, s, which start at Q(w) and are moved by the reference's own
proposals d = w' - w under a grid and a policy. Two of them bracket the run that would really happen, which
would notice that it stays behind, and compensate:

    upper   s <- policy(s + d)                  the open loop: nothing is compensated
    point   s <- policy(s + d + k (w - s))      a pull towards the reference: some of it is
    lower   Q(w)                                the projection: everything is, at once; nothing is kept for it

The pull k is a number per tensor and step: by default .8 times the square root of the largest rate of the
tensor's group so far, at most 1. Upper and lower are bounds as observed, not proved.
:mod:`halfulp.kernels.rehearse_reference` has the arithmetic; :mod:`~halfulp.audit.rehearsal.as_if` puts
rehearsed weights into the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halfulp.audit.meter.counts import Batch
from halfulp.audit.meter.tensor import Watched, check_saved
from halfulp.audit.ranks import rank, reduced
from halfulp.audit.rehearsal.specs import NO_BACK, Rehearse, moment_units
from halfulp.errors import UsageError
from halfulp.kernels import TILE
from halfulp.kernels import rehearse as kernel
from halfulp.kernels.rehearse import COUNTS, Rule, State
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream
from halfulp.trace.columns import Columns
from halfulp.trace.schema import BOUNDS, REHEARSED
from halfulp.writeback.policies import Policy, TileMaster
from halfulp.writeback.rules import rate_of
from halfulp.writeback.sharding import local, shard_offset

Numbers = np.ndarray[Any, Any]
STEP = "rehearsed.step"


@dataclass(eq=False)
class Rehearsed:
    """One tensor under rehearsal."""

    watched: Watched
    rules: list[Rule]
    states: list[State]
    """State by rehearsal, with one row per bound."""
    chosen: list[torch.Tensor | None]
    """The coordinates that have a master, by rehearsal; None if all do."""
    offset: int
    """Offset of this rank's shard in the whole tensor."""
    largest: float = 0.0
    """The largest rate of its group so far."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that a resumed audit needs."""
        tensors = {
            f"{self.watched.id}.largest": torch.tensor([self.largest], dtype=torch.float64, device="cpu")
        }
        for j, state in enumerate(self.states):
            tensors.update({f"{self.watched.id}.{j}.{what}": t for what, t in state.tensors().items()})
        return tensors


class RehearsedBatch:
    """Rehearsals of small tensors that are audited together, in one block of memory and one call."""

    def __init__(self, batch: Batch, tensors: Mapping[Watched, Rehearsed]) -> None:
        self.batch = batch
        self.members = [tensors.get(w) for w in batch.members]
        sizes = [shape.numel() for shape in batch.shapes]
        self.table = kernel.table_of(sizes, [m is not None for m in self.members])
        one = next(m for m in self.members if m is not None)
        self.states = [
            h.empty(len(self.table)) if kernel.fused(rule, batch.before) else None
            for h, rule in zip(one.states, one.rules, strict=True)
        ]
        self.chosen = [
            None if c is None else torch.zeros(batch.before.shape, dtype=torch.bool, device="cpu")
            for c in one.chosen
        ]
        for m, first, numel in zip(self.members, batch.starts, sizes, strict=True):
            for j, whole in enumerate(self.states):
                if m is None or whole is None:
                    continue
                part = whole.part(first, numel)
                for name, into in part.tensors().items():
                    into.copy_(m.states[j].tensors()[name])
                m.states[j] = part
                flat, chosen = self.chosen[j], m.chosen[j]
                if flat is not None and chosen is not None:
                    flat[first * TILE :][:numel] = chosen.reshape(-1)

    def move(
        self, j: int, rule: Rule, step: kernel.BatchStep, back: Sequence[tuple[float, float]]
    ) -> Numbers:
        """Replay a step on all members; (members, bounds, COUNTS)."""
        state, batch = self.states[j], self.batch
        assert state is not None and batch.after is not None
        counts = kernel.move_many(rule, state, batch.before, batch.after, step, back, self.chosen[j])
        return np.add.reduceat(counts, batch.starts, axis=0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The effect of one step on the rehearsals of its tensors."""

    step: int
    ids: Sequence[int]
    numbers: Numbers
    """(tensors, rehearsals, bounds, COUNTS)."""


class Rehearsals:
    """All rehearsals of an audit."""

    def __init__(self, rehearse: Rehearse, seed: int) -> None:
        self.rehearse, self.seed = rehearse, seed
        self.step, self.begun = 0, 0
        """The last step that was replayed, and the last of those that a resumed trace had."""
        self.tensors: dict[Watched, Rehearsed] = {}
        self.rows: list[Moved] = []
        self.batches: list[RehearsedBatch] = []
        self.shown: str | None = None
        """As what the model is shown at the moment, if it is."""

    @property
    def bounds(self) -> list[str]:
        """The bounds that can be shown; the lower one needs nothing that is kept."""
        return [b for b in BOUNDS if b in self.rehearse.bounds or b == "lower"]

    @property
    def each(self) -> int:
        """Rows a tensor and step."""
        return len(self.rehearse.each) * len(self.rehearse.bounds)

    def begin_at(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Continue after the step at which a trace ended."""
        self.step = self.begun = int(saved[STEP])

    # ---- tensors ----

    def wants(self, name: str, p: torch.Tensor) -> bool:
        """Return True if a tensor is to be rehearsed."""
        return p.dim() >= 2 if self.rehearse.params is None else bool(self.rehearse.params(name, p))

    def take_up(
        self,
        w: Watched,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        saved: dict[str, torch.Tensor],
    ) -> None:
        """Begin with a tensor as it is now, or restore the state that a trace saved."""
        try:
            if w.codes is not None or w.stored != str(w.tensor.dtype).removeprefix("torch."):
                raise UsageError(
                    f"it is written back to {w.stored} already; a rehearsal replays the proposals of a run "
                    "in high precision."
                )
            rules, chosen = [], []
            for r in self.rehearse.each:
                r.policy.check(r.grid, optimizer, group)
                rules.append(r.rule(w.tensor.dtype))
                chosen.append(_chosen(r.policy, w))
            if self.rehearse.needs_rate and not rate_of(group) >= 0:
                raise UsageError(
                    "its optimizer has no rate (lr) from which a pull could be taken. Pass a rule, "
                    "Rehearse(pull=function), or pull=0."
                )
        except UsageError as error:
            raise UsageError(f"parameter {w.name!r} cannot be rehearsed: {error}") from None
        rehearsed = Rehearsed(w, rules, [], chosen, shard_offset(w.tensor))
        for r, rule, of in zip(self.rehearse.each, rules, chosen, strict=True):
            raw = getattr(r.policy, "start_from", "code") == "raw"
            carries = r.kernel.keeps == "carry" and w.tensor.dtype != torch.float64
            kept = r.kernel.dtype if carries else None
            rows = len(self.rehearse.bounds)
            rehearsed.states.append(kernel.begin(rule, w.values(), rows, raw=raw, chosen=of, kept=kept))
        for key, value in rehearsed.state().items():
            if key in saved:
                check_saved(saved[key], value, f"{key} of {w.name!r}")
                value.copy_(saved.pop(key))
                if key.endswith(".largest"):
                    rehearsed.largest = float(value)
        self.tensors[w] = rehearsed
        w.rehearsed = True

    # ---- steps ----

    def join(self, batches: Sequence[Batch]) -> None:
        """Have the tensors of a batch go on together."""
        for batch in batches:
            if any(w in self.tensors for w in batch.members):
                batch.keep_after()
                self.batches.append(RehearsedBatch(batch, self.tensors))

    def replay(
        self,
        seen: Sequence[Watched],
        groups: Mapping[torch.Tensor, dict[str, Any]],
        states: Mapping[torch.Tensor, dict[str, Any]],
        step: int,
        *,
        record: bool,
    ) -> None:
        """Replay a step on the tensors that were part of it, and record what it moved."""
        with ExitStack() as units:
            for r in (self.tensors[w] for w in seen if w in self.tensors):
                for one, h in zip(self.rehearse.each, r.states, strict=True):
                    if one.kernel.keeps == "error" and h.kept is not None and r.watched.tensor in states:
                        p = r.watched.tensor
                        units.enter_context(moment_units(h.kept, groups[p], states[p]))
            moved, counts = self.follow(seen, groups, step)
        if not moved:
            return
        totals = reduced(moved, counts)
        if rank() == 0 and record:
            self.rows.append(Moved(step=step, ids=[w.id for w in moved], numbers=totals))

    def follow(
        self, seen: Sequence[Watched], groups: Mapping[torch.Tensor, dict[str, Any]], step: int
    ) -> tuple[list[Watched], list[torch.Tensor]]:
        """Replay a step on the tensors that were part of it: which, and (rehearsals, bounds, COUNTS) each."""
        present = [self.tensors[w] for w in seen if w in self.tensors]
        place = {r: i for i, r in enumerate(present)}
        each = self.rehearse.each
        steps = [self._step_of(r, groups[r.watched.tensor], step) for r in present]
        back = [[one.back(groups[r.watched.tensor]) for r in present] for one in each]
        shape = (len(present), len(each), len(self.rehearse.bounds), len(COUNTS))
        counts, done = np.zeros(shape), np.zeros(shape[:2], dtype=bool)
        for batch in self.batches:
            at = [-1 if m is None else place.get(m, -1) for m in batch.members]
            here = np.array([i for i in at if i >= 0], dtype=np.intp)
            if not here.size:
                continue
            inputs = [None if i < 0 else steps[i] for i in at]
            together = kernel.BatchStep(inputs, batch.table, batch.batch.before.dtype)
            for j in range(len(each)):
                if batch.states[j] is not None:
                    factors = [NO_BACK if i < 0 else back[j][i] for i in at]
                    moved = batch.move(j, present[here[0]].rules[j], together, factors)
                    counts[here, j], done[here, j] = moved[np.array(at) >= 0], True
        rows = list(torch.from_numpy(counts))
        for i in np.flatnonzero(~done.all(axis=1)).tolist():
            r, w = present[i], present[i].watched
            assert w.before is not None
            parts = [*rows[i]]
            for j in np.flatnonzero(~done[i]).tolist():
                given = (w.before, w.values(), steps[i], back[j][i], r.chosen[j])
                parts[j] = kernel.move(r.rules[j], r.states[j], *given).sum(dim=0).to(torch.float64)
            rows[i] = torch.stack(parts)
        self.step = step
        return [r.watched for r in present], rows

    def _step_of(self, r: Rehearsed, group: Mapping[str, Any], step: int) -> kernel.TensorStep:
        """Return what the kernel needs to know of one tensor at a step."""
        stream = Stream(seed=self.seed, name=r.watched.name, step=step, offset=r.offset)
        return kernel.TensorStep(pulls=self._pulls(r, group, step), stream=stream)

    def _pulls(self, r: Rehearsed, group: Mapping[str, Any], step: int) -> list[float]:
        rate = rate_of(group)
        r.largest = max(r.largest, rate) if rate == rate else r.largest
        rule = self.rehearse.pull
        k = rule(r.watched.name, step, rate, r.largest) if callable(rule) else rule * r.largest
        if not k >= 0:
            raise UsageError(f"the pull of {r.watched.name!r} at step {step} is {k!r}: expected 0 to 1.")
        k = min(1.0, float(k))
        return [k if bound == "point" else 0.0 for bound in self.rehearse.bounds]

    # ---- weights ----

    def index(self, spec: str) -> int:
        """Return the index of a rehearsal by its spec."""
        names, name = self.rehearse.names, spec.removesuffix(":rne")
        if name not in names:
            raise UsageError(f"{spec!r} is not rehearsed; this audit rehearses {', '.join(names)}.")
        return names.index(name)

    def weights(self, j: int, bound: str) -> dict[Watched, torch.Tensor]:
        """Return the rehearsed weights (of this rank), in the containers."""
        if bound not in BOUNDS:
            raise UsageError(f"a bound is one of {', '.join(BOUNDS)}, not {bound!r}.")
        if bound == "lower":
            return {w: projected(r.rules[j].grid, local(w.tensor.detach())) for w, r in self.tensors.items()}
        kept = tuple(self.rehearse.bounds)
        if bound not in kept:
            raise UsageError(f"bound {bound!r} is not kept: this audit was made with bounds={kept!r}.")
        at = kept.index(bound)
        return {w: self._weights(r, j, at) for w, r in self.tensors.items()}

    def _weights(self, r: Rehearsed, j: int, at: int) -> torch.Tensor:
        here = local(r.watched.tensor)
        stored = r.states[j].held[at]
        return kernel.values(r.rules[j], stored.reshape(here.shape), here.dtype)

    @property
    def payload_bytes(self) -> int:
        """Bytes that are kept between steps."""
        each = (h for r in self.tensors.values() for h in r.states)
        masks = (c for r in self.tensors.values() for c in r.chosen if c is not None)
        return sum(h.payload_bytes for h in each) + sum(c.numel() * c.element_size() for c in masks)

    # ---- the trace ----

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that a resumed audit needs, apart from the state of each tensor."""
        return {STEP: torch.tensor([self.step], device="cpu")}

    def state_of(self, w: Watched) -> dict[str, torch.Tensor]:
        """Return the state of one tensor that a resumed audit needs."""
        state = self.tensors[w].state() if w in self.tensors else {}
        return {name: t.contiguous() for name, t in state.items()}

    def tables(self) -> dict[str, Columns]:
        """Return the rows recorded since the last part, and clear them."""
        rows, self.rows = self.rows, []
        return {REHEARSED: _moved_table(rows, len(self.rehearse.each), self.rehearse.bounds)}


def projected(grid: Grid, w: torch.Tensor) -> torch.Tensor:
    """Q(w): the lower bound."""
    return grid.round(w.contiguous())


def _moved_table(rows: Sequence[Moved], specs: int, bounds: Sequence[str]) -> Columns:
    step = np.concatenate([np.zeros(0, np.int64), *(np.full(len(r.ids), r.step) for r in rows)])
    ids = np.concatenate([np.zeros(0, np.int32), *(np.asarray(r.ids, dtype=np.int32) for r in rows)])
    shape = (specs, len(bounds), len(COUNTS))
    counts = np.concatenate([np.zeros((0, *shape)), *(r.numbers.reshape(-1, *shape) for r in rows)])
    each = specs * len(bounds)
    codes = np.array([BOUNDS.index(b) for b in bounds], dtype=np.int8)
    flat = counts.reshape(-1, len(COUNTS)).astype(np.int64)
    return Columns(
        {
            "step": np.repeat(step, each),
            "tensor": np.repeat(ids, each),
            "rehearsal": np.tile(np.repeat(np.arange(specs, dtype=np.int16), len(bounds)), len(step)),
            "bound": np.tile(codes, specs * len(step)),
            **{name: np.ascontiguousarray(flat[:, i]) for i, name in enumerate(COUNTS)},
        }
    )


def _chosen(p: Policy, w: Watched) -> torch.Tensor | None:
    """Return the coordinates of a tensor that have a master."""
    if not isinstance(p, TileMaster):
        return None
    numel = w.tensor.numel()
    tiles = torch.zeros(-(-numel // p.tile), dtype=torch.bool, device="cpu")
    tiles[p.chosen(w.name, numel)] = True
    here = local(w.tensor)
    first = shard_offset(w.tensor)
    each = tiles.repeat_interleave(p.tile)[first : first + here.numel()]
    return each.reshape(here.shape).to(here.device)
