"""Implement ``remainder16`` and ``remainder8``: the bits of the fp32 master beyond a bfloat16 weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.kernels import Written
from halfulp.kernels.onepass_reference import LARGEST
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.writeback.policies.policy import Kernel, Policy, State, Step


@dataclass(frozen=True)
class Remainder(Policy):
    """Master weights, stored as the bits beyond the bfloat16 weight.

    The bit pattern of the master is that of the weight plus the remainder. With 16 bits nothing is lost:
    given the same gradients, the master equals that of ``master`` bit for bit. The weight is the nearest
    bfloat16, with *ties away from zero*: with ties to even, a weight of even pattern would have 65,537
    masters, one too many for 16 bits. So the weight differs from that of ``master`` only where a master is
    exactly between two weights and the lower one is even (and a master beyond bfloat16's range is clipped).

    With 8 bits the master is rounded stochastically to 16 significant bits. It is right on average, and off
    by less than 2**-15 of its magnitude in one step (for normal numbers).
    """

    bits: ClassVar[int] = 16

    def check(self, grid: Grid, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Refuse a grid other than bf16."""
        if not grid.within(torch.float32).same_values(named("bf16").within(torch.float32)):
            raise UsageError(
                f"policy {self.name!r} is for grid bf16, not {grid.name}: use 'master' or 'kahan'."
            )

    def check_storage(self, dtype: torch.dtype, storage: str) -> None:
        """Refuse parameters that are not stored as bfloat16."""
        if storage != "native" or dtype != torch.bfloat16:
            raise UsageError(
                f"policy {self.name!r} keeps the difference between a bfloat16 weight and its master; this "
                f"parameter is {dtype}, storage={storage!r}: use 'master', or bfloat16 parameters."
            )

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        """Begin with remainders of zero."""
        dtype = torch.int16 if self.bits == 16 else torch.int8
        return {"remainder": torch.zeros(projected.shape, dtype=dtype, device=projected.device)}

    def resync(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        """Drop remainders whose master no longer rounds to the stored weight."""
        weight = q.view(torch.int32)
        master = weight + (state["remainder"].int() << (16 - self.bits))
        nearest = ((master & 0x7FFFFFFF) + 0x8000) & 0x7FFF0000 | master & -(2**31)  # ties away from zero
        state["remainder"].masked_fill_(nearest != weight, 0)

    def before(self, q: torch.Tensor, p: torch.Tensor, state: State) -> None:
        """Show the optimizer the masters."""
        p.view(torch.int32).add_(state["remainder"].int() << (16 - self.bits))

    def after(self, step: Step) -> Written:
        """Store the upper half of the master and keep the rest as the remainder."""
        master = step.z
        if self.bits == 8:
            master = kernels.round(master, named("m15"), step.stream)
        u = master.view(torch.int32)
        largest = LARGEST & (0x7FFFFFFF << (16 - self.bits))
        u = torch.where(torch.isfinite(master), (u & 0x7FFFFFFF).clamp(max=largest) | (u & -(2**31)), u)
        # The nearest even of a tie that is nudged is the one away from zero.
        step.z.view(torch.int32).copy_(torch.where((u & 0xFFFF) == 0x8000, u | 1, u))
        fine = torch.isfinite(step.z)
        written = step.write()
        step.finish()
        rest = (u - step.z.view(torch.int32)) >> (16 - self.bits)
        kept = step.state["remainder"]
        kept.copy_(torch.where(fine, rest.to(kept.dtype), kept))
        return written


class Remainder16(Remainder):
    """Exact master weights in two extra bytes per weight.

    >>> import halfulp as hu
    >>> model = torch.nn.Linear(4, 4).bfloat16()
    >>> opt = hu.AdamW(model.parameters(), policy="remainder16")
    >>> opt.slots[0].state["remainder"].dtype
    torch.int16
    """

    name: ClassVar[str] = "remainder16"
    kernel: ClassVar[Kernel | None] = Kernel(keeps="remainder")
    bytes_kept: ClassVar[float] = 2.0


class Remainder8(Remainder):
    """Master weights in one extra byte per weight, stochastically rounded to fit.

    >>> Remainder8.bytes_kept
    1.0
    """

    name: ClassVar[str] = "remainder8"
    bits: ClassVar[int] = 8
    kernel: ClassVar[Kernel | None] = Kernel(mode="stochastic", keeps="remainder")
    bytes_kept: ClassVar[float] = 1.0
    stochastic: ClassVar[bool] = True
