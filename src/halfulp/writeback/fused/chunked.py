"""Make a step in one sweep over memory where no kernel exists: block scales above all, and other rules.

A tensor is processed in chunks of whole rows that stay in the caches. Each chunk is decoded, moved by the
rule's own step, written back by its policy and encoded before the next is read. The functions are those that
two passes call for the whole tensor, so the results are the same bit for bit. A scale that a whole tensor
shares (``int4``, and ``nvfp4``, whose block scales have a common factor) is known only when all of it has
moved, so such grids take two passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfulp.kernels import TILE, Written
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream
from halfulp.writeback import policies
from halfulp.writeback.rules import OptimizerRule, decay_of
from halfulp.writeback.storage.packed import Codes
from halfulp.writeback.telemetry import StepEvents, sampling

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

CHUNK = 1 << 20  # weights: less costs calls, more leaves the caches
OFTEN = 64  # tiles; see halfulp.writeback.telemetry.sampling


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive rows of a tensor, by their first and last weight and scale."""

    start: int
    stop: int
    shape: tuple[int, ...]
    scales: slice

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return this chunk of a tensor, as a view."""
        return x.view(-1)[self.start : self.stop].view(self.shape)


def chunks(grid: Grid, shape: tuple[int, ...]) -> Iterator[Chunk]:
    """Cut a tensor into whole tiles and, for a grid with a scale per row or block, whole rows.

    A tensor without elements is one chunk without elements.
    """
    numel, s = math.prod(shape), grid.scaling
    in_rows = s is not None and s.per != "tensor" and bool(shape)
    row = max(shape[-1], 1) if in_rows else 1
    some = TILE * OFTEN // math.gcd(row, TILE * OFTEN)  # rows
    if some * row > 2 * CHUNK:
        some = TILE // math.gcd(row, TILE)
    rows = some * max(CHUNK // (some * row), 1)
    each = s.segments((1, row)) if s is not None and in_rows else 0
    for first in range(0, max(numel // row, 1), rows):
        last = min(first + rows, numel // row)
        yield Chunk(
            start=first * row, stop=last * row, shape=(last - first, row) if in_rows else (last - first,),
            scales=slice(first * each, last * each) if in_rows else slice(None),
        )  # fmt: skip


@torch.no_grad()
def move(
    wb: WriteBack, rule: OptimizerRule, slot: Slot, state: dict[str, Any], step: int, *, first: bool
) -> None:
    """Make one step of one tensor; ``state``: the optimizer's own, with ``step`` counted on."""
    group = wb.param_groups[slot.place[0]]
    decay = math.prod(decay_of(wb.optimizer, group))
    sums = sampling(slot.p.numel()) if wb.telemetry else 0
    assert rule.advance is not None
    assert slot.p.grad is not None
    grad = slot.p.grad.detach().float().contiguous()
    codes = slot.codes if isinstance(slot.codes, Codes) else None
    shape = tuple(slot.p.shape)
    if codes is not None and codes.scales is not None:
        codes.scales = codes.scales.clone()  # others may hold the old ones
    counts, totals = [], []
    room: torch.Tensor | None = None
    for chunk in chunks(slot.grid, shape):
        if room is None:  # the first is the largest
            room = torch.empty(chunk.stop, dtype=torch.float32, device="cpu")
        aside = room[: chunk.stop - chunk.start].view(chunk.shape)
        if codes is None:
            z = chunk.of(slot.p.detach())
            q = aside.copy_(z)
        else:
            here = _codes(codes, chunk)
            q = here.get()
            z = aside.copy_(q)
        own = {k: chunk.of(x) for k, x in slot.state.items()}
        moments = {k: chunk.of(x) if k in rule.moments else x for k, x in state.items()}
        tile = chunk.start // TILE
        every = sums if sums == 0 or tile % sums == 0 else 1
        one = policies.Step(
            name=slot.name, grid=slot.grid, q=q, z=z, state=own, group=group, moments=moments, decay=decay,
            stream=Stream(seed=wb.seed, name=slot.name, step=step, offset=chunk.start),
            moved=None if slot.moved is None else slot.moved[chunk.start // 8 : (chunk.stop + 7) // 8],
            sums=every, keep_scales=codes is not None,
        )  # fmt: skip
        try:
            slot.policy.before(q, z, own)
            rule.advance(z, chunk.of(grad), moments, group, first=first)
            written = slot.policy.after(one)
            one.finish()
        except BaseException:  # an interrupt leaves no weight off the grid
            z.copy_(q)
            raise
        if codes is not None:
            here.put(z, one.scales)
            try:
                _keep(codes, chunk, here)
            except BaseException:  # codes and scales belong together
                _keep(codes, chunk, here)
                raise
        if every != sums:
            written.sums[(torch.arange(len(written.sums), device="cpu") + tile) % sums != 0] = 0
        counts.append(written.counts)
        totals.append(written.sums)
    all_of_it = Written(slot.p.detach(), torch.cat(counts), torch.cat(totals))
    slot.noted = StepEvents.of_one(slot, step, all_of_it, decay, sums)


def _bytes(codes: Codes, chunk: Chunk) -> torch.Tensor:
    bits = codes.grid.bits
    return codes.packed[chunk.start * bits // 8 : math.ceil(chunk.stop * bits / 8)]


def _keep(codes: Codes, chunk: Chunk, here: Codes) -> None:
    _bytes(codes, chunk).copy_(here.packed)
    if codes.scales is not None and here.scales is not None:
        codes.scales[chunk.scales] = here.scales


def _codes(codes: Codes, chunk: Chunk) -> Codes:
    scales = None if codes.scales is None else codes.scales[chunk.scales]
    return Codes(grid=codes.grid, shape=chunk.shape, packed=_bytes(codes, chunk), scales=scales)
