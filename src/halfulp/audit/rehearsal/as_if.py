"""The model *as if* it held other weights, for as long as somebody looks.

The weights are copied over the model's own, in place, and put back whatever happens in between, to the last
bit. In place, because compiled models, captured graphs and views know tensors by their memory. Autograd does
not see it: a graph that was built before stays usable, for afterwards its tensors are what they were.
Buffers are put back as well: a forward pass in training mode changes those of batch norm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfulp import files, tensors
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.ranks import rank
from halfulp.audit.rehearsal.rehearsals import Rehearsals
from halfulp.audit.sources.names import unwrapped
from halfulp.errors import UsageError
from halfulp.text import unwrapped_name
from halfulp.writeback.sharding import is_sharded, local

Losses = dict[str, dict[str, float]]
"""Losses by spec and bound."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The losses of the model's own weights and of the rehearsed weights at one step."""

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
    saved = [(b, b.data, _once(b.data).clone()) for b in buffers]
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
            for b, memory, values in saved:
                _point(b, memory)
                _once(memory).copy_(values)


def _reshard(models: Sequence[torch.nn.Module]) -> None:
    """Have FSDP2 gather its weights again: the root of a model keeps what it gathered for a forward pass."""
    for module in (m for model in models for m in model.modules()):
        if isinstance(getattr(module, "reshard", None), MethodType) and hasattr(module, "unshard"):
            module.reshard()  # type: ignore[operator]  # FSDPModule's


def _once(x: torch.Tensor) -> torch.Tensor:
    """Return a writable view that has every element once; expanded tensors repeat some."""
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
        """Restore the states of every generator that was saved."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002  # others use it
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


class ModelAsIf:
    """Put the weights of rehearsals into the model, for as long as somebody looks.

    Args:
        rehearsals: The rehearsals, which have tensors.
        models: The models whose buffers are put back.
    """

    def __init__(self, rehearsals: Rehearsals, models: Sequence[torch.nn.Module]) -> None:
        self.rehearsals, self.models = rehearsals, models

    @contextmanager
    def as_if(self, spec: str, bound: str, step: int) -> Iterator[None]:
        """Have the model hold a rehearsal's weights inside a with block; then its own again, to the bit."""
        rehearsals = self.rehearsals
        j, what = rehearsals.index(spec), f"as_if({spec!r}, bound={bound!r})"
        if rehearsals.shown is not None:
            raise UsageError(f"{what} was entered inside {rehearsals.shown}: leave that one first.")
        if rehearsals.begun > step:
            raise UsageError(
                f"the rehearsals are those of step {rehearsals.step}, where the resumed trace ended, but the "
                f"run is at step {step}. They go on together from there."
            )
        weights = rehearsals.weights(j, bound)
        shown = {w.tensor if w.shown is None else w.shown: values for w, values in weights.items()}
        rehearsals.shown = what
        try:
            with swapped(shown, self.models, what):
                yield
        finally:
            rehearsals.shown = None

    def losses(
        self, evaluate: Callable[[], Any], chosen: Sequence[int], bounds: Sequence[str], step: int
    ) -> tuple[float, Losses]:
        """Return the loss of the model, and of every rehearsal and bound as if it were the model."""
        before = RandomState()
        real = number(evaluate())
        losses: Losses = {}
        if step < self.rehearsals.begun:
            return real, losses
        after = RandomState()
        projections: dict[str, float] = {}
        try:
            for j in chosen:
                spec, grid = self.rehearsals.rehearse.names[j], self.rehearsals.rehearse.each[j].grid.name
                for bound in bounds:
                    if bound == "lower" and grid in projections:  # whatever the policy
                        loss = projections[grid]
                    else:
                        with self.as_if(spec, bound, step):
                            before.put_back()
                            loss = number(evaluate())
                    if bound == "lower":
                        projections[grid] = loss
                    losses.setdefault(spec, {})[bound] = loss
        finally:  # the run goes on as after its own evaluation
            after.put_back()
        return real, losses

    def save(self, spec: str, path: Path, bound: str, step: int, watched: Iterable[Watched]) -> None:
        """Write a rehearsal's weights under the model's names, or under those of the watched tensors."""
        with self.as_if(spec, bound, step):
            if len(self.models) == 1:
                state = unwrapped(self.models[0]).state_dict()
            else:
                state = {w.name: (w.tensor if w.shown is None else w.shown) for w in watched}
            weights = {
                unwrapped_name(name): _whole(x) for name, x in state.items() if isinstance(x, torch.Tensor)
            }
            header = {"halfulp.as_if": spec, "halfulp.bound": bound, "halfulp.step": str(step)}
            if rank() == 0:
                files.put(path, b"".join(tensors.content(weights, header)))


def number(loss: Any) -> float:
    """Return a loss as a number."""
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a state dict in full: all shards of it, on the CPU."""
    x = x.detach()
    full = x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]  # a DTensor
    return full.cpu().contiguous()
