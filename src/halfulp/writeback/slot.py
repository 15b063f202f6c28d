"""One managed parameter, and the bytes that managing takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from halfulp import kernels
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
    aside = [local(s.p).numel() * (4 if s.shadow is not None else s.p.element_size()) for s in slots]
    extra = [
        a * (1 + (s.p.dtype != torch.float32)) if s.shadow is not None else 0
        for a, s in zip(aside, slots, strict=True)
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
