"""Check the arguments of a write-back: its parameters, their grids, policies and storage, and its options."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from halfulp.errors import HalfulpError, UsageError
from halfulp.numbers.containers import container
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.text import unique
from halfulp.writeback.policies import Policy, policy
from halfulp.writeback.sharding import is_sharded, local, shard_offset, unsupported_moving
from halfulp.writeback.sharding.packed_shard import record_of
from halfulp.writeback.slot import Slot
from halfulp.writeback.storage.native_weight import is_native, scale_of
from halfulp.writeback.storage.stand_in import NARROW

Storage = Literal["container", "native", "packed"]
Select = Callable[[str, torch.Tensor], bool] | Iterable[str] | None


@dataclass(frozen=True, kw_only=True)
class WriteBackOptions:
    """Settings of steps and telemetry: ``WriteBack(..., options=WriteBackOptions(telemetry=False))``.

    Args:
        nonfinite: ``count`` non-finite proposals and leave their weights unchanged, or ``raise`` before
            anything changes if a gradient is not finite.
        telemetry: Keep one bit per weight to know which never moved, and count what a step loses.
        materialise: Give ``native`` and ``packed`` weights to the optimizer ``all`` at once, or (the default
            for torch's optimizers) at most as many at a time as the largest ``tensor`` has, or four million.
        one_pass: Allow a step in one sweep over memory where that gives the same bits, see
            :mod:`halfulp.writeback.route`.

    Raises:
        UsageError: If an option has another value.
    """

    nonfinite: Literal["count", "raise"] = "count"
    telemetry: bool = True
    materialise: Literal["tensor", "all"] | None = None
    one_pass: bool = True

    def __post_init__(self) -> None:
        check_choice("nonfinite", self.nonfinite, ("count", "raise"))
        check_choice("materialise", self.materialise, (None, "tensor", "all"))


def check_choice(what: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Refuse a value that is not one of those allowed."""
    if value not in allowed:
        raise UsageError(f"{what} must be one of {', '.join(filter(None, allowed))}, not {value!r}.")


def check_group(group: dict[str, Any]) -> None:
    """Refuse settings of a group, given or loaded, that no policy supports."""
    if group.get("differentiable"):
        raise UsageError(
            "differentiable=True is not supported, because rounding has no gradient: leave it out."
        )


@dataclass(kw_only=True)
class Chooser:
    """The arguments of a write-back that choose parameters, grids, policies and storage."""

    optimizer: torch.optim.Optimizer
    grid: str | Grid | torch.dtype
    policy: str | Policy
    model: torch.nn.Module | None
    select: Select
    storage: Storage | None
    warned: bool = False
    """True once the message about several tensors of one name has been given."""

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, torch.nn.Module):
            raise UsageError(f"model= takes a torch.nn.Module, not {self.model!r}.")
        named = isinstance(self.select, Iterable) and not isinstance(self.select, str)
        if self.select is not None and not named and not callable(self.select):
            raise UsageError(
                f"params= takes a list of names, or a function of name and parameter, not {self.select!r}."
            )
        if callable(self.select):
            _check_function(self.select)
        elif named:
            self.select = list(self.select or ())
            _check_names(self.select)

    def plan(
        self,
        groups: list[dict[str, Any]],
        first: int = 0,
        wanted: Callable[[str, torch.nn.Parameter, Grid], bool] | None = None,
    ) -> list[Slot]:
        """Plan which parameters to manage and how, from group ``first`` on, without changing anything."""
        wanted = wanted or self.wanted
        called = self.names(groups)
        planned = []
        for i, group in enumerate(groups[first:], start=first):
            check_group(group)
            chosen_grid = named(group.get("grid", self.grid))
            chosen = policy(group.get("policy", self.policy))
            for j, p in enumerate(group["params"]):
                name = called[p]
                if not wanted(name, p, chosen_grid):
                    continue
                chosen.check(chosen_grid, self.optimizer, group)
                planned.append(self._slot(name, p, chosen_grid, chosen, (i, j)))
        self._warn_numbered(groups, planned)
        return planned

    def _warn_numbered(self, groups: list[dict[str, Any]], planned: list[Slot]) -> None:
        """Warn once that several tensors have one name, so that their order is part of their names."""
        given = self._given(groups)
        numbered = [slot for slot in planned if slot.name != given[slot.p]]
        if numbered and not self.warned:
            self.warned = True
            logging.getLogger("halfulp").warning(
                "halfulp: this optimizer has several tensors called %r; another of them is now called %r%s. "
                "Random draws and checkpoints go by name: keep the order of these tensors in the optimizer, "
                "or give them different names.",
                given[numbered[0].p], numbered[0].name,
                f", and {len(numbered) - 1} more in the same way" if len(numbered) > 1 else "",
            )  # fmt: skip

    def names(self, groups: list[dict[str, Any]]) -> dict[torch.nn.Parameter, str]:
        """Name the parameters of an optimizer, of all its groups: the second ``weight`` is ``weight#2``."""
        taken: dict[str, torch.nn.Parameter] = {}
        for p, name in self._given(groups).items():
            taken[unique(name, taken)] = p
        return {p: name for name, p in taken.items()}

    def _given(self, groups: list[dict[str, Any]]) -> dict[torch.nn.Parameter, str]:
        """Name these parameters by the model, or else by the optimizer, or by their positions."""
        given: dict[torch.nn.Parameter, str] = {}
        for i, group in enumerate(groups):
            names = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
            given.update(zip(group["params"], names, strict=True))
        for name, p in () if self.model is None else self.model.named_parameters():
            if p in given:
                given[p] = name.replace("_orig_mod.", "")  # torch.compile puts it into names
        return given

    def wanted(self, name: str, p: torch.Tensor, grid: Grid) -> bool:
        """Return True if a parameter is managed now; frozen ones wait until they are stepped."""
        return p.requires_grad and self.chosen(name, p, grid)

    def chosen(self, name: str, p: torch.Tensor, grid: Grid) -> bool:
        """Return True if a parameter is chosen: by default matrices, and tensors whose own type is the grid.

        The latter include norm gains, which stay at exactly 1 under an optimizer that rounds; preserving
        their updates costs nothing.
        """
        if callable(self.select):
            return bool(self.select(name, p))
        if self.select is not None:
            return name in self.select
        return is_lazy(p) or p.dim() >= 2 or _is_own(grid, p.dtype)

    def check(self, planned: list[Slot]) -> None:
        """Refuse a choice that names what is not there, or nothing, now or when something is unfrozen."""
        if isinstance(self.select, list):
            missing = sorted(set(self.select) - {*self.names(self.optimizer.param_groups).values()})
            if missing:
                raise UsageError(
                    f"params= names {missing}, which the optimizer does not have. Names are those of model=, "
                    "or those that the optimizer was given (model.named_parameters())."
                )

        def later(name: str, p: torch.Tensor, grid: Grid) -> bool:
            return p.is_floating_point() and self.chosen(name, p, grid)

        if not any(group["params"] for group in self.optimizer.param_groups):
            raise UsageError(
                "the optimizer has no parameters, so there is none to write back. Give it "
                "list(model.parameters()); a generator can be used up only once."
            )
        if not planned and not self.plan(self.optimizer.param_groups, wanted=later):
            raise UsageError(
                "no parameter to write back: none that can be trained has two or more dimensions, has the "
                "grid as its dtype, or is chosen by params=. Choose with params=lambda name, p: ..."
            )

    def _slot(
        self, name: str, p: torch.nn.Parameter, g: Grid, chosen: Policy, place: tuple[int, int]
    ) -> Slot:
        try:
            container(p.dtype)
            if (what := oddity(p)) is not None:
                raise UsageError(f"{what}, expected real numbers in plain memory. Choose with params=.")
            storage = self.storage or ("native" if p.dtype in NARROW or is_native(p) else "container")
            self._check_type(p, chosen, storage)
            if is_native(p):
                _check_native(p, g, storage)
            resolved = g.within(p.dtype)
            shard_offset(p)  # refuses shards that no stream can follow
            unsupported_moving(p, resolved)
            if p.dtype in NARROW and storage != "container" and not _fits_any_step(resolved, p.dtype):
                raise UsageError(
                    f"{p.dtype} cannot hold the values of grid {g.name}, whose scales come from float32: use "
                    "float32 parameters."
                )
            if is_sharded(p) and storage == "packed":
                record_of(self.model, p)  # refuses shards that cannot be codes
            if is_sharded(p):
                chosen = chosen.on_shard(shard_offset(p), p.numel())
            if resolved.bits > 16 and storage == "packed":
                raise UsageError(
                    f"grid {g.name} has {resolved.bits} bits, so nothing can be packed: leave storage= out."
                )
        except HalfulpError as error:
            raise type(error)(f"parameter {name!r}: {error}") from None
        return Slot(name, p, g if storage == "container" else resolved, chosen, place, storage=storage)

    def _check_type(self, p: torch.nn.Parameter, chosen: Policy, storage: str) -> None:
        """Refuse a storage that this parameter's type does not have, or that would undo the policy."""
        chosen.check_storage(p.dtype, storage)
        searching = isinstance(self.optimizer, torch.optim.LBFGS)
        if searching and storage != "container":
            why = "" if self.storage else f", and {p.dtype} needs storage={storage!r}"
            raise UsageError(
                f"LBFGS evaluates the model while it moves the weights, which storage={storage!r} hides "
                f"from it{why}: use float32 parameters with storage='container'."
            )
        if storage == "native" and p.dtype not in NARROW and not is_native(p):
            raise UsageError(
                f"storage='native' takes bfloat16 or float16 parameters, not {p.dtype}; hu.native(model) "
                "makes float8 ones. Leave storage= out: each parameter is then stored by its own type."
            )
        if p.dtype in NARROW and storage == "container" and chosen.precise:
            raise UsageError(
                f"policy {chosen.name!r} needs the optimizer to work in float32, but this parameter is "
                f"{p.dtype}, to which the optimizer rounds before the policy sees anything: leave storage= "
                "out, or use storage='native'. Only 'rne' takes storage='container' here."
            )


def _check_names(names: list[Any]) -> None:
    """Refuse a list that is empty, or of something else than names."""
    if not names:
        raise UsageError(
            "no parameter to write back: params= is an empty list, or a generator that is used up."
        )
    for name in names:
        if not isinstance(name, str):
            raise UsageError(
                "params= takes the names of parameters, as in model.named_parameters(), not "
                f"{type(name).__name__}."
            )


def _check_function(select: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called with a name and a parameter."""
    try:
        signature(select).bind("name", None)
    except TypeError as error:
        raise UsageError(
            "params= takes a function of name and parameter, such as lambda name, p: p.dim() >= 2, not "
            f"{select!r}: {error}."
        ) from None
    except ValueError:  # some built-in ones do not say what they take
        return


def _check_native(p: torch.Tensor, g: Grid, storage: str) -> None:
    """Refuse a grid or a storage that the codes of a native weight are not of."""
    scale = local(p).scale  # type: ignore[attr-defined]  # of a NativeWeight
    if storage != "native" or scale_of(g) != scale:
        raise UsageError(
            f"it is stored as float8_e4m3fn codes times {scale:g}, which storage={storage!r} on grid "
            f"{g.name} is not. Leave storage= out, and use the grid that hu.native(model, grid) was given."
        )


def _fits_any_step(grid: Grid, dtype: torch.dtype) -> bool:
    """Return True if a narrow dtype holds a grid's values under any scale that float32 gives it."""
    return grid.scaling is None or (grid.scaling.rule in ("mx", "nv") and dtype == torch.bfloat16)


@cache
def _is_own(grid: Grid, dtype: torch.dtype) -> bool:
    """Return True if the grid has exactly the values of a narrow dtype, by whatever name."""
    if dtype not in NARROW:
        return False
    mine, theirs = (replace(g.within(torch.float32), name="") for g in (grid, named(dtype)))
    return mine == theirs


def unwrapped(model: torch.nn.Module | None) -> torch.nn.Module | None:
    """Return the module inside data-parallel wrappers: names and streams are the same without them."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        model = model.module
    return model


def oddity(p: torch.Tensor) -> str | None:
    """Describe why the values of a tensor cannot be read as real numbers; None if they can."""
    if is_lazy(p):
        return "without a shape so far (run the model once first)"
    if p.is_nested or p.layout is not torch.strided:
        return "nested" if p.is_nested else str(p.layout).removeprefix("torch.")
    if p.is_meta or p.is_complex():
        return "meta" if p.is_meta else str(p.dtype).removeprefix("torch.")
    return None
