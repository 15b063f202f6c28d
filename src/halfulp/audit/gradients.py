"""Gradients that accumulate over micro-batches: a sum in ``.grad`` that loses small contributions.

``backward`` adds a micro-batch's gradient g to the buffer G in the parameter's own dtype, so in bfloat16 a
contribution of less than half a gap of G is lost, element by element. A hook on the parameter sees both, g on
its way and G as it still is: the event is counted there, exactly, and nothing is set aside. A second hook
says that g was really added: ``torch.autograd.grad`` comes by the first one, too.

The role is ``grad``. One of its steps is one accumulation, a ``backward`` that finds a buffer which is not
zero; the first micro-batch after ``zero_grad`` loses nothing and is none. What is zero in g was not asked to
be added, and counts as such: rows of an embedding that the micro-batch did not use.

So these steps have numbers of their own, and the state of the role's trace says up to which accumulation of
which step of the run it goes: a run that starts again is recorded from there on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfulp import kernels
from halfulp.audit.copies import GRADIENTS
from halfulp.audit.rows import Row, leave_phases_out, numbers, numbers_on_device
from halfulp.audit.watched import Watched
from halfulp.canonical import LARGEST

if TYPE_CHECKING:
    from halfulp.audit.roles import Companion, Roles

PLACE = "accumulated"
"""In the state of the role's trace: a step of the run, and how many accumulations of it are recorded."""


class Accumulation:
    """The audit of gradient buffers, beside that of the weights."""

    def __init__(self, roles: Roles) -> None:
        self.roles = roles
        self.audit: Companion | None = None
        self._handles: dict[Watched, tuple[Any, Any]] = {}
        self._coming: dict[torch.Tensor, np.ndarray[Any, Any]] = {}
        """What was found of contributions that are not added yet, by tensor."""
        self._pending: dict[int, np.ndarray[Any, Any]] = {}
        """What this accumulation found so far, by tensor."""
        self._at = (0, 0)
        """The step of the run that it belongs to, and its number there."""
        self._held = (0, 0)
        """Up to where a resumed trace goes."""
        self._lock = threading.Lock()  # backward has threads of its own for other devices

    def watch(self, watched: Iterable[Watched]) -> None:
        """Look at the gradients of tensors from now on."""
        for w in watched:
            if w in self._handles:
                continue
            if not w.sharded and w.codes is None and w.tensor.requires_grad and w.tensor.is_leaf:
                tensor: Any = w.tensor  # torch does not type what registers hooks
                added = tensor.register_post_accumulate_grad_hook(self._added)
                self._handles[w] = (tensor.register_hook(self._hook(w)), added)

    def stop(self) -> None:
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles = {}
        self.flush()

    def flush(self) -> None:
        """The accumulation is over: its tensors are a row of the role's trace."""
        if self.audit is None or not self._pending:
            return
        pending, self._pending = self._pending, {}
        if self._at <= self._held or self.audit.trouble is not None:
            return
        ids = list(pending)
        self.audit.step += 1
        self.audit._unwritten += 1
        totals = np.stack([pending[i] for i in ids])
        leave_phases_out(totals)
        row = Row(step=self.audit.step, ids=ids, rates=[float("nan")] * len(ids), numbers=totals)
        self.audit._rows.append(row)
        self.audit._loaded[PLACE] = torch.tensor(self._at, device="cpu")
        self.audit._commit_if_due()

    def _hook(self, w: Watched) -> Callable[[torch.Tensor], None]:
        def contributed(g: torch.Tensor) -> None:
            buffer = w.tensor.grad
            self._coming.pop(w.tensor, None)  # which was not added after all
            if buffer is None or not self.roles.accumulates():
                return
            kinds = buffer.layout == g.layout == torch.strided and buffer.dtype == g.dtype == w.tensor.dtype
            if kinds and buffer.shape == g.shape and not w.altered and bool(buffer.any()):
                with self._lock, torch.no_grad():
                    self._count(w, buffer, g.detach())

        contributed.__torch_unserializable__ = True  # type: ignore[attr-defined]  # saving is silent about it
        return contributed

    def _count(self, w: Watched, buffer: torch.Tensor, g: torch.Tensor) -> None:
        if self.audit is None:
            self.audit = self.roles.companion(GRADIENTS, {w.name: w.tensor}, never_moved=False, known=True)
            self._take_up(self.audit)
        if self.roles.coming < self._held[0]:
            return
        mine = self.audit.take(w.name, w.tensor)
        if mine is None:
            return
        found = kernels.audit(buffer, g, mine.grids, phase=False)
        on_cpu = found.counts.device.type == "cpu"
        self._coming[w.tensor] = numbers(found)[0] if on_cpu else numbers_on_device(found).cpu().numpy()

    def _take_up(self, audit: Companion) -> None:
        """Go on where the role's trace ends; one that does not say where that is ends with the run's own."""
        audit._batching = False
        audit.step = audit._skip_until
        if audit._skip_until:
            place = audit._loaded.get(PLACE)
            held = (self.roles.owner._skip_until, LARGEST) if place is None else place.tolist()
            self._held = (int(held[0]), int(held[1]))

    def _added(self, p: torch.Tensor) -> None:
        """A contribution is in its buffer."""
        mine = None if self.audit is None else self.audit.watched.get(p)
        with self._lock:
            row = None if mine is None else self._coming.pop(p, None)
            if mine is not None and row is not None:
                if mine.id in self._pending:
                    self.flush()
                if not self._pending:
                    step, (last, n) = self.roles.coming, self._at
                    self._at = (step, n + 1 if step == last else 1)
                self._pending[mine.id] = row
