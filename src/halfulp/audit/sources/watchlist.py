"""``Watchlist``: the tensors under audit, with names, groups, grids and numbers.

An optimizer may gain parameters while it runs, and another process may resume a recording. So every audited
step looks for new tensors, and a resumed trace numbers them as before. What cannot be audited is refused
before the first step; a tensor that comes later and does not fit is left out, and the training goes on.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parameter import is_lazy

from halfulp.audit.meter.tensor import Watched, check_shard, gradient_of
from halfulp.audit.ranks import rank
from halfulp.audit.settings import Measure
from halfulp.audit.sources.names import Naming
from halfulp.errors import UsageError
from halfulp.kernels.plan import on_gpu
from halfulp.measures.groups import group_of
from halfulp.numbers.grids import Grid
from halfulp.text import count, tell
from halfulp.trace import Trace
from halfulp.writeback.choosing import oddity
from halfulp.writeback.sharding import is_sharded

Namer = Callable[[list[torch.Tensor]], Mapping[torch.Tensor, Naming]]
"""Names tensors that come up, and those beside them."""


class Watchlist:
    """Decide which tensors are audited, and hold them.

    Args:
        grids: The grids; those that do not fit may be dropped with the first tensors.
        measure: What is measured.
        untrained: Whether tensors without gradients are watched as well.
        unsharded: Why shards are refused, if they are.
    """

    def __init__(
        self,
        grids: Sequence[Grid],
        measure: Measure,
        *,
        untrained: bool = False,
        unsharded: str | None = None,
    ) -> None:
        self.grids, self.measure = list(grids), measure
        self.untrained, self.unsharded = untrained, unsharded
        self.watched: dict[torch.Tensor, Watched] = {}
        self.begun = False
        """True once a step was audited in this process; from then on nothing is refused."""
        self.resumed = False
        """True if it continues with the tensors that a trace lists."""
        self._left_out: set[torch.Tensor] = set()
        self._lists: WeakKeyDictionary[Any, tuple[list[torch.Tensor], list[Watched]]] = WeakKeyDictionary()

    def keep_fit(self, trace: Trace) -> None:
        """Leave out grids that a trace was begun without."""
        self.grids = [g for g in self.grids if g.name in trace.grids]

    # ---- looking up ----

    def of(self, key: object, tensors: list[torch.Tensor]) -> list[Watched]:
        """Return the watched ones among the tensors of ``key`` that this rank looks at."""
        known = self.known(key, tensors)
        if known is not None:
            return known
        watched = [self.watched[p] for p in tensors if p in self.watched]
        if len(watched) == len(tensors) or all(map(self.decided, tensors)):
            self._lists[key] = (tensors, watched)
        return _here(watched)

    def known(self, key: object, tensors: list[torch.Tensor]) -> list[Watched] | None:
        """Return the same as last time if the tensors are the same: comparing is cheaper than lookups."""
        before, watched = self._lists.get(key, ([], []))
        same = len(before) == len(tensors) > 0 and all(map(operator.is_, before, tensors))
        return _here(watched) if same else None

    def decided(self, p: torch.Tensor) -> bool:
        """Return True if a tensor is watched, or was left out."""
        return p in self.watched or p in self._left_out

    def names(self) -> dict[torch.Tensor, str]:
        """Return the names of all watched tensors."""
        return {p: w.name for p, w in self.watched.items()}

    # ---- taking up ----

    def new_among(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the trainable ones that were not decided on; a lazy one may come to have a shape."""
        new = [p for p in tensors if p not in self.watched and p not in self._left_out]
        return [
            p
            for p in new
            if (p.requires_grad or gradient_of(p) is not None or self.untrained) and not is_lazy(p)
        ]

    def take(
        self, new: list[torch.Tensor], naming: Mapping[torch.Tensor, Naming], listed: Sequence[dict[str, Any]]
    ) -> list[Watched]:
        """Watch those of new tensors that can be audited, and leave out the others.

        Args:
            new: Tensors that were not decided on.
            naming: Their names.
            listed: The tensors in the manifest of a trace that is resumed, or of this one.

        Raises:
            UsageError: If one does not fit, before the first step.
        """
        rule = self.measure.params
        chosen = self._auditable([p for p in new if rule is None or rule(naming[p].name, p)], naming)
        if self.begun:
            chosen = self._fitting(chosen, naming)
        elif self.measure.unfit == "drop" and not self.resumed:
            self._drop_unfit({p.dtype for p in chosen})
        self._left_out.update(set(new) - set(chosen))
        known = {t["name"]: t for t in listed}
        used = [t["id"] for t in listed] + [w.id for w in self.watched.values()]
        following = itertools.count(max(used, default=-1) + 1)
        for p in chosen:
            name, shape = naming[p].name, list(p.shape)
            before = known.get(name, {"shape": shape})
            if before["shape"] != shape:
                raise UsageError(
                    f"cannot resume the trace: {name!r} has shape {before['shape']} there, but {shape} here."
                )
            self.watched[p] = self._watched(
                naming[p], p, int(before["id"]) if name in known else next(following)
            )
        return [self.watched[p] for p in chosen]

    def leave_out(self, p: torch.Tensor) -> Watched:
        """Look at a tensor no longer."""
        self._left_out.add(p)
        self._lists.clear()
        return self.watched.pop(p)

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Have a new tensor take the place of one."""
        if old in self.watched:
            w = self.watched.pop(old)
            w.tensor = new
            self.watched[new] = w

    def _auditable(
        self, params: list[torch.Tensor], named: Mapping[torch.Tensor, Naming]
    ) -> list[torch.Tensor]:
        """Return the tensors that hold real numbers in memory, and report the others.

        Integers are not trained, and an empty tensor has nothing to lose; both are left out silently.
        """
        odd = {p: what for p in params if (what := oddity(p)) is not None}
        if odd and rank() == 0:
            first, what = next(iter(odd.items()))
            rest = _and_more(odd)
            tell(f"halfulp: {named[first].name!r} ({what}){rest} left out: no real numbers in plain memory.")
        return [p for p in params if p not in odd and p.is_floating_point() and p.numel()]

    def _fitting(
        self, params: list[torch.Tensor], named: Mapping[torch.Tensor, Naming]
    ) -> list[torch.Tensor]:
        """Return the tensors that came after the first step and can be audited for the grids of this run."""
        unfit = {p: why for p in params if (why := self._why_not(p)) is not None}
        if unfit:
            first, why = next(iter(unfit.items()))
            tell(
                f"halfulp: {named[first].name!r}{_and_more(unfit)} came after the first audited step and "
                f"cannot be audited with the others, so they are left out: {why}"
            )
        return [p for p in params if p not in unfit]

    def _grids_for(self, p: torch.Tensor) -> list[Grid]:
        """Return the grids in a tensor's dtype; refuse a tensor that cannot be audited."""
        grids = [g.within(p.dtype) for g in self.grids]
        check_shard(p, grids)
        if self.measure.expected_never_moved and on_gpu(p):
            raise UsageError(
                "expected_never_moved= follows probabilities on the CPU only; this tensor is on a GPU: "
                "leave it out, or audit a run on the CPU."
            )
        if self.unsharded is not None and is_sharded(p):
            raise UsageError(self.unsharded)
        return grids

    def _why_not(self, p: torch.Tensor) -> str | None:
        try:
            self._grids_for(p)
        except UsageError as error:
            return str(error)
        return None

    def _drop_unfit(self, dtypes: set[torch.dtype]) -> None:
        """Leave out grids that some parameters' dtype cannot hold, and say so if others could hold them.

        Where no dtype holds a grid's values, nothing is missing: nobody asks what fp16 loses of a bf16 run.
        """
        fit = [g for g in self.grids if all(_fits(g, dtype) for dtype in dtypes)]
        if not fit or len(fit) == len(self.grids):
            return
        missed = [g.name for g in self.grids if g not in fit and any(_fits(g, dtype) for dtype in dtypes)]
        if missed:
            narrow = {dtype for dtype in dtypes if not all(_fits(g, dtype) for g in self.grids)}
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
            tell(
                f"halfulp: {', '.join(missed)} left out of the whole run, because some weights are {names}, "
                "which does not hold its values. To audit the others, choose them with params=."
            )
        self.grids = fit

    def _watched(self, naming: Naming, p: torch.Tensor, number: int) -> Watched:
        name, rules = naming.name, self.measure.groups
        group = group_of(name, p, naming.module) if rules is None else rules(name, p)
        if not isinstance(group, str):
            raise UsageError(f"groups= must give a string: for {name!r} it gave {group!r}.")
        try:
            grids = self._grids_for(p)
        except UsageError as error:
            raise UsageError(f"parameter {name!r}: {error}") from None
        w = Watched(
            number, name, group, p, grids,
            stored=naming.stored or str(p.dtype).removeprefix("torch."),
            copy=None if naming.copy is None else str(naming.copy).removeprefix("torch."),
            codes=naming.codes,
            shown=naming.shown,
        )  # fmt: skip
        w.choose(self.measure.sample, self.measure.seed)
        return w


def _here(watched: list[Watched]) -> list[Watched]:
    """Return the tensors that this rank examines: all on the first rank, else those sharded or rehearsed."""
    return watched if rank() == 0 else [w for w in watched if w.sharded or w.rehearsed]


def _fits(grid: Grid, dtype: torch.dtype) -> bool:
    try:
        grid.within(dtype)
    except UsageError:
        return False
    return True


def _and_more(tensors: Mapping[torch.Tensor, str]) -> str:
    """Return what follows the name of the first."""
    return f" and {count(len(tensors) - 1, 'more tensor')}" if len(tensors) > 1 else ""
