"""A step in one sweep over memory for grids that lanes do not round: block scales above all.

A tensor is taken in pieces of whole rows that stay in the caches. Each is decoded, moved by torch's own fused
step, written back by its policy and encoded before the next is read, by the very functions that two passes
call for the whole tensor: so results are theirs, bit for bit. A scale that a whole tensor shares (``int4``,
and ``nvfp4``, whose block scales have a common factor) is known only when all of it has moved: such grids
take two passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from halfulp.grids import Grid
from halfulp.kernels import TILE, Written, onepass
from halfulp.streams import Stream
from halfulp.writeback import policies
from halfulp.writeback.report import TensorEvents
from halfulp.writeback.sharding import local
from halfulp.writeback.storage import Codes

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

PIECE = 1 << 20  # weights: less costs calls, more leaves the caches
OFTEN = 64  # tiles; see halfulp.writeback.onepass.sampling
KNOWN = (
    policies.Nearest, policies.Stochastic, policies.DeadzoneStochastic, policies.ECO, policies.Kahan,
    policies.Master,
)  # fmt: skip


def unsuited(wb: WriteBack, slot: Slot) -> str | None:
    """Why a tensor cannot be moved in pieces."""
    name, s = slot.grid.name, slot.grid.scaling
    if not wb.like_torch or type(wb.optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return f"grid {name} is moved in pieces by torch's fused steps only, in halfulp.WriteBack around one"
    if s is not None and s.moves and (s.per == "tensor" or s.rule == "nv"):
        return f"scales of grid {name} need the whole tensor's maximum before anything is written"
    if type(slot.policy) not in KNOWN:
        return f"policy {slot.policy.name!r} on grid {name} is made in two passes"
    if local(slot.p) is not slot.p or slot.p.device.type != "cpu":
        return f"{slot.name!r} is a shard, or not on a CPU: grid {name} is moved in two passes there"
    if slot.storage not in ("container", "packed") or slot.p.dtype != torch.float32:
        return f"{slot.name!r} is {slot.p.dtype} in {slot.storage} storage on grid {name}"
    return None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a tensor: where they begin and end, in weights, and in scales."""

    start: int
    stop: int
    shape: tuple[int, ...]
    scales: slice

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)[self.start : self.stop].view(self.shape)


def pieces(grid: Grid, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Whole tiles and, of a grid with a scale a row or block, whole rows."""
    numel, s = math.prod(shape), grid.scaling
    in_rows = s is not None and s.per != "tensor" and bool(shape)
    row = shape[-1] if in_rows else 1
    some = TILE * OFTEN // math.gcd(row, TILE * OFTEN)  # rows
    if some * row > 2 * PIECE:
        some = TILE // math.gcd(row, TILE)
    rows = some * max(PIECE // (some * row), 1)
    each = s.segments((1, row)) if s is not None and in_rows else 0
    for first in range(0, numel // max(row, 1), rows):
        last = min(first + rows, numel // row)
        yield Piece(
            start=first * row, stop=last * row, shape=(last - first, row) if in_rows else (last - first,),
            scales=slice(first * each, last * each) if in_rows else slice(None),
        )  # fmt: skip


@torch.no_grad()
def move(
    wb: WriteBack, slot: Slot, state: dict[str, Any], settings: onepass.Settings, step: int, sums: int
) -> None:
    """One step of one tensor; ``state``: the optimizer's own, with ``step`` counted on."""
    group = wb.param_groups[slot.place[0]]
    decay = settings.lr * settings.weight_decay if settings.rule == onepass.ADAMW else 0.0
    assert slot.p.grad is not None
    grad = slot.p.grad.detach().float().contiguous()
    codes = slot.codes if isinstance(slot.codes, Codes) else None
    shape = tuple(slot.p.shape)
    if codes is not None and codes.scales is not None:
        codes.scales = codes.scales.clone()  # others may hold the old ones
    found, totals = [], []
    room: torch.Tensor | None = None
    for piece in pieces(slot.grid, shape):
        if room is None:  # the first is the largest
            room = torch.empty(piece.stop, dtype=torch.float32, device="cpu")
        aside = room[: piece.stop - piece.start].view(piece.shape)
        if codes is None:
            z = piece.of(slot.p.detach())
            q = aside.copy_(z)
        else:
            here = _codes(codes, piece)
            q = here.get()
            z = aside.copy_(q)
        own = {k: piece.of(x) for k, x in slot.state.items()}
        moments = {k: x if x.dim() == 0 else piece.of(x) for k, x in state.items()}
        tile = piece.start // TILE
        every = sums if sums == 0 or tile % sums == 0 else 1
        made = policies.Step(
            name=slot.name, grid=slot.grid, q=q, z=z, state=own, group=group, moments=moments, decay=decay,
            stream=Stream(seed=wb.seed, name=slot.name, step=step, offset=piece.start),
            moved=None if slot.moved is None else slot.moved[piece.start // 8 : (piece.stop + 7) // 8],
            sums=every, keep_scales=codes is not None,
        )  # fmt: skip
        try:
            slot.policy.before(q, z, own)
            _advance(z, piece.of(grad), moments, settings)
            written = slot.policy.after(made)
            made.finish()
        except BaseException:  # an interrupt leaves no weight off the grid
            z.copy_(q)
            raise
        if codes is not None:
            here.put(z, made.scales)
            try:
                _keep(codes, piece, here)
            except BaseException:  # codes and scales belong together
                _keep(codes, piece, here)
                raise
        if every != sums:
            written.sums[(torch.arange(len(written.sums), device="cpu") + tile) % sums != 0] = 0
        found.append(written.counts)
        totals.append(written.sums)
    all_of_it = Written(slot.p.detach(), torch.cat(found), torch.cat(totals))
    slot.events = TensorEvents.of(slot.name, step, slot.p, all_of_it, decay, slot.moved is not None, sums)


def _bytes(codes: Codes, piece: Piece) -> torch.Tensor:
    bits = codes.grid.bits
    return codes.packed[piece.start * bits // 8 : math.ceil(piece.stop * bits / 8)]


def _keep(codes: Codes, piece: Piece, here: Codes) -> None:
    _bytes(codes, piece).copy_(here.packed)
    if codes.scales is not None and here.scales is not None:
        codes.scales[piece.scales] = here.scales


def _codes(codes: Codes, piece: Piece) -> Codes:
    scales = None if codes.scales is None else codes.scales[piece.scales]
    return Codes(grid=codes.grid, shape=piece.shape, packed=_bytes(codes, piece), scales=scales)


def _advance(z: torch.Tensor, grad: torch.Tensor, moments: dict[str, Any], s: onepass.Settings) -> None:
    """torch's fused step of a piece. Its end is that of the tensor, or whole vectors."""
    shared: dict[str, Any] = {
        "lr": s.lr, "weight_decay": s.weight_decay, "maximize": False, "grad_scale": None, "found_inf": None
    }  # fmt: skip
    if s.rule in (onepass.ADAMW, onepass.ADAM):
        fused = torch._fused_adam_ if s.rule == onepass.ADAM else torch._fused_adamw_
        fused(
            [z], [grad], [moments["exp_avg"]], [moments["exp_avg_sq"]], [], [moments["step"]],
            beta1=s.betas[0], beta2=s.betas[1], eps=s.eps, amsgrad=False, **shared,
        )  # fmt: skip
        return
    torch._fused_sgd_(
        [z], [grad], [moments["momentum_buffer"]], momentum=s.betas[0], dampening=s.dampening,
        nesterov=s.rule == onepass.NESTEROV, is_first_step=s.t == 1, **shared,
    )  # fmt: skip
