"""Check that a loaded state belongs to the weights of the model.

A policy's state and the stored weight are redundant, and in a file one of the two may be damaged or come from
another step. Everything that follows from the rules is checked exactly: every number that a policy keeps is
finite, and the policy itself reports where its state does not fit (:meth:`Policy.misfits`).

Grids whose scales move with the data are checked for finite numbers only, because the scale that a weight was
rounded with cannot always be recovered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from halfulp.errors import CorruptionError

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
    off, what = slot.policy.misfits(q, tensors, slot.grid) or (torch.zeros(0, device="cpu"), "")
    count = int(off.sum())
    if count:
        raise CorruptionError(
            f"parameter {slot.name!r}: for {count} of {off.numel()} values the saved {what} on grid "
            f"{slot.grid.name}. State and weights are not of one step, or damaged: load the model's weights "
            "that were saved with this state first."
        )
