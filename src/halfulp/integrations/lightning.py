"""Audit a Lightning ``Trainer``: pass it ``callbacks=[AuditCallback(["bf16", "e4m3@128"])]``.

This works with ``lightning`` and with ``pytorch_lightning``, with automatic and manual optimization.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from halfulp.contract import Contract, Terms
from halfulp.errors import UsageError
from halfulp.integrations.optional import AuditedRun, base_class, require
from halfulp.integrations.piloted import ModuleRun
from halfulp.numbers.grids import Grid
from halfulp.pilots.prices import Prices
from halfulp.text import tell

_Base: Any = base_class("lightning.pytorch.callbacks:Callback", "pytorch_lightning.callbacks:Callback")


class AuditCallback(_Base):  # type: ignore[misc]  # a class of a library that may be missing
    """Audit a ``Trainer.fit``.

    The trace goes to ``out``, by default ``halfulp`` in the trainer's root folder (``halfulp-2`` if that is
    taken). A run that resumes from a checkpoint continues its trace. The loss is that of the training step,
    averaged over accumulated batches. The first process prints the verdict when training ends.

    The trainer's loggers receive every audited step that Lightning would log (``log_every_n_steps``), on its
    own axis, under the tags of :class:`~halfulp.integrations.scalars.Scalars`. With ``rehearse=``, every
    validation is repeated as if for every rehearsal, in one process only; the value that the module logs as
    ``monitor`` goes to the loggers as ``MONITOR_as_if/SPEC``, with ``/lower`` and ``/upper`` for its bounds.

    Args:
        grids: The grids to audit.
        out: The folder of the trace.
        verdict: Print the verdict when training ends.
        monitor: The name under which the module logs the validation loss.
        report: Send audited steps to the trainer's loggers.
        pilot: Formats to price, such as ``["e4m3@128", "bf16:sr"]``: twins of them are run before the
            training, on parts of its batches, and ``prices`` has what each costs when it ends.
        budget: Extra compute for all of them together, as a share of the run.
        options: Options of :class:`halfulp.Audit`.
    """

    @property
    def prices(self) -> Prices | None:
        """What the formats of ``pilot=`` cost, once training has ended."""
        return self.running.prices

    def __init__(
        self,
        grids: Iterable[str | Grid | torch.dtype],
        out: str | Path | None = None,
        *,
        verdict: bool = True,
        monitor: str = "val_loss",
        report: bool = True,
        pilot: Sequence[str] = (),
        budget: float = 0.15,
        **options: Any,
    ) -> None:
        require("lightning.pytorch", "pytorch_lightning")
        super().__init__()
        self.running = AuditedRun(grids, out, verdict, options, pilot, budget)
        self.monitor, self.report = monitor, report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizers; Lightning counts the steps of all of them together."""
        optimizers = list(trainer.optimizers)
        usual = Path(trainer.default_root_dir) / "halfulp"
        done = trainer.global_step // max(len(optimizers), 1)
        updates = 0.0
        if self.running.piloted is not None:
            ModuleRun.check(trainer, pl_module)
            updates = trainer.estimated_stepping_batches
        twin = partial(ModuleRun, trainer, pl_module, self._validated)
        self.running.start(optimizers, pl_module, usual, done, twin, updates)

    def _validated(self, trainer: Any, module: Any) -> float:
        return ModuleValidation(trainer, module, self.monitor, alone=True)()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Note the loss, without the factor that automatic optimization puts on accumulated batches."""
        if self.running.audit is not None:
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.running.audit.log(loss.detach() * parts)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log what the newest step lost, as the module logs its own numbers."""
        if self.report and trainer.loggers and (news := self.running.news()):
            pl_module.log_dict(news, on_step=True, on_epoch=False, rank_zero_only=True)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Validate as if for every rehearsal, and log it beside what the module logged."""
        audit, real = self.running.audit, trainer.callback_metrics.get(self.monitor)
        if audit is None or real is None or trainer.sanity_checking or trainer.world_size > 1:
            return
        again = ModuleValidation(trainer, pl_module, self.monitor)
        values = self.running.evaluated(self.monitor, float(real), again, verify=True)
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Write the trace up to this step, so that it covers everything in the checkpoint."""
        if self.running.audit is not None:
            self.running.audit.commit()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the audit."""
        self.running.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop the audit; what was recorded stays."""
        self.running.stop()


class ContractCallback(_Base):  # type: ignore[misc]  # a class of a library that may be missing
    """Hold the optimizers of a ``Trainer.fit`` to a precision contract, also after a resume.

    Args:
        action: ``"raise"`` or ``"warn"``.
        **terms: Those of :func:`halfulp.require`, such as ``weights="float32"`` or ``arrives=0.99``.
    """

    def __init__(self, *, action: Literal["raise", "warn"] = "raise", **terms: Any) -> None:
        require("lightning.pytorch", "pytorch_lightning")
        super().__init__()
        self.terms, self.action = Terms.of(terms), action
        self.contract: Contract | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the optimizers as they are now, after a checkpoint was loaded."""
        self.contract = Contract(list(trainer.optimizers), self.terms, [pl_module], action=self.action)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop checking, and say what was checked."""
        if self.contract is not None:
            self.contract.release()
            if trainer.is_global_zero and stage == "fit":
                tell(f"halfulp: the precision contract {self.contract.summary()}.")


class ModuleValidation:
    """A module's validation once more, in the middle of its trainer's: its steps, and what they log.

    The trainer's own loop is not entered again, for it would call every callback and logger a second time.
    With ``alone``, the module is a copy that the trainer does not train.
    """

    def __init__(self, trainer: Any, module: Any, monitor: str, *, alone: bool = False) -> None:
        self.trainer, self.module, self.monitor, self.alone = trainer, module, monitor, alone
        self.logged: list[tuple[float, float]] = []
        """Values and the sizes of their batches."""
        self.size = 1.0

    def __call__(self) -> float:
        """Validate, and average what is logged as the trainer does, by the sizes of batches."""
        self.logged, module = [], self.module
        before = {name: module.__dict__[name] for name in ("log", "log_dict") if name in module.__dict__}
        module.__dict__.update(log=self._log, log_dict=self._log_dict)
        try:
            module.on_validation_epoch_start()
            for at, loader in enumerate(_loaders(self.trainer.val_dataloaders)):
                for i, batch in enumerate(islice(loader, self.trainer.num_val_batches[at])):
                    self._step(batch, i, at)
            self.size = 1.0
            module.on_validation_epoch_end()
        finally:
            for name in ("log", "log_dict"):
                module.__dict__.pop(name)
            module.__dict__.update(before)
        if not self.logged:
            raise UsageError(f"the module logs {self.monitor!r} only outside its validation")
        return sum(x * n for x, n in self.logged) / sum(n for _, n in self.logged)

    def _step(self, batch: Any, i: int, at: int) -> None:
        strategy = self.trainer.strategy
        batch = strategy.batch_to_device(strategy.precision_plugin.convert_input(batch), dataloader_idx=at)
        self.size = float(_size(batch))
        several = [at] if len(_loaders(self.trainer.val_dataloaders)) > 1 else []
        if not self.alone:
            strategy.validation_step(batch, i, *several)
            return
        with strategy.precision_plugin.val_step_context():  # a copy, which the strategy does not know
            self.module.validation_step(batch, i, *several)

    def _log(self, name: str, value: Any, *_: Any, batch_size: int | None = None, **__: Any) -> None:
        if name == self.monitor:
            self.logged.append((float(value), self.size if batch_size is None else float(batch_size)))

    def _log_dict(self, values: Any, *args: Any, **options: Any) -> None:
        for name, value in values.items():
            self._log(name, value, **options)


def _loaders(given: Any) -> list[Any]:
    if isinstance(given, dict):
        return list(given.values())
    return list(given) if isinstance(given, list | tuple) else [given]


def _size(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch, as Lightning takes it."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    inside = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((_size(x) for x in inside if isinstance(x, torch.Tensor | dict | list | tuple)), 1)
