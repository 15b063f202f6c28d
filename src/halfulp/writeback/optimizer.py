"""Define ``WriteBack``, which keeps stored weights on a grid under any torch optimizer.

The user keeps the optimizer, the scheduler, the scaler and the loop. A step is then:

1. the stored values q are set aside;
2. the policy may change the values that the optimizer moves (to a master);
3. the optimizer moves the parameters to z, as it always does;
4. the policy writes the next stored values over z, and counts lost updates in the same pass.

``WriteBack`` is itself a ``torch.optim.Optimizer``: it shares the parameter groups and the state of the
optimizer that it wraps, so schedulers, ``GradScaler`` and trainers work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

import numpy as np
import torch

from halfulp import kernels
from halfulp.deprecation import grouped_arguments
from halfulp.errors import UsageError
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream
from halfulp.text import plain
from halfulp.writeback import forwarding, route, stepping
from halfulp.writeback.choosing import (
    Chooser,
    Select,
    Storage,
    WriteBackOptions,
    check_choice,
    check_group,
    unwrapped,
)  # fmt: skip
from halfulp.writeback.fused import step as moving
from halfulp.writeback.in_backward import InBackward
from halfulp.writeback.policies import Policy
from halfulp.writeback.rules import RULES
from halfulp.writeback.saving import state_dict as checkpoint
from halfulp.writeback.sharding import is_sharded, local, shard_offset
from halfulp.writeback.sharding.packed_shard import ShardPlace, is_packed, record_of
from halfulp.writeback.slot import Slot, measure
from halfulp.writeback.storage.native_weight import plain as decoded
from halfulp.writeback.storage.packed import Codes, PackedWeight, Shells, Whole
from halfulp.writeback.storage.stand_in import NARROW, exchange, stand_in
from halfulp.writeback.telemetry import Bytes, Events
from halfulp.writeback.two_passes import TwoPasses

PROJECTION = -1  # the step number of the initial projection's stream


class WriteBack(torch.optim.Optimizer):
    """An optimizer wrapper that keeps weights on a grid while any optimizer trains them.

    It is an optimizer itself, and shares groups and state with the one that it wraps. A parameter that is
    frozen now is put on its grid at the first step that has a gradient for it.

    Args:
        optimizer: Any torch optimizer that moves its parameters in place.
        grid: The grid of the stored weights. A parameter group may carry its own ``grid`` and ``policy``.
        policy: The rule that turns a proposed value into the next stored one: a name, or a policy such as
            ``halfulp.writeback.Kahan()``.
        model: The model whose tensor names key random draws and checkpoints. Without it, names are those that
            the optimizer was given, or positions in it: ``0.3`` is the fourth tensor of the first group. The
            second tensor of one name is ``weight#2``.
        params: The tensors to manage, as names or a function of name and tensor. By default all trainable
            tensors that have two or more dimensions, or whose own type is the grid (norm gains of a bfloat16
            model on ``bf16``).
        seed: The seed of the random draws.
        project: The rounding that makes the first codes: ``nearest``, ``stochastic``, or ``none`` for weights
            that are on the grid already.
        storage: The form of the weights between steps, see :mod:`halfulp.writeback.storage`. By default the
            parameter's type decides: bfloat16 and float16 are ``native``, others a ``container``.
        options: Settings that few runs need.

    Raises:
        UsageError: If an argument is wrong, if parameter, grid, policy, storage and optimizer cannot be
            combined, or if there is nothing to keep on a grid. In that case nothing has been changed.

    >>> model = torch.nn.Linear(4, 4)
    >>> opt = WriteBack(torch.optim.SGD(model.parameters(), lr=1e-4), "e4m3", "rne", model=model)
    >>> _ = model(torch.ones(1, 4)).sum().backward()
    >>> opt.step()
    >>> opt.events.frozen
    1.0

    What it takes in memory, how each tensor is stepped, and its checkpoint:

    >>> opt.bytes().weights, opt.routes["weight"].name
    (64, 'one pass')
    >>> opt.load_state_dict(opt.state_dict())
    """

    like_torch = True
    """True if one pass matches two passes in every bit: torch's arithmetic throughout, and 32-bit draws."""
    moments = torch.float32
    """The type of the optimizer's moments in one pass."""

    @grouped_arguments("options", WriteBackOptions, [field.name for field in fields(WriteBackOptions)])
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        grid: str | Grid | torch.dtype,
        policy: str | Policy = "sr",
        *,
        model: torch.nn.Module | None = None,
        params: Select = None,
        seed: int = 0,
        project: Literal["nearest", "stochastic", "none"] = "nearest",
        storage: Storage | None = None,
        options: WriteBackOptions = WriteBackOptions(),  # noqa: B008  # frozen
    ) -> None:
        if isinstance(optimizer, WriteBack):
            raise UsageError("the optimizer is a WriteBack already: wrap the optimizer inside it instead.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"WriteBack wraps a torch optimizer, not {type(optimizer).__name__}. Make one first."
            )
        check_choice("project", project, ("nearest", "stochastic", "none"))
        check_choice("storage", storage, (None, "container", "native", "packed"))
        if not isinstance(options, WriteBackOptions):
            raise UsageError(f"WriteBack(options=...) takes a WriteBackOptions, not {options!r}.")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise UsageError(f"WriteBack(seed=...) takes an integer, not {seed!r}.")
        if storage == "packed" and model is None:
            raise UsageError("storage='packed' decodes weights around forwards: pass model=.")
        self.optimizer = optimizer
        self.seed, self.project, self.storage = int(seed), project, storage
        self.nonfinite, self.telemetry, self.one_pass = options.nonfinite, options.telemetry, options.one_pass
        self._explained = self._warned_spoilt = False
        self._backward: InBackward | None = None
        # torch's optimizers keep all their state by parameter, so they can be given one at a time; and they
        # leave parameters without a gradient alone.
        self._torchs_own = type(optimizer).__module__.startswith("torch.optim") or type(optimizer) in RULES
        self.materialise = options.materialise or ("tensor" if self._torchs_own else "all")
        self.steps = 0
        self.slots: list[Slot] = []
        self.plans: dict[Slot, moving.Plan] = {}
        self._two_passes = TwoPasses(self)
        self._model = unwrapped(model)
        self._chooser = Chooser(
            optimizer=optimizer, grid=grid, policy=policy, model=self._model, select=params, storage=storage
        )
        self._shells = Shells(self._model)
        planned = self._chooser.plan(optimizer.param_groups)
        self._chooser.check(planned)
        self._groups: list[dict[str, Any]] | None = []
        self._initialised = False
        defaults = getattr(optimizer, "defaults", {})  # some wrappers have none
        super().__init__([{**g, "params": list(g["params"])} for g in optimizer.param_groups], defaults)
        self._groups, self._initialised = None, True
        self._passed_on: list[dict[str, Any]] = []
        self._frozen: list[torch.nn.Parameter] = []
        self._types: dict[int, torch.dtype] = {}
        self._commit(self._prepared(planned))
        self._watch_frozen(self.param_groups)
        self.register_step_pre_hook(lambda *_: self._take_up_unfrozen())  # before an audit looks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, with parameters in place of stand-ins."""
        return self.optimizer.param_groups if self._groups is None else self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's own state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        """Ignore the empty state assigned by ``Optimizer.__init__``."""

    def __getattr__(self, name: str) -> Any:
        """Forward attribute access to the wrapped optimizer: :mod:`halfulp.writeback.forwarding`."""
        if name.startswith("_") or "optimizer" not in self.__dict__:  # torch asks for its own by such names
            raise AttributeError(name)
        return forwarding.attribute(self, name)

    # ---- adopting -------------------------------------------------------------------------------

    @torch.no_grad()
    def _prepared(self, planned: list[Slot]) -> list[tuple[Slot, torch.Tensor]]:
        """Compute first stored values and policy state: all that can fail, before anything else changes."""
        starts = []
        for slot in planned:
            raw = decoded(local(slot.p.detach()))
            raw = raw.float() if slot.storage != "container" and raw.dtype in NARROW else raw
            q, scales = self._projected(slot, raw)
            slot.state = slot.policy.start(raw, q, slot.name)
            if self.telemetry:
                slot.moved = torch.zeros((q.numel() + 7) // 8, dtype=torch.uint8, device=q.device)
            if slot.storage == "packed":
                slot.codes = Codes(grid=slot.grid, shape=tuple(local(slot.p).shape))
                slot.codes.put(q, scales)
            slot.two_passes = route.why_not_tensor(self, slot)
            slot.batched = route.can_batch(slot)
            starts.append((slot, q))
        return starts

    @torch.no_grad()
    def _commit(self, prepared: list[tuple[Slot, torch.Tensor]], *, project: bool = True) -> None:
        """Store the first values, and give the optimizer stand-ins where it must not have the parameter."""
        planned, packed = [slot for slot, _ in prepared], []
        for slot, q in prepared:
            if project:
                local(slot.p.detach()).copy_(q)
            if slot.storage != "container":
                slot.shadow = stand_in(slot.p)
            if isinstance(slot.codes, Codes):
                p, codes = slot.p, slot.codes
                place = ShardPlace(p, record_of(self._model, p), codes) if is_sharded(p) else Whole(p)
                packed.append(PackedWeight(p, slot.name, codes, place))
            slot.note_written()
        stand_ins = {slot.p: slot.shadow for slot in planned if slot.shadow is not None}
        if stand_ins and self._groups is None:
            self._groups = [{**g, "params": list(g["params"])} for g in self.optimizer.param_groups]
            self._passed_on = [{k: v for k, v in g.items() if k != "params"} for g in self._groups]
        if stand_ins:
            exchange(self.optimizer, stand_ins)
        self.slots += planned
        self._types.update({id(slot.p): slot.p.dtype for slot in planned})
        managed = {id(slot.p) for slot in planned}
        self._frozen = [p for p in self._frozen if id(p) not in managed]
        self._shells.attach(packed)

    def _watch_frozen(self, groups: list[dict[str, Any]]) -> None:
        managed = {slot.p for slot in self.slots}
        here = [p for g in groups for p in g["params"]]
        self._frozen += [p for p in here if not p.requires_grad and p not in managed]
        self._types.update({id(p): p.dtype for p in here if p.requires_grad})

    def _take_up_unfrozen(self) -> None:
        """Put parameters on their grids that were frozen so far and have a gradient now."""
        stepping.refuse_cast(self)
        thawed = [p for p in self._frozen if p.requires_grad and p.grad is not None]
        if not thawed:
            return
        fresh, wanted = {id(p) for p in thawed}, self._chooser.wanted
        self._commit(self._prepared(self._plan_frozen(lambda n, p, g: id(p) in fresh and wanted(n, p, g))))
        self._frozen = [p for p in self._frozen if id(p) not in fresh]
        self._types.update({id(p): p.dtype for p in thawed})

    def _plan_frozen(self, wanted: Callable[[str, torch.nn.Parameter, Grid], bool]) -> list[Slot]:
        """Slots for some of the parameters that are frozen so far."""
        frozen = {id(p) for p in self._frozen}
        return self._chooser.plan(
            self.param_groups, wanted=lambda n, p, g: id(p) in frozen and wanted(n, p, g)
        )

    def _projected(self, slot: Slot, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first stored values, and the scales that they were rounded with."""
        if is_packed(slot.p):
            raise UsageError(
                f"parameter {slot.name!r} is packed by another WriteBack: go on with that one, or make the "
                "model anew and load model.state_dict() into it."
            )
        bad = ~torch.isfinite(raw)
        if bool(bad.any()):
            raise UsageError(
                f"parameter {slot.name!r} has {int(bad.sum())} value(s) that are not finite: they have no "
                "code."
            )
        stream = self._stream(slot, PROJECTION) if self.project == "stochastic" else None
        g = slot.grid if self.project == "none" else slot.policy.projection(slot.grid)
        scales = kernels.scales(raw, g) if g.scaling is not None else None
        q = kernels.round(raw, g, stream, scale=scales)
        if self.project == "none" and not torch.equal(q, raw):
            off = int((q != raw).sum())
            raise UsageError(
                f"parameter {slot.name!r} is not on grid {g.name}: {off} of {raw.numel()} values are off it. "
                "Use project='nearest', or load the weights that this optimizer saved."
            )
        return q, scales

    def _stream(self, slot: Slot, step: int) -> Stream:
        return Stream(seed=self.seed, name=slot.name, step=step, offset=shard_offset(slot.p))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer and put them on the grid.

        Args:
            param_group: A group as for torch; it may carry its own ``grid`` and ``policy``.

        Raises:
            UsageError: If a parameter cannot be kept on its grid. The optimizer is unchanged.
        """
        if not self._initialised:  # Optimizer.__init__ calls this, too
            super().add_param_group(param_group)
            return
        known = len(self.optimizer.param_groups)
        try:
            if self._groups is not None:
                super().add_param_group(param_group)
                param_group = {**param_group, "params": list(param_group["params"])}
            self.optimizer.add_param_group(param_group)
            self._commit(self._prepared(self._chooser.plan(self.param_groups, known)))
            self._watch_frozen(self.param_groups[known:])
        except BaseException:
            del self.param_groups[known:], self.optimizer.param_groups[known:], self._passed_on[known:]
            raise

    # ---- stepping -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one optimizer step and write its result back.

        Args:
            closure: A function that computes the gradients; it is called first, at the stored weights.

        Returns:
            The result of the closure; None without one.

        Raises:
            UsageError: If parameters were cast, replaced or reshaped, if a group has settings that its policy
                does not support, or (with ``nonfinite="raise"``) if a gradient is not finite. The weights are
                unchanged.
        """
        return stepping.step(self, closure)

    @property
    def moved_in_backward(self) -> bool:
        """True if the backward has already moved weights of the next step, see :meth:`in_backward`."""
        return self._backward is not None and bool(self._backward.done)

    def in_backward(self) -> InBackward:
        """Move every managed parameter as its gradient arrives, and free the gradient.

        From now on the backward makes the step; ``step()`` moves the other parameters and completes it.

        Returns:
            The hooks; their ``remove()`` returns to steps at ``step()``.

        Raises:
            UsageError: If a parameter cannot be moved in one pass, or with ``nonfinite="raise"``.
        """
        if self._backward is not None:
            self._backward.remove()
        self._backward = InBackward(self)
        return self._backward

    def _pass_on_groups(self) -> None:
        """Copy what schedulers and users changed in one of two sets of groups to the other."""
        if self._groups is None:
            return
        self._passed_on += [{} for _ in self._groups[len(self._passed_on) :]]
        for mine, theirs, last in zip(
            self._groups, self.optimizer.param_groups, self._passed_on, strict=True
        ):
            for key in (k for k in {**theirs, **mine} if k != "params"):
                untouched = key not in mine or (key in last and mine[key] is last[key])
                if untouched and key in theirs:
                    mine[key] = theirs[key]
                else:
                    theirs[key] = mine[key]
            last.update({k: v for k, v in mine.items() if k != "params"})

    # ---- what happened, what it costs ------------------------------------------------------------

    @property
    def events(self) -> Events:
        """The updates that the last step lost, by tensor. With sharded parameters every rank must read it."""
        rows = [s.noted.row(s) for s in self.slots if s.noted is not None and s.noted.step == self.steps]
        return Events(tuple(rows), self.steps if rows else 0)

    @property
    def routes(self) -> dict[str, route.Route]:
        """The way the next step moves each tensor, and why not faster: :mod:`halfulp.writeback.route`."""
        return {s.name: r for s, r in zip(self.slots, route.choose(self, self.slots), strict=True)}

    def bytes(self) -> Bytes:
        """Return the bytes of the managed parameters on this rank between steps, and what a step adds."""
        routes = route.choose(self, self.slots, now=False)
        once = [slot for slot, chosen in zip(self.slots, routes, strict=True) if chosen.one_pass]
        return measure(self.slots, by_chunks=self.materialise == "tensor", at_once=once)

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and everything that the write-back keeps beside it."""
        for begins in self._optimizer_state_dict_pre_hooks.values():
            begins(self)
        state = checkpoint.state_dict(self)
        for ends in self._optimizer_state_dict_post_hooks.values():
            state = state if (other := ends(self, state)) is None else other
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a saved state.

        The state of an optimizer without a write-back can be loaded, too:
        :mod:`halfulp.writeback.saving.takeover`.

        Args:
            state_dict: The result of :meth:`state_dict`, from this or another process.

        Raises:
            UsageError: If it is of another grid, policy, storage, model, seed or kind of optimizer.
            CorruptionError: If it is incomplete, or does not belong to the model's weights.
            TamperingError: If its digest does not match its tensors.
            VersionError: If another version of halfulp wrote it.
        """
        for begins in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = state_dict.copy()  # theirs to change
            state_dict = state_dict if (other := begins(self, state_dict)) is None else other
        self._load(state_dict)
        for ends in self._optimizer_load_state_dict_post_hooks.values():
            ends(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        checkpoint.load_state_dict(self, state_dict)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse loaded settings that this optimizer cannot step with."""
        check_group(group)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a WriteBack is not copied or pickled: save its state_dict(), and make a new one.")

    def __repr__(self) -> str:
        grids = ", ".join(sorted({f"{s.policy.name} on {s.grid.name}" for s in self.slots}))
        text = f"WriteBack({grids}; {len(self.slots)} tensors; {self.optimizer!r})"
        return "\n".join(plain(line) for line in text.split("\n"))  # groups may carry any text
