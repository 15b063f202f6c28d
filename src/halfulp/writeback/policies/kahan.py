"""Implement ``kahan``: compensated summation that keeps the error beside the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from halfulp.kernels import Written
from halfulp.numbers.grids import Grid
from halfulp.writeback.policies.policy import Kernel, Policy, State, Step


@dataclass(frozen=True)
class Kahan(Policy):
    """Kahan summation: write Q(z + c), keep the rounding error c and add it to the next proposal.

    Weight decay is part of the proposal, so the compensated sum includes it.

    Args:
        dtype: The type of the carry, float32 or bfloat16.

    Raises:
        UsageError: If ``dtype`` is another type.

    >>> import halfulp as hu
    >>> model = torch.nn.Linear(64, 64).bfloat16()
    >>> hu.AdamW(model.parameters(), policy=Kahan(torch.bfloat16)).bytes().per_parameter()["policy"]
    2.0
    """

    name: ClassVar[str] = "kahan"
    words: ClassVar[str] = "Kahan"
    bytes_kept: ClassVar[float] = 4.0
    offers: ClassVar[tuple[tuple[str, float], ...]] = (("kahan in bfloat16", 2.0), ("kahan", 4.0))
    dtype: torch.dtype = torch.float32

    @property
    def kernel(self) -> Kernel:  # type: ignore[override]  # by its options
        """Return how the fused pass makes this policy."""
        return Kernel(keeps="carry", dtype=self.dtype)

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        """Begin with a carry of zeros."""
        return {"carry": torch.zeros_like(projected, dtype=self.dtype, memory_format=torch.contiguous_format)}

    def resync(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        """Drop carries that cannot belong to the stored weights."""
        state["carry"].masked_fill_(too_large(state["carry"], q, grid), 0.0)

    def after(self, step: Step) -> Written:
        """Round to nearest and keep the rest as the carry."""
        return step.write(carry=step.state["carry"])

    def misfits(self, q: torch.Tensor, state: State, grid: Grid) -> tuple[torch.Tensor, str] | None:
        """Return where the carry cannot belong to the stored weight, and why."""
        return too_large(state["carry"], q, grid), "carry is more than half the gap beside the stored weight"


def too_large(carry: torch.Tensor, q: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Find carries that nearest rounding cannot leave: more than half the gap on their side of q."""
    below, above = (side.double() for side in grid.neighbours(q))
    at, c = q.double(), carry.double()
    return (c > (above - at) / 2) | (c < (below - at) / 2)
