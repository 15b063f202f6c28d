"""Refuse steps that cannot be right, before anything has changed, and warn after a suspicious one.

The type of a parameter decides how it is stored, and what the optimizer moves in its place, when the
write-back is made. A model that is cast afterwards would be stepped in the optimizer's own arithmetic, which
rounds before any policy sees a proposal. That is exactly the loss that a policy prevents, and it is silent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING

import torch

from halfulp.errors import UsageError
from halfulp.writeback.sharding import local

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

SHAPE = attrgetter("shape")


def refuse_cast(wb: WriteBack, parameters: Sequence[torch.nn.Parameter] | None = None) -> None:
    """Refuse trainable parameters whose dtype changed after the write-back was made.

    Some of them, or all, may have been cast.
    """
    if parameters is None:
        parameters = [p for g in wb.param_groups for p in g["params"]]
    types = [p.dtype for p in parameters]
    if all(map(is_, types, map(wb._types.get, map(id, parameters), types))):
        return
    for p in parameters:
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
    """Refuse parameters that are not where they were in the groups, or have another shape.

    The state that is kept for them would be another's.
    """
    with suppress(IndexError):
        groups = [g["params"] for g in wb.param_groups]
        there = [groups[i][j] for i, j in [slot.place for slot in slots]]
        same = all(map(is_, there, [slot.p for slot in slots]))
        if same and all(map(eq, map(SHAPE, there), map(SHAPE, slots))):
            return
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
    kinds = zip([slot.place[0] for slot in slots], map(id, [slot.policy for slot in slots]), strict=True)
    for slot in dict(zip(kinds, slots, strict=True)).values():  # the same for thousands of them
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
                "step (GradScaler does), or use WriteBackOptions(nonfinite='count')."
            )


def tell_spoilt(wb: WriteBack) -> None:
    """Warn once that weights do not move because proposals are not finite, which no loss shows."""
    recent = [(s, s.noted) for s in wb.slots if s.noted is not None and s.noted.step == wb.steps]
    if any(noted.spoilt for noted in {id(noted): noted for _, noted in recent}.values()):
        spoilt = [s.name for s, noted in recent if noted.spoilt_at(s)]
        wb._told_spoilt = True
        logging.getLogger("halfulp").warning(
            "halfulp: at step %s the update of %r%s is not finite (NaN or infinity) in places, and those "
            "weights stay as they are. A NaN gradient spoils an optimizer's moments for good: go back to "
            "a checkpoint. See opt.events.nonfinite; WriteBackOptions(nonfinite='raise') refuses such steps.",
            wb.steps, spoilt[0],
            f" and of {len(spoilt) - 1} other tensors" if len(spoilt) > 1 else "",
        )  # fmt: skip
