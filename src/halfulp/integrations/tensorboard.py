"""TensorBoard: pass ``listeners=[TensorBoard("runs/board")]`` to an audit or to a trainer's callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfulp.integrations.optional import require
from halfulp.integrations.scalars import Scalars


class TensorBoard:
    """Writes every audited step to a log folder, or to a ``SummaryWriter`` that is there already.

    Tags are those of :class:`~halfulp.integrations.scalars.Scalars`.
    """

    def __init__(self, where: Any, *, worst: int = 8) -> None:
        if isinstance(where, str | Path):
            require("tensorboard")
            where = require("torch.utils.tensorboard").SummaryWriter(str(where))
        self.writer = where
        self.scalars = Scalars(worst)

    def __call__(self, summary: dict[str, Any]) -> None:
        for name, value in self.scalars.of(summary).items():
            self.writer.add_scalar(name, value, summary["step"])
        self.writer.flush()
