"""What accumulates beside the weights: copies such as an EMA, the moments of optimizers, gradients.

The event is the same: a value that changes by less than half a gap of the type it is stored in does not
change. An EMA with decay 0.9999 in bfloat16 asks for a ten-thousandth of a difference at each step, and a
second moment with beta 0.999 for a thousandth: both are below half a gap (a 512th to a 256th of the value)
unless the values differ much.

Each role has a trace of its own, in ``roles/NAME`` of the run's trace, that every tool reads: the tensors by
the names that they have there, and one grid, that of bfloat16 (or float16, for tensors that are). For what is
stored in it this is what was lost; for float32, what would be.

When something changed is known for moments: in ``step()``. A copy changes somewhere between the beginning of
a step and that of the next, so it is compared then. A step in which nothing of a copy changed says nothing of
it, because it may not have been updated; that none of it *ever* changed is said in the verdict. Gradients
accumulate in ``backward``: :mod:`~halfulp.audit.gradients`.

Where tensors are shards (FSDP2), every rank counts its own and the first records the sums, as for weights.
All agree on whether anything changed, so they meet at every step; not when an audit stops, because a rank
that a signal ends must not wait for the others: the last step of a sharded copy is not compared.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from halfulp.audit.copies import Copies, checked, followed, found_copies, role_name, tensors_of
from halfulp.audit.gradients import Accumulation
from halfulp.audit.holdings import flat
from halfulp.audit.hooks import StepHooks
from halfulp.audit.ranks import rank, reduced
from halfulp.audit.recorder import Audit
from halfulp.audit.watched import Watched
from halfulp.errors import HalfulpError
from halfulp.files import is_anothers
from halfulp.trace import Memory
from halfulp.trace.reading import ROLES
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.sharding import is_sharded

Named = dict[str, torch.Tensor]


class Held(torch.optim.Optimizer):
    """Tensors under names, in the form that an audit takes. It has no step of its own."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__(list(named.items()), {"lr": float("nan")})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody calls it
        raise AssertionError("nothing is stepped here")


class _Unhooked(StepHooks):
    """Hooks that nobody calls."""

    def attach(self, optimizers: object) -> None:
        return

    def at_exit(self, stop: object) -> None:
        """The audit that they belong to stops them."""


class Companion(Audit):
    """The audit of one role, at the steps of another audit."""

    def __init__(self, owner: Audit, role: str, grid: str, *, never_moved: bool, known: bool) -> None:
        out: Path | Memory | None = None
        if owner.out is not None:
            out = owner.out / ROLES / role
        elif owner._memory is not None:
            out = owner._memory.roles.setdefault(role, Memory())
        super().__init__(
            None, [grid], out=out, every=owner.every, never_moved=never_moved, exists="raise",
            resume=owner.resume, part_steps=owner.part_steps, part_seconds=owner.part_seconds,
            describe={"role": role, **({"proposals": "known"} if known else {})},
        )  # fmt: skip
        self._hooks = _Unhooked(self._before, self._after)
        self._counts = False  # the other audit says which step it is
        self._audited = True  # which has begun: what does not fit here is left out
        self._untrained = True
        self._phases = False  # an estimate of weights, and a third of what counting costs
        self.held: dict[int, Held] = {}
        self._begun: dict[int, Mapping[str, torch.Tensor]] = {}
        self.changed = False
        """Whether anything ever did."""
        try:
            self.start()
        except (HalfulpError, OSError) as error:
            if is_anothers(error):
                raise
            self._do_without(error)

    def _do_without(self, error: Exception) -> None:
        """Write nothing, but go on with the other ranks."""
        if self._writer is not None:
            self._writer.close()
        self._writer, self._resumed, self._loaded, self._skip_until = None, None, {}, 0
        self._step_aside(f"the trace {self.out} could not be begun: {error}")

    def take(self, name: str, x: torch.Tensor) -> Watched | None:
        """The place of one tensor, by itself; None if it does not fit."""
        if x not in self.watched and x not in self._left_out:
            self._watch(Held({name: x}))
        return self.watched.get(x)

    def begin(self, key: int, named: Mapping[str, torch.Tensor], step: int) -> None:
        """Set tensors aside; ``key``: whose they are, where several share a role."""
        held = self._hold(key, named)
        self.step = step - 1
        self._before(held)

    def _hold(self, key: int, named: Mapping[str, torch.Tensor]) -> Held:
        """The tensors as they are now: one that was replaced by a new one is the same tensor to us."""
        held = self.held.get(key)
        if held is not None and self._begun.get(key) is named:
            return held
        self._begun[key] = named
        if held is None:
            held = self.held[key] = Held(named)
        known = {n: (g["params"], i) for g in held.param_groups for i, n in enumerate(g["param_names"])}
        for name, x in named.items():
            if name not in known:
                held.add_param_group({"params": [(name, x)]})
                continue
            params, i = known[name]
            if params[i] is not x and params[i] in self.watched:
                w = self.watched.pop(params[i])
                w.tensor = x
                self.watched[x] = w
            params[i] = x
        return held

    def end(self, key: int, named: Mapping[str, torch.Tensor]) -> None:
        """Record what changed since; if nothing did, there is nothing to say."""
        if key not in self.held:
            return
        held = self._hold(key, named)
        here = self._unaltered([w for w in self._of(held) if w.before is not None])
        changed = together_changed(here)
        if not changed:
            return
        self.changed = True
        for w in here:
            w.asked = w in changed
        self._after(held)
        self._finish()


def together_changed(watched: list[Watched]) -> set[Watched]:
    """Tensors of which one has changed, or another of the same ranks: one that stayed is part of the update,
    and is what is looked for. Ranks that hold shards of them ask each other."""
    whole = [w for w in watched if not w.sharded]
    found = set(whole) if any(w.changed() for w in whole) else set()
    alike: dict[Any, list[Watched]] = {}
    for w in watched if len(whole) < len(watched) else ():
        if w.sharded:
            alike.setdefault(w.tensor.device_mesh, []).append(w)  # type: ignore[attr-defined]  # a DTensor
    for those in alike.values():
        flags = [torch.tensor([float(w.changed())], device=w.values().device) for w in those]
        if reduced(those, flags).any():
            found.update(those)
    return found


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, WriteBack) else optimizer


def moments_of(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[str, dict[str, torch.Tensor]]:
    """The float tensors of an optimizer's state that are made for a weight, or for several that are stacked:
    by kind, then by its name. Beside codes a float tensor of another shape is their scales, and no moment."""
    inner = _inner(optimizer)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for group in inner.param_groups:
        for p in (p for p in group["params"] if p in names):
            state = dict(flat(inner.state.get(p, {})))
            tensors = [x for x in state.values() if isinstance(x, torch.Tensor) and x.numel() > 1]
            coded = not all(x.is_floating_point() for x in tensors)
            for kind, x in state.items():
                if not followed(x) or (coded and x.shape != p.shape):
                    continue
                more = 0 if x.numel() == p.numel() else _stacked(x.shape, p.shape)
                if more is not None and more < len(group["params"]):
                    name = f"{names[p]} and {more} more" if more else names[p]
                    found.setdefault(role_name(str(kind)), {})[name] = x
    return found


def _stacked(shape: torch.Size, weight: torch.Size) -> int | None:
    """For how many weights beside its own a state is: none, or as many as are stacked in front. It is as
    large as they are, or has some of their dimensions, as factored moments do; None if it is neither."""
    if len(shape) > len(weight):
        return shape[0] - 1 if _stacked(shape[1:], weight) == 0 else None
    dimensions = iter(weight)
    return 0 if all(n == 1 or n in dimensions for n in shape) else None


def grid_of(tensors: Iterable[torch.Tensor]) -> str:
    return "fp16" if all(x.dtype == torch.float16 for x in tensors) else "bf16"


class Roles:
    """The audits of what accumulates beside the weights of another audit."""

    def __init__(self, owner: Audit, also: Mapping[str, Copies], states: bool, find: bool = False) -> None:
        self.owner, self.also, self.states, self.find = owner, checked(also), states, find
        self.audits: dict[str, Companion] = {}
        self.gradients = Accumulation(self) if states else None
        self._looked: set[torch.optim.Optimizer] = set()
        self._own: list[str] = []
        """The copies that were found by themselves."""
        self._open = False
        """Whether copies are set aside."""
        self._began: dict[torch.optim.Optimizer, list[str]] = {}
        """The moments that are, by kind."""
        self._found: dict[torch.optim.Optimizer, tuple[list[torch.Tensor], dict[str, Named]]] = {}
        """All tensors of an optimizer's state when its moments were looked for, and those."""

    def told(self) -> dict[str, Any]:
        return {"also": sorted(self.also), "states": self.states}

    def step_begins(self, step: int, due: bool) -> None:
        """Compare the copies with what they were when the last step began, and set them aside anew."""
        self.step_is_over()
        for name, held in self.also.items() if due else ():
            self._begin(name, 0, tensors_of(held), step)
        self._open = due

    def step_is_over(self, at_end: bool = False) -> None:
        """Copies belong to the step that has just been; at the end there is no next one."""
        for name in self.also if self._open else ():
            audit = self.audits.get(name)
            if audit is not None and not (at_end and any(w.sharded for w in audit.watched.values())):
                audit.end(0, self._mine(tensors_of(self.also[name])))
        self._open = False

    def give_up(self) -> None:
        """What copies do from here on belongs to no step."""
        self._open = False

    def _begin(self, role: str, key: int, named: Mapping[str, torch.Tensor], step: int) -> None:
        """Set tensors of a role aside."""
        mine = self._mine(named)
        if mine:
            self.companion(role, named, never_moved=self.owner.never_moved).begin(key, mine, step)

    @staticmethod
    def _mine(named: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What this rank looks at: on ranks other than the first, what it holds a shard of."""
        return named if rank() == 0 else {n: x for n, x in named.items() if is_sharded(x)}

    def look_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the copies of an optimizer's weights by themselves, for unmodified scripts, when it first
        steps; what turns out to be another optimizer's weights, or their cast, is none."""
        if not self.find or optimizer in self._looked or rank() != 0:
            return
        self._looked.add(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        shown = [w.shown for w in self.owner.watched.values() if w.shown is not None]
        theirs = {*params, *shown, *self.owner.watched}
        for label in [n for n in self._own if not theirs.isdisjoint(tensors_of(self.also[n]).values())]:
            self._own.remove(label)
            del self.also[label]
        known = [x for held in self.also.values() for x in tensors_of(held).values()]
        names = {p: self.owner.watched[p].name for p in params if p in self.owner.watched}
        for label, held in found_copies(names, [*theirs, *known]).items():
            if label not in self.also:
                self.also[label] = held
                self._own.append(label)

    @property
    def coming(self) -> int:
        """The step of the run that gradients accumulate for."""
        return self.owner.step + 1

    def accumulates(self) -> bool:
        """Whether that step is audited, or was in the part of a run that is resumed."""
        return rank() == 0 and self.owner._regular(self.coming)

    def before_skipped(self, weights: list[Watched]) -> None:
        """Follow gradients in steps that a resumed trace holds: those of the one after them are new."""
        if self.gradients is not None and rank() == 0:
            self.gradients.watch(weights)

    def before(self, optimizer: torch.optim.Optimizer, weights: list[Watched], step: int) -> None:
        """Set the moments aside that there are before a step, and follow gradients from then on."""
        if self.gradients is not None and rank() == 0:
            self.gradients.watch(weights)
        moments = self._moments(optimizer)
        for kind, named in moments.items():
            self._begin(kind, id(optimizer), named, step)
        self._began[optimizer] = [kind for kind in moments if kind in self.audits]

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what the step did to them."""
        moments = self._moments(optimizer)
        for kind in self._began.pop(optimizer, ()):
            self.audits[kind].end(id(optimizer), self._mine(moments.get(kind, {})))

    def stop(self) -> list[str]:
        """The end: compare for the last time, make everything durable; the copies that never changed."""
        self.step_is_over(at_end=True)
        if self.gradients is not None:
            self.gradients.stop()
        for audit in self.audits.values():
            audit.stop()
            audit.discard_if_empty()
        followed = [name for name in self.also if name in self.audits and self.audits[name].trouble is None]
        return [name for name in followed if not self.audits[name].changed]

    def _moments(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        if not self.states:
            return {}
        states = _inner(optimizer).state.items()
        kept = [x for p, s in states if isinstance(s, Mapping) for x in (p, *(x for _, x in flat(s)))]
        held = [*(x for x in kept if isinstance(x, torch.Tensor)), *self.owner.watched]
        known, moments = self._found.get(optimizer, ([], {}))
        if len(known) != len(held) or not all(map(operator.is_, known, held)):
            found = moments_of(optimizer, {p: w.name for p, w in self.owner.watched.items()})
            moments = {kind: named for kind, named in found.items() if kind not in self.also}
            self._found[optimizer] = (held, moments)
        return moments

    def companion(
        self, role: str, named: Mapping[str, torch.Tensor], *, never_moved: bool, known: bool = False
    ) -> Companion:
        """The audit of a role; ``known``: whether what was not asked for is told from what was lost."""
        if role not in self.audits:
            grid = grid_of(named.values())
            self.audits[role] = Companion(self.owner, role, grid, never_moved=never_moved, known=known)
        return self.audits[role]
