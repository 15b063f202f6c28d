"""Which parameters a write-back manages, by which rules, and where each is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy

from halfulp.errors import HalfulpError, UsageError
from halfulp.grids import Grid, container
from halfulp.grids import grid as named
from halfulp.writeback.native import is_native, scale_of
from halfulp.writeback.policies import Policy, Remainder, TileMaster, policy
from halfulp.writeback.sharding import is_sharded, local, shard_offset, unsupported_moving
from halfulp.writeback.shards import record_of
from halfulp.writeback.slot import Slot
from halfulp.writeback.standin import NARROW

Storage = Literal["container", "native", "packed"]
Select = Callable[[str, torch.Tensor], bool] | Iterable[str] | None


def check_group(group: dict[str, Any]) -> None:
    """Refuse settings of a group, given or loaded, that no policy can do with."""
    if group.get("differentiable"):
        raise UsageError("differentiable=True is not supported: a write-back has no gradient.")


@dataclass(kw_only=True)
class Chooser:
    """The arguments of a write-back that say which and how."""

    optimizer: torch.optim.Optimizer
    grid: str | Grid | torch.dtype
    policy: str | Policy
    model: torch.nn.Module | None
    select: Select
    storage: Storage | None
    draws_projection: bool
    keep_scratch: bool | None

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, torch.nn.Module):
            raise UsageError(f"model= takes a torch.nn.Module, not {self.model!r}.")
        named = isinstance(self.select, Iterable) and not isinstance(self.select, str)
        if self.select is not None and not named and not callable(self.select):
            raise UsageError(
                f"params= takes names in a list, or a function of name and p, not {self.select!r}."
            )
        if named and not callable(self.select):
            self.select = list(self.select or ())

    def plan(
        self,
        groups: list[dict[str, Any]],
        first: int = 0,
        wanted: Callable[[str, torch.nn.Parameter, Grid], bool] | None = None,
    ) -> list[Slot]:
        """Which parameters of these groups to manage and how; changes nothing."""
        wanted = wanted or self.wanted
        from_model, called = self._from_model(), self.names(groups, first)
        planned = []
        for i, group in enumerate(groups, start=first):
            check_group(group)
            unnamed = not group.get("param_names")
            chosen_grid = named(group.get("grid", self.grid))
            chosen = policy(group.get("policy", self.policy))
            for j, p in enumerate(group["params"]):
                name = called[p]
                if not wanted(name, p, chosen_grid):
                    continue
                if (chosen.stochastic or self.draws_projection) and p not in from_model and unnamed:
                    what = f"policy {chosen.name!r}" if chosen.stochastic else "project='stochastic'"
                    raise UsageError(
                        f"{what} draws random bits by parameter name: pass model=, or make the optimizer "
                        "from model.named_parameters()."
                    )
                chosen.check(chosen_grid, self.optimizer, group)
                planned.append(self._slot(name, p, chosen_grid, chosen, (i, j)))
        return planned

    def _from_model(self) -> dict[torch.nn.Parameter, str]:
        if self.model is None:
            return {}
        # torch.compile puts a part of its own into names
        return {p: n.replace("_orig_mod.", "") for n, p in self.model.named_parameters()}

    def names(self, groups: list[dict[str, Any]], first: int = 0) -> dict[torch.nn.Parameter, str]:
        """What the model calls the parameters of these groups, or else the optimizer, or their places."""
        found: dict[torch.nn.Parameter, str] = {}
        for i, group in enumerate(groups, start=first):
            names = group.get("param_names") or [f"{i}.{j}" for j in range(len(group["params"]))]
            found.update(zip(group["params"], names, strict=True))
        return {**found, **{p: name for p, name in self._from_model().items() if p in found}}

    def wanted(self, name: str, p: torch.Tensor, grid: Grid) -> bool:
        """Whether a parameter is managed now: what is frozen is not stepped, and left alone until it is."""
        return p.requires_grad and self.chosen(name, p, grid)

    def chosen(self, name: str, p: torch.Tensor, grid: Grid) -> bool:
        """By default matrices, and everything whose own type is the grid: a norm's gain of exactly 1 stays
        there under an optimizer that rounds, and nothing is given up by saving it."""
        if callable(self.select):
            return bool(self.select(name, p))
        if self.select is not None:
            return name in self.select
        return is_lazy(p) or p.dim() >= 2 or _is_own(grid, p.dtype)

    def _later(self, name: str, p: torch.Tensor, grid: Grid) -> bool:
        """Whether a parameter is managed once it is trained, if it can be."""
        return p.is_floating_point() and self.chosen(name, p, grid)

    def check(self, planned: list[Slot]) -> None:
        """Refuse a choice that names what is not there, or nothing, now or when something is unfrozen."""
        if isinstance(self.select, list):
            missing = sorted(set(self.select) - {*self.names(self.optimizer.param_groups).values()})
            if missing:
                raise UsageError(f"params names {missing}, which the optimizer does not have.")
        if not planned and not self.plan(self.optimizer.param_groups, wanted=self._later):
            raise UsageError(
                "no parameter to write back: none that can be trained has two or more dimensions, or the "
                "grid as its own type, or is chosen by params=. Choose with params=lambda name, p: ..."
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
            if is_sharded(p) and isinstance(chosen, TileMaster):
                chosen = replace(chosen, shard=(shard_offset(p), p.numel()))
            if resolved.bits > 16 and storage == "packed":
                raise UsageError(f"grid {g.name} has {resolved.bits} bits: nothing to pack.")
        except HalfulpError as error:
            raise type(error)(f"parameter {name!r}: {error}") from None
        keep = storage == "container" if self.keep_scratch is None else self.keep_scratch
        return Slot(
            name, p, g if storage == "container" else resolved, chosen, place,
            storage=storage, keep_scratch=keep,
        )  # fmt: skip

    def _check_type(self, p: torch.nn.Parameter, chosen: Policy, storage: str) -> None:
        """Refuse a storage that this parameter's type does not have, or that would undo the policy."""
        if isinstance(chosen, Remainder) and (storage != "native" or p.dtype != torch.bfloat16):
            raise UsageError(
                f"policy {chosen.name!r} keeps what a bfloat16 weight lacks to its master; this parameter is "
                f"{p.dtype}, storage={storage!r}: use 'master', or bfloat16 parameters."
            )
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


def _check_native(p: torch.Tensor, g: Grid, storage: str) -> None:
    """Refuse a grid or a storage that the codes of a native weight are not of."""
    scale = local(p).scale  # type: ignore[attr-defined]  # of a NativeWeight
    if storage != "native" or scale_of(g) != scale:
        raise UsageError(
            f"it is stored as float8_e4m3fn codes times {scale:g}, which storage={storage!r} on grid "
            f"{g.name} is not. Leave storage= out, and use the grid that hu.native(model, grid) was given."
        )


def _fits_any_step(grid: Grid, dtype: torch.dtype) -> bool:
    """Whether a narrow dtype holds a grid's values under whatever scale float32 gives it."""
    return grid.scaling is None or (grid.scaling.rule in ("mx", "nv") and dtype == torch.bfloat16)


@cache
def _is_own(grid: Grid, dtype: torch.dtype) -> bool:
    """Whether the grid is what a narrow type holds, by whatever name."""
    if dtype not in NARROW:
        return False
    mine, theirs = (replace(g.within(torch.float32), name="") for g in (grid, named(dtype)))
    return mine == theirs


def unwrapped(model: torch.nn.Module | None) -> torch.nn.Module | None:
    """The module inside data-parallel wrappers, so that names and streams are the same without them."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        model = model.module
    return model


def oddity(p: torch.Tensor) -> str | None:
    """What a tensor is that has no real numbers where one could look at them."""
    if is_lazy(p):
        return "without a shape so far (run the model once first)"
    if p.is_nested or p.layout is not torch.strided:
        return "nested" if p.is_nested else str(p.layout).removeprefix("torch.")
    if p.is_meta or p.is_complex():
        return "meta" if p.is_meta else str(p.dtype).removeprefix("torch.")
    return None
