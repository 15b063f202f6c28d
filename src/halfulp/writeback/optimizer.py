"""``WriteBack``: any torch optimizer, with the stored weights on a grid.

The user keeps the optimizer, the scheduler, the scaler and the loop. A step is then:

1. what is stored, q, is kept aside;
2. the policy may change what the optimizer is given (a master);
3. the optimizer moves the parameters to z, as it always does;
4. the policy writes the next stored value over z, counting what was lost in the same pass.

``WriteBack`` is itself a ``torch.optim.Optimizer``: it shares the parameter groups and the state
of the one it wraps, so schedulers, ``GradScaler`` and trainers need not know.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch._compile import _disable_dynamo

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.grids import Grid, integer_grid
from halfulp.streams import Stream
from halfulp.text import plain
from halfulp.writeback import checkpoint, guarding, onepass, passing, shards
from halfulp.writeback.backward import InBackward
from halfulp.writeback.choosing import Chooser, Select, Storage, unwrapped
from halfulp.writeback.lion import Lion
from halfulp.writeback.native import plain as decoded
from halfulp.writeback.policies import Policy, Step
from halfulp.writeback.report import Bytes, Events, TensorEvents
from halfulp.writeback.sharding import is_sharded, local, shard_offset
from halfulp.writeback.slot import Slot, measure, set_aside
from halfulp.writeback.standin import NARROW, exchange, fill, stand_in
from halfulp.writeback.storage import Codes, Shells, Whole, is_shell

TORCHS = tuple(getattr(torch.optim, n) for n in ("AdamW", "Adafactor", "Muon") if hasattr(torch.optim, n))
DECOUPLED = (*TORCHS, Lion)
PROJECTION = -1  # the step number of the initial projection's stream
LOOK_EVERY = 32  # steps between looks for spoilt moments: they do not get well, and a look waits for a GPU


class WriteBack(torch.optim.Optimizer):
    """Keep weights on a grid while any optimizer trains them.

    ``params``: which tensors, as a predicate ``(name, tensor) -> bool`` or names; by default every
    trainable tensor of two or more dimensions, and those of fewer whose own type the grid is (norm gains of a
    bfloat16 model on ``bf16``). A parameter group may carry its own ``grid`` and ``policy``. ``project``: how
    the first codes are made (``nearest``, ``stochastic``, or ``none`` for weights that are on the grid
    already). ``storage``: where weights live between steps, see :mod:`halfulp.writeback.storage`; by default
    each parameter's own type says it: bfloat16 and float16 are ``native``, others a ``container``.
    ``materialise``: whether ``native`` and ``packed`` weights are given to the optimizer one ``tensor`` at a
    time (the default for torch's own) or ``all`` at once. A parameter that is frozen now and trained later
    is taken up at the first step that has a gradient for it.
    ``one_pass``: whether a step may be made in one sweep over memory where that gives the same bits, see
    :mod:`halfulp.writeback.onepass`.
    ``nonfinite``: ``count`` proposals that are not finite and leave their weights alone, or ``raise``
    before anything changes where a gradient is not. ``telemetry`` keeps a bit a weight to know which
    never moved.

    >>> model = torch.nn.Linear(4, 4)
    >>> opt = WriteBack(torch.optim.SGD(model.parameters(), lr=1e-4), "e4m3", "rne", model=model)
    >>> _ = model(torch.ones(1, 4)).sum().backward()
    >>> opt.step()
    >>> opt.events.frozen
    1.0
    """

    like_torch = True
    """Whether one pass has torch's arithmetic to the last element, and draws of 32 bits, as two passes do."""
    moments = torch.float32
    """The type of the optimizer's moments in one pass."""

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
        nonfinite: Literal["count", "raise"] = "count",
        telemetry: bool = True,
        keep_scratch: bool | None = None,
        materialise: Literal["tensor", "all"] | None = None,
        one_pass: bool = True,
    ) -> None:
        if isinstance(optimizer, WriteBack):
            raise UsageError("the optimizer is a WriteBack already: wrap the optimizer inside it instead.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"WriteBack wraps a torch optimizer, not {type(optimizer).__name__}.")
        for value, allowed, what in (
            (project, ("nearest", "stochastic", "none"), "project"),
            (storage, (None, "container", "native", "packed"), "storage"),
            (nonfinite, ("count", "raise"), "nonfinite"),
            (materialise, (None, "tensor", "all"), "materialise"),
        ):
            if value not in allowed:
                raise UsageError(f"{what} must be one of {', '.join(filter(None, allowed))}, not {value!r}.")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise UsageError(f"WriteBack(seed=...) takes an integer, not {seed!r}.")
        if storage == "packed" and model is None:
            raise UsageError("storage='packed' decodes weights around forwards: pass model=.")
        self.optimizer = optimizer
        self.seed, self.project, self.storage = int(seed), project, storage
        self.nonfinite, self.telemetry, self.one_pass = nonfinite, telemetry, one_pass
        self._told = self._told_spoilt = False
        self._backward: InBackward | None = None
        # torch's optimizers keep all their state by parameter, so they can be given one at a time; and they
        # leave parameters without a gradient alone.
        self._torchs_own = type(optimizer).__module__.startswith("torch.optim") or type(optimizer) is Lion
        self.materialise = materialise or ("tensor" if self._torchs_own else "all")
        self.steps = 0
        self.slots: list[Slot] = []
        self._model = unwrapped(model)
        self._chooser = Chooser(
            optimizer=optimizer, grid=grid, policy=policy, model=self._model, select=params, storage=storage,
            draws_projection=project == "stochastic", keep_scratch=keep_scratch,
        )  # fmt: skip
        self._shells = Shells()
        planned = self._chooser.plan(optimizer.param_groups)
        self._chooser.check(planned)
        self._groups: list[dict[str, Any]] | None = []
        defaults = getattr(optimizer, "defaults", {})  # some wrappers have none
        super().__init__([{**g, "params": list(g["params"])} for g in optimizer.param_groups], defaults)
        self._groups = None
        self._passed_on: list[dict[str, Any]] = []
        self._frozen: list[torch.nn.Parameter] = []
        self._types: dict[int, torch.dtype] = {}
        self._commit(self._prepared(planned))
        self._watch_frozen(self.param_groups)
        self.register_step_pre_hook(lambda *_: self._take_up_unfrozen())  # before an audit looks

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own groups; where it has stand-ins, the same with the parameters."""
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
        """Takes no notice of the empty state that ``Optimizer.__init__`` sets."""

    def __getattr__(self, name: str) -> Any:
        """What else the wrapped optimizer has: :mod:`halfulp.writeback.passing`."""
        if name.startswith("_") or "optimizer" not in self.__dict__:  # torch asks for its own by such names
            raise AttributeError(name)
        return passing.attribute(self, name)

    # ---- adopting -------------------------------------------------------------------------------

    @torch.no_grad()
    def _prepared(self, planned: list[Slot]) -> list[tuple[Slot, torch.Tensor]]:
        """First stored values and the policies' state: all that can fail, and nothing else is changed."""
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
            slot.two_passes = onepass.unsuited_tensor(self, slot)
            starts.append((slot, q))
        return starts

    @torch.no_grad()
    def _commit(self, prepared: list[tuple[Slot, torch.Tensor]], *, project: bool = True) -> None:
        """Store the first values, and give the optimizer stand-ins where it must not have the parameter."""
        planned = [slot for slot, _ in prepared]
        for slot, q in prepared:
            if project:
                local(slot.p.detach()).copy_(q)
            if slot.storage != "container":
                slot.shadow = stand_in(slot.p)
            if isinstance(slot.codes, Codes):
                self._shells.add(slot.p, slot.codes, self._place(slot.p, slot.codes))
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
        packed = [slot.p for slot in planned if slot.storage == "packed"]
        if packed:
            assert self._model is not None
            self._shells.attach(self._model, packed)

    def _place(self, p: torch.nn.Parameter, codes: Codes) -> Whole | shards.ShardPlace:
        return shards.ShardPlace(p, shards.record_of(self._model, p), codes) if is_sharded(p) else Whole(p)

    def _watch_frozen(self, groups: list[dict[str, Any]]) -> None:
        managed = {slot.p for slot in self.slots}
        here = [p for g in groups for p in g["params"]]
        self._frozen += [p for p in here if not p.requires_grad and p not in managed]
        self._types.update({id(p): p.dtype for p in here if p.requires_grad})

    def _take_up_unfrozen(self) -> None:
        """Put parameters on their grids that were frozen so far and have a gradient now."""
        guarding.refuse_cast(self)
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
        bad = ~torch.isfinite(raw)
        if bool(bad.all()) and is_shell(raw):
            raise UsageError(
                f"parameter {slot.name!r} is packed by another WriteBack: go on with that one, or make the "
                "model anew and load model.state_dict() into it."
            )
        if bool(bad.any()):
            raise UsageError(
                f"parameter {slot.name!r} has {int(bad.sum())} value(s) that are not finite: they have no "
                "code."
            )
        stream = self._stream(slot, PROJECTION) if self.project == "stochastic" else None
        g = slot.grid
        if slot.policy.name == "dqt" and self.project != "none":
            g = integer_grid(g.bits, rule="absmean", symmetric=False)  # DQT starts from the mean magnitude
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
        """Add parameters to the wrapped optimizer and put them on the grid."""
        if not self.slots:  # in Optimizer.__init__
            super().add_param_group(param_group)
            return
        known = len(self.optimizer.param_groups)
        try:
            if self._groups is not None:
                super().add_param_group(param_group)
                param_group = {**param_group, "params": list(param_group["params"])}
            self.optimizer.add_param_group(param_group)
            self._commit(self._prepared(self._chooser.plan(self.param_groups[known:], known)))
            self._watch_frozen(self.param_groups[known:])
        except BaseException:
            del self.param_groups[known:], self.optimizer.param_groups[known:], self._passed_on[known:]
            raise

    # ---- stepping -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step and its write-back. A closure is evaluated at the stored weights."""
        return self._stepping(closure)

    @_disable_dynamo  # a compiled caller would look into kernels, and take one tensor's moments for another's
    @torch.no_grad()
    def _stepping(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        searching = isinstance(self.optimizer, torch.optim.LBFGS)  # evaluates the closure while it moves
        if closure is not None and not searching:
            with torch.enable_grad():
                loss = closure()
        self._take_up_unfrozen()  # a closure may have made the gradients
        if any(s.resting for s in self.slots):
            raise UsageError(
                "the model holds the weights for evaluation: call train() on the optimizer before step()."
            )
        active = [s for s in self.slots if s.p.grad is not None or (searching and s.p.requires_grad)]
        guarding.refuse_replaced(self, self.slots)
        self._pass_on_groups()
        guarding.refuse_settings(self, active)
        if self.nonfinite == "raise":
            guarding.refuse_nonfinite(active, self.steps + 1)
        self.steps += 1
        try:
            found = self._rounds(active, closure if searching else None)
        except BaseException:
            self.steps -= 1
            raise
        if self._backward is not None:
            self._backward.done.clear()
        if self.telemetry and not self._told_spoilt and self.steps % LOOK_EVERY == 1:
            guarding.tell_spoilt(self)
        return found if searching else loss

    @property
    def moved_in_backward(self) -> bool:
        """Whether weights have moved already in the step that comes next, see :meth:`in_backward`."""
        return self._backward is not None and bool(self._backward.done)

    def in_backward(self) -> InBackward:
        """Move every managed parameter as its gradient arrives, and free the gradient: from now on a backward
        makes the step, and ``step()`` moves what is not managed and ends it. ``remove()`` of what is returned
        ends that."""
        if self._backward is not None:
            self._backward.remove()
        self._backward = InBackward(self)
        return self._backward

    def _pass_on_groups(self) -> None:
        """Where there are two sets of groups: what schedulers and users changed in either, in both."""
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

    def _rounds(self, active: list[Slot], closure: Any = None) -> Any:
        """The step: in one pass where that is the same, else by the wrapped optimizer."""
        once = self._suited(active) if closure is None else []
        if not once:
            return self._wrapped_rounds(active, closure)
        taken = set(once)
        rest = [s for s in active if s not in taken]
        hidden = [s.p for s in once if s.shadow is None]
        grads = [p.grad for p in hidden]
        try:
            for p in hidden:
                p.grad = None
            if rest or any(p.grad is not None for g in self.optimizer.param_groups for p in g["params"]):
                self._wrapped_rounds(rest)
        finally:
            for p, grad in zip(hidden, grads, strict=True):
                p.grad = grad
        onepass.move(self, once, self.steps)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask
        return None

    def _suited(self, active: list[Slot]) -> list[Slot]:
        """What can be moved in one pass; the first time that something cannot, the log says why."""
        if not self.one_pass:
            return []
        once, reason = onepass.suited(self, active)
        if reason is not None and not self._told:
            self._told = True
            asked = any(g.get("fused") for g in self.param_groups)
            logging.getLogger("halfulp").log(
                logging.WARNING if asked else logging.INFO,
                "halfulp: %s of %s tensors are stepped in two passes, which takes longer: %s.",
                len(active) - len(once), len(active), reason,
            )  # fmt: skip
        return once

    def _wrapped_rounds(self, active: list[Slot], closure: Any = None) -> Any:
        """The wrapped optimizer's step: in one call, or with one stand-in after another."""
        apart = [s for s in active if s.shadow is not None] if self.materialise == "tensor" else []
        if not apart:
            loss = self._advance(active, closure)
            self._pass_on_groups()
            return loss
        others = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        grads = [p.grad for p in others]
        together = [s for s in active if s.shadow is None]
        undo = [slot.snapshot() for slot in together]
        try:
            if others:
                self._advance(together)
            for p in others:
                p.grad = None
            for slot in apart:
                undo.append(slot.snapshot())
                self._advance([slot])
        except BaseException:
            for put_back in undo:
                put_back()
            raise
        finally:
            for p, grad in zip(others, grads, strict=True):
                p.grad = grad
        self._pass_on_groups()
        return None

    def _idle(self, active: list[Slot]) -> list[Slot]:
        """Weights without a gradient, within the reach of an optimizer that may move them all the same."""
        if self._torchs_own:
            return []
        return [s for s in self.slots if s not in active and (s.shadow is None or self.materialise == "all")]

    def _advance(self, active: list[Slot], closure: Any = None) -> Any:
        """One call of the wrapped optimizer, and the write-back of what it moved."""
        idle = self._idle(active)
        opened = [*active, *idle]
        before = [list(g["params"]) for g in self.optimizer.param_groups]
        stored: list[torch.Tensor] = []
        close: Callable[[], None] | None = None
        try:
            self._open(opened, stored)
            given = [local(slot.stepped.detach()).clone() for slot in idle]
            loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            now = [p for g in self.optimizer.param_groups for p in g["params"]]
            if [id(p) for p in now] != [id(p) for params in before for p in params]:
                raise UsageError(
                    f"{type(self.optimizer).__name__}.step() replaced its parameters; WriteBack needs an "
                    "optimizer that moves them in place. The weights are as they were."
                )
            still = {
                slot
                for slot, was in zip(idle, given, strict=True)
                if torch.equal(local(slot.stepped.detach()), was)
            }
            moved = [(s, q) for s, q in zip(opened, stored, strict=True) if s not in still]
            steps = [self._step_of(slot, q) for slot, q in moved]
            written = [slot.policy.after(step) for (slot, _), step in zip(moved, steps, strict=True)]
            unmoved = [(s, q) for s, q in zip(opened, stored, strict=True) if s in still]
            close = partial(
                self._close, list(zip((s for s, _ in moved), steps, written, strict=True)), unmoved
            )
            close()
        except BaseException:  # an interrupt leaves no weight off the grid, and no stand-in filled
            if close is not None:
                close()
            else:
                for group, params in zip(self.optimizer.param_groups, before, strict=False):
                    group["params"] = params
                self._restore(opened, stored)
            raise
        return loss

    def _open(self, active: Sequence[Slot], stored: list[torch.Tensor]) -> None:
        """Set aside what is stored, in ``stored``; and have parameters as the optimizer should find them."""
        sources = []
        for slot in active:
            slot.heed_edits()
            source = slot.values()
            if slot.shadow is not None:
                fill(slot.shadow, source, slot.p.grad)
            sources.append(source)
        stored += set_aside(active, sources)
        for slot, q, p in zip(active, stored, sources, strict=True):
            slot.policy.before(q, p, slot.state)

    def _step_of(self, slot: Slot, q: torch.Tensor) -> Step:
        group = self.optimizer.param_groups[slot.place[0]]
        z = local(slot.stepped.detach())
        rate, decay = decoupled(self.optimizer, group)
        return Step(
            name=slot.name, grid=slot.grid, stream=self._stream(slot, self.steps), q=q, z=z, state=slot.state,
            moved=slot.moved, sums=onepass.sampling(z.numel()) if self.telemetry else 0,
            decay=rate * decay, group=group, moments=self.optimizer.state.get(slot.stepped, {}),
            keep_scales=slot.storage == "packed",
        )  # fmt: skip

    def _close(
        self,
        moved: Sequence[tuple[Slot, Step, kernels.Written]],
        unmoved: Sequence[tuple[Slot, torch.Tensor]],
    ) -> None:
        """Write everything back. Done again after an interrupt, it ends in the same."""
        for _, step, _ in reversed(moved):  # what the optimizer moved last may still be in the caches
            step.finish()
        for slot, step, written in moved:
            slot.events = TensorEvents.of(
                slot.name, self.steps, slot.p, written, step.decay, slot.moved is not None, step.sums
            )
            if slot.shadow is not None:
                slot.store(step.z, step.scales)
        self._restore([slot for slot, _ in unmoved], [q for _, q in unmoved])
        for slot in (*(slot for slot, *_ in moved), *(slot for slot, _ in unmoved)):
            slot.let_go()
            slot.note_written()

    def _restore(self, slots: Sequence[Slot], stored: Sequence[torch.Tensor]) -> None:
        """Put back what was set aside: of none, where an interrupt came before all of it was."""
        for slot, q in zip(slots, stored, strict=False):
            if slot.shadow is None:
                local(slot.p.detach()).copy_(q)
        for slot in slots:
            slot.let_go()

    # ---- what happened, what it costs ------------------------------------------------------------

    @property
    def events(self) -> Events:
        """What the last step lost, per tensor that it moved. On sharded parameters every rank must ask."""
        return Events.gather(
            [s.events for s in self.slots if s.events is not None and s.events.step == self.steps]
        )

    def bytes(self) -> Bytes:
        """Bytes a managed parameter: what persists for weights and policies, and what a step adds."""
        able = self.one_pass and onepass.unsuited(self.optimizer) is None
        groups = [onepass.unsuited_group(self, g) for g in self.param_groups] if able else []
        once = [s for s in self.slots if able and s.two_passes is None and groups[s.place[0]] is None]
        return measure(self.slots, one_by_one=self.materialise == "tensor", at_once=once)

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state with everything that a write-back keeps beside it."""
        for begins in self._optimizer_state_dict_pre_hooks.values():
            begins(self)
        made = checkpoint.state_dict(self)
        for ends in self._optimizer_state_dict_post_hooks.values():
            made = made if (other := ends(self, made)) is None else other
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state; a different grid, policy, model, seed or version is refused."""
        for begins in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = state_dict.copy()  # theirs to change
            state_dict = state_dict if (other := begins(self, state_dict)) is None else other
        self._load(state_dict)
        for ends in self._optimizer_load_state_dict_post_hooks.values():
            ends(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        checkpoint.load_state_dict(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a WriteBack is not copied or pickled: save its state_dict(), and make a new one.")

    def __repr__(self) -> str:
        grids = ", ".join(sorted({f"{s.policy.name} on {s.grid.name}" for s in self.slots}))
        text = f"WriteBack({grids}; {len(self.slots)} tensors; {self.optimizer!r})"
        return "\n".join(plain(line) for line in text.split("\n"))  # groups may carry any text


def decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[float, float]:
    """Rate and decay where weight decay is a part of the proposal of its own, lr * decay * w."""
    decoupled = isinstance(optimizer, DECOUPLED) or bool(group.get("decoupled_weight_decay"))
    decay = float(group.get("weight_decay") or 0.0)
    return (float(group["lr"]), decay) if decoupled and math.isfinite(decay) else (0.0, 0.0)
