"""Audit a ``transformers.Trainer``: pass ``callbacks=[AuditCallback(["bf16", "e4m3@128"])]``.

The audit is attached to the torch optimizer itself, inside the wrapper of accelerate. So only real steps
count (none that was skipped for an overflow), and the learning rate is that of the step; at the end of a
step, callbacks already see the next rate. ``Trainer(optimizers=(hu.WriteBack(...), None))`` works as well.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from halfulp.audit.sources.names import variables
from halfulp.contract import Contract, Terms
from halfulp.errors import UsageError
from halfulp.integrations.optional import AuditedRun, base_class, require
from halfulp.integrations.piloted import TrainerRun
from halfulp.numbers.grids import Grid
from halfulp.pilots.prices import Prices
from halfulp.text import tell
from halfulp.writeback.optimizer import WriteBack

_Base: Any = base_class("transformers:TrainerCallback")


class AuditCallback(_Base):  # type: ignore[misc]  # a class of a library that may be missing
    """Audit a ``Trainer`` run.

    The trace goes to ``out``, by default ``halfulp`` in the trainer's output folder (``halfulp-2`` if that
    is taken). A run that resumes from a checkpoint continues its trace. The loss is the one that the trainer
    logs: set ``logging_steps=1`` for one per step; otherwise it is the mean since the last log. The first
    process prints the verdict when training ends.

    The trainer's loggers (``report_to``: W&B, TensorBoard, MLflow, Trackio, Comet, ...) receive the newest
    audited step with every log of the trainer, under the tags of
    :class:`~halfulp.integrations.scalars.Scalars`. With ``rehearse=``, every evaluation of the trainer is
    repeated as if for every rehearsal and logged beside the real one as ``eval_loss_as_if/SPEC``, with
    ``/lower`` and ``/upper`` for its bounds.

    Args:
        grids: The grids to audit.
        out: The folder of the trace.
        verdict: Print the verdict when training ends.
        report: False sends nothing to the loggers; True logs even if ``report_to`` is empty.
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
        report: bool | None = None,
        pilot: Sequence[str] = (),
        budget: float = 0.15,
        **options: Any,
    ) -> None:
        require("transformers")
        super().__init__()
        self.report = report
        self.running = AuditedRun(grids, out, verdict, options, pilot, budget)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Attach to the real optimizer."""
        own, trainer, usual = _real(optimizer), _trainer(), Path(args.output_dir) / "halfulp"
        if self.running.piloted is not None:
            TrainerRun.check(trainer, own)
        twin = partial(TrainerRun, trainer, own, _again)
        self.running.start(own, model, usual, state.global_step, twin, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Take the loss of the step that was just taken, and log beside it what that step lost."""
        audit = self.running.audit
        if audit is None or not logs or "loss" not in logs:
            return
        audit.log(float(logs["loss"]), step=audit.step)
        wanted = bool(args.report_to) if self.report is None else self.report
        news = self.running.news() if wanted else {}
        trainer = _trainer() if news else None
        if trainer is not None:
            trainer.log(news)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Evaluate as if for every rehearsal, by the trainer's own loop, and log it beside the real loss."""
        evaluation = _evaluation()
        if self.running.audit is None or evaluation is None:
            return
        trainer, loader, options = evaluation
        loss = f"{options['metric_key_prefix']}_loss"
        if loss not in (metrics or {}):
            return
        values = self.running.evaluated(loss, metrics[loss], lambda: _again(trainer, loader, options)[loss])
        if values:
            trainer.log(values)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Have the last step evaluated, if formats are priced by its loss."""
        if self.running.piloted is not None and state.global_step >= state.max_steps:
            control.should_evaluate = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the trace up to this step, so that it covers everything in the checkpoint."""
        if self.running.audit is not None:
            self.running.audit.commit()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the audit."""
        _end_bar(args)
        self.running.end()


_FIX = 'Trainer(..., optimizer_cls_and_kwargs=(hu.AdamW, {"lr": ...}))'


class ContractCallback(_Base):  # type: ignore[misc]  # a class of a library that may be missing
    """Hold the optimizer of a ``Trainer`` to a precision contract, from its first step on and after a resume.

    Args:
        action: ``"raise"`` or ``"warn"``.
        **terms: Those of :func:`halfulp.require`, such as ``weights="float32"`` or ``arrives=0.99``.
    """

    def __init__(self, *, action: Literal["raise", "warn"] = "raise", **terms: Any) -> None:
        require("transformers")
        super().__init__()
        self.terms, self.action = Terms.of(terms), action
        self.contract: Contract | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Begin with the optimizer as it is now, after a checkpoint was loaded."""
        self.contract = Contract([_real(optimizer)], self.terms, [model], action=self.action, fix=_FIX)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop checking, and say what was checked."""
        if self.contract is not None:
            self.contract.release()
            if state.is_world_process_zero:
                _end_bar(args)
                tell(f"halfulp: the precision contract {self.contract.summary()}.")


def _end_bar(args: Any) -> None:
    """End the line of the trainer's progress bar, which is closed only after our callbacks have run."""
    if not args.disable_tqdm:
        tell("")


def _callers() -> Iterator[dict[str, Any]]:
    """Yield the variables of every method of a trainer that led here, the newest first."""
    kind = require("transformers").Trainer
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        there = variables(frame)
        if isinstance(there.get("self"), kind):
            yield there
        frame = frame.f_back


def _trainer() -> Any:
    """Return the trainer that called this callback."""
    return next((there["self"] for there in _callers()), None)


def _evaluation() -> tuple[Any, Any, dict[str, Any]] | None:
    """Return the trainer whose ``evaluate`` called this callback, its data, and what it was called with."""
    for there in _callers():
        if {"eval_dataloader", "metric_key_prefix"} <= there.keys():
            options = {key: there.get(key) for key in ("ignore_keys", "metric_key_prefix")}
            return there["self"], there["eval_dataloader"], options
    return None


def _again(trainer: Any, loader: Any, options: dict[str, Any]) -> dict[str, float]:
    """Run the trainer's evaluation again for its loss alone, with all callbacks disabled."""
    handler = trainer.callback_handler
    trainer.callback_handler = copy.copy(handler)
    trainer.callback_handler.callbacks = []
    try:
        output = trainer.evaluation_loop(loader, description="as if", prediction_loss_only=True, **options)
        return dict(output.metrics)
    finally:
        trainer.callback_handler = handler


def _real(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer inside accelerate's wrapper."""
    while not isinstance(optimizer, WriteBack) and type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"an audit needs a torch optimizer; this trainer has {type(optimizer).__name__}.")
    return optimizer
