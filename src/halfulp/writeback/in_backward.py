"""Make steps inside the backward: each parameter moves as its gradient arrives, and the gradient is freed.

This saves the memory of holding all gradients at once. Features that need all of them are not available:
clipping by a norm over all tensors, gradient accumulation, a scaler that skips steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from halfulp.errors import UsageError
from halfulp.writeback import stepping
from halfulp.writeback.fused import step as moving
from halfulp.writeback.route import choose, why_not_now
from halfulp.writeback.sharding import is_sharded

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot


class InBackward:
    """The hooks of a write-back whose parameters move during the backward."""

    def __init__(self, wb: WriteBack) -> None:
        self.wb = wb
        self.done: list[Slot] = []
        for slot, chosen in zip(wb.slots, choose(wb, wb.slots, now=False), strict=True):
            why = chosen.reason or ("it is sharded" if is_sharded(slot.p) else None)
            if why is not None:
                raise UsageError(
                    f"in_backward() needs steps in one pass, and parameter {slot.name!r} cannot have one: "
                    f"{why}."
                )
        if wb.nonfinite == "raise":
            raise UsageError(
                "in_backward() moves weights before all gradients are known, so nonfinite='raise' could not "
                "leave them as they were: use nonfinite='count'."
            )
        self._handles: list[Any] = [
            slot.p.register_post_accumulate_grad_hook(partial(self._arrived, slot))  # type: ignore[no-untyped-call]
            for slot in wb.slots
            if slot.p.requires_grad  # one that is frozen now moves at step(), when it is not any more
        ]

    def _arrived(self, slot: Slot, p: torch.Tensor) -> None:
        if slot in self.done:
            raise UsageError(
                f"parameter {slot.name!r} has a second gradient before step(): with in_backward() every "
                "backward is a step, so gradients are not accumulated over several."
            )
        stepping.refuse_cast(self.wb, [slot.p])
        stepping.refuse_replaced(self.wb, [slot])
        stepping.refuse_settings(self.wb, [slot])
        why = why_not_now(self.wb, slot)
        if why is not None:
            raise UsageError(f"parameter {slot.name!r} cannot be moved inside the backward: {why}.")
        moving.move(self.wb, [slot], self.wb.steps + 1)
        p.grad = None
        self.done.append(slot)

    def remove(self) -> None:
        """Remove the hooks, so that ``step()`` makes the steps again."""
        for handle in self._handles:
            handle.remove()
