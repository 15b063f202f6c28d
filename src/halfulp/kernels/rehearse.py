"""Run rehearsals on tensors: one call moves the codes of a rehearsal, of one tensor or of many side by side.

:mod:`~halfulp.kernels.rehearse_reference` defines the results. This module holds the state: codes of one or
two bytes for grids of at most 16 bits with fixed scales, otherwise values of the working type; beside them
the state of the policy, and one bit per coordinate for whether it ever moved; one row of each per pull.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import kernels
from halfulp.kernels import native
from halfulp.kernels.codes import code_table, decode, encode
from halfulp.kernels.plan import as_floats, flat_of, on_gpu, plan_for
from halfulp.kernels.reference import DEADZONE, MODES, NEAREST, STOCHASTIC, TILE, tile_count, tiles_of
from halfulp.kernels.rehearse_reference import CARRY, COUNTS, MASTER, NOTHING, PENDING, Rule
from halfulp.kernels.unchanged import unchanged
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream

__all__ = [
    "CARRY",
    "COUNTS",
    "DEADZONE",
    "MASTER",
    "NEAREST",
    "NOTHING",
    "PENDING",
    "STOCHASTIC",
    "BatchStep",
    "Rule",
    "State",
    "TensorStep",
    "begin",
    "fused",
    "move",
    "move_many",
    "table_of",
    "values",
]  # fmt: skip

Array = npt.NDArray[Any]
NAMES: dict[int, Any] = {code: name for name, code in MODES.items()}


@dataclass(kw_only=True)
class State:
    """The state of a rehearsal: one row per pull, over the coordinates of one tensor or of several."""

    held: torch.Tensor
    """Codes (uint8, or int16 read as unsigned), or values."""
    moved: torch.Tensor
    """One bit per coordinate, in bytes."""
    kept: torch.Tensor | None = None
    """A carry, or what is pending."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, by name."""
        parts = {"held": self.held, "moved": self.moved, "kept": self.kept}
        return {name: t for name, t in parts.items() if t is not None}

    @property
    def payload_bytes(self) -> int:
        """Return the bytes that the rehearsal holds."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def empty(self, tiles: int) -> State:
        """The like of it, for so many tiles."""
        zeros = {
            name: t.new_zeros((len(t), tiles * (TILE // 8 if name == "moved" else TILE)))
            for name, t in self.tensors().items()
        }
        return State(**zeros)

    def part(self, first: int, numel: int) -> State:
        """A view of the coordinates from a tile on."""
        views = {}
        for name, t in self.tensors().items():
            per = 8 if name == "moved" else 1
            views[name] = t[:, first * TILE // per :][:, : -(-numel // per)]
        return State(**views)


@dataclass(frozen=True, kw_only=True)
class TensorStep:
    """The inputs of a step for one tensor."""

    pulls: Sequence[float]
    stream: Stream


def working(dtype: torch.dtype) -> torch.dtype:
    """The type in which rehearsals of such weights compute."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fused(rule: Rule, w: torch.Tensor) -> bool:
    """Return True if one pass over memory is enough: floats with fixed scales, on the CPU."""
    plain = not rule.grid.integer and not plan_for(rule.grid, working(w.dtype)).scaled
    fits = plain and (rule.coded or rule.keeps == MASTER)
    return fits and w.device.type == "cpu" and native.library() is not None


def begin(
    rule: Rule,
    w: torch.Tensor,
    rows: int,
    *,
    raw: bool = False,
    chosen: torch.Tensor | None = None,
    kept: torch.dtype | None = None,
) -> State:
    """The start: the codes of Q(w), with nothing kept; ``raw``: masters start at w itself.

    Weights that are not finite start at zero.
    """
    work = working(w.dtype)
    start = w.detach().to(work).contiguous()
    start = torch.where(torch.isfinite(start), start, 0)
    s = kernels.round(start, rule.grid)
    if rule.keeps == MASTER and raw:
        s = start.clone() if chosen is None else torch.where(chosen, start, s)
    first = (_coded(s, rule.grid) if rule.coded else s).reshape(1, -1)
    moved = torch.zeros((rows, (w.numel() + 7) // 8), dtype=torch.uint8, device=w.device)
    beside = torch.zeros((rows, w.numel()), dtype=kept or work, device=w.device)
    return State(
        held=first.repeat(rows, 1), moved=moved, kept=beside if rule.keeps in (CARRY, PENDING) else None
    )


def values(rule: Rule, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rehearsed weights, in the container; of the shape of ``stored``."""
    if rule.coded and on_gpu(stored):
        return _values_on(rule.grid, stored.device)[_wide(stored).long()].to(dtype)
    if rule.coded:
        return decode(_wide(stored), rule.grid, dtype=dtype)
    return (kernels.round(stored, rule.grid) if rule.keeps == MASTER else stored).to(dtype)


# ---- one pass --------------------------------------------------------------------------------------------


def table_of(sizes: Sequence[int], wanted: Sequence[bool] | None = None) -> Array:
    """Whose every tile is, where tensors of these sizes lie side by side: see ``RehearseCall``."""
    rows, first = [], 0
    for i, numel in enumerate(sizes):
        n = tiles_of(numel)
        tiles = np.empty((n, 3), dtype=np.int64)
        tiles[:, 0], tiles[:, 1], tiles[:, 2] = i if wanted is None or wanted[i] else -1, first, TILE
        if n:
            tiles[-1, 2] -= n * TILE - numel
        rows.append(tiles)
        first += n
    return np.concatenate(rows) if rows else np.empty((0, 3), dtype=np.int64)


class BatchStep:
    """The inputs of a step for tensors that lie side by side (:func:`table_of`), for all their rehearsals.

    A tensor that takes no part in the step is None.
    """

    def __init__(self, tensors: Sequence[TensorStep | None], table: Array, dtype: torch.dtype) -> None:
        self.tensors = tensors
        rows = max((len(a.pulls) for a in tensors if a is not None), default=0)
        self.work = str(working(dtype)).removeprefix("torch.")
        self.pulls = np.zeros((len(tensors), rows), dtype=self.work)
        self.offsets = np.zeros(len(tensors), dtype=np.int64)
        absent = np.zeros(len(tensors), dtype=bool)
        for i, a in enumerate(tensors):
            if a is None:
                absent[i] = True
            else:
                self.pulls[i], self.offsets[i] = a.pulls, a.stream.offset
        self.table = table
        if absent.any():
            self.table = table.copy()
            self.table[absent[table[:, 0]], 0] = -1

    @cached_property
    def keys(self) -> Array:
        """Of the streams, a row a tensor."""
        keys = [(0, 0) if a is None else a.stream.key for a in self.tensors]
        return np.array(keys, dtype=np.uint32).reshape(-1, 2)


def move_many(
    rule: Rule,
    state: State,
    w: torch.Tensor,
    after: torch.Tensor,
    step: BatchStep,
    back: Sequence[tuple[float, float]] | None = None,
    chosen: torch.Tensor | None = None,
) -> Array:
    """Replay a step on tensors that lie side by side, for rules that are :func:`fused`.

    ``back``: of every tensor, the factors of what is pending. Returns what happened: (tiles, rows, COUNTS),
    int32.
    """
    work, many = step.work, len(step.tensors)
    plan = plan_for(rule.grid, getattr(torch, work))
    keys = np.zeros((many, 2), dtype=np.uint32) if rule.mode == NEAREST else step.keys
    factors = np.zeros((many, 2), dtype=work) if back is None else np.array(back, dtype=work).reshape(-1, 2)
    which = None if chosen is None else chosen.reshape(-1).view(torch.uint8).numpy()
    x, y = flat_of(w), flat_of(after)
    if x.dtype != y.dtype:
        x, y = as_floats(x), as_floats(y)
    rows, size = state.held.shape
    counts = np.zeros((len(step.table), rows, len(COUNTS)), dtype=np.int32)
    call = native.call_of("rehearse", mode=rule.mode, keeps=rule.keeps, stored=native.OF_ARRAY[x.dtype],
        held_as=native.STORED[state.held.dtype], top=1 << (rule.grid.bits - 1),
        kept_as=native.STORED[None if state.kept is None else state.kept.dtype],
        w=x, after=y, tiles=step.table, keys=keys,
        offsets=step.offsets, pulls=step.pulls, back=factors,
        **plan.numbers, held=state.held.data_ptr(),
        kept=None if state.kept is None else state.kept.data_ptr(), chosen=which,
        moved=state.moved.data_ptr(), counts=counts, rows=rows, size=size,
        moved_row=state.moved.shape[1],
    )  # fmt: skip
    native.run("rehearse", len(step.table), call)
    return counts


# ---- any grid --------------------------------------------------------------------------------------------


def move(
    rule: Rule,
    state: State,
    w: torch.Tensor,
    after: torch.Tensor,
    step: TensorStep,
    back: tuple[float, float] = (0.0, 0.0),
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replay a step of one tensor, w to after, on every row of the state.

    ``back``: the factors b and c of what is pending. Returns what happened: (tiles, rows, COUNTS), int32.
    """
    if fused(rule, w):
        alone = BatchStep([step], table_of([w.numel()]), w.dtype)
        return torch.from_numpy(move_many(rule, state, w, after, alone, [back], chosen))
    rows = [{name: t[i] for name, t in state.tensors().items()} for i in range(len(step.pulls))]
    counts = [
        _move(rule, State(**row), w, after, (k, *back), step.stream, chosen)
        for k, row in zip(step.pulls, rows, strict=True)
    ]
    return torch.stack(counts, dim=1)


def _move(
    rule: Rule,
    h: State,
    w: torch.Tensor,
    after: torch.Tensor,
    factors: tuple[float, float, float],
    stream: Stream,
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    """One row of one tensor, from the library's own rounding and write-back kernels: any grid, any device.

    ``factors``: the pull, and the factors of what is pending.
    """
    k, b, c = factors
    work, grid, shape = working(w.dtype), rule.grid, w.shape
    s = (values(rule, h.held, work) if rule.coded else h.held).reshape(shape)
    w = w.to(work)
    z = (w - s).mul_(k).add_(after.to(work) - w).add_(s)
    ok = torch.isfinite(z)
    beside = None if h.kept is None else h.kept.reshape(shape).to(work)
    if beside is not None:
        whole = z + beside
        z = torch.where(ok & torch.isfinite(whole), whole, z)
    if rule.keeps == MASTER:
        safe = torch.where(ok, z, s)
        now, then = ((kernels.scales(x, grid) if grid.scaling is not None else None) for x in (s, safe))
        old, r = kernels.round(s, grid, scale=now), kernels.round(safe, grid, scale=then)
        same = unchanged(old, r, safe == s, grid, now, then)
        new = safe if chosen is None else torch.where(chosen & ok, safe, torch.where(ok, r, s))
        h.held.copy_(new.reshape(-1))  # s is a view of it
        return _counted(same, ok, h.moved)
    rest = None if h.kept is None else torch.zeros_like(z)
    moved = h.moved.clone()  # a row of a larger tensor may begin anywhere
    carry = None if rest is None else kernels.Carry(rest, add=False)
    written = kernels.write_back(s, z, grid, NAMES[rule.mode], stream, moved=moved, carry=carry)
    h.moved.copy_(moved)
    if beside is not None and rest is not None and h.kept is not None:
        new = rest if rule.keeps == CARRY else b * beside + c * rest
        h.kept.copy_(torch.where(ok, new, beside).reshape(-1))
    h.held.copy_((_coded(written.out, grid) if rule.coded else written.out).reshape(-1))
    return written.counts[:, [0, 4, 3]]


def _counted(same: torch.Tensor, ok: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """COUNTS of a tensor, and the bits of what moved."""
    still, fine = ((x.cpu().reshape(-1).numpy()) for x in (same & ok, ok))
    bits = np.packbits(~still & fine, bitorder="little") | moved.cpu().numpy()
    moved.copy_(torch.from_numpy(bits))
    never = np.unpackbits(bits, count=still.size, bitorder="little") == 0
    return torch.from_numpy(np.stack([tile_count(x) for x in (still, never, ~fine)], axis=1))


def _coded(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    if grid.integer or not on_gpu(x):
        codes = encode(x, grid)
    else:  # without a way through the CPU: the place among the values that are not negative
        sizes = _values_on(grid, x.device)[: grid.last_index + 1]
        codes = torch.searchsorted(sizes, x.abs().double()) + torch.signbit(x) * (1 << (grid.bits - 1))
    return codes.to(torch.uint8 if grid.bits <= 8 else torch.int16)


@lru_cache(maxsize=64)
def _values_on(grid: Grid, device: torch.device) -> torch.Tensor:
    """The values of all codes, in float64."""
    return torch.from_numpy(code_table(grid)).to(device)


def _wide(codes: torch.Tensor) -> torch.Tensor:
    return codes if codes.dtype == torch.uint8 else codes.to(torch.int32) & 0xFFFF
