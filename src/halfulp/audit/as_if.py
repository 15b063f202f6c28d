"""The model *as if* it held other weights, for as long as somebody looks.

The weights are copied over the model's own, in place, and put back whatever happens in between, to the last
bit. In place, because compiled models, captured graphs and views know tensors by their memory. Autograd does
not see it: a graph that was built before stays usable, for afterwards its tensors are what they were.
Buffers are put back as well: a forward pass in training mode changes those of batch norm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfulp import files, tensors
from halfulp.audit.names import WRAPPERS, unwrapped
from halfulp.audit.ranks import rank, world
from halfulp.audit.rehearsal import Rehearsals
from halfulp.audit.watched import Watched
from halfulp.errors import UsageError
from halfulp.trace.forecast import REAL
from halfulp.trace.schema import BOUNDS
from halfulp.writeback.sharding import is_sharded, local

Losses = dict[str, dict[str, float]]
"""By spec and bound."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the model's own weights give at a step, and what the rehearsed ones would."""

    step: int
    real: float
    losses: Losses


@contextmanager
def swapped(
    weights: Mapping[torch.Tensor, torch.Tensor], models: Sequence[torch.nn.Module], what: str
) -> Iterator[None]:
    """Let tensors hold these values (of this rank), and refuse steps of optimizers that hold one of them."""

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any(p in weights for g in optimizer.param_groups for p in g["params"]):
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called inside {what}: the weights there are not the "
                "run's own. Leave the with block before you train on."
            )

    _reshard(models)
    places = [(m._buffers, dict(m._buffers)) for model in models for m in model.modules()]
    buffers = [b for model in models for b in model.buffers()]
    own = {p: p.data for p in weights}
    kept = {p: local(x).clone() for p, x in own.items()}
    held = [(b, b.data, _once(b.data).clone()) for b in buffers]
    handle = register_optimizer_step_pre_hook(refuse)
    try:
        with torch.no_grad():
            for p, values in weights.items():
                local(p.data).copy_(values)
        yield
    finally:
        handle.remove()
        _reshard(models)
        with torch.no_grad():
            for p, x in own.items():
                _point(p, x)
                local(x).copy_(kept[p])
            for place, named in places:
                place.update(named)
            for b, memory, values in held:
                _point(b, memory)
                _once(memory).copy_(values)


def _reshard(models: Sequence[torch.nn.Module]) -> None:
    """Have FSDP2 gather its weights again: the root of a model keeps what it gathered for a forward pass."""
    for module in (m for model in models for m in model.modules()):
        if isinstance(getattr(module, "reshard", None), MethodType) and hasattr(module, "unshard"):
            module.reshard()  # type: ignore[operator]  # FSDPModule's


def _once(x: torch.Tensor) -> torch.Tensor:
    """A tensor with every number once, as it can be written to: an expanded one has some many times."""
    if x.layout == torch.strided:
        for i in (i for i, stride in enumerate(x.stride()) if stride == 0 and x.shape[i] > 1):
            x = x.narrow(i, 0, 1)
    return x


def _point(p: torch.Tensor, memory: torch.Tensor) -> None:
    """Have a tensor use its own memory again, if something inside gave it another (``model.to``)."""
    if local(p.data).data_ptr() != local(memory).data_ptr() or p.dtype != memory.dtype:
        p.data = memory


class RandomState:
    """The state of the generators that code without one of its own draws from: Python's, NumPy's, torch's."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # others use it
        self._torch = torch.get_rng_state()
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's
        self._cuda = torch.cuda.get_rng_state_all() if used else None

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002  # others use it
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class Showing:
    """What an audit offers of its rehearsals."""

    rehearsing: Rehearsals | None
    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer] | None
    watched: dict[torch.Tensor, Watched]
    step: int
    given_up: bool
    _inside: str | None = None
    _watch: Callable[[torch.optim.Optimizer], list[Watched]]
    _skip_until: int
    _around: list[torch.nn.Module]
    """Models that nobody gave, but that were found around a step."""
    _evaluated: list[tuple[int, int, int, float]]
    """Evaluations that are not written yet: step, rehearsal, bound, loss; -1 for the run itself."""

    @property
    def rehearsals(self) -> list[str]:
        """The specs that are rehearsed."""
        return [] if self.rehearsing is None else self.rehearsing.asked.names

    @property
    def bounds(self) -> list[str]:
        """The bounds of a rehearsal that can be shown; the lower one needs nothing that is kept."""
        kept = () if self.rehearsing is None else self.rehearsing.asked.bounds
        return [b for b in BOUNDS if b in kept or (kept and b == "lower")]

    @property
    def rehearsed(self) -> bool:
        """Whether there are rehearsed weights to show."""
        return self.rehearsing is not None and bool(self.rehearsing.tensors)

    def _ready(self) -> Rehearsals:
        if self.rehearsing is None:
            raise UsageError(
                "this audit rehearses nothing: pass rehearse=['e4m3@128', ...] when you make it."
            )
        if not self.rehearsing.tensors:  # before the first step, s = Q(w)
            for optimizer in self.optimizers or ():
                self._watch(optimizer)
        if not self.rehearsing.tensors:
            raise UsageError("nothing is rehearsed yet: no tensor that is to be has been part of a step.")
        return self.rehearsing

    @contextmanager
    def as_if(self, spec: str, bound: str = "point") -> Iterator[None]:
        """Have the model hold a rehearsal's weights inside a with block; then its own again, to the bit.

        ``bound``: ``point``, ``upper`` or ``lower``. Steps of the optimizer are refused inside, and so is
        another ``as_if``. On several ranks, all of them enter.
        """
        ready = self._ready()
        j, what = ready.index(spec), f"as_if({spec!r}, bound={bound!r})"
        if self._inside is not None:
            raise UsageError(f"{what} was entered inside {self._inside}: leave that one first.")
        if ready.begun > self.step:
            raise UsageError(
                f"the rehearsals are those of step {ready.step}, where the resumed trace ended, but the run "
                f"is at step {self.step}. They go on together from there."
            )
        weights = ready.weights(j, bound)
        shown = {w.tensor if w.shown is None else w.shown: values for w, values in weights.items()}
        self._inside = what
        try:
            with swapped(shown, self.models or self._around, what):
                yield
        finally:
            self._inside = None

    def evaluate(
        self,
        evaluate: Callable[[], Any],
        *,
        specs: Sequence[str] | None = None,
        bounds: Sequence[str] | None = None,
        record: bool = True,
    ) -> Evaluation:
        """The loss of the model, and of every rehearsal and bound as if it were the model; in the trace, too.

        ``evaluate`` is called for each, and gives a number. It draws the same random numbers every time, and
        the run goes on as if it had been called once: the global generators of Python, NumPy and torch and
        the model's buffers are put back. A generator of your own is yours to rewind. An audit that rehearses
        nothing, or has stepped aside, takes the loss of the model alone, for calibrations and comparisons.
        """
        alone = self.rehearsing is None or (self.given_up and world() == 1)
        if alone or (specs is not None and not specs):
            real = _number(evaluate())
            self._note([(REAL, REAL, real)] if record else [])
            return Evaluation(step=self.step, real=real, losses={})
        ready = self._ready()
        chosen = [ready.index(s) for s in (self.rehearsals if specs is None else specs)]
        wanted = tuple(self.bounds if bounds is None else bounds)
        before = RandomState()
        real = _number(evaluate())
        made: Losses = {}
        rows = [(REAL, REAL, real)]
        if self.step >= ready.begun:
            after = RandomState()
            projections: dict[str, float] = {}
            try:
                for j in chosen:
                    spec, grid = ready.asked.names[j], ready.asked.each[j].grid.name
                    for bound in wanted:
                        if bound == "lower" and grid in projections:  # whatever the policy
                            loss = projections[grid]
                        else:
                            with self.as_if(spec, bound):
                                before.put_back()
                                loss = _number(evaluate())
                        if bound == "lower":
                            projections[grid] = loss
                        made.setdefault(spec, {})[bound] = loss
                        rows.append((j, BOUNDS.index(bound), loss))
            finally:  # the run goes on as after its own evaluation
                after.put_back()
            self._note(rows if record else [])
        return Evaluation(step=self.step, real=real, losses=made)

    def _note(self, rows: Sequence[tuple[int, int, float]]) -> None:
        """Record an evaluation: (rehearsal, bound, loss) each; a later one of the same step counts."""
        begun = self._skip_until if self.rehearsing is None else self.rehearsing.begun
        if rank() != 0 or self.step < begun:
            return  # it is there already
        new = {(self.step, *row[:2]) for row in rows}
        self._evaluated = [row for row in self._evaluated if row[:3] not in new]
        self._evaluated += [(self.step, *row) for row in rows]

    def save_as_if(self, spec: str, path: str | Path, bound: str = "point") -> None:
        """Write a rehearsal's weights under the model's names, as one safetensors file.

        It has what ``model.state_dict()`` has; without a model, the tensors that the optimizers hold.
        """
        if len(self.models) > 1:
            raise UsageError("save_as_if is for one model; this audit was given several.")
        models = self.models or self._around
        with self.as_if(spec, bound):
            if len(models) == 1:
                found = unwrapped(models[0]).state_dict()
            else:
                found = {w.name: (w.tensor if w.shown is None else w.shown) for w in self.watched.values()}
            made = {_clean(name): _whole(x) for name, x in found.items() if isinstance(x, torch.Tensor)}
            told = {"halfulp.as_if": spec, "halfulp.bound": bound, "halfulp.step": str(self.step)}
            if rank() == 0:
                files.put(Path(path), b"".join(tensors.content(made, told)))


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A tensor of a state dict in full: all shards of it, on the CPU."""
    x = x.detach()
    full = x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]  # a DTensor
    return full.cpu().contiguous()
