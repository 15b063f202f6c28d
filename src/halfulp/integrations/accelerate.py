"""accelerate: pass ``listeners=[Trackers(accelerator)]`` to an audit, after ``accelerator.init_trackers``.

The numbers go wherever the accelerator logs: W&B, TensorBoard, MLflow, Trackio, Comet, Aim, ...
"""

from __future__ import annotations

from typing import Any

from halfulp.errors import UsageError
from halfulp.integrations.scalars import Dashboard


class Trackers(Dashboard):
    """Logs every audited step to the trackers of an ``Accelerator``, under the step's own number.

    Tags are those of :class:`~halfulp.integrations.scalars.Scalars`.
    """

    def __init__(self, accelerator: Any, *, worst: int = 8) -> None:
        if not getattr(accelerator, "trackers", None):
            raise UsageError(
                "this accelerator has no trackers: make it with log_with=... and call init_trackers() first."
            )
        self.accelerator = accelerator
        super().__init__(worst)

    def show(self, step: int, values: dict[str, float]) -> None:
        """Log the values of one step to every tracker."""
        self.accelerator.log(values, step=step)
