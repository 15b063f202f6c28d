"""``transformers.Trainer``: pass ``callbacks=[AuditCallback(["bf16", "e4m3@128"])]``.

The audit is attached to the torch optimizer itself, inside what accelerate puts around it, so a step is a
step (not one that was skipped for an overflow) and the learning rate is that of the step: at the end of a
step, callbacks see the next one already. ``Trainer(optimizers=(hu.WriteBack(...), None))`` works as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from halfulp.errors import UsageError
from halfulp.grids import Grid
from halfulp.integrations.optional import AuditedRun, base_class, require
from halfulp.writeback.optimizer import WriteBack

_Base: Any = base_class("transformers:TrainerCallback")


class AuditCallback(_Base):  # type: ignore[misc]  # a class of a library that may be missing
    """Audit a ``Trainer`` run. ``options`` are those of :class:`halfulp.Audit`.

    The trace goes to ``out``, by default ``halfulp`` in the trainer's output folder (``halfulp-2`` if that
    is taken). A run that resumes from a checkpoint goes on with its trace. The loss is the one that the
    trainer logs: set ``logging_steps=1`` for one a step; otherwise it is the mean since the last log. The
    first process prints the verdict when training ends.
    """

    def __init__(
        self,
        grids: Iterable[str | Grid | torch.dtype],
        out: str | Path | None = None,
        *,
        verdict: bool = True,
        **options: Any,
    ) -> None:
        require("transformers")
        super().__init__()
        self.running = AuditedRun(grids, out, verdict, options)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Attach to the real optimizer."""
        usual = Path(args.output_dir) / "halfulp"
        self.running.start(_real(optimizer), model, usual, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Take the loss of the step that was just taken."""
        audit = self.running.audit
        if audit is not None and logs and "loss" in logs:
            audit.log(float(logs["loss"]), step=audit.step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """What a checkpoint holds, the trace holds too."""
        if self.running.audit is not None:
            self.running.audit.commit()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.running.stop()


def _real(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's wrapper."""
    while not isinstance(optimizer, WriteBack) and type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"an audit needs a torch optimizer; this trainer has {type(optimizer).__name__}.")
    return optimizer
