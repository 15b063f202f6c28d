"""Which weights a step moves in one pass, and the call that does it.

Adam, AdamW and SGD with momentum, made with ``fused=True``, have an arithmetic that
:mod:`halfulp.kernels.onepass_reference` equals bit for bit, so a write-back around one of them need not call
it: gradient, moments and weights are read once and written once. Everything that the optimizer keeps
(``step``, ``exp_avg``, ``momentum_buffer``...) is kept in its place and is the same. Where that is not so,
for an optimizer (:func:`unsuited`), a group (:func:`unsuited_group`) or a tensor (:func:`unsuited_tensor`),
the step is made in two passes; they return the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfulp.kernels import Written, onepass, tiles_of
from halfulp.kernels.plan import plan_for
from halfulp.kernels.reference import DEADZONE, NEAREST, STOCHASTIC
from halfulp.streams import key_of
from halfulp.writeback import pieces, policies
from halfulp.writeback.lion import Lion
from halfulp.writeback.report import TensorEvents
from halfulp.writeback.sharding import local, shard_offset, wrap_like
from halfulp.writeback.tiles import put_tiles, take_tiles

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

KEPT: dict[Any, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"), torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",), Lion: ("exp_avg",),
}  # fmt: skip
"""The optimizers that one pass knows, and the names of their moments."""


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    if type(optimizer) is torch.optim.SGD:
        return onepass.NESTEROV if group["nesterov"] else onepass.SGD
    rules = {torch.optim.Adam: onepass.ADAM, torch.optim.AdamW: onepass.ADAMW, Lion: onepass.LION}
    return rules[type(optimizer)]


DECOUPLED = (onepass.ADAMW, onepass.LION)
"""Rules whose weight decay is a part of the proposal of its own."""


class Way(NamedTuple):
    """A policy as the kernel knows it: how it rounds, what it keeps and under which name."""

    mode: int
    keeps: int = onepass.NOTHING
    key: str | None = None


WAYS = {
    policies.Nearest: Way(NEAREST),
    policies.Stochastic: Way(STOCHASTIC),
    policies.DeadzoneStochastic: Way(DEADZONE),
    policies.Kahan: Way(NEAREST, onepass.CARRY, "carry"),
    policies.Master: Way(NEAREST, onepass.MASTER, "master"),
    policies.TileMaster: Way(NEAREST, onepass.MASTER, "master"),
    policies.Remainder16: Way(NEAREST, onepass.REMAINDER, "remainder"),
    policies.Remainder8: Way(STOCHASTIC, onepass.REMAINDER, "remainder"),
}


def way(policy: policies.Policy) -> Way | None:
    """What the kernel has for a policy; nothing for one that it does not know, a user's own for instance."""
    if type(policy) is policies.ECO:
        return Way(STOCHASTIC if policy.stochastic else NEAREST, onepass.ERROR)
    return WAYS.get(type(policy))


def unsuited(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer's own step must be called."""
    name = type(optimizer).__name__
    if type(optimizer) not in KEPT:
        return f"{name} is not torch's Adam, AdamW or SGD"
    patched = optimizer.__dict__.get("step")
    if patched is not None and not getattr(patched, "_wrapped_by_lr_sched", False):
        return "its step() was replaced"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has step hooks"  # those of all optimizers see the step of the write-back
    return None


def unsuited_group(wb: WriteBack, group: dict[str, Any]) -> str | None:
    """Why the optimizer's own step must be called for a group; of optimizers that one pass knows."""
    if not group.get("fused") and type(wb.optimizer) is not Lion:
        return "it was not made with fused=True, the arithmetic that one pass equals"
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            return f"{option}=True"
    names = ("lr", "weight_decay", "betas", "eps", "momentum", "dampening")
    numbers = [x for name in names if name in group for x in _each(group[name])]
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
        return "its rate, betas, eps or weight decay are not plain finite numbers"
    if group.get("momentum") == 0:
        return "SGD without momentum has nothing that one pass would save"
    if wb.like_torch and onepass.torchs_end(rule_of(wb.optimizer, group)) is None:
        return "torch's fused step has another arithmetic on this machine"
    return None


def _each(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)


@cache
def gpu_is_exact() -> bool:
    """Whether Triton's rounded quotient and square root keep subnormal numbers: from 3.6 on, by the code that
    it makes. There is nothing to ask where it is not installed."""
    with suppress(PackageNotFoundError):
        return tuple(int(n) for n in version("triton").split(".")[:2]) >= (3, 6)
    return True


def in_pieces(slot: Slot) -> bool:
    """Whether lanes do not round to a tensor's grid: scales of blocks, other exponents."""
    return onepass.kind_of(plan_for(slot.grid, torch.float32).grid) is None


def unsuited_tensor(wb: WriteBack, slot: Slot) -> str | None:
    """Why the optimizer's own step must be called for a tensor."""
    p = local(slot.p)
    if p.device.type not in ("cpu", "cuda"):
        return f"{slot.name!r} is on {p.device.type}"
    if p.device.type == "cuda" and wb.like_torch:
        return f"{slot.name!r} is on a GPU, where torch's fused step has an arithmetic of its own"
    if p.device.type == "cuda" and not gpu_is_exact():
        return f"{slot.name!r} is on a GPU, and Triton before 3.6 takes subnormal quotients for zero"
    if p.device.type == "cuda" and (slot.codes is not None or isinstance(slot.policy, policies.TileMaster)):
        return f"{slot.name!r} is on a GPU, where codes and tile masters are stepped in two passes"
    if way(slot.policy) is None:
        return f"policy {slot.policy.name!r} is made in two passes"
    if slot.codes is not None and slot.grid.bits > 8:
        return f"codes of {slot.grid.bits} bits, more than eight, are packed in two passes"
    if in_pieces(slot) and (why := pieces.unsuited(wb, slot)) is not None:
        return why
    if slot.codes is None and p.dtype != (torch.float32 if slot.storage == "container" else torch.bfloat16):
        return f"{slot.name!r} is {p.dtype}"
    if slot.codes is None and not p.is_contiguous():
        return f"{slot.name!r} is not contiguous"
    return None


def suited(wb: WriteBack, active: Sequence[Slot]) -> tuple[list[Slot], str | None]:
    """Which of these tensors can be moved in one pass, and why the first of the others cannot."""
    reason = unsuited(wb.optimizer)
    if reason is not None:
        return [], reason
    groups = [unsuited_group(wb, g) for g in wb.param_groups]
    found = []
    for slot in active:
        why = groups[slot.place[0]] or slot.two_passes or unsuited_now(wb, slot)
        if why is None:
            found.append(slot)
        else:
            reason = reason or why
    return found, reason


def unsuited_now(wb: WriteBack, slot: Slot) -> str | None:
    """Why the optimizer's own step must be called for a tensor as it lies in memory at this step."""
    grad, p = slot.p.grad, local(slot.p)
    if grad is None:
        return f"{slot.name!r} has no gradient"
    if grad.layout != torch.strided or grad.dtype not in (torch.float32, torch.bfloat16):
        return f"the gradient of {slot.name!r} is {grad.layout} of {grad.dtype}"
    if slot.codes is None and not p.is_contiguous():
        return f"{slot.name!r} is not contiguous"
    state = wb.optimizer.state.get(slot.stepped, {})
    kept = KEPT[type(wb.optimizer)]
    odd = [k for k in kept if state.get(k) is not None and not _plain(state[k], wb.moments, p)]
    return f"{odd[0]} of {slot.name!r} is not contiguous {wb.moments} of its size" if odd else None


def _plain(x: torch.Tensor, dtype: torch.dtype, like: torch.Tensor) -> bool:
    here = local(x)
    alike = (here.dtype, here.device, here.numel()) == (dtype, like.device, like.numel())
    return alike and here.is_contiguous()


def started(wb: WriteBack, slot: Slot) -> tuple[dict[str, Any], int]:
    """The optimizer's state of a parameter, as its own first step would make it; and which step this is."""
    state = wb.optimizer.state[slot.stepped]
    counts = isinstance(wb.optimizer, torch.optim.Adam | torch.optim.AdamW)  # the others do not
    if counts and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    new = [key for key in KEPT[type(wb.optimizer)] if state.get(key) is None]
    for key in new:
        p = local(slot.p)
        shape = slot.codes.shape if slot.codes is not None else p.shape
        state[key] = wrap_like(torch.zeros(shape, dtype=wb.moments, device=p.device), slot.p)
    if not counts:
        return state, 1 if new else 2
    state["step"] += 1
    return state, int(state["step"])


@torch.no_grad()
def move(wb: WriteBack, slots: Sequence[Slot], step: int) -> None:
    """One step of these parameters: a kernel call for all that are stored and rounded alike."""
    settings: dict[tuple[int, int, bool], onepass.Settings] = {}
    calls: dict[Any, tuple[onepass.Case, list[Slot], list[onepass.Job]]] = {}
    masters = _masters(slots)
    for slot in slots:
        slot.heed_edits()
        state, t = started(wb, slot)
        group, how = slot.place[0], way(slot.policy)
        assert how is not None
        exact = isinstance(slot.policy, policies.ECO) and slot.policy.decay_exact
        at = group, t, exact
        if at not in settings:
            settings[at] = _settings(wb, *at)
        numbers = settings[at]
        if in_pieces(slot):
            size = local(slot.p).numel()
            pieces.move(wb, slot, state, numbers, step, sampling(size) if wb.telemetry else 0)
            slot.note_written()
            continue
        job = _job(wb, slot, state, how, numbers, step, masters)
        alone = slot if isinstance(slot.policy, policies.TileMaster) else None  # they share the memory
        like = (id(slot.grid), how, numbers.rule, onepass.small(numbers), job.types, alone)
        if like not in calls:
            case = onepass.Case(
                grid=slot.grid, rule=numbers.rule, small=like[3], mode=how.mode, keeps=how.keeps,
                short=not wb.like_torch, drawn=wb.moments == torch.bfloat16,
            )  # fmt: skip
            calls[like] = case, [], []
        calls[like][1].append(slot)
        calls[like][2].append(job)
    for case, together, jobs in calls.values():
        for slot, job in zip(together, jobs, strict=True):
            _spread(slot, job)
        made = onepass.steps(case, jobs)
        for slot, job, found in zip(together, jobs, made, strict=True):
            _collect(slot, job)
            slot.note_written()
            g = wb.param_groups[slot.place[0]]
            decay = float(g["lr"]) * float(g["weight_decay"]) if case.rule in DECOUPLED else 0.0
            slot.events = TensorEvents.of(
                slot.name, step, slot.p, Written(job.stored, *found), decay, slot.moved is not None, job.sums
            )


def _masters(slots: Sequence[Slot]) -> torch.Tensor | None:
    """Memory for the masters of a whole tensor, where only chosen tiles keep theirs: a tensor at a time."""
    chosen = [s for s in slots if isinstance(s.policy, policies.TileMaster)]
    sizes = [local(s.p).numel() for s in chosen]
    return torch.empty(max(sizes), dtype=torch.float32, device="cpu") if sizes else None


def _spread(slot: Slot, job: onepass.Job) -> None:
    """Masters of a whole tensor: of chosen tiles the packed ones, elsewhere what is stored, whose master step
    is the nearest step."""
    if isinstance(slot.policy, policies.TileMaster):
        assert job.kept is not None
        job.kept.copy_(slot.values().reshape(-1))
        put_tiles(job.kept, slot.state["tiles"], slot.state["master"], slot.policy.tile, slot.policy.offset)


def _collect(slot: Slot, job: onepass.Job) -> None:
    """Keep the masters of chosen tiles."""
    if isinstance(slot.policy, policies.TileMaster):
        assert job.kept is not None
        master, how = slot.state["master"], slot.policy
        master.copy_(take_tiles(job.kept, slot.state["tiles"], master.numel(), how.tile, how.offset))


def _settings(wb: WriteBack, group: int, t: int, exact: bool) -> onepass.Settings:
    g = wb.param_groups[group]
    b1, b2 = g["betas"] if "betas" in g else (g["momentum"], 0.0)
    return onepass.Settings(
        lr=float(g["lr"]), betas=(float(b1), float(b2)), eps=float(g.get("eps", 0.0)),
        weight_decay=float(g["weight_decay"]), rule=rule_of(wb.optimizer, g), t=t, decay_exact=exact,
        dampening=float(g.get("dampening", 0.0)),
    )  # fmt: skip


def _job(
    wb: WriteBack, slot: Slot, state: dict[str, Any], how: Way, settings: onepass.Settings, step: int,
    masters: torch.Tensor | None,
) -> onepass.Job:  # fmt: skip
    assert slot.p.grad is not None
    stored = local(slot.p.detach()) if slot.codes is None else slot.codes.packed
    first, *second = (local(state[key]) for key in KEPT[type(wb.optimizer)])
    size, end = first.numel(), onepass.torchs_end(settings.rule) if wb.like_torch else None
    draws, bits = how.mode != NEAREST, 32 if wb.like_torch else 16
    of_weights = key_of(wb.seed, slot.name, step, bits) if draws else (0, 0)
    narrow = wb.moments == torch.bfloat16
    of_moments = key_of(wb.seed, f"{slot.name}\0moments", step, 16) if narrow else (0, 0)
    kept = slot.state[how.key] if how.key else None
    if isinstance(slot.policy, policies.TileMaster):
        assert masters is not None
        kept = masters[:size]
    return onepass.Job(
        stored=stored, grad=local(slot.p.grad.detach()).contiguous(), first=first,
        second=second[0] if second else None, kept=kept, moved=slot.moved,
        rates=onepass.rates(settings), keys=(*of_weights, *of_moments), offset=shard_offset(slot.p),
        plain=size - size % end if end else size, sums=sampling(size) if wb.telemetry else 0,
    )  # fmt: skip


def sampling(numel: int) -> int:
    """Of every how many tiles there are sums: of all of a small tensor, of sixteen or more of a large one."""
    tiles = tiles_of(numel)
    return 64 if tiles >= 1024 else 16 if tiles >= 256 else 1
