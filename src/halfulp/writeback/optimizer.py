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

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from halfulp import kernels
from halfulp.errors import HalfulpError, UsageError
from halfulp.grids import Grid, container, integer_grid
from halfulp.grids import grid as named
from halfulp.streams import Stream
from halfulp.text import plain
from halfulp.writeback import checkpoint
from halfulp.writeback.policies import Policy, Step, TileMaster, policy
from halfulp.writeback.report import Bytes, Events, TensorEvents
from halfulp.writeback.sharding import is_sharded, local, shard_offset, unsupported_moving
from halfulp.writeback.slot import Slot, measure, set_aside
from halfulp.writeback.storage import Codes, Shells

Storage = Literal["container", "native", "packed"]
Select = Callable[[str, torch.Tensor], bool] | Iterable[str] | None
NATIVE = {torch.bfloat16, torch.float16}
DECOUPLED = tuple(getattr(torch.optim, n) for n in ("AdamW", "Adafactor", "Muon") if hasattr(torch.optim, n))
PROJECTION = -1  # the step number of the initial projection's stream


class WriteBack(torch.optim.Optimizer):
    """Keep weights on a grid while any optimizer trains them.

    ``params``: which tensors, as a predicate ``(name, tensor) -> bool`` or names; by default every
    trainable tensor of two or more dimensions. A parameter group may carry its own ``grid`` and
    ``policy``. ``project``: how the first codes are made (``nearest``, ``stochastic``, or ``none`` for
    weights that are on the grid already). ``storage``: where weights live between steps, see
    :mod:`halfulp.writeback.storage`; ``materialise``: whether ``native`` and ``packed`` weights are given to
    the optimizer one ``tensor`` at a time (the default for torch's own) or ``all`` at once.
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
        storage: Storage = "container",
        nonfinite: Literal["count", "raise"] = "count",
        telemetry: bool = True,
        keep_scratch: bool | None = None,
        materialise: Literal["tensor", "all"] | None = None,
    ) -> None:
        if isinstance(optimizer, WriteBack):
            raise UsageError("the optimizer is a WriteBack already: wrap the optimizer inside it instead.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"WriteBack wraps a torch optimizer, not {type(optimizer).__name__}.")
        for value, allowed, what in (
            (project, ("nearest", "stochastic", "none"), "project"),
            (storage, ("container", "native", "packed"), "storage"),
            (nonfinite, ("count", "raise"), "nonfinite"),
        ):
            if value not in allowed:
                raise UsageError(f"{what} must be one of {', '.join(allowed)}, not {value!r}.")
        if storage == "packed" and model is None:
            raise UsageError("storage='packed' decodes weights around forwards: pass model=.")
        searching = isinstance(optimizer, torch.optim.LBFGS)
        if searching and storage != "container":
            raise UsageError(
                "LBFGS evaluates the model while it moves the weights, which "
                f"storage={storage!r} hides from it: use storage='container'."
            )
        self.optimizer = optimizer
        self.seed, self.project, self.storage = int(seed), project, storage
        self.nonfinite, self.telemetry = nonfinite, telemetry
        self.keep_scratch = storage == "container" if keep_scratch is None else keep_scratch
        # torch's optimizers keep all their state by parameter, so they can be given one at a time.
        apart = type(optimizer).__module__.startswith("torch.optim")
        self.materialise = materialise or ("tensor" if apart else "all")
        self.steps = 0
        self.slots: list[Slot] = []
        self._default = (grid, policy)
        self._model, self._select = _unwrapped(model), params
        self._shells = Shells()
        planned = self._plan(optimizer.param_groups, 0)
        self._check_selection(planned)
        self._groups: list[dict[str, Any]] | None = []
        super().__init__(
            [{**g, "params": list(g["params"])} for g in optimizer.param_groups], optimizer.defaults
        )
        if storage == "container":
            self._groups = None
        self._passed_on = [{k: v for k, v in g.items() if k != "params"} for g in self._groups or []]
        self._adopt(planned)

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

    # ---- choosing -------------------------------------------------------------------------------

    def _plan(self, groups: list[dict[str, Any]], first: int) -> list[Slot]:
        """Which parameters to manage and how; changes nothing."""
        from_model = {}
        if self._model is not None:  # torch.compile puts a part of its own into names
            from_model = {p: n.replace("_orig_mod.", "") for n, p in self._model.named_parameters()}
        planned = []
        for i, group in enumerate(groups, start=first):
            if group.get("differentiable"):
                raise UsageError("differentiable=True is not supported: a write-back has no gradient.")
            names = group.get("param_names", [])
            chosen_grid = named(group.get("grid", self._default[0]))
            chosen = policy(group.get("policy", self._default[1]))
            for j, p in enumerate(group["params"]):
                name = from_model.get(p) or (names[j] if names else f"{i}.{j}")
                if not self._wanted(name, p):
                    continue
                draws = chosen.stochastic or self.project == "stochastic"
                if draws and p not in from_model and not names:
                    what = f"policy {chosen.name!r}" if chosen.stochastic else "project='stochastic'"
                    raise UsageError(
                        f"{what} draws random bits by parameter name: pass model=, or make the optimizer "
                        "from model.named_parameters()."
                    )
                chosen.check(chosen_grid, self.optimizer, group)
                planned.append(self._slot(name, p, chosen_grid, chosen, (i, j)))
        return planned

    def _wanted(self, name: str, p: torch.Tensor) -> bool:
        if callable(self._select):
            return bool(self._select(name, p))
        if self._select is not None:
            self._select = list(self._select)
            return name in self._select
        return p.requires_grad and p.dim() >= 2

    def _slot(
        self, name: str, p: torch.nn.Parameter, g: Grid, chosen: Policy, place: tuple[int, int]
    ) -> Slot:
        try:
            container(p.dtype)
            if self.storage == "native" and p.dtype not in NATIVE:
                raise UsageError(f"storage='native' takes bfloat16 or float16 parameters, not {p.dtype}.")
            resolved = g.within(p.dtype)
            shard_offset(p)  # refuses shards that no stream can follow
            unsupported_moving(p, resolved)
            if p.dtype in NATIVE and self.storage == "container" and chosen.precise:
                raise UsageError(
                    f"policy {chosen.name!r} needs the optimizer to work in float32, but this parameter is "
                    f"{p.dtype}: use storage='native'."
                )
            if p.dtype in NATIVE and self.storage != "container" and not _fits_any_step(resolved, p.dtype):
                raise UsageError(
                    f"{p.dtype} cannot hold the values of grid {g.name}, whose steps come from float32: use "
                    "float32 parameters."
                )
            if is_sharded(p) and (self.storage != "container" or isinstance(chosen, TileMaster)):
                what = (
                    f"storage={self.storage!r}" if self.storage != "container" else f"policy {chosen.name!r}"
                )
                raise UsageError(f"{what} is for whole tensors; this one is sharded.")
            if resolved.bits > 16 and self.storage == "packed":
                raise UsageError(f"grid {g.name} has {resolved.bits} bits: nothing to pack.")
        except HalfulpError as error:
            raise type(error)(f"parameter {name!r}: {error}") from None
        return Slot(name, p, g if self.storage == "container" else resolved, chosen, place)

    def _check_selection(self, planned: list[Slot]) -> None:
        if isinstance(self._select, list):
            missing = sorted(set(self._select) - {s.name for s in planned})
            if missing:
                raise UsageError(f"params names {missing}, which the optimizer does not have.")
        if not planned:
            raise UsageError(
                "no parameter to write back: none of the optimizer's is trainable with two or more "
                "dimensions. Choose with params=lambda name, p: ..."
            )

    # ---- adopting -------------------------------------------------------------------------------

    @torch.no_grad()
    def _adopt(self, planned: list[Slot]) -> None:
        """Project, start the policies' state, and move parameters to their storage."""
        starts = []
        for slot in planned:  # everything that can fail comes before anything changes
            raw = local(slot.p.detach()).float() if self.storage == "native" else local(slot.p.detach())
            q, steps = self._projected(slot, raw)
            starts.append((slot, q, steps, slot.policy.start(raw, q, slot.name)))
        for slot, q, steps, state in starts:
            slot.state = state
            if self.telemetry:
                slot.moved = torch.zeros((q.numel() + 7) // 8, dtype=torch.uint8, device=q.device)
            local(slot.p.detach()).copy_(q)
            if self.storage != "container":
                self._shadow(slot)
            if self.storage == "packed":
                slot.codes = Codes(grid=slot.grid, shape=tuple(slot.p.shape))
                slot.codes.put(q, steps)
                self._shells.add(slot.p, slot.codes)
        self.slots += planned
        if self.storage == "packed":
            assert self._model is not None
            self._shells.attach(self._model, [slot.p for slot in planned])

    def _shadow(self, slot: Slot) -> None:
        """The wrapped optimizer moves a float32 stand-in that exists only during a step."""
        slot.shadow = torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device=slot.p.device))
        i, j = slot.place
        self.optimizer.param_groups[i]["params"][j] = slot.shadow

    def _projected(self, slot: Slot, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first stored values, and the steps that they were rounded with."""
        bad = ~torch.isfinite(raw)
        if bool(bad.any()):
            raise UsageError(
                f"parameter {slot.name!r} has {int(bad.sum())} value(s) that are not finite: they have no "
                "code."
            )
        stream = self._stream(slot, PROJECTION) if self.project == "stochastic" else None
        g = slot.grid
        if slot.policy.name == "dqt" and self.project != "none":
            g = integer_grid(g.bits, rule="absmean", symmetric=False)  # DQT starts from the mean magnitude
        steps = kernels.steps(raw, g) if g.scaling is not None else None
        q = kernels.round(raw, g, stream, step=steps)
        if self.project == "none" and not torch.equal(q, raw):
            off = int((q != raw).sum())
            raise UsageError(
                f"parameter {slot.name!r} is not on grid {g.name}: {off} of {raw.numel()} values are off it. "
                "Use project='nearest', or load the weights that this optimizer saved."
            )
        return q, steps

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
            self._adopt(self._plan(self.param_groups[known:], known))
        except BaseException:
            del self.param_groups[known:], self.optimizer.param_groups[known:], self._passed_on[known:]
            raise

    # ---- stepping -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step and its write-back. A closure is evaluated at the stored weights."""
        loss = None
        searching = isinstance(self.optimizer, torch.optim.LBFGS)  # evaluates the closure while it moves
        if closure is not None and not searching:
            with torch.enable_grad():
                loss = closure()
        active = [s for s in self.slots if s.p.grad is not None or (searching and s.p.requires_grad)]
        if self.nonfinite == "raise":
            self._refuse_nonfinite(active)
        self.steps += 1
        try:
            if self.storage == "container":
                found = self._round(active, closure if searching else None)
                loss = found if searching else loss
            else:
                loss = self._shadow_rounds(active, closure if searching else None, loss)
        except BaseException:
            self.steps -= 1
            raise
        return loss

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

    def _shadow_rounds(self, active: list[Slot], closure: Any, loss: Any) -> Any:
        """Give the wrapped optimizer float32 stand-ins: all at once, or one tensor at a time."""
        self._pass_on_groups()
        if self.materialise == "all":
            found = self._round(active, closure)
            return found if closure is not None else loss
        shadows = {s.shadow for s in self.slots}
        others = [
            p
            for g in self.optimizer.param_groups
            for p in g["params"]
            if p not in shadows and p.grad is not None
        ]
        grads = [p.grad for p in others]
        if others:
            self._round([])
        undo: list[Callable[[], None]] = []
        try:
            for p in others:
                p.grad = None
            for slot in active:
                undo.append(slot.snapshot())
                self._round([slot])
        except BaseException:
            for put_back in undo:
                put_back()
            raise
        finally:
            for p, grad in zip(others, grads, strict=True):
                p.grad = grad
        return loss

    def _round(self, active: list[Slot], closure: Any = None) -> Any:
        """One call of the wrapped optimizer, and the write-back of what it moved."""
        stored = self._open(active)
        before = [list(g["params"]) for g in self.optimizer.param_groups]
        try:
            loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            now = [p for g in self.optimizer.param_groups for p in g["params"]]
            if [id(p) for p in now] != [id(p) for params in before for p in params]:
                raise UsageError(
                    f"{type(self.optimizer).__name__}.step() replaced its parameters; WriteBack needs an "
                    "optimizer that moves them in place. The weights are as they were."
                )
            steps = [self._step_of(slot, q) for slot, q in zip(active, stored, strict=True)]
            written = [slot.policy.after(step) for slot, step in zip(active, steps, strict=True)]
        except BaseException:
            for group, params in zip(self.optimizer.param_groups, before, strict=False):
                group["params"] = params
            self._restore(active, stored)
            raise
        try:
            for step in reversed(steps):  # what the optimizer moved last may still be in the caches
                step.finish()
        finally:
            for step in steps:  # an interrupt leaves no weight off the grid
                step.finish()
        for slot, step, counted in zip(active, steps, written, strict=True):
            self._close(slot, step, counted)
        return loss

    def _refuse_nonfinite(self, active: list[Slot]) -> None:
        for slot in active:
            grad = slot.p.grad
            if grad is not None and grad.is_sparse:
                grad = grad.coalesce().values()
            if grad is not None and not bool(torch.isfinite(local(grad)).all()):
                raise UsageError(
                    f"the gradient of {slot.name!r} is not finite at step {self.steps + 1}; nothing was "
                    "changed. Skip the step (GradScaler does), or use nonfinite='count'."
                )

    def _open(self, active: list[Slot]) -> list[torch.Tensor]:
        """What is stored, set aside; and parameters as the optimizer should find them."""
        sources = []
        for slot in active:
            if slot.shadow is None:
                source = local(slot.p.detach())
            else:
                source = self._values(slot)
                slot.shadow.data = source
                slot.shadow.grad = None if slot.p.grad is None else slot.p.grad.float()
            sources.append(source)
        stored = set_aside(active, sources)
        for slot, q, p in zip(active, stored, sources, strict=True):
            slot.policy.before(q, p, slot.state)
        return stored

    def _values(self, slot: Slot) -> torch.Tensor:
        """The stored values in float32, in a fresh tensor."""
        return slot.p.detach().float() if slot.codes is None else slot.codes.get(torch.float32)

    def _step_of(self, slot: Slot, q: torch.Tensor) -> Step:
        group = self.optimizer.param_groups[slot.place[0]]
        z = local(slot.stepped.detach())
        rate, decay = _decoupled(self.optimizer, group)
        return Step(
            name=slot.name, grid=slot.grid, stream=self._stream(slot, self.steps), q=q, z=z, state=slot.state,
            moved=slot.moved, sums=_sampling(z) if decay > 0 and self.telemetry else 0, decay=rate * decay,
            group=group, moments=self.optimizer.state.get(slot.stepped, {}),
            keep_steps=slot.codes is not None,
        )  # fmt: skip

    def _close(self, slot: Slot, step: Step, written: kernels.Written) -> None:
        slot.events = TensorEvents.of(
            slot.name, self.steps, slot.p, written, step.decay, slot.moved is not None
        )
        if slot.shadow is not None:
            if slot.codes is None:
                slot.p.data.copy_(step.z)
            else:
                slot.codes.put(step.z, step.steps)
            slot.shadow.data = torch.empty(0, dtype=torch.float32, device=step.z.device)
            slot.shadow.grad = None
        if not self.keep_scratch:
            slot.scratch = None

    def _restore(self, active: list[Slot], stored: list[torch.Tensor]) -> None:
        for slot, q in zip(active, stored, strict=True):
            if slot.shadow is None:
                local(slot.p.detach()).copy_(q)
            else:
                slot.shadow.data = torch.empty(0, dtype=torch.float32, device=q.device)
                slot.shadow.grad = None

    # ---- what happened, what it costs ------------------------------------------------------------

    @property
    def events(self) -> Events:
        """What the last step lost, per tensor that it moved. On sharded parameters every rank must ask."""
        return Events.gather(
            [s.events for s in self.slots if s.events is not None and s.events.step == self.steps]
        )

    def bytes(self) -> Bytes:
        """Bytes a managed parameter: what persists for weights and policies, and what a step adds."""
        one_by_one = self.storage != "container" and self.materialise == "tensor"
        return measure(self.slots, self.keep_scratch, one_by_one)

    # ---- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state with everything that a write-back keeps beside it."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a saved state; a different grid, policy, model, seed or version is refused."""
        checkpoint.load_state_dict(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a WriteBack is not copied or pickled: save its state_dict(), and make a new one.")

    def __repr__(self) -> str:
        grids = ", ".join(sorted({f"{s.policy.name} on {s.grid.name}" for s in self.slots}))
        text = f"WriteBack({grids}; {len(self.slots)} tensors; {self.optimizer!r})"
        return "\n".join(plain(line) for line in text.split("\n"))  # groups may carry any text


def _sampling(x: torch.Tensor) -> int:
    """Which tiles tell how much of a proposal is decay: all of a small tensor, every sixteenth of a large."""
    return 16 if kernels.tiles_of(x.numel()) >= 256 else 1


def _fits_any_step(grid: Grid, dtype: torch.dtype) -> bool:
    """Whether a narrow dtype holds a grid's values under whatever step float32 gives it."""
    return grid.scaling is None or (grid.scaling.rule in ("mx", "nv") and dtype == torch.bfloat16)


def _unwrapped(model: torch.nn.Module | None) -> torch.nn.Module | None:
    """The module inside data-parallel wrappers, so that names and streams are the same without them."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        model = model.module
    return model


def _decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[float, float]:
    """Rate and decay where weight decay is a part of the proposal of its own, lr * decay * w."""
    decoupled = isinstance(optimizer, DECOUPLED) or bool(group.get("decoupled_weight_decay"))
    decay = float(group.get("weight_decay") or 0.0)
    return (float(group["lr"]), decay) if decoupled and math.isfinite(decay) else (0.0, 0.0)
