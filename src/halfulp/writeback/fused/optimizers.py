"""Define ``AdamW``, ``Adam``, ``SGD`` and ``Lion`` for weights on a grid, in one pass, for new runs.

Each is a write-back around torch's optimizer, so schedulers, checkpoints, events and bytes work as in
:class:`~halfulp.WriteBack`. They need not continue an earlier run bit for bit, which allows 16-bit random
draws, refined where they do not decide; the same arithmetic for every element, so that shards give the same
result as the whole tensor; and two-byte moments, rounded stochastically. (With beta2 = .999 a second moment
in bfloat16 does not move under nearest rounding.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch

from halfulp.deprecation import grouped_arguments
from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.numbers.spellings import grid_name
from halfulp.writeback import moments_kept
from halfulp.writeback.choosing import Select, Storage, WriteBackOptions
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.policies import Policy
from halfulp.writeback.route import why_not_group
from halfulp.writeback.rules.lion import Lion as PlainLion
from halfulp.writeback.rules.rule import NUMBERS, is_number

_grouped = grouped_arguments("options", WriteBackOptions, ("nonfinite", "telemetry"))


class Given(TypedDict, total=False):
    """The keyword arguments of all one-pass optimizers: see :class:`AdamW`."""

    grid: str | Grid | torch.dtype
    policy: str | Policy
    moments: Literal["fp32", "bf16", "int8"]
    model: torch.nn.Module | None
    select: Select
    seed: int
    storage: Storage | None
    project: Literal["nearest", "stochastic", "none"]
    options: WriteBackOptions
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
"""Options of torch's optimizers, with the values that are accepted because they change nothing here. A step
in one pass is neither fused nor foreach, and has the same maths."""


class _OnePass(WriteBack):
    """The shared base of the one-pass optimizers; ``kind`` is the optimizer that each wraps."""

    like_torch = False
    kind: ClassVar[Any]

    def __init__(self, params: Any, given: Given, **own: Any) -> None:
        name = self.kind.__name__
        if isinstance(params, torch.nn.Module):
            raise UsageError(
                f"halfulp.{name} takes parameters, not the module ({type(params).__name__}): "
                f"{name}(model.named_parameters(), ...)."
            )
        params = _listed(params, name)
        for option in (option for option in NUMBERS if option in own):
            _check_number(own[option], option, name)
        for option, value in given.items():
            if option not in Given.__annotations__ or value not in TORCHS.get(option, (value,)):
                torchs = hasattr(torch.optim, name)
                around = f"torch.optim.{name}(...)" if torchs else "an optimizer that has it"
                raise UsageError(
                    f"halfulp.{name} does not support {option}={value!r}; help(halfulp.{name}) lists its "
                    "options. For any other optimizer or option, use "
                    f"halfulp.WriteBack({around}, grid, policy)."
                )
        options: dict[str, Any] = {k: value for k, value in given.items() if k not in TORCHS}
        if not getattr(options.get("options"), "one_pass", True):
            raise UsageError(
                f"halfulp.{name} makes its steps in one pass, which one_pass=False forbids. Use "
                "halfulp.WriteBack around torch's own."
            )
        moments = options.pop("moments", "fp32")
        kinds = {grid_name(kind): kept for kind, kept in moments_kept.KINDS.items()}  # in any spelling
        if grid_name(str(moments)) not in kinds:
            raise UsageError(f"moments must be one of {', '.join(moments_kept.KINDS)}, not {moments!r}.")
        self.moments = kinds[grid_name(str(moments))]
        grid, select = options.pop("grid", "bf16"), options.pop("select", None)
        super().__init__(self.kind(params, **own), grid, params=select, **options)

    def _prepared(self, planned: Any) -> Any:
        prepared = super()._prepared(planned)
        for slot, _ in prepared:
            group = self.param_groups[slot.place[0]]
            self._refuse(
                slot.two_passes or why_not_group(self, group), f"parameter {slot.name!r} cannot have one",
                "Use halfulp.WriteBack around torch's own, or another's.",
            )  # fmt: skip
        return prepared

    def _refuse(self, why: str | None, what: str, instead: str) -> None:
        """Refuse what cannot be moved in one pass, if there is a reason why."""
        if why is not None:
            name = self.kind.__name__
            raise UsageError(f"halfulp.{name} makes its steps in one pass, and {what}: {why}. {instead}")

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        self._refuse(
            why_not_group(self, group), "the settings of this state prevent that",
            "Load it into halfulp.WriteBack around the optimizer that saved it.",
        )  # fmt: skip

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Restore the form of the moments after torch has cast them to the type of the parameter."""
        super()._load(state_dict)
        for slot in self.slots:
            state = self.optimizer.state.get(slot.stepped, {})
            moments_kept.restore(self, slot, state)
            if "step" in state:
                state["step"] = state["step"].cpu()  # to read it from a GPU would wait for it


def _listed(params: Any, name: str) -> list[Any]:
    """Return parameters as a list; refuse what has none."""
    if not isinstance(params, Iterable) or isinstance(params, torch.Tensor):
        raise UsageError(
            f"halfulp.{name} takes parameters, not {type(params).__name__}: "
            f"{name}(model.named_parameters(), ...)."
        )
    listed = list(params)
    if not listed:
        raise UsageError(
            f"halfulp.{name} was given no parameters: an empty list, or a generator that is used up. "
            "model.named_parameters() makes a new one each time."
        )
    return listed


def _check_number(value: Any, option: str, name: str) -> None:
    """Refuse text and other things for a number; its range is torch's to check."""
    if option == "betas":
        fine = isinstance(value, tuple | list) and len(value) == 2 and all(map(is_number, value))
        expected = "a pair of numbers, such as (0.9, 0.999)"
    else:
        fine = is_number(value) and not (option == "lr" and isinstance(value, bool))
        expected = "a number, such as 1e-5"
    if not fine:
        raise UsageError(f"halfulp.{name}: {option} must be {expected}, not {value!r}.")


class _Adams(_OnePass):
    @_grouped
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
        super().__init__(params, given, lr=lr, betas=betas, eps=eps, fused=True, **decay)


class AdamW(_Adams):
    """One-pass AdamW for weights on a grid.

    Bytes per bfloat16 weight: 10; 6 with ``moments="bf16"``; 4.125 with ``moments="int8"``.

    Args:
        params: Parameters, named parameters or groups. Random draws and checkpoints use the names in
            ``model=``, or those given here (``model.named_parameters()``), or positions; with positions, keep
            the order of the parameters.
        lr: The learning rate.
        betas: The decay rates of the two moments.
        eps: A term added to the root of the second moment.
        weight_decay: The decoupled weight decay; by default torch's.
        grid: The grid of the stored weights; ``bf16`` by default.
        policy: The rule that turns a proposed value into the next stored one; ``sr`` by default.
        moments: The form of the moments: ``fp32``; ``bf16`` with stochastic rounding; or ``int8``, codes of
            eight bits with a scale for every 64 values, written by stochastic rounding (on the CPU).
        select: The tensors to keep on the grid, as ``params=`` of :class:`~halfulp.WriteBack`. The others are
            moved by torch's fused step.
        model, seed, storage, project, options: As in :class:`~halfulp.WriteBack`.
        fused, foreach, amsgrad, maximize, capturable, differentiable: Options of torch's optimizers, accepted
            with values that change nothing.

    Raises:
        UsageError: If an argument is wrong, or a tensor cannot be moved in one pass; the message says why.

    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> opt = AdamW(model.named_parameters(), lr=3e-4, moments="bf16")
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    >>> [state["exp_avg"].dtype for state in opt.state.values()]
    [torch.bfloat16, torch.bfloat16]
    """

    kind = torch.optim.AdamW


class Adam(_Adams):
    """One-pass Adam for weights on a grid: :class:`AdamW` with weight decay in the gradient.

    Args:
        params, lr, betas, eps: As in :class:`AdamW`.
        weight_decay: The weight decay; it is multiplied by the weight and added to the gradient.

    Raises:
        UsageError: As in :class:`AdamW`.

    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> opt = Adam(model.parameters(), policy="remainder16")
    >>> opt.bytes().per_parameter()["policy"]
    2.0
    """

    kind = torch.optim.Adam


class SGD(_OnePass):
    """One-pass SGD for weights on a grid.

    Bytes per bfloat16 weight: 6, or 4 with ``moments="bf16"``; 2 without momentum.

    Args:
        params: As in :class:`AdamW`; so are the keyword arguments that are not listed here.
        lr: The learning rate.
        momentum: The momentum; 0 for none (on the CPU).
        dampening: The share of each gradient that the momentum leaves out.
        weight_decay: The weight decay; it is multiplied by the weight and added to the gradient.
        nesterov: Use Nesterov momentum.

    Raises:
        UsageError: As in :class:`AdamW`.

    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> opt = SGD(model.parameters(), lr=0.1, policy="kahan")
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    >>> opt.routes["0.0"].name
    'one pass'
    """

    kind = torch.optim.SGD

    @_grouped
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
        super().__init__(
            params, given, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=nesterov, fused=True,
        )  # fmt: skip


class Lion(_OnePass):
    """One-pass Lion (Chen et al. 2023) for weights on a grid.

    Bytes per bfloat16 weight: 6, or 4 with ``moments="bf16"``. ``eco`` is refused: Lion steps by a
    sign, so the size of its moment has no effect.

    Args:
        params: As in :class:`AdamW`; so are the keyword arguments that are not listed here.
        lr: The learning rate, which is the size of every step.
        betas: The weight of the moment in the sign of a step, and the decay rate of the moment.
        weight_decay: The decoupled weight decay.

    Raises:
        UsageError: As in :class:`AdamW`.

    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> opt = Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    >>> model(torch.ones(1, 64).bfloat16()).sum().backward()
    >>> opt.step()
    >>> opt.events["0.0"].decay_share is not None
    True
    """

    kind = PlainLion

    @_grouped
    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **given: Unpack[Given],
    ) -> None:
        super().__init__(params, given, lr=lr, betas=betas, weight_decay=weight_decay)
