"""Lightning: pass ``callbacks=[AuditCallback(["bf16", "e4m3@128"])]`` to its ``Trainer``.

Works with ``lightning`` and with ``pytorch_lightning``, with automatic and manual optimization.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from halfulp.grids import Grid
from halfulp.integrations.optional import AuditedRun, base_class, require

_Base: Any = base_class("lightning.pytorch.callbacks:Callback", "pytorch_lightning.callbacks:Callback")


class AuditCallback(_Base):  # type: ignore[misc]  # a class of a library that may be missing
    """Audit a ``Trainer.fit``. ``options`` are those of :class:`halfulp.Audit`.

    The trace goes to ``out``, by default ``halfulp`` in the trainer's root folder (``halfulp-2`` if that is
    taken). A run that resumes from a checkpoint goes on with its trace. The loss is that of the training
    step, averaged over accumulated batches. The first process prints the verdict when training ends.
    """

    def __init__(
        self,
        grids: Iterable[str | Grid | torch.dtype],
        out: str | Path | None = None,
        *,
        verdict: bool = True,
        **options: Any,
    ) -> None:
        require("lightning.pytorch", "pytorch_lightning")
        super().__init__()
        self.running = AuditedRun(grids, out, verdict, options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizers; Lightning counts the steps of all of them together."""
        optimizers = list(trainer.optimizers)
        usual = Path(trainer.default_root_dir) / "halfulp"
        self.running.start(optimizers, pl_module, usual, trainer.global_step // max(len(optimizers), 1))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Note the loss, without the factor that automatic optimization puts on accumulated batches."""
        if self.running.audit is not None:
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.running.audit.log(loss.detach() * parts)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """What a checkpoint holds, the trace holds too."""
        if self.running.audit is not None:
            self.running.audit.commit()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.running.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.running.stop()
