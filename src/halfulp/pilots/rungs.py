"""Run what a pilot needs: the reference, its twins on a part of every batch, and forks of it.

A training is given as a *factory* of runs. A run has a model, an optimizer and three methods, and must not
depend on other runs:

    class Run:
        def __init__(self):                  # the factory is the class itself
            self.model, self.optimizer = ...
        def batch(self, update): ...         # the batch of an update, counted from 1
        def step(self, batch, update): ...   # one update, by self.optimizer
        def evaluate(self): ...              # the loss that is to be forecast

Batches are tensors or arrays (in tuples, lists, dicts) whose first dimension counts sequences. A run that
keeps more than its model and optimizer (a schedule object, an average of weights) has ``state_dict()`` and
``load_state_dict()`` for it. Every run begins from the same state of the global random generators, so the
reference is bit for bit the run that a plain loop would have made, and so are twins and forks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from halfulp.audit.rehearsal.as_if import number
from halfulp.audit.rehearsal.specs import Pull, Rehearse, root_of_peak
from halfulp.audit.session import Audit
from halfulp.errors import UsageError
from halfulp.numbers.streams import Stream
from halfulp.pilots import run_states
from halfulp.writeback.optimizer import WriteBack

NUDGE = 2.0**-16
"""Largest relative change of a weight at the start of the nudged twin."""
PARTS = (torch.Tensor, np.ndarray)


class PilotRun(Protocol):
    """A training: see the module's docstring."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def batch(self, update: int) -> Any:
        """Return the batch of an update."""

    def step(self, batch: Any, update: int) -> Any:
        """Make an update."""

    def evaluate(self) -> Any:
        """Return the loss."""


class Clock:
    """Processor time since it was made.

    Args:
        elsewhere: Gives the processor time of other processes that counts as well.
    """

    def __init__(self, elsewhere: Callable[[], float] = float) -> None:
        self._processor, self._wall = time.process_time(), time.perf_counter()
        self._elsewhere = elsewhere

    @property
    def seconds(self) -> float:
        """Seconds of this process, on all of its threads, and those spent elsewhere."""
        return time.process_time() - self._processor + self._elsewhere()

    def busy(self, wall: float) -> float:
        """Return what some wall-clock time was in processor time, on a machine that has others to serve."""
        passed = time.perf_counter() - self._wall
        return wall * min(1.0, self.seconds / passed) if passed else wall


Make = Callable[[], PilotRun]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The results of a reference run."""

    start: float
    """Loss before the first update."""
    real: float
    again: float
    """Loss of the same weights, evaluated again from another state of the generators."""
    as_if: Mapping[str, Mapping[str, float]]
    """The loss by format and bound."""
    forked: Mapping[int, Any] = field(default_factory=dict)
    """The states that were set aside for forks, by update."""
    seconds: float = 0.0
    """Processor time of the run alone, all of its updates."""
    beside: float = 0.0
    """Processor time of the rehearsals."""


@dataclass(frozen=True, kw_only=True)
class Factory:
    """A factory of runs, the number of their updates, and the formats to forecast."""

    make: Make
    updates: int
    formats: tuple[str, ...]
    seed: int = 0
    pull: Pull = root_of_peak
    """The pull of the rehearsals."""
    random: Any = field(default_factory=run_states.generators, repr=False)
    """State of the random generators from which every run begins."""

    def begin(self) -> PilotRun:
        """Make a run, from the state of the generators from which all begin."""
        run_states.put_generators(self.random)
        return self.make()

    @property
    def rehearse(self) -> Rehearse:
        """The rehearsals of the formats."""
        return Rehearse(list(self.formats), pull=self.pull)


def size(batch: Any) -> int:
    """Return how many sequences a batch has; all its tensors must agree."""
    lengths = {len(x) for x in _leaves(batch) if x.ndim}
    if len(lengths) != 1:
        raise UsageError(
            "a twin takes the first sequences of every batch, so batch() must give tensors or arrays whose "
            f"first dimension counts them; found {sorted(lengths) or type(batch).__name__}."
        )
    return lengths.pop()


def first(batch: Any, count: int) -> Any:
    """Return the first sequences of a batch.

    >>> first({"x": torch.arange(4), "y": (torch.arange(4) * 2, "text")}, 2)
    {'x': tensor([0, 1]), 'y': (tensor([0, 2]), 'text')}
    """
    if isinstance(batch, PARTS):
        return batch[:count] if batch.ndim else batch
    if isinstance(batch, MutableMapping):
        kept = copy.copy(batch)  # of its own class: a tokenizer's batch has methods
        kept.update({k: first(v, count) for k, v in batch.items()})
        return kept
    if isinstance(batch, list) and batch and all(isinstance(v, str) for v in batch):
        return batch[:count]  # one text for each sequence
    if isinstance(batch, tuple | list):
        each = [first(v, count) for v in batch]
        return type(batch)(*each) if hasattr(batch, "_fields") else type(batch)(each)
    return batch


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, PARTS):
        return [batch]
    inner = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [leaf for value in inner for leaf in _leaves(value)]


def advance(run: PilotRun, update: int, part: int | None) -> None:
    """Make one update, on all of its batch or on the first sequences."""
    batch = run.batch(update)
    run.step(batch if part is None else first(batch, part), update)


def reference(
    training: Factory,
    part: int | None = None,
    *,
    fork_at: Collection[int] = (),
    bounds: Sequence[str] = ("point",),
) -> Reference:
    """Run the reference, on a part of every batch or on all of it, and rehearse every format with it.

    Args:
        training: What is run.
        part: How many sequences of a batch; None for all.
        fork_at: The updates whose state is set aside for forks.
        bounds: The bounds whose codes are set aside with them.
    """
    clock, run = Clock(), training.begin()
    start, forked = number(run.evaluate()), dict[int, Any]()
    run = training.begin()  # an evaluation may leave something behind
    # One grid is counted, because an audit counts something; rehearsals are what is wanted.
    rehearse = training.rehearse
    audit = Audit(
        run.optimizer, rehearse.each[0].grid, model=run.model, rehearse=rehearse, seed=training.seed
    )
    with audit:
        for update in range(1, training.updates + 1):
            advance(run, update, part)
            if update in fork_at:
                codes = {b: {f: _codes(audit, f, b) for f in training.formats} for b in bounds}
                forked[update] = run_states.taken(run, update=update, codes=codes)
        evaluating = Clock()
        evaluation = audit.evaluate(run.evaluate, record=False)
        evaluations_took = evaluating.seconds
        again = number(run.evaluate())
    count = 1 + sum(len(losses) for losses in evaluation.losses.values())
    beside = clock.busy(audit.seconds) + evaluations_took * (count - 1) / count
    return Reference(
        start=start, real=evaluation.real, again=again, as_if=evaluation.losses, forked=forked,
        seconds=max(0.0, clock.seconds - beside), beside=beside,
    )  # fmt: skip


def _codes(audit: Audit, spec: str, bound: str) -> dict[str, torch.Tensor]:
    """Return the rehearsed weights by the names of the model."""
    assert audit.rehearsing is not None
    codes = audit.rehearsing.weights(audit.rehearsing.index(spec), bound)
    return {w.name: values.clone() for w, values in codes.items()}


def stored(run: PilotRun, spec: str, seed: int) -> WriteBack:
    """Store the weights of a run in a format from now on."""
    rehearsal = Rehearse([spec]).each[0]
    run.optimizer = WriteBack(run.optimizer, rehearsal.grid, rehearsal.policy, model=run.model, seed=seed)
    return run.optimizer


def twin(training: Factory, spec: str, part: int | None) -> float:
    """Return the loss of a format that is really run, on a part of every batch or on all of it."""
    run = training.begin()
    wrapped = stored(run, spec, training.seed)
    return _finished(training, run, wrapped, 0, part)


def fork(training: Factory, spec: str, bound: str, forked: Mapping[str, Any]) -> float:
    """Return the loss of a format that is really run from the state that was set aside, from these codes."""
    run = training.begin()
    run_states.put_back(run, forked)
    parameters = dict(run.model.named_parameters())
    with torch.no_grad():
        for name, values in forked["codes"][bound][spec].items():
            parameters[name].copy_(values)
    wrapped = stored(run, spec, training.seed)
    return _finished(training, run, wrapped, forked["update"], None)


def _finished(training: Factory, run: PilotRun, wrapped: WriteBack, begun: int, part: int | None) -> float:
    for update in range(begun + 1, training.updates + 1):
        advance(run, update, part)
    if wrapped.steps == 0 and begun < training.updates:
        raise UsageError(
            "step() never called self.optimizer.step(), so nothing was stored in the format: use the run's "
            "attribute `optimizer` in step(), not a name of your own for it."
        )
    return number(run.evaluate())


def nudged(training: Factory, part: int | None) -> float:
    """Return the loss of the reference on a part of every batch, started from slightly different weights.

    The difference between two runs that differ by less than any format does is the noise floor.
    """
    run = training.begin()
    nudge(dict(run.model.named_parameters()), training.seed)
    for update in range(1, training.updates + 1):
        advance(run, update, part)
    return number(run.evaluate())


@torch.no_grad()
def nudge(weights: Mapping[str, torch.Tensor], seed: int) -> None:
    """Move every weight by a random share of itself, at most one of 65,536."""
    for name, p in weights.items():
        if p.is_floating_point():
            words = Stream(seed=seed, name=f"nudge {name}").words(p.numel())
            drawn = torch.from_numpy(words.astype(np.float64) / 2**31 - 1.0).view(p.shape)
            p.mul_((1.0 + NUDGE * drawn).to(p.dtype).to(p.device))
