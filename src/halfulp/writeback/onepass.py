"""Which weights a step moves in one pass, and the call that does it.

Adam and AdamW made with ``fused=True`` have an arithmetic that :mod:`halfulp.kernels.onepass_reference`
equals bit for bit, so a write-back around one of them need not call it: gradient, moments and weights are
read once and written once. Everything that the optimizer keeps (``step``, ``exp_avg``, ``exp_avg_sq``) is
kept
in its place and is the same. Where that is not so, for an optimizer (:func:`unsuited`) or a tensor
(:func:`unsuited_tensor`), the step is made in two passes; both return the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import optimizer as torchs

from halfulp.kernels import Written, onepass, tiles_of
from halfulp.kernels.plan import plan_for
from halfulp.kernels.reference import DEADZONE, NEAREST, STOCHASTIC
from halfulp.streams import Stream
from halfulp.writeback import policies
from halfulp.writeback.report import TensorEvents
from halfulp.writeback.sharding import local, shard_offset, wrap_like

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

FIRST, SECOND = "exp_avg", "exp_avg_sq"
RULES = {torch.optim.Adam: onepass.ADAM, torch.optim.AdamW: onepass.ADAMW}


class Way(NamedTuple):
    """A policy as the kernel knows it: how it rounds, what it keeps and under which name."""

    mode: int
    keeps: int = onepass.NOTHING
    key: str | None = None


def way(policy: policies.Policy) -> Way | None:
    """What the kernel has for a policy; nothing for one that it does not know, a user's own for instance."""
    kind = type(policy)
    if kind is policies.ECO:
        return Way(STOCHASTIC if policy.stochastic else NEAREST, onepass.ERROR)
    return {
        policies.Nearest: Way(NEAREST),
        policies.Stochastic: Way(STOCHASTIC),
        policies.DeadzoneStochastic: Way(DEADZONE),
        policies.Kahan: Way(NEAREST, onepass.CARRY, "carry"),
        policies.Master: Way(NEAREST, onepass.MASTER, "master"),
        policies.Remainder16: Way(NEAREST, onepass.REMAINDER, "remainder"),
        policies.Remainder8: Way(STOCHASTIC, onepass.REMAINDER, "remainder"),
    }.get(kind)


def unsuited(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer's own step must be called."""
    name = type(optimizer).__name__
    if type(optimizer) not in RULES:
        return f"{name} is not torch's Adam or AdamW"
    patched = optimizer.__dict__.get("step")
    if patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False):
        return "its step() was replaced"
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(own) or torchs._global_optimizer_pre_hooks or torchs._global_optimizer_post_hooks:
        return "it has step hooks"
    return None


def unsuited_group(group: dict[str, Any]) -> str | None:
    """Why the optimizer's own step must be called for a group."""
    if not group.get("fused"):
        return "it was not made with fused=True, the arithmetic that one pass equals"
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            return f"{option}=True"
    numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
        return "its rate, betas, eps or weight decay are not plain finite numbers"
    return None


def unsuited_tensor(slot: Slot) -> str | None:
    """Why the optimizer's own step must be called for a tensor."""
    p = local(slot.p)
    if p.device.type != "cpu":
        return f"{slot.name!r} is on {p.device.type}"
    if onepass.kind_of(plan_for(slot.grid, torch.float32).grid) is None:
        return f"grid {slot.grid.name} has scales that move, or exponents that lanes do not round"
    if way(slot.policy) is None:
        return f"policy {slot.policy.name!r} is made in two passes"
    if slot.codes is not None and slot.grid.bits != 8:
        return f"codes of {slot.grid.bits} bits are packed in two passes"
    if slot.codes is None and p.dtype != (torch.float32 if slot.storage == "container" else torch.bfloat16):
        return f"{slot.name!r} is {p.dtype}"
    if slot.codes is None and not p.is_contiguous():
        return f"{slot.name!r} is not contiguous"
    return None


def suited(wb: WriteBack, active: Sequence[Slot]) -> tuple[list[Slot], str | None]:
    """Which of these tensors can be moved in one pass, and why the first of the others cannot."""
    reason = unsuited(wb.optimizer)
    if reason is None and onepass.torchs_end() is None and wb.like_torch:
        reason = "torch's fused step has another arithmetic on this machine"
    if reason is not None:
        return [], reason
    groups = [unsuited_group(g) for g in wb.param_groups]
    found = []
    for slot in active:
        why = groups[slot.place[0]] or slot.two_passes or _unsuited_state(wb, slot)
        if why is None:
            found.append(slot)
        else:
            reason = reason or why
    return found, reason


def _unsuited_state(wb: WriteBack, slot: Slot) -> str | None:
    grad = slot.p.grad
    if grad is None:
        return f"{slot.name!r} has no gradient"
    if grad.layout != torch.strided or grad.dtype not in (torch.float32, torch.bfloat16):
        return f"the gradient of {slot.name!r} is {grad.layout} of {grad.dtype}"
    state = wb.optimizer.state.get(slot.stepped, {})
    odd = [k for k in (FIRST, SECOND) if k in state and not _plain(state[k], wb.moments)]
    return f"{odd[0]} of {slot.name!r} is not contiguous {wb.moments}" if odd else None


def _plain(x: torch.Tensor, dtype: torch.dtype) -> bool:
    here = local(x)
    return here.dtype == dtype and here.is_contiguous() and here.device.type == "cpu"


def started(wb: WriteBack, slot: Slot) -> dict[str, Any]:
    """The optimizer's state of a parameter, as its own first step would make it."""
    state = wb.optimizer.state[slot.stepped]
    if not state:
        shape = slot.codes.shape if slot.codes is not None else local(slot.p).shape
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key in (FIRST, SECOND):
            state[key] = wrap_like(torch.zeros(shape, dtype=wb.moments), slot.p)
    found: dict[str, Any] = state
    return found


@torch.no_grad()
def move(wb: WriteBack, slot: Slot, step: int) -> None:
    """One step of one parameter."""
    group, how = wb.param_groups[slot.place[0]], way(slot.policy)
    assert how is not None and slot.p.grad is not None
    state = started(wb, slot)
    state["step"] += 1
    rule = RULES[type(wb.optimizer)]
    settings = onepass.Settings(
        lr=float(group["lr"]), betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]), weight_decay=float(group["weight_decay"]), rule=rule, t=int(state["step"]),
        decay_exact=isinstance(slot.policy, policies.ECO) and slot.policy.decay_exact,
    )  # fmt: skip
    stored = local(slot.p.detach()) if slot.codes is None else slot.codes.packed
    size, end = stored.numel(), onepass.torchs_end()
    offset = shard_offset(slot.p)
    bits = 32 if wb.like_torch else 16
    draws = how.mode != NEAREST
    decay = settings.lr * settings.weight_decay if rule == onepass.ADAMW else 0.0
    counts, sums = onepass.step(
        stored, local(slot.p.grad.detach()), local(state[FIRST]), local(state[SECOND]), slot.grid, settings,
        mode=how.mode, keeps=how.keeps, kept=slot.state[how.key] if how.key else None,
        stream=Stream(seed=wb.seed, name=slot.name, step=step, offset=offset, bits=bits) if draws else None,
        drawing=_drawing(wb, slot, step, offset) if wb.moments == torch.bfloat16 else None,
        plain=size - size % end if wb.like_torch and end else None, moved=slot.moved,
        sums=sampling(size) if settings.weight_decay > 0 and rule == onepass.ADAMW and wb.telemetry else 0,
    )  # fmt: skip
    slot.events = TensorEvents.of(
        slot.name, step, slot.p, Written(stored, counts, sums), decay, slot.moved is not None
    )


def _drawing(wb: WriteBack, slot: Slot, step: int, offset: int) -> tuple[Stream, Stream]:
    """The streams of both moments: those of the tensor's name with theirs."""
    first, second = (
        Stream(seed=wb.seed, name=f"{slot.name}\0{key}", step=step, offset=offset, bits=16)
        for key in (FIRST, SECOND)
    )
    return first, second


def sampling(numel: int) -> int:
    """Which tiles tell how much of a proposal is decay: all of a small tensor, every sixteenth of a large."""
    return 16 if tiles_of(numel) >= 256 else 1
