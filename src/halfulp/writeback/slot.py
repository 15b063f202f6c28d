"""One managed parameter, and the bytes that managing takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.writeback.native import NativeCodes, is_native
from halfulp.writeback.policies import Policy, State, TileMaster
from halfulp.writeback.report import TILE_BYTES, Bytes, TensorEvents
from halfulp.writeback.sharding import local
from halfulp.writeback.standin import drop
from halfulp.writeback.storage import Codes


class Slot:
    """One managed parameter: its grid, policy and what is kept for it."""

    def __init__(
        self,
        name: str,
        p: torch.nn.Parameter,
        grid: Grid,
        chosen: Policy,
        place: tuple[int, int],
        *,
        storage: str = "container",
        keep_scratch: bool = True,
    ) -> None:
        self.name, self.p, self.grid, self.policy, self.place = name, p, grid, chosen, place
        self.shape = p.shape
        self.storage, self.keep_scratch = storage, keep_scratch
        self.state: State = {}
        self.moved: torch.Tensor | None = None
        self.scratch: torch.Tensor | None = None
        self.codes: Codes | NativeCodes | None = NativeCodes(p, grid) if is_native(p) else None
        self.shadow: torch.nn.Parameter | None = None
        self.resting: dict[str, torch.Tensor] = {}
        """The training weights while the model holds others, those for evaluation."""
        self.events: TensorEvents | None = None
        self.two_passes: str | None = None
        """Why this tensor cannot be moved in one pass."""
        self._written: tuple[torch.Tensor, int, int] | None = None

    def snapshot(self) -> Callable[[], None]:
        """What puts the stored values, the policy's state and the telemetry back as they are now."""
        state = {k: t.clone() for k, t in self.state.items()}
        moved = None if self.moved is None else self.moved.clone()
        values = local(self.p.detach()).clone() if self.codes is None else None
        packed, scales = (
            (None, None) if self.codes is None else (self.codes.packed.clone(), self.codes.scales)
        )
        events = self.events

        def put_back() -> None:
            self.state, self.moved, self.events = state, moved, events
            if values is not None:
                local(self.p.detach()).copy_(values)
            if self.codes is not None and packed is not None:
                self._put_codes(packed, scales)

        return put_back

    def values(self) -> torch.Tensor:
        """What is stored here, in the type in which the optimizer is given it; fresh beside a container."""
        if self.codes is not None:
            return self.codes.get()
        p = local(self.p.detach())
        return p if self.storage == "container" else p.float()

    def _held(self) -> tuple[torch.Tensor, int, int]:
        """The memory of what is stored, and how often torch has seen it change."""
        held = local(self.p.detach()) if self.codes is None else self.codes.packed
        return held, held._version, self.p._version

    def note_written(self) -> None:
        """What is stored now is what this write-back wrote. The memory is held, so that no other tensor gets
        its address."""
        self._written = self._held() if self.state else None

    def heed_edits(self) -> None:
        """Where somebody has set weights since they were written, the policy starts again from them. A tensor
        that torch has not seen change is not looked at, for that takes as long as a step. From here to
        :meth:`note_written` it counts as changed, so that an interrupted step is looked at."""
        if not self.state or self.resting:  # nothing is kept of evaluation weights
            return
        now, was, self._written = self._held(), self._written, None
        if was is None or now[0].data_ptr() != was[0].data_ptr() or now[1:] != was[1:]:
            self.policy.heed(self.values(), self.state, self.grid)

    def store(self, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Keep grid values."""
        if self.codes is None:
            local(self.p.detach()).copy_(values)
        else:
            self.codes.put(values, scales)

    def let_go(self) -> None:
        """Free what a step needed: the stand-in's values and gradient, and the copy of what was stored."""
        if self.shadow is not None:
            drop(self.shadow)
        if not self.keep_scratch:
            self.scratch = None

    def rested(self) -> dict[str, torch.Tensor]:
        """The weights that are stored now, under the names that they wait by while the model holds others."""
        if self.codes is None:
            return {"resting": local(self.p.detach()).clone()}
        scales = self.codes.scales
        return {"resting": self.codes.packed.clone()} | ({} if scales is None else {"resting_steps": scales})

    def wake(self) -> None:
        """Put the training weights back."""
        if self.codes is None:
            local(self.p.detach()).copy_(self.resting["resting"])
        else:
            self._put_codes(self.resting["resting"], self.resting.get("resting_steps"))
        self.resting = {}

    def _put_codes(self, packed: torch.Tensor, scales: torch.Tensor | None) -> None:
        assert self.codes is not None
        self.codes.packed = packed
        if isinstance(self.codes, Codes):
            self.codes.scales = scales

    @property
    def aside(self) -> torch.dtype:
        """What the stored values are set aside in during a step: two bytes where they fit those."""
        wide = self.p.dtype if self.storage == "container" else torch.float32
        halved = wide == torch.float32 and self.p.device.type == "cpu" and _fits_bfloat16(self.grid)
        return torch.bfloat16 if halved else wide

    @property
    def stepped(self) -> torch.nn.Parameter:
        """What the wrapped optimizer moves."""
        return self.p if self.shadow is None else self.shadow

    def kept_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that persists for this parameter beside the parameter itself."""
        kept = {**self.state, **self.resting}
        if self.moved is not None:
            kept["moved"] = self.moved
        if isinstance(self.codes, Codes):  # native ones are in the model
            kept["codes"] = self.codes.packed
            if self.codes.scales is not None:
                kept["steps"] = self.codes.scales
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


def measure(slots: Sequence[Slot], one_by_one: bool, at_once: Sequence[Slot] = ()) -> Bytes:
    """Bytes for these parameters: between steps, and what a step adds, with stand-ins one by one or not.
    ``at_once``: those that are moved in one pass, which sets nothing aside but, one tensor at a time, the
    masters of one of which only chosen tiles keep theirs."""
    numel = sum(local(s.p).numel() for s in slots)
    weights = sum(
        local(s.p).numel() * s.p.element_size()
        if s.codes is None
        else s.codes.payload_bytes + (s.p.element_size() if s.storage == "packed" else 0)  # a shell's number
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
    aside = {s: 0 if s in at_once else local(s.p).numel() * s.aside.itemsize for s in slots}
    added = {
        s: (0 if s.keep_scratch else aside[s])
        + (
            0
            if s.storage == "container" or s in at_once
            else local(s.p).numel() * 4 * (1 + (s.p.dtype != torch.float32))
        )
        for s in slots
    }
    apart = [s for s in slots if s.storage != "container" and s not in at_once] if one_by_one else []
    together = sum(added[s] for s in slots if s not in apart)
    # One tensor at a time, everything is kept until the last is done, to be put back if it fails.
    step = max([together, *(added[s] for s in apart)]) + (weights + kept + moved if apart else 0)
    step += max((4 * local(s.p).numel() for s in at_once if isinstance(s.policy, TileMaster)), default=0)
    scratch = sum(aside[s] for s in slots if s.keep_scratch)
    return Bytes(
        parameters=numel,
        weights=weights,
        policy=kept,
        telemetry=moved + counts,
        scratch=scratch,
        step=step,
    )
