"""``OptimizerSteps``: bring the parameters of optimizers, before and after each step, to a pipeline.

A step is a call of ``step()``; one that ``GradScaler`` skips is no step, accumulated gradients are one.
A tensor is part of it if it had a gradient when ``step()`` was called or has one when it returns, or if its
values changed. Several optimizers share a step: it is over when one of them steps again. Concurrent
``step()`` calls of several threads cannot be attributed to steps, so the audit is disabled.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from halfulp.audit.meter.counts import count_apart, score
from halfulp.audit.meter.tensor import Watched, gradient_of
from halfulp.audit.pipeline import Pipeline
from halfulp.audit.ranks import as_tensor, taking_part, world
from halfulp.audit.sources.gain import Gain
from halfulp.audit.sources.held_dtypes import OptimizerNotes, written_to
from halfulp.audit.sources.names import Naming, models_around, name_parameters
from halfulp.audit.sources.states import groups_of, wrapped
from halfulp.audit.sources.step_count import StepCount
from halfulp.audit.sources.step_hooks import StepHooks
from halfulp.audit.sources.tracked import TrackedStates
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.rules import decay_of, rate_of


class OptimizerSteps:
    """Follow the steps of optimizers.

    Args:
        pipeline: Where their parameters go.
        optimizers: The optimizers, or None for all of the process.
        models: The models that name their parameters.
        tracked: What is followed beside the weights.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        models: list[torch.nn.Module],
        tracked: TrackedStates | None,
    ) -> None:
        self.pipeline, self.optimizers, self.models, self.tracked = pipeline, optimizers, models, tracked
        self.hooks = StepHooks(self._before, self._after, self._together)
        self.notes = OptimizerNotes()
        self._gain = Gain()
        self.around: list[torch.nn.Module] = []
        """Models that were not passed in, but were found in the frames around a step."""
        self.losses: list[torch.Tensor | float] = []
        """Losses of the coming step that were logged so far."""
        self.opening: Callable[[], object] | None = None
        """Opens the trace before the first step, if that was put off until then."""
        self.seconds = 0.0
        """The time that was spent here."""
        self._count = StepCount(pipeline.sink, optimizers)
        pipeline.sink.states.append(self._count.state)
        self._stepped: list[torch.optim.Optimizer] = []
        """Those that took part in the step at hand."""

    def stop(self) -> None:
        """Remove the hooks and make everything durable; the trace is not a fork's to end."""
        if self.hooks.forked:
            self.hooks.detach()
            return
        sink = self.pipeline.sink
        with self.hooks.uninterrupted():
            self.hooks.detach()
            self._finish()
            if self.tracked is not None:
                still = self.tracked.stop()
                if still and sink.rows:
                    sink.state_in_manifest({"run": {"unchanged": still}})
            if self._gain.mean is not None and sink.rows:
                sink.state_in_manifest({"run": {"gain": self._gain.mean}})
            self.pipeline.commit()
            sink.close()

    # ---- steps ----

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        start = time.perf_counter()
        pipeline, tracked, sink = self.pipeline, self.tracked, self.pipeline.sink
        if self.opening is not None:
            opening, self.opening = self.opening, None
            opening()
        self._count.go_on(optimizer, pipeline)
        if self._stepped and self._begins(optimizer):
            self._finish()
        if not self._stepped:
            pipeline.commit_if_due()
        if isinstance(optimizer, WriteBack) and optimizer.moved_in_backward:
            pipeline.give_up(
                "weights move inside the backward (in_backward()), before step() is called.",
                "What is lost there is in optimizer.events; or leave in_backward() out.",
            )
        coming = sink.step if self._stepped else sink.step + 1
        due = pipeline.due(coming)
        looks = due or pipeline.rehearses(coming)
        here = self.watch(optimizer) if looks else []
        if tracked is not None:
            if self._resumes(coming):
                tracked.follow_gradients(self.watch(optimizer))
            if due:
                tracked.look_for(optimizer)
            if not self._stepped:
                tracked.step_begins(coming, due)
        if looks:
            here = pipeline.unaltered(here)
            self.notes.before(optimizer)
            for w in here:
                grad = w.tensor.grad
                grad = gradient_of(w.tensor) if grad is None else grad
                w.takes_part, w.given = grad is not None, None if w.scores is None else grad
            pipeline.meter.set_aside(here)
            if tracked is not None and due:
                tracked.before(optimizer, here, coming)
        self.seconds += time.perf_counter() - start

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        start = time.perf_counter()
        pipeline, sink = self.pipeline, self.pipeline.sink
        if not self._stepped:
            pipeline.advance()
        self._count.stepped(optimizer)
        self._stepped.append(optimizer)
        due, rehearses = pipeline.due(sink.step), pipeline.rehearses(sink.step)
        if due or rehearses:
            with torch.no_grad():
                self._record(optimizer, due, rehearses)
                if self.notes.after(optimizer):
                    run = {"caller": self.notes.caller} if self.notes.caller else {}
                    sink.state_in_manifest({"optimizers": self.notes.described(), "run": run})
                if self.tracked is not None and due:
                    self.tracked.after(optimizer)
        self.losses.clear()
        if self.optimizers is not None and len(self._stepped) == len(self.optimizers):
            self._finish()
        self.seconds += time.perf_counter() - start

    def _begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the current step is over for this optimizer or for one of its tensors.

        A newly created optimizer may step the same tensors.
        """
        if optimizer in self._stepped:
            return True
        mine = set(_params(optimizer))
        return any(not mine.isdisjoint(_params(other)) for other in self._stepped)

    def _together(self) -> None:
        """Handle a step that begins in one thread while another thread is inside one."""
        self.pipeline.give_up(
            "a thread called step() while another was in its own, and steps in several threads at once "
            "cannot be told apart.",
            "Audit the optimizer of one thread: hu.Audit(optimizer, ...).",
        )

    def _resumes(self, step: int) -> bool:
        """Return True if a resumed run is only repeating this step and tensors may already be taken up in it.

        Rehearsals take tensors up where they continue, and ranks do so together, so both return False.
        """
        return (
            step <= self.pipeline.sink.skip_until
            and self.pipeline.sink.trouble is None
            and self.pipeline.rehearsing is None
            and world() == 1
        )

    def _finish(self) -> None:
        """Finish the step for all optimizers."""
        self._stepped.clear()
        self.notes.announce()
        self.pipeline.finish()

    # ---- tensors ----

    def watch(self, optimizer: torch.optim.Optimizer) -> list[Watched]:
        """Take up parameters that were not seen before; return what this rank looks at."""
        params = _params(optimizer)
        known = self.pipeline.watchlist.known(optimizer, params)
        if known is not None:
            return known
        groups = {p: (optimizer, group) for p, group in groups_of(optimizer).items()}
        named = functools.partial(self._named, optimizer)
        return self.pipeline.watch(optimizer, params, named, groups, self.notes.described)

    def _named(self, optimizer: torch.optim.Optimizer, new: list[torch.Tensor]) -> dict[torch.Tensor, Naming]:
        """Return the names of an optimizer's tensors, and the storage of those that are written back."""
        self.notes.see(optimizer)
        known = self.pipeline.watchlist.names()
        named = name_parameters(optimizer, self.models, search=not self.models, known=known)
        if not self.models and self.pipeline.rehearsing is not None:
            shown = [p if named[p].shown is None else named[p].shown for p in new]
            self.around += [m for m in models_around(shown) if m not in self.around]
        for slot in optimizer.slots if isinstance(optimizer, WriteBack) else ():
            if slot.p in named:
                named[slot.p] = replace(named[slot.p], stored=written_to(slot), codes=slot.codes)
        return named

    # ---- recording ----

    def _record(self, optimizer: torch.optim.Optimizer, due: bool, rehearses: bool) -> None:
        pipeline, sink, measure = self.pipeline, self.pipeline.sink, self.pipeline.measure
        watched = pipeline.watchlist.of(optimizer, _params(optimizer))
        seen = pipeline.unaltered([w for w in watched if w.before is not None])
        if pipeline.given_up and world() == 1:
            return
        seen = taking_part(seen)
        mine = pipeline.counted_here(seen)
        if pipeline.rehearsing is not None and rehearses:
            pipeline.meter.look(seen)
            pipeline.rehearsing.replay(seen, groups_of(optimizer), optimizer.state, sink.step, record=due)
        if not due:
            return
        if sink.writer is not None:
            self._gain.look(optimizer, seen)
        rows = pipeline.meter.count(mine)
        if measure.decay:
            groups, inner = groups_of(optimizer), wrapped(optimizer)
            for w, row in zip(mine, rows, strict=True):
                rate, decay = decay_of(inner, groups[w.tensor])
                if decay and w.before is not None:
                    count_apart(w, as_tensor(row), (-rate * decay) * w.before)
        if measure.scored is not None:
            score(measure.scored, sink.step, mine)
        if mine and pipeline.measured(mine, _rates(optimizer, mine), rows):
            sink.add_loss(self.losses)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for g in optimizer.param_groups for p in g["params"]]


def _rates(optimizer: torch.optim.Optimizer, seen: Sequence[Watched]) -> list[float]:
    """Return the learning rate of each tensor."""
    groups = [(rate_of(group), group["params"]) for group in optimizer.param_groups]
    if len(groups) == 1:  # tensors are slow as keys of a dictionary
        return [groups[0][0]] * len(seen)
    rates = {id(p): rate for rate, params in groups for p in params}
    return [rates[id(w.tensor)] for w in seen]
