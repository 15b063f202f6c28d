"""Implement ``master``: master weights, an fp32 copy of every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from halfulp import kernels
from halfulp.kernels import Written
from halfulp.numbers.grids import Grid
from halfulp.writeback.policies.policy import Kernel, Policy, State, Step

UNROUNDED = "master does not round to the stored weight"


@dataclass(frozen=True)
class Master(Policy):
    """Master weights: the optimizer moves an fp32 copy, and the weight is the nearest code of it.

    Args:
        start_from: Start the copy from the projected ``code``, so that all policies start from the same
            values, or from the ``raw`` value before projection (the historical protocol).

    Raises:
        UsageError: If ``start_from`` has another value.

    >>> Master(start_from="raw").spec
    'master(start_from=raw)'
    """

    name: ClassVar[str] = "master"
    words: ClassVar[str] = "full fp32 masters"
    kernel: ClassVar[Kernel | None] = Kernel(keeps="master")
    bytes_kept: ClassVar[float] = 4.0
    offers: ClassVar[tuple[tuple[str, float], ...]] = (("master", 4.0),)
    start_from: Literal["code", "raw"] = "code"

    def start(self, raw: torch.Tensor, projected: torch.Tensor, name: str) -> State:
        """Begin with a float32 copy of the weights."""
        source = projected if self.start_from == "code" else raw
        return {"master": source.detach().clone(memory_format=torch.contiguous_format)}

    def resync(self, q: torch.Tensor, state: State, grid: Grid) -> None:
        """Replace masters that no longer round to the stored weights."""
        state["master"].copy_(mended(state["master"], q, grid))

    def before(self, q: torch.Tensor, p: torch.Tensor, state: State) -> None:
        """Show the optimizer the masters."""
        p.copy_(state["master"])

    def after(self, step: Step) -> Written:
        """Keep the finite masters and store them rounded to nearest."""
        master = step.state["master"]
        if bool(torch.isfinite(step.z.sum())):  # then every term is
            master.copy_(step.z)
        else:
            master.copy_(torch.where(torch.isfinite(step.z), step.z, master))
        return step.write()

    def misfits(self, q: torch.Tensor, state: State, grid: Grid) -> tuple[torch.Tensor, str] | None:
        """Return where a master does not round to the stored weight, and why."""
        return unrounded(state["master"], q, grid, raw=self.start_from == "raw"), UNROUNDED


def mended(master: torch.Tensor, q: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the masters, replaced by the stored value where they do not round to it."""
    return torch.where(kernels.round(master, grid) == q, master, q)


def unrounded(master: torch.Tensor, q: torch.Tensor, grid: Grid, *, raw: bool) -> torch.Tensor:
    """Find masters that do not round to q.

    With ``raw``, a master that started from a stochastic projection may have either neighbour stored.
    """
    off = kernels.round(master, grid) != q
    if raw and bool(off.any()):
        below, above = grid.neighbours(master)
        off &= (q < below) | (q > above)
    return off
