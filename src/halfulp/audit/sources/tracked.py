"""Track what accumulates beside the weights: copies such as an EMA, optimizer moments and gradients.

A second moment with beta 0.999 asks for a thousandth of a difference at each step, an EMA for less: below
half a gap of bfloat16 (a 512th to a 256th of the value). Each of these *roles* has a trace of its own, in
``roles/NAME`` of the run's trace, with one grid: bfloat16, or float16 for tensors that are.

Moments change in ``step()``. A copy changes somewhere between the beginning of a step and that of the next,
so it is compared then; a step in which none of it changed says nothing, because it may not have been updated.
Gradients accumulate in ``backward``: :mod:`~halfulp.audit.sources.gradients`. Ranks that hold shards agree at
every step on whether anything changed, but not when an audit stops: one that a signal ends must not wait.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfulp.audit.meter.counts import Meter
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.pipeline import Pipeline
from halfulp.audit.ranks import rank, reduced, taking_part
from halfulp.audit.settings import Measure, Recording
from halfulp.audit.sinks.newest import BESIDE
from halfulp.audit.sources.gradients import Accumulation
from halfulp.audit.sources.names import given_names, model_names
from halfulp.audit.sources.states import (
    Copies,
    checked,
    found_copies,
    grid_of,
    moments_of,
    state_tensors,
    stopped,
    tensors_of,
    wrapped,
)
from halfulp.trace import Memory
from halfulp.trace.reader import ROLES
from halfulp.writeback.sharding import is_sharded

Named = dict[str, torch.Tensor]


@dataclass(eq=False)
class _Followed:
    """Tensors of one owner under their names: one that is replaced by a new one is the same to us."""

    named: Mapping[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]


class TrackedState:
    """Follow the tensors of one role at the steps of an audit, into a trace of its own.

    Args:
        owner: The pipeline of the audit.
        role: The name of the role.
        grid: The grid that is measured.
        never_moved: Whether to follow which coordinates never moved.
        known: Whether what was not asked for is told from what was lost.
    """

    def __init__(self, owner: Pipeline, role: str, grid: str, *, never_moved: bool, known: bool) -> None:
        out: Path | Memory | None = None
        if owner.sink.out is not None:
            out = owner.sink.out / ROLES / role
        elif owner.sink.memory is not None:
            out = owner.sink.memory.roles.setdefault(role, Memory())
        how = owner.sink.recording
        self.pipeline = Pipeline(
            grid,
            out,
            every=owner.every,
            measure=Measure(never_moved=never_moved),
            recording=Recording(
                resume=how.resume,
                exists="raise",
                part_steps=how.part_steps,
                part_seconds=how.part_seconds,
                describe={"role": role, **({"proposals": "known"} if known else {})},
            ),
            meter=Meter(phase=False, batching=not known),  # phases: a third of what counting costs
            untrained=True,
        )
        self.pipeline.watchlist.begun = True  # the run has begun: what does not fit here is left out
        self.modules: dict[torch.Tensor, torch.nn.Module] = {}
        """The modules that tensors belong to, where they are those of a copy."""
        self._followed: dict[int, _Followed] = {}
        self.changed = False
        """True once any of it has changed."""
        self.pipeline.sink.begin(lambda: self.pipeline.open({"rehearse": None}))

    @property
    def trouble(self) -> str | None:
        """The reason why its trace ends before the run, or None."""
        return self.pipeline.sink.trouble

    def take(self, name: str, x: torch.Tensor) -> Watched | None:
        """Return the place of one tensor, by itself; None if it does not fit."""
        if not self.pipeline.watchlist.decided(x):
            self._watch(_Followed({name: x}, {name: x}))
        return self.pipeline.watched.get(x)

    def begin(self, key: int, named: Mapping[str, torch.Tensor], step: int) -> None:
        """Set tensors aside; ``key``: whose they are, where several share a role."""
        followed, pipeline = self._follow(key, named), self.pipeline
        pipeline.sink.step = step - 1
        pipeline.commit_if_due()
        if pipeline.due(step):
            here = pipeline.unaltered(self._watch(followed))
            for w in here:
                w.takes_part = w.tensor.grad is not None
            pipeline.meter.set_aside(here)

    def end(self, key: int, named: Mapping[str, torch.Tensor]) -> None:
        """Record what changed since; if nothing did, there is nothing to say."""
        if key not in self._followed:
            return
        followed, pipeline = self._follow(key, named), self.pipeline
        watched = pipeline.watchlist.of(followed, list(followed.tensors.values()))
        here = pipeline.unaltered([w for w in watched if w.before is not None])
        changed = together_changed(here) or {w for w in here if stopped(w.tensor)}
        if not changed:
            return
        self.changed = True
        for w in here:
            w.takes_part = w in changed
        pipeline.advance()
        if pipeline.due(pipeline.sink.step):
            with torch.no_grad():
                seen = pipeline.counted_here(taking_part(here))
                if seen:
                    pipeline.measured(seen, [math.nan] * len(seen), pipeline.meter.count(seen))
        pipeline.finish()

    def _watch(self, followed: _Followed) -> list[Watched]:
        def name(_: list[torch.Tensor]) -> Any:
            return given_names(followed.tensors, self.modules, self.pipeline.watchlist.names())

        return self.pipeline.watch(followed, list(followed.tensors.values()), name)

    def _follow(self, key: int, named: Mapping[str, torch.Tensor]) -> _Followed:
        followed = self._followed.setdefault(key, _Followed({}, {}))
        if followed.named is not named:
            followed.named = named
            for name, x in named.items():
                old = followed.tensors.get(name)
                if old is not None and old is not x:
                    self.pipeline.watchlist.replace(old, x)
                followed.tensors[name] = x
        return followed

    def stop(self) -> None:
        """Make everything durable; a trace without rows goes away."""
        self.pipeline.finish()
        self.pipeline.commit()
        self.pipeline.sink.close()
        self.pipeline.sink.discard_if_empty()


def together_changed(watched: list[Watched]) -> set[Watched]:
    """Keep tensors of which one has changed, or another of the same ranks.

    A tensor that stayed is part of the update, and is what is looked for. Ranks that hold shards of them ask
    each other.
    """
    whole = [w for w in watched if not w.sharded]
    changed = set(whole) if any(w.changed() for w in whole) else set()
    alike: dict[Any, list[Watched]] = {}
    for w in watched if len(whole) < len(watched) else ():
        if w.sharded:
            alike.setdefault(w.tensor.device_mesh, []).append(w)  # type: ignore[attr-defined]  # a DTensor
    for those in alike.values():
        flags = [torch.tensor([float(w.changed())], device=w.values().device) for w in those]
        if reduced(those, flags).any():
            changed.update(those)
    return changed


class TrackedStates:
    """Follow what accumulates beside the weights of an audit."""

    def __init__(self, owner: Pipeline, also: Mapping[str, Copies], states: bool, find: bool = False) -> None:
        self.owner, self.also, self.states, self.find = owner, checked(also), states, find
        self.tracks: dict[str, TrackedState] = {}
        self.gradients = Accumulation(self) if states else None
        self._looked: set[torch.optim.Optimizer] = set()
        self._own: list[str] = []
        """The copies that were found automatically."""
        self._open = False
        """True while copies are set aside."""
        self._began: dict[torch.optim.Optimizer, list[str]] = {}
        """The moments that are set aside, by kind."""
        self._moments_of: dict[torch.optim.Optimizer, tuple[list[torch.Tensor], dict[str, Named]]] = {}
        """All tensors in an optimizer's state when it was searched for moments, and the moments found."""

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest says."""
        return {"also": sorted(self.also), "states": self.states}

    def step_begins(self, step: int, due: bool) -> None:
        """Compare the copies with what they were when the last step began, and set them aside anew."""
        self.step_is_over()
        for name, copies in self.also.items() if due else ():
            self._begin(name, 0, tensors_of(copies), step)
        self._open = due

    def step_is_over(self, at_end: bool = False) -> None:
        """Copies belong to the step that has just been; at the end there is no next one."""
        for name in self.also if self._open and not self.owner.given_up else ():
            track = self.tracks.get(name)
            if track is not None and not (at_end and any(w.sharded for w in track.pipeline.watched.values())):
                track.end(0, self._mine(tensors_of(self.also[name])))
        self._open = False

    def _begin(self, role: str, key: int, named: Mapping[str, torch.Tensor], step: int) -> None:
        """Set tensors of a role aside."""
        mine = self._mine(named)
        if mine:
            track = self.track(role, named, never_moved=self.owner.measure.never_moved)
            if not track.modules and isinstance(copy := self.also.get(role), torch.nn.Module):
                track.modules = {p: module for p, (_, module) in model_names(copy).items()}
            track.begin(key, mine, step)

    @staticmethod
    def _mine(named: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return what this rank looks at: on ranks other than the first, what it holds a shard of."""
        return named if rank() == 0 else {n: x for n, x in named.items() if is_sharded(x)}

    def look_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the copies of an optimizer's weights, for unmodified scripts, when it first steps.

        What turns out to be another optimizer's weights, or their cast, is left out.
        """
        if not self.find or optimizer in self._looked or rank() != 0:
            return
        self._looked.add(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        shown = [w.shown for w in self.owner.watched.values() if w.shown is not None]
        theirs = {*params, *shown, *self.owner.watched}
        for label in [n for n in self._own if not theirs.isdisjoint(tensors_of(self.also[n]).values())]:
            self._own.remove(label)
            del self.also[label]
        known = [x for copies in self.also.values() for x in tensors_of(copies).values()]
        names = {p: self.owner.watched[p].name for p in params if p in self.owner.watched}
        for label, copies in found_copies(names, [*theirs, *known]).items():
            if label not in self.also:
                self.also[label] = copies
                self._own.append(label)

    @property
    def coming(self) -> int:
        """Return the step of the run that gradients accumulate for."""
        return self.owner.sink.step + 1

    def accumulates(self) -> bool:
        """Return True if that step is audited, or was in the part of a run that is resumed."""
        return rank() == 0 and self.owner.regular(self.coming)

    def follow_gradients(self, weights: list[Watched]) -> None:
        """Follow the gradients of weights from now on."""
        if self.gradients is not None and rank() == 0:
            self.gradients.watch(weights)

    def before(self, optimizer: torch.optim.Optimizer, weights: list[Watched], step: int) -> None:
        """Set the moments aside that there are before a step, and follow gradients from then on."""
        self.follow_gradients(weights)
        moments = self._moments(optimizer)
        for kind, named in moments.items():
            self._begin(kind, id(optimizer), named, step)
        self._began[optimizer] = [kind for kind in moments if kind in self.tracks]

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what the step did to them."""
        moments = self._moments(optimizer)
        for kind in self._began.pop(optimizer, ()):
            self.tracks[kind].end(id(optimizer), self._mine(moments.get(kind, {})))

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the newest step of every role in few numbers, by the names that they have in the trace."""
        newest = {name: track.pipeline.latest for name, track in sorted(self.tracks.items())}
        return {name: {key: summary[key] for key in BESIDE} for name, summary in newest.items() if summary}

    def stop(self) -> list[str]:
        """Compare for the last time and make everything durable; return the copies that never changed."""
        self.step_is_over(at_end=True)
        if self.gradients is not None:
            self.gradients.stop()
        for track in self.tracks.values():
            track.stop()
        followed = [name for name in self.also if name in self.tracks and self.tracks[name].trouble is None]
        return [name for name in followed if not self.tracks[name].changed]

    def _moments(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        if not self.states:
            return {}
        states = wrapped(optimizer).state
        now = [*states, *state_tensors(states.values()), *self.owner.watched]
        before, moments = self._moments_of.get(optimizer, ([], {}))
        if len(before) != len(now) or not all(map(operator.is_, before, now)):
            by_kind = moments_of(optimizer, self.owner.watchlist.names())
            moments = {kind: named for kind, named in by_kind.items() if kind not in self.also}
            self._moments_of[optimizer] = (now, moments)
        return moments

    def track(
        self, role: str, named: Mapping[str, torch.Tensor], *, never_moved: bool, known: bool = False
    ) -> TrackedState:
        """Return what follows a role; ``known``: whether proposals of zero are told from lost ones."""
        if role not in self.tracks:
            grid = grid_of(named.values())
            self.tracks[role] = TrackedState(self.owner, role, grid, never_moved=never_moved, known=known)
        return self.tracks[role]
