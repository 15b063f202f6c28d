"""Hold one managed parameter, and measure the bytes that managing takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from halfulp import kernels
from halfulp.errors import CorruptionError, UsageError
from halfulp.numbers.grids import Grid
from halfulp.writeback.policies import Policy, State
from halfulp.writeback.sharding import local
from halfulp.writeback.storage.native_weight import NativeCodes, is_native
from halfulp.writeback.storage.packed import Codes
from halfulp.writeback.storage.stand_in import drop
from halfulp.writeback.telemetry import TILE_BYTES, Bytes, StepEvents


@dataclass(eq=False, repr=False)
class Slot:
    """One managed parameter, with its grid, its policy and the state kept for it."""

    name: str
    p: torch.nn.Parameter
    grid: Grid
    policy: Policy
    place: tuple[int, int]
    """The parameter's group, and its position in it."""
    storage: str = "container"
    state: State = field(default_factory=dict)
    """The tensors that the policy keeps."""
    moved: torch.Tensor | None = None
    """One bit per weight: whether it ever moved."""
    scratch: torch.Tensor | None = None
    """Memory in which a step sets stored values aside."""
    shadow: torch.nn.Parameter | None = None
    """The float32 stand-in that the wrapped optimizer moves; None where it moves the parameter."""
    resting: dict[str, torch.Tensor] = field(default_factory=dict)
    """The training weights while the model holds others, those for evaluation."""
    noted: StepEvents | None = None
    """The counts of the last call that moved this tensor, and of the tensors moved with it."""
    two_passes: str | None = None
    """Why this tensor cannot be moved in one pass: :mod:`halfulp.writeback.route`."""
    batched: bool = False
    """True if others can share its second pass: :class:`halfulp.writeback.two_passes.Alike`."""
    _written: tuple[torch.Tensor, int, int] | None = None

    def __post_init__(self) -> None:
        self.shape = self.p.shape
        self.codes: Codes | NativeCodes | None = NativeCodes(self.p, self.grid) if is_native(self.p) else None

    def snapshot(self) -> Callable[[], None]:
        """Return what puts the stored values, the policy's state and the telemetry back as they are now."""
        state = {k: t.clone() for k, t in self.state.items()}
        moved = None if self.moved is None else self.moved.clone()
        stored, noted = self.rested(), self.noted

        def put_back() -> None:
            self.state, self.moved, self.noted = state, moved, noted
            self.put(stored)

        return put_back

    def values(self) -> torch.Tensor:
        """Return what is stored, in the type in which the optimizer is given it; fresh beside a container."""
        if self.codes is not None:
            return self.codes.get()
        p = local(self.p.detach())
        return p if self.storage == "container" else p.float()

    def _memory(self) -> tuple[torch.Tensor, int, int]:
        """Return the memory of the stored values, and the number of changes that torch has seen."""
        memory = local(self.p.detach()) if self.codes is None else self.codes.packed
        return memory, memory._version, self.p._version

    def note_written(self) -> None:
        """Record that this write-back wrote the stored values.

        It keeps their memory, so that no other tensor gets the address.
        """
        self._written = self._memory() if self.state else None

    def resync(self) -> None:
        """Reset the policy's state for weights that the user has set since they were written.

        A tensor that torch has not seen change is skipped, because checking it takes as long as a step. From
        here to :meth:`note_written` it counts as changed, so that it is checked after an interrupted step.
        """
        if not self.state or self.resting:  # nothing is kept of evaluation weights
            return
        edited, self._written = self.edited(), None
        if edited:
            self.policy.resync(self.values(), self.state, self.grid)

    def edited(self) -> bool:
        """Return True if torch has seen the weights change since they were written."""
        now, was = self._memory(), self._written
        return was is None or now[0].data_ptr() != was[0].data_ptr() or now[1:] != was[1:]

    def room(self, values: torch.Tensor) -> torch.Tensor:
        """Return memory for a copy of the stored values, which this slot keeps."""
        kept = self.scratch
        if kept is None or kept.shape != values.shape or kept.dtype != self.aside:
            kept = self.scratch = torch.empty(values.shape, dtype=self.aside, device=values.device)
        return kept

    def store(self, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Store grid values."""
        if self.codes is None:
            local(self.p.detach()).copy_(values)
        else:
            self.codes.put(values, scales)

    def let_go(self) -> None:
        """Free the memory of a step: the stand-in's values and gradient, and the copy of stored values."""
        if self.shadow is not None:
            drop(self.shadow)
        if self.storage != "container":
            self.scratch = None

    def rested(self) -> dict[str, torch.Tensor]:
        """Copy the stored weights, under the names that they have while the model holds others."""
        if self.codes is None:
            return {"resting": local(self.p.detach()).clone()}
        scales = self.codes.scales
        return {"resting": self.codes.packed.clone()} | ({} if scales is None else {"resting_steps": scales})

    def put(self, rested: dict[str, torch.Tensor]) -> None:
        """Restore the weights that :meth:`rested` returned."""
        if self.codes is None:
            local(self.p.detach()).copy_(rested["resting"])
            return
        self.codes.packed = rested["resting"]
        if isinstance(self.codes, Codes):
            self.codes.scales = rested.get("resting_steps")

    def check_state(self, kept: State, q: torch.Tensor) -> None:
        """Refuse policy state that cannot belong to the stored values ``q``.

        The two are redundant, and in a file one of them may be damaged or come from another step. Numbers
        must be finite, and the policy itself reports what does not fit (:meth:`Policy.misfits`), except on
        grids whose scales move with the data: the scale of a rounded weight cannot always be recovered.

        Raises:
            CorruptionError: If it does not belong to them.
        """
        for key, value in kept.items():
            bad = int((~torch.isfinite(value)).sum()) if value.is_floating_point() else 0
            if bad:
                raise CorruptionError(
                    f"parameter {self.name!r}: {bad} of {value.numel()} values of the saved {key} are not "
                    "finite. No run leaves such a state: take an older checkpoint."
                )
        if self.grid.scaling is not None and self.grid.scaling.moves:
            return
        misfits = self.policy.misfits(q, kept, self.grid)
        if misfits is not None and bool(misfits[0].any()):
            off, what = misfits
            raise CorruptionError(
                f"parameter {self.name!r}: for {int(off.sum())} of {off.numel()} values the saved {what} on "
                f"grid {self.grid.name}. State and weights are not of one step, or damaged: load the model's "
                "weights that were saved with this state first."
            )

    @property
    def aside(self) -> torch.dtype:
        """The type in which a step sets stored values aside; bfloat16 where it holds them exactly."""
        wide = self.p.dtype if self.storage == "container" else torch.float32
        halved = wide == torch.float32 and self.p.device.type == "cpu" and _fits_bfloat16(self.grid)
        return torch.bfloat16 if halved else wide

    @property
    def stepped(self) -> torch.nn.Parameter:
        """The parameter that the wrapped optimizer moves."""
        return self.p if self.shadow is None else self.shadow

    def kept_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that persists for this parameter beside the parameter itself."""
        kept = {**self.state, **self.resting}
        if self.moved is not None:
            kept["moved"] = self.moved
        if isinstance(self.codes, Codes):  # native ones are in the model
            kept["codes"] = self.codes.packed
            if self.codes.scales is not None:
                kept["steps"] = self.codes.scales
        return kept


ROOM = 1 << 22
"""The number of weights that a step may always hold in float32 at once, even if every tensor is smaller:
32 MB with gradients."""


def chunks(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Cut slots into the fewest runs, each given to the optimizer in one call.

    A run fits in the memory that the largest tensor needs anyway, or in :data:`ROOM`.
    """
    sizes = [local(slot.p).numel() if slot.codes is None else math.prod(slot.codes.shape) for slot in slots]
    most, left = max([ROOM, *sizes]), 0
    cut: list[list[Slot]] = []
    for slot, size in zip(slots, sizes, strict=True):
        if not cut or size > left:
            cut.append([])
            left = most
        cut[-1].append(slot)
        left -= size
    return cut


def set_aside(slots: Sequence[Slot], stored: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the stored values into the slots' scratch."""
    copies = [slot.room(values) for slot, values in zip(slots, stored, strict=True)]
    whole = [i for i, values in enumerate(stored) if copies[i].dtype == values.dtype]
    halved = [i for i, values in enumerate(stored) if copies[i].dtype != values.dtype]
    if whole:
        torch._foreach_copy_([copies[i] for i in whole], [stored[i] for i in whole])
    fits = kernels.set_aside([stored[i] for i in halved], [copies[i] for i in halved])
    for i in (i for i, fit in zip(halved, fits, strict=True) if not fit):  # somebody put it off the grid
        copies[i] = slots[i].scratch = stored[i].clone(memory_format=torch.contiguous_format)
    return copies


@cache
def _fits_bfloat16(grid: Grid) -> bool:
    """Return True if every value of a grid in float32 is also a bfloat16 value."""
    try:
        return grid.scaling is None and grid.within(torch.bfloat16) is not None
    except UsageError:
        return False


def measure(slots: Sequence[Slot], by_chunks: bool, at_once: Sequence[Slot] = ()) -> Bytes:
    """Count bytes for these parameters: between steps, and what a step adds.

    Args:
        slots: The parameters.
        by_chunks: Whether stand-ins are filled in chunks, or all at once.
        at_once: Those that are moved in one pass, which sets nothing aside but, one tensor at a time, the
            whole of masters of which only chosen tiles are kept.
    """
    once, size = set(at_once), {s: local(s.p).numel() for s in slots}
    weights = sum(
        size[s] * s.p.element_size()
        if s.codes is None
        else s.codes.payload_bytes + (s.p.element_size() if s.storage == "packed" else 0)  # a shell's number
        for s in slots
    )
    kept = sum(t.nbytes for s in slots for t in (*s.state.values(), *s.resting.values()))
    moved = sum(0 if s.moved is None else s.moved.numel() for s in slots)
    counts = sum(kernels.tiles_of(size[s]) * TILE_BYTES for s in slots)
    apart = [s for s in slots if s.storage != "container" and s not in once]
    # A step sets q aside and, beside other storage, needs a stand-in and a gradient in float32.
    aside = {s: 0 if s in once else size[s] * s.aside.itemsize for s in slots}
    added = {s: 0 if s.storage == "container" else aside[s] for s in slots}
    for s in apart:
        added[s] += size[s] * 4 * (1 + (s.p.dtype != torch.float32))
    cut = chunks(apart) if by_chunks else [apart]
    calls = [sum(added[s] for s in chunk) for chunk in cut] or [0]
    calls[0] += sum(added.values()) - sum(added[s] for s in apart)
    # In several calls, everything is kept until the last is done, to be put back if it fails.
    step = max(calls) + (weights + kept + moved if len(calls) > 1 else 0)
    partial = (s for s in at_once if s.policy.kernel is not None and s.policy.kernel.partial)
    step += max((4 * size[s] for s in partial), default=0)
    return Bytes(
        parameters=sum(size.values()),
        weights=weights,
        policy=kept,
        telemetry=moved + counts,
        scratch=sum(aside[s] for s in slots if s.storage == "container"),
        step=step,
    )
