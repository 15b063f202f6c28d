"""Implement ``halfulp check``: find the weights that a step at a given learning rate cannot move.

A stored weight stays where it is if half the gap to its neighbours is more than the step. That depends on the
weight and on the rate, not on data, so it is known before any run, exactly for the stated bound
(:mod:`~halfulp.checkpoints.check_bounds`). What a step cannot move, no number of such steps moves: each is
rounded away.
Two bounds are stated of Adam: a step of size lr, which is typical, and the largest that any gradients give.
Tensors whose rows see gradients rarely can be named, and are judged by the second.

Weights of up to 16 bits are counted by their codes, every code is decided once, and the same counts tell from
which rate on a share of them could move. float32 weights on their own grid are counted by binade and by what
decides in it. Weights are checked on the grid that they are stored on, or on another one to which they are
rounded first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from halfulp.checkpoints import counting
from halfulp.checkpoints.check_bounds import Reach, adam_bound, reach
from halfulp.checkpoints.check_result import Check, Checked, Spread, Sweep, quantile
from halfulp.checkpoints.stored_tensors import Stored, located, opened
from halfulp.errors import UsageError
from halfulp.measures.groups import GROUPS, group_of
from halfulp.numbers.elements import index_of
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.text import several

Array = npt.NDArray[Any]
PIECE = 8 << 20  # bytes read at once by a thread
FOLD = 1 << 30  # values after which 32-bit counts are emptied into wide ones
NARROW = {
    torch.bfloat16: np.uint16, torch.float16: np.uint16,
    torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8,
}  # fmt: skip
SCALES = ("_scale_inv", "_scale")
"""Suffixes of the names of tensors that hold the scales of another tensor's codes."""
RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
"""The learning rates of a sweep."""
Model = str | Path | torch.nn.Module | Mapping[str, torch.Tensor]
"""A checkpoint on disk, a model, or its tensors by name."""


def check(
    what: Model,
    lr: float,
    *,
    optimizer: str = "adamw",
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    bound: Literal["step", "worst"] | float = "step",
    rare: str | Sequence[str] = (),
    grid: str | Grid | torch.dtype | None = None,
) -> Check:
    """Count the stored weights that a step at a learning rate cannot move.

    Args:
        what: A ``.safetensors`` file, an index of shards, a folder, a file of ``torch.save``, a GGUF file, a
            model or its tensors.
        lr: The learning rate.
        optimizer: ``adamw``, ``adam`` or ``lion``; others with a ``bound`` of your own.
        betas: Adam's betas, which determine its worst case.
        weight_decay: Decoupled weight decay.
        bound: The size of a step: lr (``step``), the largest that Adam can make with any gradients
            (``worst``), or a multiple of lr. ``step`` also gives the counts for ``worst``.
        rare: Tensors whose rows rarely see gradients, such as embeddings, by name or pattern
            (``"*embed*"``), one or several. They are judged by the worst case.
        grid: A grid to which the weights would be rounded; by default the type in which they are stored.

    Returns:
        The counts per tensor and in total.

    Raises:
        UsageError: If the step has no bound, ``rare`` names no tensor, or the gaps of the grid move.

    >>> norm = {"norm.weight": torch.ones(768, dtype=torch.bfloat16)}
    >>> checked = check(norm, lr=6e-4)
    >>> checked.stuck, checked.rate_for(0.5), checked.stuck_worst
    (768, 0.001953125, 0)
    """
    far = reach(lr, optimizer, betas, weight_decay, bound)
    worst = None
    if bound == "step" and optimizer.lower() != "lion" and math.isfinite(adam_bound(*betas)):
        worst = reach(lr, optimizer, betas, weight_decay, "worst")
    if (patterns := several(rare)) is None:
        raise UsageError(f"rare takes names or patterns of tensors, such as '*embed*', not {rare!r}.")
    if patterns and worst is None:
        raise UsageError(
            "rare names tensors for Adam's worst step, beside its typical one: it goes with bound='step', "
            "optimizer adam or adamw, and betas for which there is a worst case."
        )
    wanted = None if grid is None else named(grid)
    if wanted is not None and wanted.scaling is not None:
        raise UsageError(
            f"the gaps of grid {wanted.name} move with the data, so a checkpoint alone does not tell what a "
            "step reaches. Audit a run instead, or check a grid with a fixed scale, such as e4m3@128."
        )
    place = located(dict(what.named_parameters()) if isinstance(what, torch.nn.Module) else what)
    with opened(place) as tensors:
        checking = _Checking(far, worst, patterns, wanted, _scales(tensors))
        for stored in tensors.values():
            checking.add(stored)
    return checking.result()


def sweep(
    what: Model,
    rates: Sequence[float] = RATES,
    *,
    optimizer: str = "adamw",
    betas: tuple[float, float] = (0.9, 0.999),
    bound: Literal["step", "worst"] | float = "step",
    rare: str | Sequence[str] = (),
    grid: str | Grid | torch.dtype | None = None,
) -> Sweep:
    """Compute the share of stored weights that a step cannot move, at each of several learning rates.

    One pass over the checkpoint answers for every rate, because a check counts weights by the rate from which
    each can move. Weight decay is left out: with it, the order of two weights would depend on the rate.

    Args:
        what: As for :func:`~halfulp.checkpoints.check`.
        rates: The learning rates, in rising order.
        optimizer: As for ``check``.
        betas: As for ``check``.
        bound: As for ``check``.
        rare: As for ``check``.
        grid: As for ``check``.

    Returns:
        The shares by rate, in total and by kind of layer.

    Raises:
        UsageError: As for ``check``, or if the rates are not in rising order.

    >>> norm = {"norm.weight": torch.ones(768, dtype=torch.bfloat16)}
    >>> [row["share"] for row in sweep(norm, (1e-3, 2e-3)).table()]
    [1.0, 0.0]
    """
    if not rates or list(rates) != sorted(set(rates)):
        raise UsageError(f"rates must be some learning rates in rising order, not {list(rates)}.")
    middle = rates[len(rates) // 2]
    checked = check(what, middle, optimizer=optimizer, betas=betas, bound=bound, rare=rare, grid=grid)
    return Sweep(tuple(rates), checked)


def _scales(tensors: Mapping[str, Stored]) -> dict[str, float | None]:
    """Read the scales of fp8 tensors: a number each, or None if there is one per block."""
    fp8 = [n for n, x in tensors.items() if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    scales: dict[str, float | None] = {}
    for name, end in product(fp8, SCALES):
        scale = tensors.get(name + end)
        if scale is not None and scale.dtype is not None and scale.dtype.is_floating_point:
            scales[name] = float(scale.values(0, 1).double()) if math.prod(scale.shape) == 1 else None
    return scales


class _Checking:
    """A check in progress, tensor after tensor."""

    def __init__(
        self,
        far: Reach,
        worst: Reach | None,
        rare: Sequence[str],
        grid: Grid | None,
        scales: dict[str, float | None],
    ) -> None:
        self.far, self.worst, self.rare, self.grid, self.scales = far, worst, list(rare), grid, scales
        self.bounds = [far] if worst is None else [worst, far]  # the one that reaches further first
        self.of_scale = {name + end for name in scales for end in SCALES}
        self.rows: list[Checked] = []
        self.skipped: dict[str, str] = {}
        self.spread, self.spread_worst = Spread(), Spread()
        self.groups: dict[str, Spread] = {}
        self.firsts: Array | None = None

    def add(self, stored: Stored) -> None:
        if stored.name in self.of_scale:
            return
        scale = self.scales.get(stored.name, 1.0)
        why = None
        if stored.dtype is None or stored.dtype not in (*NARROW, torch.float32, torch.float64):
            why = f"{stored.kind} is not a type of weights that is known here"
        elif stored.dtype == torch.float64 and self.grid is None:
            why = "float64 weights are checked on a grid only"
        elif scale is None:
            why = "its codes have a scale for every block"
        elif not (math.isfinite(scale) and scale > 0):
            why = f"its scale is {scale}"
        elif stored.size == 0:
            why = "it is empty"
        if why is not None:
            self.skipped[stored.name] = why
            return
        assert scale is not None
        if stored.dtype in NARROW:
            n, counts, grid = self._narrow(stored, scale)
            scale = scale if self.grid is None else 1.0
        elif self.grid is None:
            n, counts, grid = self._wide(stored)
        else:
            n, counts, grid = self._rounded(stored, self.grid)
        self._row(stored, n, counts, grid, scale)

    def _row(self, stored: Stored, n: Array, counts: Array, grid: Grid, scale: float) -> None:
        there = (n >= 0) & (counts > 0)
        bad = int(counts[n < 0].sum())
        n, counts = n[there], counts[there]
        stays = [int(counts[~bound.moves(n, grid, scale)].sum()) for bound in self.bounds]
        rare = self.worst is not None and any(fnmatchcase(stored.name, pattern) for pattern in self.rare)
        rates = self.bounds[0 if rare else -1].rates(n, grid, scale)
        group = group_of(stored.name, torch.empty(stored.shape, device="meta"))
        row = Checked(
            stored.name,
            stored.kind,
            grid.name,
            group,
            int(counts.sum()) + bad,
            stays[0 if rare else -1],
            bad,
            quantile(rates, counts, 0.5),
            stuck_worst=None if self.worst is None else stays[0],
            rare=rare,
        )
        self.rows.append(row)
        self.spread.add(rates, counts)
        self.groups.setdefault(group, Spread()).add(rates, counts)
        if self.worst is not None:
            self.spread_worst.add(self.worst.rates(n, grid, scale), counts)

    def _narrow(self, stored: Stored, scale: float) -> tuple[Array, Array, Grid]:
        """By codes: their indices on the grid (-1: not finite), how often each occurs, and the grid."""
        assert stored.dtype is not None
        view = np.dtype(NARROW[stored.dtype])
        width = 1 << 8 * view.itemsize
        counts = _count(stored, view, width, counting.occurrences)
        codes = torch.from_numpy(np.arange(width, dtype=np.int64).astype(view))
        values = codes.view(stored.dtype).float()
        grid = named(stored.dtype) if self.grid is None else self.grid.within(torch.float32)
        if self.grid is not None:
            values = grid.round(values.double() * scale) if scale != 1.0 else grid.round(values)
        return _indices(values, grid), counts, grid

    def _wide(self, stored: Stored) -> tuple[Array, Array, Grid]:
        """float32 on its own grid, by classes whose members all move or all stay."""
        grid, binades = named("float32"), 256
        if self.firsts is None:
            self.firsts = np.stack([bound.first_moving(grid, binades) for bound in self.bounds])
        firsts, size = self.firsts, 1 << grid.mantissa
        args = (grid.mantissa, firsts[0], firsts[-1])
        counts = _count(stored, np.dtype(np.uint32), 16 * binades, counting.classes, *args)
        n = np.zeros(counts.size, dtype=np.int64)
        for e in range(binades - 1):
            begin = e * size
            for odd in (0, 1):
                n[16 * e + odd] = begin + 2 - odd  # below the first that moves, if there is any
                for level, first in ((4, firsts[0, e]), (8, firsts[-1, e])):
                    n[16 * e + level + odd] = first + (first % 2 != odd)
            n[16 * e + 2 : 16 * e + 16 : 4] = begin
        n[16 * (binades - 1) :] = -1
        return n, counts, grid

    def _rounded(self, stored: Stored, grid: Grid) -> tuple[Array, Array, Grid]:
        """Wide weights on a grid of at most 16 bits, to which they are rounded first."""
        assert stored.dtype is not None
        grid = grid.within(stored.dtype)
        if grid.bits > 16:
            raise UsageError(
                f"grid {grid.name} has {grid.bits} bits; {stored.kind} weights are checked on grids of at "
                "most 16, or on the grid that they are stored on."
            )
        width = 1 << grid.bits
        view = np.dtype(f"u{stored.dtype.itemsize}")
        counts = _count(stored, view, width + 1, _encoded, stored.dtype, grid)
        known = np.flatnonzero(counts[:-1])
        values = grid.decode(torch.from_numpy(known), dtype=torch.float64)
        n = np.append(_indices(values, grid), -1)
        return n, np.append(counts[known], counts[-1]), grid

    def result(self) -> Check:
        if not self.rows:
            why = next(iter(self.skipped.values()), "it holds no tensor")
            raise UsageError(f"nothing to check: {why}.")
        names = [row.name for row in self.rows]
        for pattern in self.rare:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(f"rare={pattern!r} names no tensor that was checked, such as {names[0]!r}.")
        worst = None if self.worst is None else self.spread_worst
        groups = {g: self.groups[g] for g in GROUPS if g in self.groups}
        return Check(self.far, self.rows, self.skipped, self.spread, groups, worst, self.worst)


def _indices(values: torch.Tensor, grid: Grid) -> Array:
    """Return the index of every magnitude on a grid; -1 for what is not finite."""
    v = values.double().abs().numpy()
    finite = np.isfinite(v)
    return np.where(finite, index_of(np.where(finite, v, 0.0), grid), -1)


def _encoded(bits: Array, dtype: torch.dtype, grid: Grid, table: Array) -> None:
    """Count wide values by their codes on a grid, and those that are not finite in the last column."""
    x = torch.from_numpy(bits).view(dtype)
    finite = torch.isfinite(x)
    counting.occurrences(grid.encode(x[finite]).numpy().astype(np.uint16), table)
    table[0, -1] += int((~finite).sum())


def _count(stored: Stored, view: np.dtype[Any], width: int, loop: Any, *args: Any) -> Array:
    """Run a counting loop over the bits of a tensor, on as many threads as torch uses."""
    chunks = math.ceil(stored.size / PIECE)
    threads = max(1, min(torch.get_num_threads(), chunks))

    def part(first: int, last: int) -> Array:
        total = np.zeros(width, dtype=np.int64)
        table = np.zeros((counting.LANES, width), dtype=np.uint32)
        buffer = np.empty(min(PIECE, stored.size), dtype=np.uint8)
        counted = 0
        for i in range(first, last):
            raw = buffer[: min(PIECE, stored.size - i * PIECE)]
            stored.read(i * PIECE, raw)
            loop(raw.view(view), *args, table)
            counted += raw.size
            if counted >= FOLD:
                total += table.sum(axis=0, dtype=np.int64)
                table[:], counted = 0, 0
        return np.asarray(total + table.sum(axis=0, dtype=np.int64))

    ends = [chunks * i // threads for i in range(threads + 1)]
    if threads == 1:
        return part(0, chunks)
    with ThreadPoolExecutor(threads, thread_name_prefix="halfulp") as pool:
        return np.asarray(sum(pool.map(part, ends[:-1], ends[1:])))
