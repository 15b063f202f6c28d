"""``AdamW``, ``Adam``, ``SGD`` and ``Lion`` for weights on a grid, in one pass, for those who start afresh.

A write-back around torch's own, so that schedulers, checkpoints, events and bytes are those of
:class:`~halfulp.WriteBack`. What it may do because no earlier run has to be continued bit for bit: draws of
16 bits, refined where they do not decide; one arithmetic for every element, so that shards give what the
whole tensor gives; and moments of two bytes, rounded stochastically. (With beta2 = .999 a second moment in
bfloat16 does not move under nearest rounding.)
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

import torch

from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.writeback import onepass
from halfulp.writeback.choosing import Select, Storage
from halfulp.writeback.lion import Lion as PlainLion
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.policies import Policy

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Given(TypedDict, total=False):
    """What all of them take: see :class:`AdamW`."""

    grid: str | Grid | torch.dtype
    policy: str | Policy
    moments: Literal["fp32", "bf16"]
    model: torch.nn.Module | None
    select: Select
    seed: int
    storage: Storage | None
    nonfinite: Literal["count", "raise"]
    telemetry: bool
    project: Literal["nearest", "stochastic", "none"]
    keep_scratch: bool | None
    fused: bool | None
    foreach: bool | None
    capturable: bool
    differentiable: bool
    maximize: bool
    amsgrad: bool


TORCHS: dict[str, tuple[bool | None, ...]] = {
    "fused": (None, False, True), "foreach": (None, False, True), "capturable": (False,),
    "differentiable": (False,), "maximize": (False,), "amsgrad": (False,),
}  # fmt: skip
"""Options of torch's that change nothing here, so that who comes from there need not take them away, by the
values for which that is so: a step in one pass is neither fused nor foreach, and has the same maths."""


def _without_torchs(name: str, given: Given) -> dict[str, Any]:
    """What is given without :data:`TORCHS`; refused where it asks for something that is not done."""
    for option, value in given.items():
        if option not in Given.__annotations__ or value not in TORCHS.get(option, (value,)):
            around = f"torch.optim.{name}(...)" if hasattr(torch.optim, name) else "an optimizer that has it"
            raise UsageError(
                f"halfulp.{name} has no {option}={value!r}: its step in one pass is plain {name}, and its "
                f"options are those of help(halfulp.{name}). Use halfulp.WriteBack({around}, grid, policy)."
            )
    return {option: value for option, value in given.items() if option not in TORCHS}


class _OnePass(WriteBack):
    """What they have in common."""

    like_torch = False

    def __init__(self, inner: torch.optim.Optimizer, given: Given) -> None:
        options = {"grid": "bf16", **_without_torchs(type(self).__name__, given)}
        moments = options.pop("moments", "fp32")
        if moments not in MOMENTS:
            raise UsageError(f"moments must be one of {', '.join(MOMENTS)}, not {moments!r}.")
        self.moments = MOMENTS[moments]
        if "select" in options:
            options["params"] = options.pop("select")
        super().__init__(inner, **options)

    def _prepared(self, planned: Any) -> Any:
        made = super()._prepared(planned)
        for slot, _ in made:
            group = self.param_groups[slot.place[0]]
            why = slot.two_passes or onepass.unsuited_group(self, group)
            if why is not None:
                raise UsageError(
                    f"halfulp.{type(self).__name__} makes its steps in one pass, and parameter {slot.name!r} "
                    f"cannot have one: {why}. Use halfulp.WriteBack around torch's own, or another's."
                )
        return made

    def _suited(self, active: Any) -> Any:
        once, reason = onepass.suited(self, active)
        if reason is not None:
            raise UsageError(f"{type(self).__name__} cannot make this step in one pass: {reason}.")
        return once

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Torch gives moments the parameter's type; they get theirs again."""
        super()._load(state_dict)
        for slot in self.slots:
            state = self.optimizer.state.get(slot.stepped, {})
            for key in onepass.KEPT[type(self.optimizer)]:
                if state.get(key) is not None:
                    state[key] = state[key].to(self.moments)
            if "step" in state:
                state["step"] = state["step"].cpu()  # to read it from a GPU would wait for it


class _Adams(_OnePass):
    kind: Any

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        **given: Unpack[Given],
    ) -> None:
        decay = {} if weight_decay is None else {"weight_decay": weight_decay}  # else torch's own default
        inner = self.kind(params, lr=lr, betas=betas, eps=eps, fused=True, **decay)
        super().__init__(inner, given)


class AdamW(_Adams):
    """AdamW with weights on a grid, in one pass.

    ``params``, ``lr``, ``betas``, ``eps``, ``weight_decay`` as torch has them, defaults included; names
    (``model.named_parameters()``) or ``model=`` where something is drawn. ``moments``: ``fp32`` or
    ``bf16``, the latter rounded stochastically. ``select``: which tensors are on the grid, by default as in
    :class:`~halfulp.WriteBack`; the others are moved by torch's fused step. The rest as there. Of torch's
    ``fused``, ``foreach``, ``amsgrad``, ``maximize``, ``capturable`` and ``differentiable``, what changes
    nothing is taken.

    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> opt = AdamW(model.named_parameters(), lr=3e-4, moments="bf16")
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    >>> [state["exp_avg"].dtype for state in opt.state.values()]
    [torch.bfloat16, torch.bfloat16]
    """

    kind = torch.optim.AdamW


class Adam(_Adams):
    """As :class:`AdamW`, with weight decay as a part of the gradient."""

    kind = torch.optim.Adam


class SGD(_OnePass):
    """SGD with momentum and weights on a grid, in one pass: as :class:`AdamW`, otherwise as torch has it.
    Bytes a bfloat16 weight: 6, or 4 with ``moments="bf16"``."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **given: Unpack[Given],
    ) -> None:
        options: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        inner = torch.optim.SGD(params, lr=lr, weight_decay=weight_decay, fused=True, **options)
        super().__init__(inner, given)


class Lion(_OnePass):
    """Lion (Chen et al. 2023) with weights on a grid, in one pass: as :class:`AdamW`. Bytes a bfloat16
    weight: 6, or 4 with ``moments="bf16"``. Weight decay is decoupled. ``eco`` is refused: a step is a
    sign, and a moment of any size brings back the same."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **given: Unpack[Given],
    ) -> None:
        super().__init__(PlainLion(params, lr=lr, betas=betas, weight_decay=weight_decay), given)
