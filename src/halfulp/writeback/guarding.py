"""What a step is refused for, while nothing has changed yet; and a warning after one.

How a parameter is stored, and what the optimizer is given in its place, follows from its type when the
write-back is made. A model that is cast afterwards would be stepped in the optimizer's own arithmetic, which
rounds before any policy sees a proposal: the very loss that a policy is there to prevent, and silent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.writeback.sharding import local

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot


def refuse_cast(wb: WriteBack, parameters: Iterable[torch.nn.Parameter] | None = None) -> None:
    """Refuse trainable parameters that have another type than when the write-back was made; of some,
    or of all."""
    everything = (p for g in wb.param_groups for p in g["params"])
    for p in everything if parameters is None else parameters:
        was = wb._types.get(id(p), p.dtype)
        if p.dtype != was and p.requires_grad:
            name = wb._chooser.names(wb.param_groups)[p]
            was_, now = (str(dtype).removeprefix("torch.") for dtype in (was, p.dtype))
            raise UsageError(
                f"parameter {name!r} was {was_} when the {type(wb).__name__} was made and is {now} now; no "
                "step was made. Cast the model first (model.bfloat16(), .half(), .to(dtype)), then make the "
                "optimizer around it."
            )


def refuse_replaced(wb: WriteBack, slots: Sequence[Slot]) -> None:
    """Refuse parameters that are not where they were in the groups, or have another shape: what is kept for
    them would be another's."""
    for slot in slots:
        i, j = slot.place
        here = wb.param_groups[i]["params"][j : j + 1] if i < len(wb.param_groups) else []
        if not here or here[0] is not slot.p:
            found = "another is in its place" if here else "it is gone"
            raise UsageError(
                f"parameter {slot.name!r} is not where it was in the optimizer's groups: {found}; no step "
                "was made. Make a new optimizer for a model whose parameters are replaced."
            )
        if slot.p.shape != slot.shape:
            raise UsageError(
                f"parameter {slot.name!r} had shape {tuple(slot.shape)} when the {type(wb).__name__} was "
                f"made and has {tuple(slot.p.shape)} now; no step was made. Make a new optimizer for it."
            )


def refuse_settings(wb: WriteBack, slots: Sequence[Slot]) -> None:
    """Refuse settings that somebody gave a group since, and that a policy cannot do with."""
    for slot in {(slot.place[0], id(slot.policy)): slot for slot in slots}.values():
        slot.policy.check(slot.grid, wb.optimizer, wb.param_groups[slot.place[0]])


def refuse_nonfinite(slots: Sequence[Slot], step: int) -> None:
    """Refuse gradients that are not finite."""
    for slot in slots:
        grad = slot.p.grad
        if grad is not None and grad.is_sparse:
            grad = grad.coalesce().values()
        if grad is not None and not bool(torch.isfinite(local(grad)).all()):
            raise UsageError(
                f"the gradient of {slot.name!r} is not finite at step {step}; nothing was changed. Skip the "
                "step (GradScaler does), or use nonfinite='count'."
            )


def tell_spoilt(wb: WriteBack) -> None:
    """Say once that weights stand still because their proposals are not finite: no loss will show it."""
    at = kernels.WRITE_COUNTS.index("nonfinite")
    recent = [s.events for s in wb.slots if s.events is not None and s.events.step == wb.steps]
    spoilt = [events.name for events in recent if bool(events.counts[:, at].any())]
    if spoilt:
        wb._told_spoilt = True
        logging.getLogger("halfulp").warning(
            "halfulp: at step %s the update of %r%s is not finite (NaN or infinity) in places, and those "
            "weights stay as they are. A NaN gradient spoils an optimizer's moments for good: go back to "
            "a checkpoint. See opt.events.nonfinite; nonfinite='raise' refuses such steps beforehand.",
            wb.steps, spoilt[0],
            f" and of {len(spoilt) - 1} other tensors" if len(spoilt) > 1 else "",
        )  # fmt: skip
