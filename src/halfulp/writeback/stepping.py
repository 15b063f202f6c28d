"""Make a step of a write-back: check everything, choose each tensor's route, move it, look at the outcome.

What cannot be right is refused before anything has changed. The type of a parameter, for one, decides how it
is stored and what the optimizer moves in its place when the write-back is made; a model that is cast
afterwards would be stepped in the optimizer's own arithmetic, which rounds before any policy sees a proposal.
That is exactly the loss that a policy prevents, and it is silent.

Then tensors that can have it are moved in one pass (:mod:`halfulp.writeback.fused.step`), the others by the
wrapped optimizer and their policies (:mod:`halfulp.writeback.two_passes`): :mod:`halfulp.writeback.route`
says which, and all routes give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from halfulp.errors import UsageError
from halfulp.writeback import route
from halfulp.writeback.fused import step as fused
from halfulp.writeback.sharding import local
from halfulp.writeback.wrapped_step import Calls, without_gradients

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

LOOK_EVERY = 32  # steps between looks for spoilt moments: they do not get well, and a look waits for a GPU
SHAPE = attrgetter("shape")


@_disable_dynamo  # a compiled caller would look into kernels, and take one tensor's moments for another's
@torch.no_grad()
def step(wb: WriteBack, closure: Callable[[], Any] | None) -> Any:
    """Make one step; return the result of the closure."""
    loss = None
    searching = isinstance(wb.optimizer, torch.optim.LBFGS)  # evaluates the closure while it moves
    if closure is not None and not searching:
        with torch.enable_grad():
            loss = closure()
    if closure is not None:  # it may have computed the gradients
        wb._take_up_unfrozen()
    if any(slot.resting for slot in wb.slots):
        raise UsageError(
            "the model holds the weights for evaluation: call train() on the optimizer before step()."
        )
    active = [s for s in wb.slots if s.p.grad is not None or (searching and s.p.requires_grad)]
    refuse_replaced(wb, wb.slots)
    wb._pass_on_groups()
    refuse_settings(wb, active)
    if wb.nonfinite == "raise":
        refuse_nonfinite(active, wb.steps + 1)
    wb.steps += 1
    try:
        if searching:
            loss = wb._two_passes.step(active, closure)
        else:
            _move(wb, active)
    except BaseException:
        wb.steps -= 1
        raise
    if wb._backward is not None:
        wb._backward.done.clear()
    if wb.telemetry and not wb._warned_spoilt and wb.steps % LOOK_EVERY == 1:
        warn_spoilt(wb)
    return loss


def _move(wb: WriteBack, active: list[Slot]) -> None:
    """Move tensors by their routes: in one pass where that is the same, else by the wrapped optimizer."""
    plan = fused.planned(wb, active)
    once = active if plan is not None else _in_one_pass(wb, active)
    if not once:
        wb._two_passes.step(active)
        return
    if len(once) < sum(len(g["params"]) for g in wb.param_groups):
        moved = {slot.stepped for slot in once}
        rest = [slot for slot in active if slot.stepped not in moved]
        others = (p for g in wb.optimizer.param_groups for p in g["params"] if p not in moved)
        with without_gradients(moved):
            if rest:
                wb._two_passes.step(rest)
            elif any(p.grad is not None for p in others):  # none of them is written back
                Calls(wb.optimizer)()
                wb._pass_on_groups()
    (plan or fused.plan_for(wb, once)).move(wb.steps)
    wb.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask


def _in_one_pass(wb: WriteBack, active: list[Slot]) -> list[Slot]:
    """Find what this step moves in one pass; say why, the first time that something is not but may be."""
    if (wb._explained or not wb.one_pass) and route.none_fused(wb):
        return []
    routes = route.choose(wb, active)
    slower = [chosen for chosen in routes if not chosen.one_pass]
    if slower and not wb.like_torch:
        raise UsageError(
            f"halfulp.{type(wb).__name__} cannot make this step in one pass: {slower[0].reason}."
        )
    if slower and wb.one_pass and not wb._explained:
        wb._explained = True
        wanted = any(g.get("fused") for g in wb.param_groups)
        logging.getLogger("halfulp").log(
            logging.WARNING if wanted else logging.INFO,
            "halfulp: %s of %s tensors are stepped in two passes, which takes longer: %s.",
            len(slower), len(routes), slower[0].reason,
        )  # fmt: skip
    return [slot for slot, chosen in zip(active, routes, strict=True) if chosen.one_pass]


# ---- what is checked -------------------------------------------------------------------------------


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
            why = "another is in its place" if here else "it is gone"
            raise UsageError(
                f"parameter {slot.name!r} is not where it was in the optimizer's groups: {why}; no step "
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


def warn_spoilt(wb: WriteBack) -> None:
    """Warn once that weights do not move because proposals are not finite, which no loss shows."""
    recent = [(s, s.noted) for s in wb.slots if s.noted is not None and s.noted.step == wb.steps]
    if any(noted.spoilt for noted in {id(noted): noted for _, noted in recent}.values()):
        spoilt = [s.name for s, noted in recent if noted.spoilt_at(s)]
        wb._warned_spoilt = True
        logging.getLogger("halfulp").warning(
            "halfulp: at step %s the update of %r%s is not finite (NaN or infinity) in places, and those "
            "weights stay as they are. A NaN gradient spoils an optimizer's moments for good: go back to "
            "a checkpoint. See opt.events.nonfinite; WriteBackOptions(nonfinite='raise') refuses such steps.",
            wb.steps, spoilt[0],
            f" and of {len(spoilt) - 1} other tensors" if len(spoilt) > 1 else "",
        )  # fmt: skip
