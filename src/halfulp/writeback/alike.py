"""Make the second of two passes for many tensors at once: set aside in one call, written back in another.

This is for policies whose ``after`` is a single kernel call, on contiguous tensors in CPU memory. All others
are written back one by one, by :meth:`halfulp.writeback.policies.Policy.after`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.kernels.many import Many
from halfulp.kernels.plan import Parts
from halfulp.numbers.streams import keys_of, name_bytes
from halfulp.writeback.storage.stand_in import fill
from halfulp.writeback.telemetry import StepEvents, sampling

if TYPE_CHECKING:
    from halfulp.writeback.optimizer import WriteBack
    from halfulp.writeback.slot import Slot

CONTIGUOUS = torch.Tensor.is_contiguous
SHAPE, DTYPE = attrgetter("shape"), attrgetter("dtype")


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

    def _ever(self) -> list[torch.Tensor]:
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
                moved=self._ever() if wb.telemetry else None,
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
