"""``halfulp check``: what one step of a given learning rate cannot move, from a checkpoint alone.

A stored weight stays where it is if half the gap to its neighbours is more than the step. That depends on the
weight and on the rate, not on data, so it can be told before any run, exactly for the bound that is stated
(:mod:`~halfulp.stored.bounds`). What a step cannot move, no number of such steps moves: each is rounded away.

Weights of up to 16 bits are counted by their codes, every code is decided once, and the same counts tell from
which rate on a share of them could move. float32 weights on their own grid are counted by binade and by what
decides in it. Weights are checked on the grid that they are stored on, or on another one to which they are
rounded first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from halfulp import pictures
from halfulp.elements import index_of
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.grids import grid as named
from halfulp.stored import counting
from halfulp.stored.bounds import Reach, reach
from halfulp.stored.checkpoints import Stored, opened
from halfulp.text import shown

Array = npt.NDArray[Any]
PIECE = 8 << 20  # bytes read at once by a thread
FOLD = 1 << 30  # values after which 32-bit counts are emptied into wide ones
NARROW = {
    torch.bfloat16: np.uint16, torch.float16: np.uint16,
    torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8,
}  # fmt: skip
SCALES = ("_scale_inv", "_scale")
"""How the names of tensors end that say what the codes of another one are times."""


@dataclass(frozen=True)
class Checked:
    """One tensor."""

    name: str
    kind: str
    """The dtype that it is stored in."""
    grid: str
    weights: int
    stuck: int
    """Weights that no such step can move."""
    nonfinite: int
    half_from: float
    """The learning rate from which on half of the weights can move; NaN if none is finite."""

    @property
    def share(self) -> float:
        return self.stuck / max(self.weights - self.nonfinite, 1)


@dataclass(frozen=True)
class Check:
    """What one step cannot move, tensor by tensor."""

    reach: Reach
    tensors: list[Checked]
    skipped: dict[str, str]
    """Tensors that were not checked, and why."""
    rates: Array = field(repr=False)
    counts: Array = field(repr=False)

    @cached_property
    def weights(self) -> int:
        return sum(t.weights for t in self.tensors)

    @cached_property
    def stuck(self) -> int:
        return sum(t.stuck for t in self.tensors)

    @property
    def share(self) -> float:
        """The share of all finite weights that no such step can move; NaN if none is finite."""
        finite = self.weights - sum(t.nonfinite for t in self.tensors)
        return self.stuck / finite if finite else math.nan

    def rate_for(self, share: float) -> float:
        """The learning rate from which on this share of the weights can move; NaN if none is finite."""
        return _quantile(self.rates, self.counts, share)

    def lines(self, most: int | None = 12) -> list[str]:
        """In words, the most stuck tensors first; ``most`` of them, None for all."""
        kinds = sorted({t.kind if t.grid == t.kind else f"{t.kind} as {t.grid}" for t in self.tensors})
        out = [
            f"{len(self.tensors)} tensors, {self.weights:,} weights ({', '.join(kinds)}); {self.reach.said}.",
            "none of the weights is finite."
            if math.isnan(self.share)
            else f"{self.share:.2%} of the weights cannot be moved by such a step.",
        ]
        if self.counts.size:
            told = ", ".join(f"{s:.0%} from {self.rate_for(s):.2g}" for s in (0.1, 0.5, 0.9, 0.99))
            out.append(f"  could move at a learning rate: {told}")
        bad = sum(t.nonfinite for t in self.tensors)
        if bad:
            out.append(f"  NOT FINITE: {bad:,} weights, in none of these shares")
        listed = sorted((t for t in self.tensors if t.stuck), key=lambda t: (-t.share, -t.weights, t.name))
        for t in listed[:most]:
            place = "" if t.grid == t.kind else f" as {t.grid}"
            out.append(
                f"  {t.share:7.2%} of {shown(t.name)} ({t.weights:,} {t.kind}{place}); "
                f"half could from lr {t.half_from:.2g}"
            )
        if most is not None and len(listed) > most:
            out.append(f"  and {len(listed) - most} more tensors")
        whys: dict[str, list[str]] = {}
        for name, why in self.skipped.items():
            whys.setdefault(why, []).append(name)
        for why, names in whys.items():
            out.append(f"  not checked: {len(names)} tensor(s), such as {shown(names[0])}: {why}")
        return out

    def table(self) -> list[dict[str, Any]]:
        """One row a tensor, for a file or a frame."""
        return [
            {
                "tensor": t.name, "dtype": t.kind, "grid": t.grid, "weights": t.weights, "stuck": t.stuck,
                "nonfinite": t.nonfinite, "half_from": known(t.half_from),
            }
            for t in self.tensors
        ]  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return pictures.pre(str(self))


def check(
    what: str | Path | torch.nn.Module | Mapping[str, torch.Tensor],
    lr: float,
    *,
    optimizer: str = "adamw",
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    bound: Literal["step", "worst"] | float = "step",
    grid: str | Grid | torch.dtype | None = None,
) -> Check:
    """Which stored weights one step of a learning rate cannot move.

    ``what``: a ``.safetensors`` file, an index of shards, a folder, a model or its tensors. ``bound``: a step
    of size lr (``step``), the most that Adam makes of any gradients (``worst``), or how many times lr.
    ``grid``: where the weights would be stored; None: where they are.

    >>> norm = {"norm.weight": torch.ones(768, dtype=torch.bfloat16)}
    >>> found = check(norm, lr=6e-4)
    >>> found.stuck, found.rate_for(0.5)
    (768, 0.001953125)
    """
    far = reach(lr, optimizer, betas, weight_decay, bound)
    wanted = None if grid is None else named(grid)
    if wanted is not None and wanted.scaling is not None:
        raise UsageError(
            f"the gaps of grid {wanted.name} move with the data: what a step reaches cannot be told from one "
            "number. Audit a run instead, or check a grid with a fixed scale, such as e4m3@128."
        )
    if isinstance(what, torch.nn.Module):
        what = dict(what.named_parameters())
    place = Path(what) if isinstance(what, str | Path) else what
    made = _Checking(far, wanted, _scales(place))
    with opened(place) as walk:
        for stored in walk:
            made.add(stored)
    return made.result()


def _scales(place: Path | Mapping[str, torch.Tensor]) -> dict[str, float | None]:
    """What the codes of fp8 tensors are times: a number, or None where there is one a block."""
    narrow: set[str] = set()
    found: dict[str, float | None] = {}
    with opened(place) as walk:
        for s in walk:
            if s.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                narrow.add(s.name)
            end = next((e for e in SCALES if s.name.endswith(e)), None)
            if end is None or s.dtype is None or not s.dtype.is_floating_point:
                continue
            one = math.prod(s.shape) == 1
            found[s.name] = None
            if one:
                raw = np.empty(s.size, dtype=np.uint8)
                s.read(0, raw)
                found[s.name] = float(torch.from_numpy(raw).view(s.dtype).double())
    return {n: found[n + e] for n in sorted(narrow) for e in SCALES if n + e in found}


class _Checking:
    """Tensor after tensor."""

    def __init__(self, far: Reach, grid: Grid | None, scales: dict[str, float | None]) -> None:
        self.far, self.grid, self.scales = far, grid, scales
        self.of_scale = {name + end for name in scales for end in SCALES}
        self.rows: list[Checked] = []
        self.skipped: dict[str, str] = {}
        self.rates, self.counts = np.empty(0), np.empty(0, dtype=np.int64)
        self.first: Array | None = None

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
        moves, rates = self.far.moves(n, grid, scale), self.far.rates(n, grid, scale)
        half = _quantile(rates, counts, 0.5)
        row = Checked(
            stored.name, stored.kind, grid.name, int(counts.sum()) + bad, int(counts[~moves].sum()), bad, half
        )
        self.rows.append(row)
        self.rates, where = np.unique(np.concatenate([self.rates, rates]), return_inverse=True)
        merged = np.zeros(self.rates.size, dtype=np.int64)
        np.add.at(merged, where, np.concatenate([self.counts, counts]))
        self.counts = merged

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
        if self.first is None:
            self.first = self.far.first_moving(grid, binades)
        first, size = self.first, 1 << grid.mantissa
        args = (grid.mantissa, first)
        counts = _count(stored, np.dtype(np.uint32), 8 * binades, counting.classes, *args)
        n = np.zeros(counts.size, dtype=np.int64)
        for e in range(binades - 1):
            begin = e * size
            for odd in (0, 1):
                n[8 * e + odd] = begin + 2 - odd  # below the first that moves, if there is any
                n[8 * e + 4 + odd] = first[e] + (first[e] % 2 != odd)
            n[8 * e + 2] = begin
        n[8 * (binades - 1) :] = -1
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
        table, bad = np.zeros((counting.LANES, width), dtype=np.int64), 0
        for piece in _pieces(stored):
            x = torch.from_numpy(piece).view(stored.dtype)
            finite = torch.isfinite(x)
            if not bool(finite.all()):
                bad += int((~finite).sum())
                x = x[finite]
            counting.occurrences(grid.encode(x).numpy().astype(np.uint16), table)
        counts = table.sum(axis=0)
        known = np.flatnonzero(counts)
        values = grid.decode(torch.from_numpy(known), dtype=torch.float64)
        n = np.append(_indices(values, grid), -1)
        return n, np.append(counts[known], bad), grid

    def result(self) -> Check:
        if not self.rows:
            why = next(iter(self.skipped.values()), "it holds no tensor")
            raise UsageError(f"nothing to check: {why}.")
        return Check(self.far, self.rows, self.skipped, self.rates, self.counts)


def _indices(values: torch.Tensor, grid: Grid) -> Array:
    """The index of every magnitude on a grid; -1 for what is not finite."""
    v = values.double().abs().numpy()
    finite = np.isfinite(v)
    return np.where(finite, index_of(np.where(finite, v, 0.0), grid), -1)


def _pieces(stored: Stored) -> Iterator[Array]:
    buffer = np.empty(min(PIECE, stored.size), dtype=np.uint8)
    for at in range(0, stored.size, PIECE):
        part = buffer[: min(PIECE, stored.size - at)]
        stored.read(at, part)
        yield part


def _count(stored: Stored, view: np.dtype[Any], width: int, loop: Any, *args: Any) -> Array:
    """What a loop counts in the bits of a tensor, on torch's number of threads."""
    pieces = math.ceil(stored.size / PIECE)
    threads = max(1, min(torch.get_num_threads(), pieces))

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

    ends = [pieces * i // threads for i in range(threads + 1)]
    if threads == 1:
        return part(0, pieces)
    with ThreadPoolExecutor(threads, thread_name_prefix="halfulp") as pool:
        return np.asarray(sum(pool.map(part, ends[:-1], ends[1:])))


def known(rate: float) -> float | None:
    """A rate, if there is one: JSON has no NaN."""
    return None if math.isnan(rate) else rate


def _quantile(rates: Array, counts: Array, share: float) -> float:
    """The smallest rate at or below which a share of what was counted lies."""
    if not counts.size:
        return math.nan
    order = np.argsort(rates, kind="stable")
    reached = np.cumsum(counts[order])
    return float(rates[order][np.searchsorted(reached, share * reached[-1])])
