"""Rehearsals on tensors: one call moves the codes of one rehearsal of one tensor, under every pull it has.

:mod:`~halfulp.kernels.rehearse.reference` defines what happens. Here is where it is kept: codes of one byte
or two for grids of at most 16 bits and fixed steps, else values of the working type; beside them what the
policy keeps, and a bit a coordinate for what ever moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halfulp import kernels
from halfulp.grids import Grid
from halfulp.kernels.codes import decode, encode
from halfulp.kernels.reference import DEADZONE, MODES, NEAREST, STOCHASTIC, tile_count
from halfulp.kernels.rehearse.reference import CARRY, COUNTS, MASTER, NOTHING, PENDING, Rule
from halfulp.streams import Stream

__all__ = [
    "CARRY", "COUNTS", "DEADZONE", "MASTER", "NEAREST", "NOTHING", "PENDING", "STOCHASTIC", "Held", "Rule",
    "begin", "move", "values",
]  # fmt: skip

NAMES: dict[int, Any] = {code: name for name, code in MODES.items()}


@dataclass(kw_only=True)
class Held:
    """What a rehearsal holds of one tensor under one pull."""

    held: torch.Tensor
    """Codes (uint8, or int16 that are taken as unsigned), or values."""
    moved: torch.Tensor
    """A bit a coordinate."""
    kept: torch.Tensor | None = None
    """A carry, or what is pending."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, by name."""
        found = {"held": self.held, "moved": self.moved, "kept": self.kept}
        return {name: t for name, t in found.items() if t is not None}

    @property
    def payload_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


def working(dtype: torch.dtype) -> torch.dtype:
    """The type in which rehearsals of such weights compute."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def begin(
    rule: Rule, w: torch.Tensor, *, raw: bool = False, chosen: torch.Tensor | None = None,
    kept: torch.dtype | None = None,
) -> Held:  # fmt: skip
    """The start: the codes of Q(w), with nothing kept; ``raw``: masters start at w itself.

    Weights that are not finite start at zero.
    """
    work = working(w.dtype)
    start = w.detach().to(work).contiguous()
    start = torch.where(torch.isfinite(start), start, 0)
    s = kernels.round(start, rule.grid)
    if rule.keeps == MASTER and raw:
        s = start.clone() if chosen is None else torch.where(chosen, start, s)
    held = _coded(s, rule.grid) if rule.coded else s
    moved = torch.zeros((w.numel() + 7) // 8, dtype=torch.uint8, device=w.device)
    beside = torch.zeros(w.shape, dtype=kept or work, device=w.device)
    return Held(held=held, moved=moved, kept=beside if rule.keeps in (CARRY, PENDING) else None)


def values(rule: Rule, held: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rehearsed weights, in the container."""
    if rule.coded:
        return decode(_wide(held), rule.grid, dtype=dtype)
    return (kernels.round(held, rule.grid) if rule.keeps == MASTER else held).to(dtype)


def move(
    rule: Rule,
    held: Sequence[Held],
    w: torch.Tensor,
    after: torch.Tensor,
    pulls: Sequence[float],
    *,
    stream: Stream | None = None,
    chosen: torch.Tensor | None = None,
    back: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:
    """Replay a step of the reference, w to after, on each of what is held, with a pull each.

    Returns what happened: (tiles, those held, COUNTS), int32.
    """
    found = [
        _move(rule, h, w, after, k, stream, chosen, back) for h, k in zip(held, pulls, strict=True)
    ]  # fmt: skip
    return torch.stack(found, dim=1)


def _move(
    rule: Rule,
    h: Held,
    w: torch.Tensor,
    after: torch.Tensor,
    k: float,
    stream: Stream | None,
    chosen: torch.Tensor | None,
    back: tuple[float, float],
) -> torch.Tensor:
    """One of them, from the library's own rounding and write-back kernels: for any grid."""
    work = working(w.dtype)
    grid = rule.grid
    s = values(rule, h.held, work) if rule.coded else h.held
    w = w.to(work)
    z = (w - s).mul_(k).add_(after.to(work) - w).add_(s)
    ok = torch.isfinite(z)
    if h.kept is not None:
        whole = z + h.kept.to(work)
        z = torch.where(ok & torch.isfinite(whole), whole, z)
    if rule.keeps == MASTER:
        safe = torch.where(ok, z, s)
        old, r = kernels.round(s, grid), kernels.round(safe, grid)
        h.held.copy_(safe if chosen is None else torch.where(chosen & ok, safe, torch.where(ok, r, s)))
        return _counted(r == old, ok, h.moved)
    rest = None if h.kept is None else torch.zeros_like(z)
    mode = NAMES[rule.mode]
    written = kernels.write_back(s, z, grid, mode, stream, moved=h.moved, carry=rest, carry_in=False)
    if h.kept is not None and rest is not None:
        new = rest if rule.keeps == CARRY else back[0] * h.kept + back[1] * rest
        h.kept.copy_(torch.where(ok, new.to(h.kept.dtype), h.kept))
    h.held.copy_(_coded(written.out, grid) if rule.coded else written.out)
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
