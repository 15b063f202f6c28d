"""One managed parameter, and the bytes that managing takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.writeback.policies import Policy, State
from halfulp.writeback.report import TILE_BYTES, Bytes, TensorEvents
from halfulp.writeback.sharding import local
from halfulp.writeback.storage import Codes


class Slot:
    """One managed parameter: its grid, policy and what is kept for it."""

    def __init__(
        self, name: str, p: torch.nn.Parameter, grid: Grid, chosen: Policy, place: tuple[int, int]
    ) -> None:
        self.name, self.p, self.grid, self.policy, self.place = name, p, grid, chosen, place
        self.state: State = {}
        self.moved: torch.Tensor | None = None
        self.scratch: torch.Tensor | None = None
        self.codes: Codes | None = None
        self.shadow: torch.nn.Parameter | None = None
        self.events: TensorEvents | None = None

    def snapshot(self) -> Callable[[], None]:
        """What puts the stored values, the policy's state and the telemetry back as they are now."""
        state = {k: t.clone() for k, t in self.state.items()}
        moved = None if self.moved is None else self.moved.clone()
        values = self.p.detach().clone() if self.codes is None else None
        packed, steps = (None, None) if self.codes is None else (self.codes.packed, self.codes.steps)
        events = self.events

        def put_back() -> None:
            self.state, self.moved, self.events = state, moved, events
            if values is not None:
                self.p.data.copy_(values)
            if self.codes is not None and packed is not None:
                self.codes.packed, self.codes.steps = packed, steps

        return put_back

    @property
    def aside(self) -> torch.dtype:
        """What the stored values are set aside in during a step: two bytes where they fit those."""
        wide = self.p.dtype if self.shadow is None else self.shadow.dtype
        halved = wide == torch.float32 and self.p.device.type == "cpu" and _fits_bfloat16(self.grid)
        return torch.bfloat16 if halved else wide

    @property
    def stepped(self) -> torch.nn.Parameter:
        """What the wrapped optimizer moves."""
        return self.p if self.shadow is None else self.shadow

    def kept_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that persists for this parameter beside the parameter itself."""
        kept = dict(self.state)
        if self.moved is not None:
            kept["moved"] = self.moved
        if self.codes is not None:
            kept["codes"] = self.codes.packed
            if self.codes.steps is not None:
                kept["steps"] = self.codes.steps
        return kept


def set_aside(slots: Sequence[Slot], stored: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the stored values, in the slots' scratch."""
    copies = []
    for slot, values in zip(slots, stored, strict=True):
        dtype = slot.aside
        if slot.scratch is None or slot.scratch.shape != values.shape or slot.scratch.dtype != dtype:
            slot.scratch = torch.empty(values.shape, dtype=dtype, device=values.device)
        copies.append(slot.scratch)
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
    """Whether every value of a grid in float32 is one of bfloat16."""
    try:
        return grid.scaling is None and grid.within(torch.bfloat16) is not None
    except UsageError:
        return False


def measure(slots: Sequence[Slot], keep_scratch: bool, one_by_one: bool) -> Bytes:
    """Bytes for these parameters: between steps, and what a step adds, for all or one after another."""
    numel = sum(local(s.p).numel() for s in slots)
    weights = sum(
        local(s.p).numel() * s.p.element_size()
        if s.codes is None
        else s.codes.payload_bytes + s.p.element_size()  # and the shell's one number
        for s in slots
    )
    kept = sum(
        t.numel() * t.element_size()
        for s in slots
        for k, t in s.kept_tensors().items()
        if k not in ("codes", "steps", "moved")
    )
    moved = sum(0 if s.moved is None else s.moved.numel() for s in slots)
    counts = sum(kernels.tiles_of(local(s.p).numel()) * TILE_BYTES for s in slots)
    # A step sets q aside and, beside other storage, needs a stand-in and a gradient in float32.
    aside = [local(s.p).numel() * s.aside.itemsize for s in slots]
    extra = [
        local(s.p).numel() * 4 * (1 + (s.p.dtype != torch.float32)) if s.shadow is not None else 0
        for s in slots
    ]
    scratch = sum(aside) if keep_scratch else 0
    added = [e + (0 if keep_scratch else a) for a, e in zip(aside, extra, strict=True)]
    # One tensor at a time, everything is kept until the last is done, to be put back if it fails.
    step = max(added) + weights + kept + moved if one_by_one else sum(added)
    return Bytes(
        parameters=numel,
        weights=weights,
        policy=kept,
        telemetry=moved + counts,
        scratch=scratch,
        step=step,
    )
