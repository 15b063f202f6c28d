"""Make a step in two passes: the wrapped optimizer moves parameters, then policies write them back.

Contiguous tensors in CPU memory whose policy's ``after`` is a single kernel call are set aside and written
back many in one call (:class:`Alike`), the others one by one (:meth:`Policy.after`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels.many import Many
from halfulp.kernels.plan import Parts
from halfulp.numbers.streams import keys_of, name_bytes
from halfulp.writeback.policies import Step
from halfulp.writeback.rules import decay_of
from halfulp.writeback.sharding import local
from halfulp.writeback.slot import Slot, chunks, set_aside
from halfulp.writeback.storage.stand_in import fill
from halfulp.writeback.telemetry import StepEvents, sampling
from halfulp.writeback.wrapped_step import Calls, without_gradients

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack

CONTIGUOUS = torch.Tensor.is_contiguous
SHAPE, DTYPE = attrgetter("shape"), attrgetter("dtype")


class TwoPasses:
    """The steps of a write-back that call the wrapped optimizer."""

    def __init__(self, wb: WriteBack) -> None:
        self.wb = wb
        self._cuts: dict[Slot, tuple[list[Slot], list[Alike], list[Slot]]] = {}

    def step(self, active: list[Slot], closure: Any = None) -> Any:
        """Make the wrapped optimizer's step: in one call, or in several with some of the stand-ins each."""
        apart = chunks([s for s in active if s.shadow is not None]) if self.wb.materialise == "tensor" else []
        if len(apart) < 2:
            loss = self._advance(active, Calls(self.wb.optimizer), closure)
            self.wb._pass_on_groups()
            return loss
        call = Calls(self.wb.optimizer, len(apart))
        others = [p for g in self.wb.optimizer.param_groups for p in g["params"]]
        apart[0] = [*(s for s in active if s.shadow is None), *apart[0]]
        undo = []
        try:
            undo += [slot.snapshot() for slot in apart[0]]
            self._advance(apart[0], call)
            with without_gradients(others):  # they were moved by the first call
                for chunk in apart[1:]:
                    undo += [slot.snapshot() for slot in chunk]
                    self._advance(chunk, call)
        except BaseException:
            for put_back in undo:
                put_back()
            raise
        self.wb._pass_on_groups()
        return None

    def _idle(self, active: list[Slot]) -> list[Slot]:
        """Find weights without a gradient that an optimizer may move all the same."""
        if self.wb._torchs_own:
            return []
        return [
            s for s in self.wb.slots if s not in active and (s.shadow is None or self.wb.materialise == "all")
        ]

    def _advance(self, active: list[Slot], call: Calls, closure: Any = None) -> Any:
        """Make one call of the wrapped optimizer, and write back what it moved."""
        idle = self._idle(active)
        alike, rest = self._cut(active)
        opened, batches = [*rest, *idle], list(alike)
        before = [list(g["params"]) for g in self.wb.optimizer.param_groups]
        stored: list[torch.Tensor] = []
        close: Callable[[], None] | None = None
        try:
            for batch in alike:
                if not batch.open():
                    batches.remove(batch)
                    opened = [*batch.slots, *opened]
            self.open(opened, stored)
            given = values_of(idle)
            loss = call() if closure is None else call(closure)
            self._refuse_replaced(before)
            for batch in batches:
                batch.take()
            still = {*idle}.difference(moved_from(given, idle))
            moved = [(s, q) for s, q in zip(opened, stored, strict=True) if s not in still]
            steps = [self._step_of(slot, q) for slot, q in moved]
            written = [slot.policy.after(step) for (slot, _), step in zip(moved, steps, strict=True)]
            unmoved = [(s, q) for s, q in zip(opened, stored, strict=True) if s in still]
            close = partial(
                self._close, batches, list(zip((s for s, _ in moved), steps, written, strict=True)), unmoved
            )
            close()
        except BaseException:  # an interrupt leaves no weight off the grid, and no stand-in filled
            if close is not None:
                close()
            else:
                for group, params in zip(self.wb.optimizer.param_groups, before, strict=False):
                    group["params"] = params
                for batch in batches:
                    self.restore(batch.slots, batch.stored)
                self.restore(opened, stored)
            raise
        finally:
            for batch in batches:
                batch.forget()
        return loss

    def _cut(self, active: list[Slot]) -> tuple[list[Alike], list[Slot]]:
        """Cut tensors into batches of one kind, and the rest; remembered while the same are active."""
        cached = self._cuts.get(active[0]) if active else None
        if cached is None or cached[0] != active:
            kinds: dict[Any, list[Slot]] = {}
            for slot in active:
                like = (slot.grid, slot.policy.kernel, slot.storage, slot.aside) if slot.batched else None
                kinds.setdefault(like, []).append(slot)
            rest = kinds.pop(None, [])
            cached = active, [Alike(self.wb, slots) for slots in kinds.values()], rest
            self._cuts.update(dict.fromkeys(active[:1], cached))
        return cached[1:]

    def open(self, active: Sequence[Slot], stored: list[torch.Tensor]) -> None:
        """Set stored values aside in ``stored``, and prepare the parameters for the optimizer."""
        sources = []
        for slot in active:
            slot.resync()
            source = slot.values()
            if slot.shadow is not None:
                fill(slot.shadow, source, slot.p.grad)
            sources.append(source)
        stored += set_aside(active, sources)
        for slot, q, p in zip(active, stored, sources, strict=True):
            slot.policy.before(q, p, slot.state)

    def _step_of(self, slot: Slot, q: torch.Tensor) -> Step:
        group = self.wb.optimizer.param_groups[slot.place[0]]
        z = local(slot.stepped.detach())
        rate, decay = decay_of(self.wb.optimizer, group)
        return Step(
            name=slot.name, grid=slot.grid, stream=self.wb._stream(slot, self.wb.steps), q=q, z=z,
            state=slot.state, moved=slot.moved, sums=sampling(z.numel()) if self.wb.telemetry else 0,
            decay=rate * decay, group=group, moments=self.wb.optimizer.state.get(slot.stepped, {}),
            keep_scales=slot.storage == "packed",
        )  # fmt: skip

    def _close(
        self,
        batches: Sequence[Alike],
        moved: Sequence[tuple[Slot, Step, kernels.Written]],
        unmoved: Sequence[tuple[Slot, torch.Tensor]],
    ) -> None:
        """Write everything back. Done again after an interrupt, it ends in the same."""
        for _, step, _ in reversed(moved):  # what the optimizer moved last may still be in the caches
            step.finish()
        rates = [decay_of(self.wb.optimizer, g) for g in self.wb.optimizer.param_groups] if batches else []
        for batch in batches:
            batch.close([rate * decay for rate, decay in rates])
        for slot, step, written in moved:
            slot.noted = StepEvents.of_one(slot, self.wb.steps, written, step.decay, step.sums)
            if slot.shadow is not None:
                slot.store(step.z, step.scales)
        self.restore([slot for slot, _ in unmoved], [q for _, q in unmoved])
        for slot in (*(slot for slot, *_ in moved), *(slot for slot, _ in unmoved)):
            slot.let_go()
            slot.note_written()

    def restore(self, slots: Sequence[Slot], stored: Sequence[torch.Tensor]) -> None:
        """Restore the values that were set aside; nothing if an interrupt came before all of them were."""
        for slot, q in zip(slots, stored, strict=False):
            if slot.shadow is None:
                local(slot.p.detach()).copy_(q)
        for slot in slots:
            slot.let_go()

    def _refuse_replaced(self, before: list[list[torch.nn.Parameter]]) -> None:
        """Refuse an optimizer that has other parameters in its groups than before its step."""
        now = [p for g in self.wb.optimizer.param_groups for p in g["params"]]
        then = [p for params in before for p in params]
        if len(now) != len(then) or not all(map(is_, now, then)):
            raise UsageError(
                f"{type(self.wb.optimizer).__name__}.step() replaced its parameters; WriteBack needs an "
                "optimizer that moves them in place. The weights are as they were."
            )


def values_of(slots: Sequence[Slot]) -> list[torch.Tensor]:
    """Copy the values that the optimizer is given."""
    return [local(slot.stepped.detach()).clone() for slot in slots]


def moved_from(given: Sequence[torch.Tensor], slots: Sequence[Slot]) -> list[Slot]:
    """Find the tensors that an optimizer has moved since :func:`values_of`."""
    pairs = zip(slots, given, strict=True)
    return [slot for slot, was in pairs if not torch.equal(local(slot.stepped.detach()), was)]


@dataclass(eq=False)
class Alike:
    """Tensors of one grid, mode and types, which one call writes back."""

    wb: WriteBack
    slots: list[Slot]
    stored: list[torch.Tensor] = field(default_factory=list)
    """The stored values from before the current step."""
    _z: list[torch.Tensor] = field(default_factory=list)
    _counted: Parts | None = None
    _plain: bool = True

    def __post_init__(self) -> None:
        first = self.slots[0]
        kernel = first.policy.kernel
        assert kernel is not None
        self._mode, self._key = kernel.mode, kernel.key
        self._native = first.shadow is not None
        sizes = [slot.p.numel() for slot in self.slots]
        self._sums = [sampling(size) if self.wb.telemetry else 0 for size in sizes]
        self._many = Many(first.grid, sizes, self._sums)
        self._names = [name_bytes(slot.name) for slot in self.slots]
        self._places = {slot: i for i, slot in enumerate(self.slots)}
        self._params: list[Any] = [slot.p for slot in self.slots]
        self._stepped: list[Any] = [slot.stepped for slot in self.slots]
        self._shapes = [slot.shape for slot in self.slots]
        self._scratch: list[torch.Tensor] = []
        self._moved: list[torch.Tensor | None] = []

    def open(self) -> bool:
        """Set stored values aside, or fill stand-ins; return True if one call can write them back."""
        slots = self.slots
        self.forget()
        params = self._params
        if not all(map(CONTIGUOUS, params)) or not all(map(CONTIGUOUS, self._kept())):
            return False
        if not self._native:
            if not self._scratch or not all(map(is_, self._scratch, map(attrgetter("scratch"), slots))):
                self._scratch = [slot.room(slot.p) for slot in slots]
            if not self._many.set_aside(params, self._scratch):  # somebody put one off the grid
                return False
        for slot in slots if self._key else ():
            slot.resync()
        for slot in slots if self._native else ():
            fill(slot.stepped, slot.p.detach().float(), slot.p.grad)
        self.stored = params if self._native else self._scratch
        return True

    def _moved_bits(self) -> list[torch.Tensor]:
        """Return the bits of what ever moved, in the same list as long as they are the same."""
        now = [slot.moved for slot in self.slots]
        if not self._moved or not all(map(is_, self._moved, now)):
            self._moved = now
        return self._moved  # type: ignore[return-value]  # telemetry is on: there are

    def _kept(self) -> list[torch.Tensor]:
        return [] if self._key is None else [slot.state[self._key] for slot in self.slots]

    def take(self) -> None:
        """Collect the values to which the optimizer has moved the weights."""
        moved: list[torch.Tensor] = self._stepped
        if self._native:  # stand-ins are let go while their values are needed, if this is interrupted
            moved = [z.detach() for z in moved]
        if not all(map(eq, map(SHAPE, moved), self._shapes)):
            pairs = zip(self.slots, map(SHAPE, moved), strict=True)
            slot, shape = next((s, x) for s, x in pairs if x != s.shape)
            raise UsageError(
                f"{type(self.wb.optimizer).__name__}.step() gave parameter {slot.name!r} the shape "
                f"{tuple(shape)}, expected {tuple(slot.shape)}. The weights are as they were."
            )
        self._plain = all(map(CONTIGUOUS, moved)) and {*map(DTYPE, moved)} == {torch.float32}
        self._z = moved if self._plain else [z.detach().float().contiguous() for z in moved]

    def close(self, decays: Sequence[float]) -> None:
        """Write back what the optimizer moved. Repeating it after an interrupt gives the same result."""
        slots, wb = self.slots, self.wb
        draws = self._mode != "nearest"
        if self._counted is None:
            keys = keys_of(wb.seed, self._names, wb.steps) if draws else np.zeros((len(slots), 2), np.uint32)
            self._counted = self._many.write_back(
                self.stored, self._z, self._mode, keys,
                moved=self._moved_bits() if wb.telemetry else None,
                carry=self._kept() or None,
            )  # fmt: skip
        noted = StepEvents(
            step=wb.steps, places=self._places, counted=self._counted, summed=self._sums,
            decay_rates=[decays[slot.place[0]] for slot in slots],
        )  # fmt: skip
        for slot in slots:
            slot.noted = noted
        if self._native or not self._plain:
            torch._foreach_copy_(self._params, self._z)
        for slot in slots if self._native else ():
            slot.let_go()
        for slot in slots if self._key else ():
            slot.note_written()

    def forget(self) -> None:
        """Release the tensors of a finished step."""
        self.stored, self._z, self._counted = [], [], None
