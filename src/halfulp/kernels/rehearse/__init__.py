"""Rehearsals on tensors: one call moves the codes of one rehearsal, of one tensor or of many side by side.

:mod:`~halfulp.kernels.rehearse.reference` defines what happens. Here is where it is kept: codes of one byte
or two for grids of at most 16 bits and fixed scales, else values of the working type; beside them what the
policy keeps, and a bit a coordinate for what ever moved; a row of each for every pull.
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
from halfulp.grids import Grid
from halfulp.kernels import params as _params
from halfulp.kernels.codes import code_table, decode, encode
from halfulp.kernels.plan import flat_of, on_gpu, plan_for
from halfulp.kernels.pool import run
from halfulp.kernels.reference import DEADZONE, MODES, NEAREST, STOCHASTIC, TILE, tile_count, tiles_of
from halfulp.kernels.rehearse.reference import CARRY, COUNTS, MASTER, NOTHING, PENDING, Rule
from halfulp.streams import Stream

__all__ = [
    "CARRY", "COUNTS", "DEADZONE", "MASTER", "NEAREST", "NOTHING", "PENDING", "STOCHASTIC", "Asked", "Held",
    "Rule", "Tensor", "begin", "fused", "move", "move_many", "table_of", "values",
]  # fmt: skip

Array = npt.NDArray[Any]
NAMES: dict[int, Any] = {code: name for name, code in MODES.items()}


@dataclass(kw_only=True)
class Held:
    """What a rehearsal holds: a row a pull, over the coordinates of one tensor, or of several."""

    held: torch.Tensor
    """Codes (uint8, or int16 that are taken as unsigned), or values."""
    moved: torch.Tensor
    """A bit a coordinate, in bytes."""
    kept: torch.Tensor | None = None
    """A carry, or what is pending."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, by name."""
        found = {"held": self.held, "moved": self.moved, "kept": self.kept}
        return {name: t for name, t in found.items() if t is not None}

    @property
    def payload_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def empty(self, tiles: int) -> Held:
        """The like of it, for so many tiles."""
        made = {
            name: t.new_zeros((len(t), tiles * (TILE // 8 if name == "moved" else TILE)))
            for name, t in self.tensors().items()
        }
        return Held(**made)

    def part(self, first: int, numel: int) -> Held:
        """A view of the coordinates from a tile on."""
        made = {}
        for name, t in self.tensors().items():
            per = 8 if name == "moved" else 1
            made[name] = t[:, first * TILE // per :][:, : -(-numel // per)]
        return Held(**made)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """What a step asks of one tensor."""

    pulls: Sequence[float]
    stream: Stream


def working(dtype: torch.dtype) -> torch.dtype:
    """The type in which rehearsals of such weights compute."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fused(rule: Rule, w: torch.Tensor) -> bool:
    """Whether one pass over memory does it: floats with fixed scales, on the CPU."""
    return w.device.type == "cpu" and _simple(rule, w)


def _simple(rule: Rule, w: torch.Tensor) -> bool:
    plain = not rule.grid.integer and not plan_for(rule.grid, working(w.dtype)).scaled
    return plain and (rule.coded or rule.keeps == MASTER)


def begin(
    rule: Rule,
    w: torch.Tensor,
    rows: int,
    *,
    raw: bool = False,
    chosen: torch.Tensor | None = None,
    kept: torch.dtype | None = None,
) -> Held:
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
    return Held(
        held=first.repeat(rows, 1), moved=moved, kept=beside if rule.keeps in (CARRY, PENDING) else None
    )


def values(rule: Rule, held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rehearsed weights, in the container; of the shape of what is held."""
    if rule.coded and held.device.type != "cpu":
        return _lookup_on(rule.grid, "float64", held.device)[_wide(held).long()].to(dtype)
    if rule.coded:
        return decode(_wide(held), rule.grid, dtype=dtype)
    return (kernels.round(held, rule.grid) if rule.keeps == MASTER else held).to(dtype)


# ---- one pass --------------------------------------------------------------------------------------------


def table_of(sizes: Sequence[int], wanted: Sequence[bool] | None = None) -> Array:
    """Whose every tile is, where tensors of these sizes lie side by side: see ``cpu.OF``."""
    rows, first = [], 0
    for i, numel in enumerate(sizes):
        n = tiles_of(numel)
        made = np.empty((n, 3), dtype=np.int64)
        made[:, 0], made[:, 1], made[:, 2] = i if wanted is None or wanted[i] else -1, first, TILE
        if n:
            made[-1, 2] -= n * TILE - numel
        rows.append(made)
        first += n
    return np.concatenate(rows) if rows else np.empty((0, 3), dtype=np.int64)


class Asked:
    """What a step asks of tensors that lie side by side (:func:`table_of`), for all rehearsals of them; None
    for one that has no part in the step."""

    def __init__(self, tensors: Sequence[Tensor | None], table: Array, dtype: torch.dtype) -> None:
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
        made = [(0, 0) if a is None else a.stream.key for a in self.tensors]
        return np.array(made, dtype=np.uint32).reshape(-1, 2)


def move_many(
    rule: Rule,
    held: Held,
    w: torch.Tensor,
    after: torch.Tensor,
    asked: Asked,
    back: Sequence[tuple[float, float]] | None = None,
    chosen: torch.Tensor | None = None,
) -> Array:
    """Replay a step on tensors that lie side by side, for rules that are :func:`fused`.

    ``back``: of every tensor, the factors of what is pending. Returns what happened: (tiles, rows, COUNTS),
    int32.
    """
    from halfulp.kernels.rehearse import cpu

    work, many = asked.work, len(asked.tensors)
    plan = plan_for(rule.grid, getattr(torch, work))
    keys = np.zeros((many, 2), dtype=np.uint32) if rule.mode == NEAREST else asked.keys
    factors = np.zeros((many, 2), dtype=work) if back is None else np.array(back, dtype=work).reshape(-1, 2)
    codes = held.held.numpy()
    beside = np.empty((0, 0), dtype=work) if held.kept is None else _flat_rows(held.kept)
    which = np.empty(0, dtype=np.uint8) if chosen is None else chosen.reshape(-1).view(torch.uint8).numpy()
    top, lookup = np.int32(1 << (rule.grid.bits - 1)), np.empty(0, dtype=work)
    if rule.coded:
        lookup = _lookup(rule.grid, work)
    counts = np.zeros((len(asked.table), len(codes), len(COUNTS)), dtype=np.int32)
    kernel = cpu.move_tiles(rule.mode, rule.keeps, work == "float32" and rule.grid.lowest is None)
    run(
        kernel, len(asked.table), flat_of(w), flat_of(after), asked.table, keys, asked.offsets, asked.pulls,
        factors, plan.floats, plan.ints, _params.masks(work), lookup, top,
        codes.view(np.uint16) if codes.dtype == np.int16 else codes, beside, which, held.moved.numpy(),
        counts,
    )  # fmt: skip
    return counts


@lru_cache(maxsize=64)
def _lookup(grid: Grid, work: str) -> Array:
    return code_table(grid).astype(work)


@lru_cache(maxsize=64)
def _lookup_on(grid: Grid, work: str, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_lookup(grid, work)).to(device)


def _flat_rows(kept: torch.Tensor) -> Array:
    return kept.view(torch.int16).numpy().view(np.uint16) if kept.dtype == torch.bfloat16 else kept.numpy()


# ---- any grid --------------------------------------------------------------------------------------------


def move(
    rule: Rule,
    held: Held,
    w: torch.Tensor,
    after: torch.Tensor,
    asked: Tensor,
    back: tuple[float, float] = (0.0, 0.0),
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replay a step of one tensor, w to after, on every row of what is held.

    ``back``: the factors b and c of what is pending. Returns what happened: (tiles, rows, COUNTS), int32.
    """
    if fused(rule, w):
        alone = Asked([asked], table_of([w.numel()]), w.dtype)
        return torch.from_numpy(move_many(rule, held, w, after, alone, [back], chosen))
    found = []
    for i, k in enumerate(asked.pulls):
        row = {name: t[i] for name, t in held.tensors().items()}
        if on_gpu(w) and _simple(rule, w) and row.get("kept", row["held"]).dtype != torch.bfloat16:
            found.append(_move_on_gpu(rule, row, w, after, (k, *back), asked.stream, chosen))
        else:
            found.append(_move(rule, Held(**row), w, after, (k, *back), asked.stream, chosen))
    return torch.stack(found, dim=1)


def _move_on_gpu(
    rule: Rule,
    row: dict[str, torch.Tensor],
    w: torch.Tensor,
    after: torch.Tensor,
    told: tuple[float, float, float],
    stream: Stream,
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    from halfulp.kernels.rehearse import gpu

    work = working(w.dtype)
    sent = torch.tensor(told, dtype=work, device=w.device)
    lookup = _lookup_on(rule.grid, str(work).removeprefix("torch."), w.device) if rule.coded else sent
    return gpu.move(rule, row, w, after, sent, lookup, stream, chosen)


def _move(
    rule: Rule,
    h: Held,
    w: torch.Tensor,
    after: torch.Tensor,
    told: tuple[float, float, float],
    stream: Stream,
    chosen: torch.Tensor | None,
) -> torch.Tensor:
    """One row of one tensor, from the library's own rounding and write-back kernels: for any grid.

    ``told``: the pull, and the factors of what is pending.
    """
    k, b, c = told
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
        old, r = kernels.round(s, grid), kernels.round(safe, grid)
        new = safe if chosen is None else torch.where(chosen & ok, safe, torch.where(ok, r, s))
        h.held.copy_(new.reshape(-1))
        return _counted(r == old, ok, h.moved)
    rest = None if h.kept is None else torch.zeros_like(z)
    moved = h.moved.clone()  # a row of a larger tensor may begin anywhere
    written = kernels.write_back(
        s, z, grid, NAMES[rule.mode], stream, moved=moved, carry=rest, carry_in=False
    )
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
    codes = encode(x, grid)
    return codes if grid.bits <= 8 else codes.to(torch.int16)


def _wide(codes: torch.Tensor) -> torch.Tensor:
    return codes if codes.dtype == torch.uint8 else codes.to(torch.int32) & 0xFFFF
