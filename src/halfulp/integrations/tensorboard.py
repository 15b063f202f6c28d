"""Write to TensorBoard: pass ``listeners=[TensorBoard("runs/board")]`` to an audit or trainer callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfulp.integrations.optional import require
from halfulp.integrations.scalars import Dashboard


class TensorBoard(Dashboard):
    """A listener that writes every audited step to TensorBoard.

    Tags are those of :class:`~halfulp.integrations.scalars.Scalars`.

    Args:
        where: A log folder, or an existing ``SummaryWriter``.
        worst: Number of tensors shown per grid.
    """

    def __init__(self, where: Any, *, worst: int = 8) -> None:
        if isinstance(where, str | Path):
            require("tensorboard")
            where = require("torch.utils.tensorboard").SummaryWriter(str(where))
        self.writer = where
        super().__init__(worst)

    def show(self, step: int, values: dict[str, float]) -> None:
        """Write the values of one step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()
