"""Gradients that accumulate over micro-batches: a sum in ``.grad`` that loses small contributions.

``backward`` adds a micro-batch's gradient g to the buffer G in the parameter's own dtype. A hook on the
parameter sees both, g on its way and G as it still is, so the event is counted there and nothing is set
aside. A second hook says that g was really added: ``torch.autograd.grad`` passes the first one, too.

The role is ``grad``. One of its steps is one accumulation, a ``backward`` that finds a buffer which is not
zero, so these steps have numbers of their own; the state of the role's trace says up to which accumulation
of which step of the run it goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfulp import kernels
from halfulp.audit.meter.rows import Row, mark_unmeasured, row_of
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.sources.states import GRADIENTS
from halfulp.canonical import LARGEST

if TYPE_CHECKING:
    from halfulp.audit.sources.tracked import TrackedState, TrackedStates

PLACE = "accumulated"
"""In the state of the role's trace: a step of the run, and how many accumulations of it are recorded."""


class Accumulation:
    """Follow gradient buffers, beside the weights."""

    def __init__(self, states: TrackedStates) -> None:
        self.states = states
        self.track: TrackedState | None = None
        self._handles: dict[Watched, tuple[Any, Any]] = {}
        self._coming: dict[torch.Tensor, np.ndarray[Any, Any]] = {}
        """Counts for contributions that are not added yet, by tensor."""
        self._pending: dict[int, np.ndarray[Any, Any]] = {}
        """Counts of this accumulation so far, by tensor."""
        self._at = (0, 0)
        """The step of the run that it belongs to, and its number there."""
        self._resumed_at = (0, 0)
        """The point up to which a resumed trace goes."""
        self._lock = threading.Lock()  # backward has threads of its own for other devices

    def watch(self, watched: Iterable[Watched]) -> None:
        """Start watching the gradients of tensors."""
        for w in watched:
            if w in self._handles:
                continue
            if not w.sharded and w.codes is None and w.tensor.requires_grad and w.tensor.is_leaf:
                tensor: Any = w.tensor  # torch does not type what registers hooks
                added = tensor.register_post_accumulate_grad_hook(self._added)
                self._handles[w] = (tensor.register_hook(self._hook(w)), added)

    def stop(self) -> None:
        """Remove the hooks and count what is still open."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles = {}
        self.flush()

    def flush(self) -> None:
        """Write the finished accumulation as rows of the tracked state's trace."""
        if self.track is None or not self._pending:
            return
        pending, self._pending = self._pending, {}
        if self._at <= self._resumed_at or self.track.trouble is not None:
            return
        pipeline, ids = self.track.pipeline, list(pending)
        pipeline.sink.step += 1
        pipeline.sink.unwritten += 1
        totals = np.stack([pending[i] for i in ids])
        mark_unmeasured(totals, "phase", "expected")
        row = Row(step=pipeline.sink.step, ids=ids, rates=[float("nan")] * len(ids), numbers=totals)
        pipeline.sink.rows.append(row)
        pipeline.finish()
        pipeline.sink.loaded[PLACE] = torch.tensor(self._at, device="cpu")
        pipeline.commit_if_due()

    def _hook(self, w: Watched) -> Callable[[torch.Tensor], None]:
        def contributed(g: torch.Tensor) -> None:
            buffer = w.tensor.grad
            self._coming.pop(w.tensor, None)  # which was not added after all
            if buffer is None or not self.states.accumulates():
                return
            kinds = buffer.layout == g.layout == torch.strided and buffer.dtype == g.dtype == w.tensor.dtype
            if kinds and buffer.shape == g.shape and not w.altered and bool(buffer.any()):
                with self._lock, torch.no_grad():
                    self._count(w, buffer, g.detach())

        contributed.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saving is silent about it
        return contributed

    def _count(self, w: Watched, buffer: torch.Tensor, g: torch.Tensor) -> None:
        if self.track is None:
            self.track = self.states.track(GRADIENTS, {w.name: w.tensor}, never_moved=False, known=True)
            self._resume(self.track)
        if self.states.coming < self._resumed_at[0]:
            return
        mine = self.track.take(w.name, w.tensor)
        if mine is None:
            return
        row = row_of(kernels.audit(buffer, g, mine.grids, phase=False))
        self._coming[w.tensor] = row.cpu().numpy() if isinstance(row, torch.Tensor) else row

    def _resume(self, track: TrackedState) -> None:
        """Go on where the role's trace ends; one that does not say where that is ends with the run's own."""
        sink = track.pipeline.sink
        sink.step = sink.skip_until
        if sink.skip_until:
            place = sink.loaded.get(PLACE)
            begun = (self.states.owner.sink.skip_until, LARGEST) if place is None else place.tolist()
            self._resumed_at = (int(begun[0]), int(begun[1]))

    def _added(self, p: torch.Tensor) -> None:
        """Handle a contribution that was added to its buffer."""
        mine = None if self.track is None else self.track.pipeline.watched.get(p)
        with self._lock:
            row = None if mine is None else self._coming.pop(p, None)
            if mine is not None and row is not None:
                if mine.id in self._pending:
                    self.flush()
                if not self._pending:
                    step, (last, n) = self.states.coming, self._at
                    self._at = (step, n + 1 if step == last else 1)
                self._pending[mine.id] = row
