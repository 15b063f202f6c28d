"""Implement ``dqt``: stochastic rounding to integers, scaled by the old weights' signed maximum."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from halfulp.errors import UsageError
from halfulp.kernels import Written
from halfulp.numbers.grids import Grid, integer_grid
from halfulp.writeback.policies.policy import Policy, Step
from halfulp.writeback.policies.stochastic import RIGHT_ON_AVERAGE


class DQT(Policy):
    """Stochastic rounding to integers whose scale is the maximum of the old weights.

    >>> import halfulp as hu
    >>> hu.grid("int3/dqt").scaling.rule
    'dqt'
    """

    name: ClassVar[str] = "dqt"
    words: ClassVar[str] = "DQT"
    stochastic: ClassVar[bool] = True
    why_kept: ClassVar[str] = RIGHT_ON_AVERAGE

    def check(self, grid: Grid, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Refuse a grid without DQT's scale."""
        if grid.scaling is None or grid.scaling.rule != "dqt":
            raise UsageError(f"policy 'dqt' needs a grid with DQT's rule, such as int3/dqt, not {grid.name}.")

    def projection(self, grid: Grid) -> Grid:
        """Return the grid that starts from the mean magnitude."""
        return integer_grid(grid.bits, rule="absmean", symmetric=False)

    def after(self, step: Step) -> Written:
        """Round stochastically under DQT's scale."""
        return step.write("stochastic")
