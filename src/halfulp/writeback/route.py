"""Choose the route of a step: how each tensor is moved, and why not faster.

=================== =====================================================================================
route               what happens
=================== =====================================================================================
one pass            a kernel reads gradient, moments and weights once and writes them once
one pass in chunks  the optimizer's own step and the policy's, chunk by chunk in the caches: grids with block
                    scales, and rules that no kernel has
two passes, batched the wrapped optimizer's step; then one kernel call writes all tensors that are alike
two passes          the wrapped optimizer's step; then each tensor is written by its policy
=================== =====================================================================================

All give the same bits; :func:`choose` takes the first that a tensor can have. What decides is the optimizer,
the group, the tensor (found once, in ``slot.two_passes``) and how things lie in memory at this step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from halfulp.kernels import onepass
from halfulp.kernels.many import suits
from halfulp.kernels.plan import plan_for
from halfulp.writeback import moments_kept
from halfulp.writeback.rules import OptimizerRule, rule_of
from halfulp.writeback.sharding import is_sharded, local
from halfulp.writeback.wrapped_step import replaced_step

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

ONE_PASS, CHUNKED = "one pass", "one pass in chunks"
BATCHED, TWO_PASSES = "two passes, batched", "two passes"


@dataclass(frozen=True)
class Route:
    """The way in which a tensor is moved.

    Args:
        name: One of the names in the table above.
        reason: Why the tensor is not moved in one pass; empty if it is.
    """

    name: str
    reason: str = ""

    @property
    def one_pass(self) -> bool:
        """True if the wrapped optimizer is not called for the tensor."""
        return self.name in (ONE_PASS, CHUNKED)


def choose(wb: WriteBack, slots: Sequence[Slot], *, now: bool = True) -> list[Route]:
    """Choose the route of each tensor.

    Args:
        wb: The write-back.
        slots: The tensors that a step moves.
        now: Take existing gradients into account, as in a step.

    Returns:
        A route for each tensor, with the reason if it is not moved in one pass.
    """
    optimizer = why_not_optimizer(wb)
    groups: dict[int, str | None] = {}
    routes = []
    for slot in slots:
        place = slot.place[0]
        if optimizer is None and place not in groups:
            groups[place] = why_not_group(wb, wb.param_groups[place])
        why = optimizer or groups[place] or slot.two_passes or why_not_together(wb, slot)
        if why is None and now and slot.p.grad is not None:
            why = why_not_now(wb, slot)
        if why is None:
            routes.append(_route(CHUNKED if in_chunks(wb, slot) else ONE_PASS))
        else:
            routes.append(_route(BATCHED if slot.batched else TWO_PASSES, why))
    return routes


@cache
def _route(name: str, reason: str = "") -> Route:
    return Route(name, reason)


def none_fused(wb: WriteBack) -> bool:
    """Return True if the optimizer's own step must be called for everything."""
    return why_not_optimizer(wb) is not None or all(why_not_group(wb, g) for g in wb.param_groups)


def why_not_optimizer(wb: WriteBack) -> str | None:
    """Return why the optimizer's own step must be called for every tensor."""
    optimizer = wb.optimizer
    if not wb.one_pass:
        return "one_pass=False"
    if rule_of(optimizer) is None:
        return f"{type(optimizer).__name__} is not torch's Adam, AdamW or SGD"
    if replaced_step(optimizer) is not None:
        return "its step() was replaced"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has step hooks"  # those of all optimizers see the step of the write-back
    return None


def why_not_group(wb: WriteBack, group: dict[str, Any]) -> str | None:
    """Return why the optimizer's own step must be called for a group, of an optimizer that has a rule."""
    rule = _rule(wb)
    why = rule.why_not_fused(group, wb.optimizer.defaults, like_torch=wb.like_torch)
    number = rule.number(group) if why is None and wb.like_torch else None
    if number is not None and onepass.torchs_end(number, fused=bool(group.get("fused"))) is None:
        return "torch's step has another arithmetic on this machine"
    return why


def why_not_together(wb: WriteBack, slot: Slot) -> str | None:
    """Return why a tensor and the options of its group, which may change, do not go together in one pass."""
    rule, group, kernel = _rule(wb), wb.param_groups[slot.place[0]], slot.policy.kernel
    number = rule.number(group)
    if number == onepass.PLAIN and slot.p.is_cuda:
        return f"{slot.name!r} is on a GPU, where SGD without momentum is stepped in two passes"
    if number is None or not wb.like_torch or group.get("fused") or in_chunks(wb, slot):
        return None
    if kernel is not None and kernel.keeps == "error" and rule.counts:
        return f"policy {slot.policy.name!r} is made in one pass only by the arithmetic of fused=True"
    return None


def why_not_tensor(wb: WriteBack, slot: Slot) -> str | None:
    """Return why the optimizer's own step must be called for a tensor, whatever its group and gradient."""
    p, kernel = local(slot.p), slot.policy.kernel
    if p.device.type not in ("cpu", "cuda"):
        return f"{slot.name!r} is on {p.device.type}"
    if p.device.type == "cuda" and wb.like_torch:
        return f"{slot.name!r} is on a GPU, where torch's fused step has an arithmetic of its own"
    if p.device.type == "cuda" and not gpu_is_exact():
        return f"{slot.name!r} is on a GPU, and Triton before 3.6 takes subnormal quotients for zero"
    if p.device.type == "cuda" and (slot.codes is not None or (kernel is not None and kernel.partial)):
        return f"{slot.name!r} is on a GPU, where codes and tile masters are stepped in two passes"
    if kernel is None:
        return f"policy {slot.policy.name!r} is made in two passes"
    if (why := moments_kept.why_not(wb, slot)) is not None:
        return why
    if slot.codes is not None and slot.grid.bits > 8:
        return f"codes of {slot.grid.bits} bits, more than eight, are packed in two passes"
    if rule_of(wb.optimizer) is not None and in_chunks(wb, slot):
        why = why_not_chunked(wb, slot)
        if why is not None:
            return why
    if slot.codes is None and p.dtype != (torch.float32 if slot.storage == "container" else torch.bfloat16):
        return f"{slot.name!r} is {p.dtype}"
    if slot.codes is None and not p.is_contiguous():
        return f"{slot.name!r} is not contiguous"
    return None


def why_not_chunked(wb: WriteBack, slot: Slot) -> str | None:
    """Return why a tensor cannot be moved in chunks."""
    name, s, kernel = slot.grid.name, slot.grid.scaling, slot.policy.kernel
    if not wb.like_torch or _rule(wb).advance is None:
        return f"grid {name} is moved in chunks by torch's fused steps only, in halfulp.WriteBack around one"
    if s is not None and s.moves and (s.per == "tensor" or s.rule == "nv"):
        return f"scales of grid {name} need the whole tensor's maximum before anything is written"
    if kernel is None or kernel.partial:
        return f"policy {slot.policy.name!r} on grid {name} is made in two passes"
    if local(slot.p) is not slot.p or slot.p.device.type != "cpu":
        return f"{slot.name!r} is a shard, or not on a CPU: grid {name} is moved in two passes there"
    if slot.storage not in ("container", "packed") or slot.p.dtype != torch.float32:
        return f"{slot.name!r} is {slot.p.dtype} in {slot.storage} storage on grid {name}"
    return None


def why_not_now(wb: WriteBack, slot: Slot) -> str | None:
    """Return why the optimizer's own step must be called for a tensor as it lies in memory at this step."""
    grad, p = slot.p.grad, local(slot.p)
    if grad is None:
        return f"{slot.name!r} has no gradient"
    if grad.layout != torch.strided or grad.dtype not in (torch.float32, torch.bfloat16):
        return f"the gradient of {slot.name!r} is {grad.layout} of {grad.dtype}"
    if slot.codes is None and not p.is_contiguous():
        return f"{slot.name!r} is not contiguous"
    return moments_kept.why_not_now(wb, slot, wb.optimizer.state.get(slot.stepped, {}))


def can_batch(slot: Slot) -> bool:
    """Return True if the second of two passes can be made with other tensors."""
    kernel = slot.policy.kernel
    if kernel is None or not kernel.batched:
        return False
    if slot.codes is not None or is_sharded(slot.p) or not slot.p.is_cpu:
        return False
    plain = {"container": torch.float32, "native": torch.bfloat16}.get(slot.storage)
    return slot.p.dtype == plain and suits(slot.grid)


def in_chunks(wb: WriteBack, slot: Slot) -> bool:
    """Return True if kernels do not have a tensor's grid (scales of blocks, other exponents) or its rule."""
    if _rule(wb).number(wb.param_groups[slot.place[0]]) is None:
        return True
    return onepass.kind_of(plan_for(slot.grid, torch.float32).grid) is None


@cache
def gpu_is_exact() -> bool:
    """Return True if Triton's rounded quotient and square root keep subnormal numbers.

    By the code that it generates, they do from version 3.6 on. If Triton is not installed, return True.
    """
    with suppress(PackageNotFoundError):
        return tuple(int(n) for n in version("triton").split(".")[:2]) >= (3, 6)
    return True


def _rule(wb: WriteBack) -> OptimizerRule:
    rule = rule_of(wb.optimizer)
    assert rule is not None
    return rule
