"""A trace reduced to what a page can show, in one pass over its files.

A trace of 10,000 steps, 500 tensors and 8 grids has 40 million rows. Asking :class:`~halfulp.trace.Trace`
for every curve would read them dozens of times; here each part is read once, and every sum that the page
needs falls out of it by counting into arrays::

    counts[column]   (steps, classes, grids)    a class: the tensors of one group, matrices apart from vectors
    totals           (tensors, grids)           over the whole run

The invariant, held by a test: curves, crossings and findings equal those of ``Trace`` and
:mod:`halfulp.verdicts.findings` to the last bit. Sums are of whole numbers below 2**53, so float64 adds them
exactly, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.measures.crossings import Majority, majority
from halfulp.measures.groups import CORE
from halfulp.trace import Columns, Trace
from halfulp.trace.columns import groups
from halfulp.trace.shares import known_zero, lost_share
from halfulp.trace.stored_on import on_grid
from halfulp.verdicts.findings import HARDLY, Finding, average, concerned, known, unkept

Array = npt.NDArray[Any]

COLUMNS = ("frozen", "never_moved", "expected")
FOLLOWED = {"never_moved": "never_moved", "expected": "expected_never_moved"}
"""The options of an audit by which there is a column."""
BINS, GROUPS = 600, 10
"""Approximate limits: points per curve, groups by name."""
STORED = "stored"
"""The default scope of a grid: the tensors that are stored on it; where none is, all."""


def bins(n: int, most: int) -> Array:
    """Return where bins begin, among n records: one record each if there are no more than ``most``.

    Otherwise they widen from single records to a fixed width, so that a logarithmic axis has a start to show.

    >>> bins(4, 10), len(bins(10_000, 600)), bins(10_000, 600)[[0, 1, 2, -1]]
    (array([0, 1, 2, 3]), 469, array([   0,    1,    2, 9985]))
    """
    if n <= most:
        return np.arange(n)
    widest, starts, at = -(-n * 5 // (3 * most)), [], 0
    while at < n:
        starts.append(at)
        at += min(widest, 1 + at * 16 // most)
    return np.array(starts)


@dataclass(frozen=True)
class Gathered:
    """A trace as :func:`gather` read it. NaN stands for steps at which nothing of a scope moved."""

    trace: Trace
    steps: Array
    loss: Array
    classes: Sequence[tuple[str, bool, tuple[str, ...]]]
    """(group, whether of two or more dimensions, the grids that it is stored on, without those on which a
    policy keeps its updates and not the others'); the groups that are not shown by name are ''."""
    sizes: Array
    """Weights, (steps, classes)."""
    idle: Array
    """Proposals of zero, (steps, classes): they are frozen, and have nothing to lose."""
    bad: Array
    """Weights and proposals that are not finite, (steps, classes): they are in no other count."""
    counts: dict[str, Array]
    still: Array
    """Weights that were frozen, summed over the run, (tensors, grids)."""
    zeros: Array
    """Proposals of zero, summed over the run, (tensors)."""
    spoilt: Array
    """Weights or proposals that were not finite, summed over the run, (tensors)."""
    moves: Array
    """Weights that steps were about, summed over the run, (tensors)."""
    last_never: Array
    """Weights that no step moved, (tensors, grids)."""
    present: Array
    """Number of steps that each tensor took part in."""
    arrived: Array
    """The part of the proposals that arrived, projected on them and summed over the run, (tensors, grids)."""
    proposed: Array
    """Squared norms of the proposals for which that is known, (tensors, grids)."""

    @property
    def grids(self) -> list[str]:
        """Return the names of the audited grids."""
        return self.trace.grids

    @cached_property
    def scopes(self) -> list[str]:
        """Return the scopes that moved and are told apart.

        The default one comes first, if it is not that of all weights; then all, all-2d, core, and the largest
        groups.
        """
        moved = [key for key, size in zip(self.classes, self.sizes.sum(axis=0), strict=True) if size]
        groups = [g for g in dict.fromkeys(g for g, _, _ in moved) if g]
        some = any(0 < sum(grid in on for _, _, on in moved) < len(moved) for grid in self.grids)
        names = [*([STORED] if some else []), "all"]
        if len({matrix for _, matrix, _ in moved}) == 2:
            names.append("all-2d")
        if len(set(groups) & set(CORE)) == 2:
            names.append("core")
        return names + [g for g in groups if g not in names] if len(groups) > 1 else names

    def _chosen(self, scope: str, grid: str) -> Array:
        wanted: Callable[[str, bool, tuple[str, ...]], bool] = {
            STORED: lambda group, matrix, on: grid in on,
            "all": lambda group, matrix, on: True,
            "all-2d": lambda group, matrix, on: matrix,
            "core": lambda group, matrix, on: group in CORE,
        }.get(scope, lambda group, matrix, on: group == scope)
        chosen = np.array([wanted(*key) for key in self.classes], dtype=bool)
        none = scope == STORED and not self.sizes[:, chosen].any()
        return np.ones_like(chosen) if none else chosen

    def share(self, column: str, grid: str, scope: str = STORED) -> Array:
        """Return a column summed over a scope as a share of its weights, one value per recorded step."""
        chosen = self._chosen(scope, grid)
        total = self.counts[column][:, chosen, self.grids.index(grid)].sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.asarray(total / self.sizes[:, chosen].sum(axis=1))

    def lost_share(self, grid: str, scope: str = STORED) -> Array:
        """Return the share of updates that is lost, one value per recorded step, as :meth:`Trace.frozen`."""
        chosen = self._chosen(scope, grid)
        frozen = self.counts["frozen"][:, chosen, self.grids.index(grid)].sum(axis=1)
        idle, bad, sizes = (x[:, chosen].sum(axis=1) for x in (self.idle, self.bad, self.sizes))
        return np.where(sizes > 0, lost_share(frozen, idle, bad, sizes), np.nan)

    def curve(self, column: str, grid: str, scope: str = STORED) -> Array:
        """Return what a chart shows of a column: of frozen weights, the share of updates that is lost."""
        return self.lost_share(grid, scope) if column == "frozen" else self.share(column, grid, scope)

    def majority(self, grid: str, scope: str = STORED) -> Majority | None:
        """Return the majority that lasts, if there is one."""
        f = self.lost_share(grid, scope)
        there = ~np.isnan(f)
        return majority(f[there], steps=self.steps[there]) if there.any() else None

    def never_moved(self, grid: str, scope: str = STORED) -> float | None:
        """Return the share of a scope's weights that no recorded step moved."""
        if not self.trace.manifest["options"]["never_moved"]:
            return None
        f = self.share("never_moved", grid, scope)
        return float(f[~np.isnan(f)][-1])

    def tensor_share(self, grid: str) -> Array:
        """Return the share of each tensor's updates that is lost over the run; NaN if it had none."""
        shares = lost_share(self.still[:, self.grids.index(grid)], self.zeros, self.spoilt, self.moves)
        return np.where(self.present > 0, shares, np.nan)

    def stored(self, grid: str) -> float:
        """Return the share of the weights that are stored on a grid."""
        return self.trace.numel(on_grid(self.trace, grid)) / self.trace.numel()

    def findings(self) -> list[Finding]:
        """Return the same as :func:`halfulp.verdicts.findings.findings`."""
        return [self._finding(grid) for grid in self.grids]

    def _finding(self, grid: str) -> Finding:
        f = self.lost_share(grid)
        f, ids = f[~np.isnan(f)], self.trace.ids(concerned(self.trace, grid))
        return Finding(
            grid=grid,
            measured=set(ids) <= set(on_grid(self.trace, grid)),
            of=self.trace.numel(ids) / self.trace.numel(),
            idle=self._idle(grid),
            lost=average(f),
            lost_late=average(f[-max(1, len(f) // 10) :]),
            majority=self.majority(grid),
            never_moved=self.never_moved(grid),
            hardly=self._hardly(grid, set(ids)),
            gain=known(self.trace.gain(grid, ids)),
            cosine=known(self.trace.cosine(grid, ids)),
        )

    def _idle(self, grid: str) -> float:
        chosen = self._chosen(STORED, grid)
        sizes = self.sizes[:, chosen].sum(axis=1)
        return float((self.idle[:, chosen].sum(axis=1)[sizes > 0] / sizes[sizes > 0]).mean())

    def _hardly(self, grid: str, ids: set[int]) -> tuple[tuple[str, str, float, float], ...]:
        followed = self.trace.manifest["options"]["never_moved"]
        never, shares = self.last_never[:, self.grids.index(grid)], self.tensor_share(grid)
        rows = [
            (str(t["name"]), str(t["group"]), float(share), float(n / t["recorded"]) if followed else np.nan)
            for t, share, n, there in zip(self.trace.tensors, shares, never, self.present, strict=True)
            if t["id"] in ids and share >= HARDLY and there >= len(self.steps) / 2
        ]
        return tuple(sorted(rows, key=lambda r: (-r[2], r[0])))


def gather(trace: Trace) -> Gathered:
    """Read a trace once."""
    run = trace.scan("run").sort("step")
    steps, tensors = run["step"], trace.tensors
    recorded = np.array([t["recorded"] for t in tensors], dtype=np.float64)
    place = np.full(max(t["id"] for t in trace.manifest["tensors"]) + 1, -1)  # -1: a tensor without weights
    place[[t["id"] for t in tensors]] = np.arange(len(tensors))
    full = np.isin([t["id"] for t in tensors], trace.tells_zero())
    keys = _classes(trace)
    classes = list(dict.fromkeys(keys))
    class_of = np.array([classes.index(key) for key in keys])
    columns = _columns(trace)

    n, k, g, m = len(steps), len(classes), len(trace.grids), len(tensors)
    counts = {c: np.zeros((n, k, g)) for c in columns}
    sizes, idle, bad, last_never = np.zeros((n, k)), np.zeros((n, k)), np.zeros((n, k)), np.zeros((m, g))
    there, zeros, spoilt = np.zeros((3, m))
    still, arrived, proposed = np.zeros((3, m, g))
    for by_tensor, by_grid in zip(
        trace.by_part("tensors", "step", "tensor", "lr", "zero_proposal", "nonfinite", "proposal_sq"),
        trace.by_part("grids", "step", "tensor", "grid", "arrived", *columns),
        strict=True,
    ):
        at, tensor, frame = _rows(by_tensor, steps, place)
        lame = frame["nonfinite"]
        zero = known_zero(frame["zero_proposal"], full[tensor], frame["lr"], recorded[tensor] - lame)
        _add(sizes, at * k + class_of[tensor], recorded[tensor])
        _add(idle, at * k + class_of[tensor], zero)
        _add(bad, at * k + class_of[tensor], lame)
        _add(there, tensor)
        _add(zeros, tensor, zero)
        _add(spoilt, tensor, lame)
        squares = np.repeat(frame["proposal_sq"], g)
        at, tensor, frame = _rows(by_grid, steps, place)
        grid = frame["grid"]
        cell = (at * k + class_of[tensor]) * g + grid
        for column in columns:
            _add(counts[column], cell, frame[column])
        _add_arrived(arrived, proposed, tensor * g + grid, frame["arrived"], squares, full[tensor])
        _add(still, tensor * g + grid, frame["frozen"])
        if "never_moved" in columns:  # rows come step by step, so the last assignment is the last step's
            last_never[tensor, grid] = frame["never_moved"]

    return Gathered(
        trace, steps, run["loss"], classes, sizes, idle, bad, counts, still, zeros, spoilt, there * recorded,
        last_never, there, arrived, proposed,
    )  # fmt: skip


def _columns(trace: Trace) -> list[str]:
    """Return the columns that a trace has been recorded with."""
    options = trace.manifest["options"]
    return [c for c in COLUMNS if c == "frozen" or options[FOLLOWED[c]]]


def _rows(table: Columns, steps: Array, place: Array) -> tuple[Array, Array, Columns]:
    """Return the rows of tensors with weights, after the positions of their steps and of their tensors."""
    there = place[table["tensor"]] >= 0
    table = table if there.all() else table.take(there)
    distinct, row_of = groups(table["step"])
    return np.searchsorted(steps, distinct)[row_of], place[table["tensor"]], table


def _add(total: Array, flat: Array, values: Array | None = None) -> None:
    """Add values (or ones) at flat places, which may repeat."""
    total += np.bincount(flat, weights=values, minlength=total.size).reshape(total.shape)


def _add_arrived(
    arrived: Array, proposed: Array, flat: Array, along: Array, squares: Array, known: Array
) -> None:
    """Add what arrived and what was proposed, of rows of which both are known."""
    there = known & np.isfinite(along) & np.isfinite(squares)
    _add(arrived, flat[there], along[there])
    _add(proposed, flat[there], squares[there])


def _classes(trace: Trace) -> list[tuple[str, bool, tuple[str, ...]]]:
    """Return the class of each tensor; the smallest of too many groups share one."""
    tensors, weights = trace.tensors, dict[str, int]()
    concern = {grid: set(unkept(trace, grid) or on_grid(trace, grid)) for grid in trace.grids}
    for t in tensors:
        weights[t["group"]] = weights.get(t["group"], 0) + int(t["recorded"])
    largest = sorted(weights, key=lambda group: (-weights[group], group))[:GROUPS]
    named = {g for g in weights if g in largest or g in CORE}
    return [
        (
            t["group"] if t["group"] in named else "",
            len(t["shape"]) >= 2,
            tuple(grid for grid, ids in concern.items() if t["id"] in ids),
        )
        for t in tensors
    ]
