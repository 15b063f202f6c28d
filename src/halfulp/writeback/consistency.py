"""Whether a loaded state belongs to the weights that are there.

A policy's state and the stored weight say the same thing twice, and a file may have one of the two damaged,
or from another step. What follows from the rules is checked exactly:

- every number that a policy keeps is finite;
- a master rounds to the stored value: Q(master) = q. One that started raw, under a stochastic projection, may
  still have either of its neighbours beside it;
- a carry is what nearest rounding left over: no more than half the gap on its side of q.

Grids whose scales move with the data are checked for finite numbers only: the scale that a weight was rounded
with need not be found again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfulp import kernels
from halfulp.errors import CorruptionError
from halfulp.writeback.policies import TileMaster, too_large
from halfulp.writeback.tiles import take_tiles

if TYPE_CHECKING:
    from halfulp.writeback.slot import Slot


def check_consistent(slot: Slot, tensors: dict[str, torch.Tensor], q: torch.Tensor) -> None:
    """Refuse state that cannot stand beside the stored values q."""
    for key, value in tensors.items():
        bad = int((~torch.isfinite(value)).sum()) if value.is_floating_point() else 0
        if bad:
            raise CorruptionError(
                f"parameter {slot.name!r}: {bad} of {value.numel()} values of the saved {key} are not "
                "finite. No run leaves such a state: take an older checkpoint."
            )
    if slot.grid.scaling is not None and slot.grid.scaling.moves:
        return
    if "master" in tensors:
        _check_master(slot, tensors, q)
    if "carry" in tensors:
        _check_carry(slot, tensors["carry"], q)


def _check_master(slot: Slot, tensors: dict[str, torch.Tensor], q: torch.Tensor) -> None:
    master = tensors["master"]
    if isinstance(slot.policy, TileMaster):
        q = take_tiles(q, tensors["tiles"], master.numel(), slot.policy.tile, slot.policy.offset)
    off = kernels.round(master, slot.grid) != q
    if getattr(slot.policy, "start_from", "code") == "raw" and bool(off.any()):
        below, above = slot.grid.neighbours(master)
        off &= (q < below) | (q > above)
    _refuse(slot, off, "master does not round to the stored weight")


def _check_carry(slot: Slot, carry: torch.Tensor, q: torch.Tensor) -> None:
    off = too_large(carry, q, slot.grid)
    _refuse(slot, off, "carry is more than half the gap beside the stored weight")


def _refuse(slot: Slot, off: torch.Tensor, what: str) -> None:
    count = int(off.sum())
    if count:
        raise CorruptionError(
            f"parameter {slot.name!r}: for {count} of {off.numel()} values the saved {what} on grid "
            f"{slot.grid.name}. State and weights are not of one step, or damaged: load the model's weights "
            "that were saved with this state first."
        )
