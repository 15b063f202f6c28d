"""Weights & Biases: after ``wandb.init``, pass ``listeners=[WandB()]`` to an audit or a callback."""

from __future__ import annotations

from typing import Any

from halfulp.errors import UsageError
from halfulp.integrations.optional import require
from halfulp.integrations.scalars import Dashboard


class WandB(Dashboard):
    """Logs every audited step to a run, against the metric ``halfulp/step``.

    Tags are those of :class:`~halfulp.integrations.scalars.Scalars`. ``commit=False`` adds the numbers to the
    row that your own next ``log`` call writes: for scripts that count W&B's steps themselves (``step=``).
    """

    def __init__(self, run: Any = None, *, worst: int = 8, commit: bool = True) -> None:
        self.run = require("wandb").run if run is None else run
        if self.run is None:
            raise UsageError("there is no W&B run yet: call wandb.init() first, or pass the run.")
        self.run.define_metric("halfulp/step", hidden=True)
        self.run.define_metric("halfulp/*", step_metric="halfulp/step")
        super().__init__(worst)
        self.commit = commit

    def show(self, step: int, values: dict[str, float]) -> None:
        """Log the values of one step."""
        self.run.log({"halfulp/step": step, **values}, commit=self.commit)
