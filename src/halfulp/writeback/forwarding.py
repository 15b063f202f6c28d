"""Call methods of the wrapped optimizer through a write-back, without letting a weight leave its grid.

Schedule-free optimizers have ``eval()`` and ``train()``; between the two calls the model holds evaluation
weights. These are rounded to the grid too, by nearest rounding, and the training weights are kept beside
them, so that ``train()`` restores them bit for bit. Any other method that moves managed weights is refused,
and the weights are unchanged.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.writeback import stepping
from halfulp.writeback.sharding import local
from halfulp.writeback.two_passes import moved_from, values_of

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack


def attribute(wb: WriteBack, name: str) -> Any:
    """Return an attribute of the wrapped optimizer; wrap a method in :func:`call`."""
    value = getattr(wb.optimizer, name)
    return partial(call, wb, name) if isinstance(value, MethodType) else value


def call(wb: WriteBack, name: str, *args: Any, **options: Any) -> Any:
    """Call a method of the wrapped optimizer on its own parameters, and handle the weights that it moved."""
    stepping.refuse_cast(wb)
    wb._pass_on_groups()
    slots = wb.slots
    stored: list[torch.Tensor] = []
    try:
        wb._two_passes.open(slots, stored)
        given = values_of(slots)
        result = getattr(wb.optimizer, name)(*args, **options)
        moved = moved_from(given, slots)
        resting = any(slot.resting for slot in slots)
        evaluated = _on_grid(wb, name, moved) if moved and name == "eval" and not resting else {}
        if moved and not evaluated and not (name == "train" and resting):
            raise UsageError(
                f"{type(wb.optimizer).__name__}.{name}() moved {len(moved)} managed tensor(s), the first "
                f"{moved[0].name!r}, which would leave them off their grids; the weights are as they were. "
                "Call it on the optimizer before WriteBack is made around it."
            )
    finally:
        wb._two_passes.restore(slots, stored)
    for slot in slots:
        if evaluated:
            slot.resting = slot.rested()
        elif name == "train" and slot.resting:
            slot.put(slot.resting)
            slot.resting = {}
        if slot in evaluated:
            slot.store(evaluated[slot])
    wb._pass_on_groups()
    return result


def _on_grid(wb: WriteBack, name: str, moved: list[Any]) -> dict[Any, torch.Tensor]:
    """Round evaluation weights to their grids."""
    rounded = {}
    for slot in moved:
        z = local(slot.stepped.detach())
        bad = int((~torch.isfinite(z)).sum())
        if bad:
            raise UsageError(
                f"{type(wb.optimizer).__name__}.{name}() made {bad} value(s) of {slot.name!r} that are not "
                "finite: they have no code. The weights are as they were."
            )
        rounded[slot] = kernels.round(z, slot.grid)
    return rounded
