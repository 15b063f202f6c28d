"""Methods of the wrapped optimizer, called through a write-back: no weight leaves its grid by them.

Schedule-free optimizers have ``eval()`` and ``train()``: between them the model holds other weights, those
for evaluation. They are put on the grid too, by nearest rounding, and the training weights wait beside them,
so that ``train()`` brings them back bit for bit. Any other method that moves managed weights is refused, and
the weights are as they were.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.writeback import guarding
from halfulp.writeback.sharding import local

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack


def attribute(wb: WriteBack, name: str) -> Any:
    """An attribute of the wrapped optimizer; a method of it with everything that belongs around it."""
    value = getattr(wb.optimizer, name)
    return partial(call, wb, name) if isinstance(value, MethodType) else value


def call(wb: WriteBack, name: str, *args: Any, **options: Any) -> Any:
    """Call a method of the wrapped optimizer with its parameters at hand, and account for what it moved."""
    guarding.refuse_cast(wb)
    wb._pass_on_groups()
    slots = wb.slots
    stored: list[torch.Tensor] = []
    try:
        wb._open(slots, stored)
        given = [local(slot.stepped.detach()).clone() for slot in slots]
        result = getattr(wb.optimizer, name)(*args, **options)
        moved = [
            slot
            for slot, was in zip(slots, given, strict=True)
            if not torch.equal(local(slot.stepped.detach()), was)
        ]
        resting = any(slot.resting for slot in slots)
        evaluated = _on_grid(wb, name, moved) if moved and name == "eval" and not resting else {}
        if moved and not evaluated and not (name == "train" and resting):
            raise UsageError(
                f"{type(wb.optimizer).__name__}.{name}() moved {len(moved)} managed tensor(s), the first "
                f"{moved[0].name!r}, which would leave them off their grids; the weights are as they were. "
                "Call it on the optimizer before WriteBack is made around it."
            )
    finally:
        wb._restore(slots, stored)
    for slot in slots:
        if evaluated:
            slot.resting = slot.rested()
        elif name == "train" and slot.resting:
            slot.wake()
        if slot in evaluated:
            slot.store(evaluated[slot])
    wb._pass_on_groups()
    return result


def _on_grid(wb: WriteBack, name: str, moved: list[Any]) -> dict[Any, torch.Tensor]:
    """What evaluation weights become on their grids."""
    found = {}
    for slot in moved:
        z = local(slot.stepped.detach())
        bad = int((~torch.isfinite(z)).sum())
        if bad:
            raise UsageError(
                f"{type(wb.optimizer).__name__}.{name}() made {bad} value(s) of {slot.name!r} that are not "
                "finite: they have no code. The weights are as they were."
            )
        found[slot] = kernels.round(z, slot.grid)
    return found
