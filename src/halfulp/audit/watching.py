"""Which tensors an audit watches: parameters as optimizers bring them, with names, groups, grids, numbers.

An optimizer may gain parameters while it runs, and a recording may be taken up by another process. So tensors
are looked for at every step that is audited, and the manifest of a trace says the same of one as before.

What cannot be audited is refused before the first step. Later nothing is, for the training is not the audit's
to end: a tensor that comes then and does not fit is left out, and where one becomes another (a cast, another
shape) the audit steps aside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parameter import is_lazy

from halfulp.audit import holdings, manifest, shards
from halfulp.audit.attribution import Attributing
from halfulp.audit.batch import Batch, batches
from halfulp.audit.copies import role_name
from halfulp.audit.names import Naming, models_around, name_parameters
from halfulp.audit.ranks import rank
from halfulp.audit.shards import Shards
from halfulp.audit.watched import Watched, check_shard
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.measures.groups import Rules, group_of
from halfulp.text import count, tell
from halfulp.trace import Memory, TraceWriter
from halfulp.trace.resuming import Resumed
from halfulp.writeback.choosing import oddity
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.sharding import is_sharded

LONGEST = 200
"""Characters of a state's name in a manifest."""


class Watching(Attributing):
    """The part of an audit that knows its tensors."""

    grids: list[Grid]
    never_moved: bool
    expected: bool
    unfit: str
    sample: float | None
    seed: int
    keep: bool
    resume: bool
    out: Path | None
    rules: Rules | None
    params: Callable[[str, torch.Tensor], bool] | None
    _left_out: set[torch.Tensor]
    _untrained: bool
    _batching: bool
    _phases: bool
    _batches: list[Batch]
    _lists: WeakKeyDictionary[torch.optim.Optimizer, tuple[list[torch.Tensor], list[Watched]]]
    _loaded: dict[str, torch.Tensor]
    _resumed: Resumed | None
    """Where a resumed recording goes on; none if it is in memory."""
    _shards: Shards | None
    _seen: list[torch.optim.Optimizer]
    _holds: dict[torch.optim.Optimizer, dict[str, Any]]
    _gradients: holdings.Sizes
    _writer: TraceWriter | Memory | None
    _written: Callable[..., None]
    _give_up: Callable[[str, str], None]
    _audited: bool
    """Whether a step was audited in this process."""

    def _of(self, optimizer: torch.optim.Optimizer) -> list[Watched]:
        """What this rank looks at: on ranks other than the first, only tensors that it holds a shard of."""
        params = self._params(optimizer)
        found = self._known(optimizer, params)
        if found is None:
            found = [self.watched[p] for p in params if p in self.watched]
            if all(p in self.watched or p in self._left_out for p in params):
                self._lists[optimizer] = (params, found)
        return self._here(found)

    @staticmethod
    def _here(found: list[Watched]) -> list[Watched]:
        return found if rank() == 0 else [w for w in found if w.sharded or w.rehearsed]

    @staticmethod
    def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [p for g in optimizer.param_groups for p in g["params"]]

    def _known(self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> list[Watched] | None:
        """What is watched of its parameters, if each was decided on and they are the same as then: looking
        dozens of tensors up costs more than to see that."""
        decided, found = self._lists.get(optimizer, ([], []))
        same = len(decided) == len(params) > 0 and all(map(operator.is_, decided, params))
        return found if same else None

    def _batches_of(self, watched: list[Watched]) -> list[Batch]:
        return [b for b in self._batches if any(w.batch is b for w in watched)]

    def _watch(self, optimizer: torch.optim.Optimizer) -> list[Watched]:
        """Take up parameters that were not seen before; what :meth:`_of` gives then."""
        params = self._params(optimizer)
        found = self._known(optimizer, params)
        if found is not None:
            return self._here(found)
        try:
            self._take(optimizer, params)
        except UsageError as error:
            if not self._audited:
                raise
            self._leave_out([p for p in params if p in self.watched and self.watched[p].before is None])
            self._give_up(str(error), "")
        return self._of(optimizer)

    def _leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look at tensors no longer."""
        for p in tensors:
            batch = self.watched.pop(p).batch
            if isinstance(batch, Batch):
                batch.dissolve()
                self._batches.remove(batch)
            self._left_out.add(p)
        self._lists.clear()

    def _unaltered(self, watched: list[Watched]) -> list[Watched]:
        """Those that are what they were; if not all are, the audit steps aside."""
        altered = [w for w in watched if w.altered]
        if not altered:
            return watched
        w = altered[0]
        was, now = (f"{str(d).removeprefix('torch.')} {list(n)} on {at}" for d, n, at in (w.began_as, w.kind))
        self._give_up(
            f"{w.name!r} was {was} when the audit began and is {now} now, so its steps cannot be compared.",
            "Audit what comes before such a change and what comes after it apart: audit.stop(), and another "
            "Audit with an out= of its own.",
        )
        self._leave_out(w.tensor for w in altered)
        return [w for w in watched if w not in altered]

    def _take(self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        new = [
            p
            for p in params
            if p not in self.watched
            and p not in self._left_out
            and (p.requires_grad or p.grad is not None or self._untrained)
            and not is_lazy(p)  # which may come to have a shape
        ]
        if not new:
            return
        if optimizer not in self._seen:
            self._seen.append(optimizer)
        known = {p: w.name for p, w in self.watched.items()}
        found = name_parameters(optimizer, self.models, search=not self.models, known=known)
        if not self.models and self.rehearsing is not None:
            held = [p if found[p].held is None else found[p].held for p in new]
            self._around += [m for m in models_around(held) if m not in self._around]
        chosen = [p for p in new if self.params is None or self.params(found[p].name, p)]
        chosen = self._auditable(chosen, found)
        if self.unfit == "drop" and not self._audited and not self._skip_until:
            self._drop_unfit(chosen)
        if self._audited:
            chosen = self._fitting(chosen, found)
        self._left_out.update(set(new) - set(chosen))
        for p in chosen:
            self.watched[p] = self._new(found[p], p, optimizer)
        if not chosen:
            return
        if any(w.tensor.device.type == "cuda" for w in self.watched.values()):
            self.expected = False  # probabilities are followed on the CPU only
        self._share([self.watched[p] for p in chosen])
        for p in chosen:
            self.watched[p].follow(
                moved=self.never_moved,
                stay=self.expected,
                scores=None if self.scores is None else self.scores.tile,
                saved=self._loaded,
            )
        if self.rehearsing is not None:
            groups = {p: group for group in optimizer.param_groups for p in group["params"]}
            for p in (p for p in chosen if self.rehearsing.wants(self.watched[p].name, p)):
                self.rehearsing.take_up(self.watched[p], optimizer, groups[p], self._loaded)
        if rank() == 0 and self._batching:
            fresh = batches([self.watched[p] for p in chosen], self._phases)
            self._batches += fresh
            if self.rehearsing is not None:
                self.rehearsing.join(fresh)
        if self._writer is not None:
            told = self._writer.manifest
            inventory = {w.id: w.inventory() for w in self.watched.values()}
            for listed in told["tensors"]:  # parts are bound to what is listed, so that stays
                here = inventory.get(listed["id"], listed)
                for key in (k for k in listed if k != "device" and listed[k] != here[k]):
                    raise UsageError(
                        f"cannot resume {self.out}: {listed['name']!r} has {key} {listed[key]!r} there, but "
                        f"{here[key]!r} here."
                    )
                inventory[listed["id"]] = listed
            told["tensors"] = [inventory[i] for i in sorted(inventory)]
            told["grids"] = [g.name for g in self.grids]
            told["optimizers"] = [self._described(o) for o in self._seen]
            told["options"].update(never_moved=self.never_moved, expected_never_moved=self.expected)
            self._written(self._writer.write_manifest)

    def _share(self, new: list[Watched]) -> None:
        """Meet the ranks that hold other shards, and take from a resumed trace what this one needs."""
        writer = self._writer if isinstance(self._writer, TraceWriter) else None
        last = self._skip_until
        writes = None if writer is None else (writer.path, writer.manifest["id"], last)
        sharded = [w for w in new if w.sharded]
        self._shards = shards.met(self._shards, writes, sharded, last, self._loaded)
        if self._shards is not None:
            self.out = self._shards.out  # numbered, if it was taken
        if self._resumed is not None:
            shards.give(self._loaded, self._resumed, new, self._followed)

    def _followed(self, w: Watched) -> bool:
        rehearsed = self.rehearsing is not None and self.rehearsing.wants(w.name, w.tensor)
        return rehearsed or self.never_moved

    def _described(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        holds = self._holds.get(optimizer)
        return {**manifest.described(optimizer), **({} if holds is None else {"holds": holds})}

    def _look_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Once its first step is over, say which dtypes an optimizer holds."""
        if optimizer in self._holds or optimizer not in self._seen or self._untrained:
            return
        found = holdings.held(optimizer, self._gradients or holdings.gradients(optimizer))  # or a closure's
        found["states"] = {_writable(kind): sizes for kind, sizes in found["states"].items()}
        self._holds[optimizer] = found
        if self._writer is not None:
            self._writer.manifest["optimizers"] = [self._described(o) for o in self._seen]
            self._written(self._writer.write_manifest)

    def _auditable(
        self, params: list[torch.Tensor], named: Mapping[torch.Tensor, Naming]
    ) -> list[torch.Tensor]:
        """Those that have real numbers in memory; which are left out is said. Whole numbers are not trained,
        and an empty tensor has nothing to lose."""
        odd = {p: what for p in params if (what := oddity(p)) is not None}
        if odd and rank() == 0:
            first, what = next(iter(odd.items()))
            rest = _and_more(odd)
            tell(f"halfulp: {named[first].name!r} ({what}){rest} left out: no real numbers in plain memory.")
        return [p for p in params if p not in odd and p.is_floating_point() and p.numel()]

    def _fitting(
        self, params: list[torch.Tensor], named: Mapping[torch.Tensor, Naming]
    ) -> list[torch.Tensor]:
        """Of tensors that came after the first step, those that can be audited for the grids of this run."""
        unfit = {p: why for p in params if (why := self._unfit(p)) is not None}
        if unfit:
            first, why = next(iter(unfit.items()))
            tell(
                f"halfulp: {named[first].name!r}{_and_more(unfit)} came after the first audited step and "
                f"cannot be audited with the others, so they are left out: {why}"
            )
        return [p for p in params if p not in unfit]

    def _unfit(self, p: torch.Tensor) -> str | None:
        """Why a tensor cannot be audited, if it cannot."""
        try:
            check_shard(p, [g.within(p.dtype) for g in self.grids])
            if is_sharded(p) and (self.keep or self.scores is not None):
                raise UsageError("keep= and scores= are for whole tensors; this one is sharded.")
            if is_sharded(p) and self.resume and self.out is None:
                raise UsageError("resume= of a sharded tensor needs a folder: out=.")
        except UsageError as error:
            return str(error)
        return None

    def _drop_unfit(self, params: list[torch.Tensor]) -> None:
        """Leave out grids that some parameter's dtype cannot hold."""
        fit = [g for g in self.grids if all(_fits(g, p.dtype) for p in params)]
        if fit and len(fit) < len(self.grids):
            left = ", ".join(g.name for g in self.grids if g not in fit)
            dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in params}))
            tell(f"halfulp: {left} left out: what the optimizer sees ({dtypes}) does not hold its values.")
            self.grids = fit

    def _new(self, naming: Naming, p: torch.Tensor, optimizer: torch.optim.Optimizer) -> Watched:
        name = naming.name
        group = group_of(name, p, naming.module) if self.rules is None else self.rules(name, p)
        if not isinstance(group, str):
            raise UsageError(f"groups= must give a string: for {name!r} it gave {group!r}.")
        slots = optimizer.slots if isinstance(optimizer, WriteBack) else []
        slot = next((s for s in slots if s.p is p), None)
        stored = str(p.dtype).removeprefix("torch.") if slot is None else slot.grid.name
        w = Watched(self._id(name, p), name, group, p, [], stored)
        w.codes = None if slot is None else slot.codes
        w.copy = None if naming.copy is None else str(naming.copy).removeprefix("torch.")
        w.shown = naming.held
        if (why := self._unfit(p)) is not None:
            raise UsageError(f"parameter {name!r}: {why}")
        w.grids = [g.within(p.dtype) for g in self.grids]
        w.choose(self.sample, self.seed)
        return w

    def _id(self, name: str, p: torch.Tensor) -> int:
        """The number of a tensor in the trace: the one it has there already, or the next."""
        begun = self._resumed if self._writer is None else self._writer
        known = {} if begun is None else {t["name"]: t for t in begun.manifest["tensors"]}
        if name in known and known[name]["shape"] != list(p.shape):
            raise UsageError(
                f"cannot resume {self.out}: {name!r} has shape {known[name]['shape']} there, but "
                f"{list(p.shape)} here."
            )
        if name in known:
            return int(known[name]["id"])
        used = [t["id"] for t in known.values()] + [w.id for w in self.watched.values()]
        return max(used, default=-1) + 1


def _writable(kind: str) -> str:
    """What an optimizer calls a state, as a manifest takes it: valid text, and not too long."""
    return kind.encode("utf-8", "backslashreplace").decode() if len(kind) <= LONGEST else role_name(kind)


def _fits(grid: Grid, dtype: torch.dtype) -> bool:
    try:
        grid.within(dtype)
    except UsageError:
        return False
    return True


def _and_more(tensors: Mapping[torch.Tensor, str]) -> str:
    """What follows the name of the first."""
    return f" and {count(len(tensors) - 1, 'more tensor')}" if len(tensors) > 1 else ""
