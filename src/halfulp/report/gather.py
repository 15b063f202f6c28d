"""A trace reduced to what a page can show, in one pass over its files.

A trace of 10,000 steps, 500 tensors and 8 grids has 40 million rows. Asking :class:`~halfulp.trace.Trace`
for every curve would read them dozens of times; here each part is read once, and every sum that the page
needs falls out of it by counting into arrays::

    counts[column]   (steps, classes, grids)    a class: the tensors of one group, matrices apart from vectors
    heat             (bins, rows, grids)        a row: a tensor, or the tensors of one layer and group
    totals           (tensors, grids)           over the whole run

The invariant, held by a test: curves, crossings and findings equal those of ``Trace`` and
:mod:`halfulp.audit.findings` to the last bit. Sums are of whole numbers below 2**53, so float64 adds them
exactly, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from halfulp.audit.findings import NOT_FINITE, STUCK, Finding, average, known, lost_updates, onset_words
from halfulp.audit.stored_on import same_values
from halfulp.measures.crossings import Crossing, crossing
from halfulp.measures.groups import CORE
from halfulp.trace import Trace
from halfulp.trace.reading import scan_files

Array = npt.NDArray[Any]

COLUMNS = ("frozen", "never_moved", "expected")
BINS, HEAT_BINS, HEAT_ROWS, GROUPS = 600, 200, 240, 10
"""At most (about) this many points a curve, columns and rows a heat map, groups by name."""
TENSOR_ROWS = 100
"""Above this many tensors, the rows of the heat map are layers."""


def bins(n: int, most: int) -> Array:
    """Where bins begin, among n records: one record each if there are no more than ``most``.

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


def layer_of(name: str) -> str:
    """A tensor's name up to its first number: the layer that it is in.

    >>> layer_of("transformer.h.3.attn.c_proj.weight"), layer_of("lm_head.weight")
    ('transformer.h.3', 'lm_head.weight')
    """
    found = re.match(r".*?(?:^|\.)\d+(?=\.)", name[:500])
    return found[0] if found else name


@dataclass(frozen=True, kw_only=True)
class HeatRow:
    """One row of the heat map."""

    name: str
    group: str
    tensors: int
    numel: int


@dataclass(frozen=True)
class Gathered:
    """What :func:`gather` found. NaN stands for steps at which nothing of a scope moved."""

    trace: Trace
    steps: Array
    loss: Array
    classes: Sequence[tuple[str, bool]]
    """(group, whether of two or more dimensions); the groups that are not shown by name are ''."""
    sizes: Array
    """Weights, (steps, classes)."""
    idle: Array
    """Proposals of zero, (steps, classes): they are frozen, and have nothing to lose."""
    bad: Array
    """Weights and proposals that are not finite, (steps, classes): they are in no other count."""
    counts: dict[str, Array]
    heat_starts: Array
    heat_rows: Sequence[HeatRow]
    heat: Array
    """Share of updates lost, (grids, rows, bins); NaN where nothing moved."""
    lost: Array
    """Updates lost over the run, (tensors, grids)."""
    asked: Array
    """Proposals that were finite and not zero, (tensors)."""
    last_never: Array
    """Weights that no step moved, (tensors, grids)."""
    present: Array
    """Steps that each tensor was part of."""
    spoilt: Array
    """Whether any weight or proposal of a tensor was not finite."""

    @property
    def grids(self) -> list[str]:
        return self.trace.grids

    @cached_property
    def scopes(self) -> list[str]:
        """The scopes that moved and are told apart: all, all-2d, core, and the largest groups."""
        moved = [key for key, size in zip(self.classes, self.sizes.sum(axis=0), strict=True) if size]
        groups = [g for g in dict.fromkeys(g for g, _ in moved) if g]
        found = ["all"]
        if len({matrix for _, matrix in moved}) == 2:
            found.append("all-2d")
        if len(set(groups) & set(CORE)) == 2:
            found.append("core")
        return found + [g for g in groups if g not in found] if len(groups) > 1 else found

    def _chosen(self, scope: str) -> Array:
        wanted: Callable[[str, bool], bool] = {
            "all": lambda group, matrix: True,
            "all-2d": lambda group, matrix: matrix,
            "core": lambda group, matrix: group in CORE,
        }.get(scope, lambda group, matrix: group == scope)
        return np.array([wanted(*key) for key in self.classes], dtype=bool)

    def share(self, column: str, grid: str, scope: str = "all") -> Array:
        """A column summed over a scope as a share of its weights, one value a recorded step."""
        chosen = self._chosen(scope)
        total = self.counts[column][:, chosen, self.grids.index(grid)].sum(axis=1)
        with np.errstate(invalid="ignore"):
            return np.asarray(total / self.sizes[:, chosen].sum(axis=1))

    def lost_share(self, grid: str, scope: str = "all") -> Array:
        """The share of updates, that is of proposals other than zero, that is lost."""
        chosen, frozen = self._chosen(scope), self.share("frozen", grid, scope)
        with np.errstate(invalid="ignore"):
            sizes = self.sizes[:, chosen].sum(axis=1)
            zero, bad = (x[:, chosen].sum(axis=1) / sizes for x in (self.idle, self.bad))
            return np.where(np.isnan(frozen), np.nan, lost_updates(frozen, zero, bad))

    def crossing(self, grid: str, scope: str = "all") -> Crossing | None:
        """First and persistent majority; None if no update of the scope was finite."""
        f = self.lost_share(grid, scope)
        there = ~np.isnan(f)
        return crossing(f[there], steps=self.steps[there]) if there.any() else None

    def never_moved(self, grid: str, scope: str = "all") -> float | None:
        """The share of a scope's weights that no recorded step moved."""
        if not self.trace.manifest["options"]["never_moved"]:
            return None
        f = self.share("never_moved", grid, scope)
        return float(f[~np.isnan(f)][-1])

    def tensor_share(self, grid: str) -> Array:
        """Of each tensor's updates, the share that is lost over the run; NaN if none was finite."""
        lost = self.lost[:, self.grids.index(grid)]
        share = np.where(self.asked > 0, lost / np.where(self.asked > 0, self.asked, 1), 0.0)
        return np.where((self.present > 0) & ~((self.asked <= 0) & self.spoilt), share, np.nan)

    def stored(self, grid: str, scope: str = "all") -> float:
        """The share of a scope's weights that are stored on a grid."""
        ids = set(self.trace.ids(scope))
        sizes: dict[tuple[str, str], float] = {}
        for t in (t for t in self.trace.tensors if t["id"] in ids):
            key = (t["stored"], t["dtype"])
            sizes[key] = sizes.get(key, 0.0) + float(t["recorded"])
        there = (n for (stored, dtype), n in sizes.items() if same_values(stored, grid, dtype))
        return sum(there) / sum(sizes.values())

    def findings(self, scope: str = "all") -> list[Finding]:
        """What :func:`halfulp.audit.findings.findings` says."""
        return [self._finding(grid, scope) for grid in self.grids]

    def _finding(self, grid: str, scope: str) -> Finding:
        f = self.lost_share(grid, scope)
        f, found = f[~np.isnan(f)], self.crossing(grid, scope)
        return Finding(
            grid=grid,
            stored=self.stored(grid, scope),
            idle=self._idle(scope),
            lost=average(f),
            lost_late=average(f[-max(1, len(f) // 10) :]),
            onset=NOT_FINITE if found is None else onset_words(found),
            never_moved=self.never_moved(grid, scope),
            stuck=self._stuck(grid),
            gain=known(self.trace.gain(grid, scope)),
            cosine=known(self.trace.cosine(grid, scope)),
        )

    def _idle(self, scope: str) -> float:
        chosen = self._chosen(scope)
        sizes = self.sizes[:, chosen].sum(axis=1)
        return float((self.idle[:, chosen].sum(axis=1)[sizes > 0] / sizes[sizes > 0]).mean())

    def _stuck(self, grid: str) -> tuple[tuple[str, str, float, float], ...]:
        followed = self.trace.manifest["options"]["never_moved"]
        never, shares = self.last_never[:, self.grids.index(grid)], self.tensor_share(grid)
        rows = [
            (str(t["name"]), str(t["group"]), float(share), float(n / t["recorded"]) if followed else np.nan)
            for t, share, n, there in zip(self.trace.tensors, shares, never, self.present, strict=True)
            if share >= STUCK and there >= len(self.steps) / 2
        ]
        return tuple(sorted(rows, key=lambda r: (-r[2], r[0])))


def gather(trace: Trace) -> Gathered:
    """Read a trace once."""
    run = trace.scan("run").sort("step").collect()
    steps, tensors = run["step"].to_numpy(), trace.tensors
    recorded = np.array([t["recorded"] for t in tensors], dtype=np.float64)
    place = np.full(max(t["id"] for t in trace.manifest["tensors"]) + 1, -1)  # -1: a tensor without weights
    place[[t["id"] for t in tensors]] = np.arange(len(tensors))
    full = np.isin([t["id"] for t in tensors], trace.tells_zero())
    keys = _classes(tensors)
    classes = list(dict.fromkeys(keys))
    class_of = np.array([classes.index(key) for key in keys])
    heat_rows, row_of = _heat_rows(tensors)
    starts = bins(len(steps), HEAT_BINS)
    bin_of = np.searchsorted(starts, np.arange(len(steps)), side="right") - 1
    followed = trace.manifest["options"]
    columns = [c for c, on in zip(COLUMNS, (True, followed["never_moved"], followed["expected_never_moved"]),
                                  strict=True) if on]  # fmt: skip

    n, k, g, m = len(steps), len(classes), len(trace.grids), len(tensors)
    counts = {c: np.zeros((n, k, g)) for c in columns}
    sizes, idle, bad, last_never = np.zeros((n, k)), np.zeros((n, k)), np.zeros((n, k)), np.zeros((m, g))
    binned, there = np.zeros((len(starts), m, g)), np.zeros((len(starts), m))
    zeros, spoilt = np.zeros(m), np.zeros(m)
    for by_tensor, by_grid in zip(trace.table_files("tensors"), trace.table_files("grids"), strict=True):
        at, tensor, frame = _rows(by_tensor, "tensors", steps, place, ["zero_proposal", "nonfinite"])
        zero, lame = frame["zero_proposal"].to_numpy() * full[tensor], frame["nonfinite"].to_numpy()
        _add(sizes, at * k + class_of[tensor], recorded[tensor])
        _add(idle, at * k + class_of[tensor], zero)
        _add(bad, at * k + class_of[tensor], lame)
        _add(there, bin_of[at] * m + tensor)
        _add(zeros, tensor, zero)
        _add(spoilt, tensor, lame)
        at, tensor, frame = _rows(by_grid, "grids", steps, place, ["grid", *columns])
        grid = frame["grid"].to_numpy()
        cell = (at * k + class_of[tensor]) * g + grid
        for column in columns:
            _add(counts[column], cell, frame[column].to_numpy())
        _add(binned, (bin_of[at] * m + tensor) * g + grid, frame["frozen"].to_numpy())
        if "never_moved" in columns:  # rows come step by step, so the last assignment is the last step's
            last_never[tensor, grid] = frame["never_moved"].to_numpy()

    heat, weights = np.zeros((len(heat_rows), len(starts), g)), np.zeros((len(heat_rows), len(starts)))
    np.add.at(heat, row_of, binned.transpose(1, 0, 2))
    np.add.at(weights, row_of, (there * recorded).T)
    with np.errstate(invalid="ignore"):
        shares = np.moveaxis(heat / weights[:, :, None], 2, 0)
    return Gathered(
        trace, steps, run["loss"].to_numpy(), classes, sizes, idle, bad, counts, starts, heat_rows, shares,
        np.maximum(binned.sum(axis=0) - zeros[:, None], 0), there.sum(axis=0) * recorded - zeros - spoilt,
        last_never, there.sum(axis=0), spoilt > 0,
    )  # fmt: skip


def _rows(
    file: Path | bytes, table: str, steps: Array, place: Array, columns: list[str]
) -> tuple[Array, Array, pl.DataFrame]:
    """Of every row of a table: the position of its step and of its tensor; and more columns."""
    there = pl.Series(np.flatnonzero(place >= 0))
    frame = scan_files([file], table).select("step", "tensor", *columns).collect()
    frame = frame.filter(pl.col("tensor").is_in(there.implode()) | (len(there) == len(place)))
    frame = frame.with_columns(pl.col("step").rle_id().alias("run"))
    run = frame["run"].to_numpy()
    first = np.searchsorted(run, np.arange(int(run[-1]) + 1)) if len(run) else np.zeros(0, dtype=int)
    of_run = np.searchsorted(steps, frame["step"].to_numpy()[first])
    return of_run[run], place[frame["tensor"].to_numpy()], frame


def _add(total: Array, flat: Array, values: Array | None = None) -> None:
    """Add values (or ones) at flat places, which may repeat."""
    total += np.bincount(flat, weights=values, minlength=total.size).reshape(total.shape)


def _classes(tensors: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The class of each tensor; the smallest of too many groups share one."""
    weights: dict[str, int] = {}
    for t in tensors:
        weights[t["group"]] = weights.get(t["group"], 0) + int(t["recorded"])
    largest = sorted(weights, key=lambda group: (-weights[group], group))[:GROUPS]
    named = {g for g in weights if g in largest or g in CORE}
    return [(t["group"] if t["group"] in named else "", len(t["shape"]) >= 2) for t in tensors]


def _heat_rows(tensors: list[dict[str, Any]]) -> tuple[list[HeatRow], Array]:
    """The rows of the heat map, and the row of each tensor.

    Layers come as they first appear, with all their tensors together: an optimizer with several groups
    lists the matrices of all layers before their norms.
    """
    layers = [layer_of(t["name"]) for t in tensors]
    many = len(tensors) > TENSOR_ROWS
    keys: list[Any] = [(layers[i] if many else t["name"], t["group"]) for i, t in enumerate(tensors)]
    seen = {layer: i for i, layer in reversed(list(enumerate(layers)))}
    known = list(dict.fromkeys(keys[i] for i in sorted(range(len(tensors)), key=lambda i: seen[layers[i]])))
    if len(known) > HEAT_ROWS:  # neighbours share a row
        merged = {key: i * HEAT_ROWS // len(known) for i, key in enumerate(known)}
        keys, known = [merged[key] for key in keys], list(dict.fromkeys(merged.values()))
    position = {key: i for i, key in enumerate(known)}
    row_of = np.array([position[key] for key in keys])
    rows = []
    for i in range(len(known)):
        members = [t for t, row in zip(tensors, row_of, strict=True) if row == i]
        names = list(dict.fromkeys(layer_of(t["name"]) if len(members) > 1 else t["name"] for t in members))
        groups = list(dict.fromkeys(t["group"] for t in members))
        rows.append(
            HeatRow(
                name=names[0] if len(names) == 1 else f"{names[0][:200]} to {names[-1][:200]}",
                group=groups[0] if len(groups) == 1 else "several",
                tensors=len(members),
                numel=sum(int(t["recorded"]) for t in members),
            )
        )
    return rows, row_of
