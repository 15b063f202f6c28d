"""Infer the next step of a resumed run from the optimizers' own counters, if the run does not state it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from halfulp.audit.pipeline import Pipeline
from halfulp.audit.ranks import rank
from halfulp.audit.sinks.trace_sink import FIRST, State, TraceSink
from halfulp.text import tell
from halfulp.writeback import WriteBack

AHEAD = "steps.ahead"
"""In the state of a part: how far the steps of the trace are ahead of what the optimizers have counted, below
zero if they had counted before; empty if that did not stay the same, so that nothing follows from a count."""


class StepCount:
    """Compare the steps of a trace with those that optimizers count.

    Args:
        sink: The trace.
        optimizers: The optimizers that count; None for the one that steps first in this process.
    """

    def __init__(self, sink: TraceSink, optimizers: Sequence[torch.optim.Optimizer] | None) -> None:
        self.sink, self.optimizers = sink, optimizers
        self._unknown = sink.recording.first_step is None
        self._first: torch.optim.Optimizer | None = None
        """The one that stepped first in this process."""

    def go_on(self, optimizer: torch.optim.Optimizer, pipeline: Pipeline) -> None:
        """Before the first step of a resumed run, take its number from the optimizer.

        The optimizer may have been loaded with its state.
        """
        sink, unknown = self.sink, self._unknown
        self._unknown = False
        if not unknown or not sink.skip_until:
            return
        counted, uncounted = _steps_made(self.optimizers or [optimizer])
        ahead = sink.loaded[AHEAD].tolist() if AHEAD in sink.loaded else [0]  # older traces do not say
        done = sink.step = max(0, counted + int(ahead[0])) if ahead else 0
        if rank():
            return
        doubt = ""
        if counted and not ahead:
            doubt = "the steps of this trace are not those that its optimizer had counted"
        elif uncounted and not done:
            doubt = "the optimizer was loaded with a state that does not say how many steps it has made"
        tell(
            f"halfulp: {sink.out or 'the trace'} holds steps up to {sink.skip_until}; the first one of this "
            f"process is taken for step {done + 1}"
            + (", as the optimizer has counted." if done else ".")
            + (f" But {doubt}: if it goes on from a checkpoint, say so with {FIRST}." if doubt else "")
        )
        if pipeline.first_missing <= done:
            sink.guard(sink.refuse_gap, pipeline.first_missing)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the optimizer that stepped first, once its first step is over."""
        if self._first is None:
            self._first = optimizer
            self._note()

    def _note(self) -> None:
        """Keep how far the steps are ahead of what was counted, if that is as it was."""
        if self._first is None:
            return
        loaded = self.sink.loaded
        now = [self.sink.step - _steps_made(self.optimizers or [self._first])[0]]
        same = AHEAD not in loaded or loaded[AHEAD].tolist() == now
        loaded[AHEAD] = torch.tensor(now if same else [], dtype=torch.int64, device="cpu")

    def state(self) -> State:
        """Return how far the steps are ahead."""
        self._note()
        return {AHEAD: self.sink.loaded[AHEAD]} if AHEAD in self.sink.loaded else {}


def _steps_made(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[int, bool]:
    """Return the most steps that any has made, if known, and True if one has a state that does not say."""
    counted: list[Any] = []
    for optimizer in optimizers:
        if isinstance(optimizer, WriteBack):
            counted.append(optimizer.steps)
        else:
            counted += [s.get("step") for s in optimizer.state.values() if isinstance(s, dict)]
    plain = [n.item() if isinstance(n, torch.Tensor) and n.numel() == 1 else n for n in counted]
    numbers = [int(n) for n in plain if isinstance(n, int | float) and math.isfinite(n)]
    return max(numbers, default=0), len(numbers) < len(counted)
