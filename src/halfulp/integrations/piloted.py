"""Price formats beside a trainer's run: ``AuditCallback(..., pilot=["e4m3@128", "bf16:sr"], budget=0.15)``.

Twins are made before the run, on copies of its model, optimizer and schedule and on parts of its own batches:
what a step is, is the trainer's. The run is then the reference, with every format rehearsed beside it, and
goes on from the random state it would have had. A trainer's run cannot be forked, so a format whose twin the
guard distrusts keeps the free point with its wider interval.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from halfulp.audit.rehearsal.as_if import Evaluation
from halfulp.audit.rehearsal.specs import Rehearse
from halfulp.errors import UsageError
from halfulp.pilots import rungs
from halfulp.pilots.pilot import Pilot
from halfulp.pilots.prices import Prices
from halfulp.pilots.results import NAME
from halfulp.text import tell
from halfulp.writeback.optimizer import WriteBack

INSTEAD = "Use `halfulp pilot SCRIPT`, or write the training as a run for hu.Pilot."


class PilotedRun:
    """Twins before a trainer's run, and the price of each format after it.

    Args:
        formats: Grids, each followed by a colon and a policy unless it rounds to nearest.
        budget: Extra compute for all formats together, as a share of the run itself.
        options: Options of the audit, which rehearses the formats.
    """

    def __init__(self, formats: Sequence[str], budget: float, options: dict[str, Any]) -> None:
        self.formats, self.budget = list(formats), budget
        self.prices: Prices | None = None
        self._pilot: Pilot | None = None
        if "rehearse" in options:
            raise UsageError("pilot= rehearses its formats: name them there, and leave rehearse= out.")
        Rehearse(self.formats)
        options["rehearse"] = self.formats

    def before(self, make: rungs.Make, updates: int, folder: Path, done: int) -> None:
        """Make the twins; a run that resumes has those of its start.

        Args:
            make: A factory of runs.
            updates: Number of updates in the full run.
            folder: Where the results of twins are kept.
            done: The updates that the run has made already.

        Raises:
            UsageError: If a run resumes and the results of its twins are not there.
        """
        if not done:
            (folder / NAME).unlink(missing_ok=True)
        elif not (folder / NAME).exists():
            raise UsageError(
                f"pilot= cannot begin at step {done}: twins begin where the run did, and {folder} has none "
                "of its start. Begin anew, or leave pilot= out."
            )
        else:
            tell(f"halfulp: the twins of this run's start are in {folder}.")
        self._pilot = Pilot(make, self.formats, updates=updates, budget=self.budget, out=folder)
        if not done:
            tell(f"halfulp: twins before the run, for {self.budget:.0%} of it at most")
        self._twins = self._pilot.before()
        self._start = self._pilot.start()

    def after(self, last: Evaluation | None) -> None:
        """Say what each format costs, by the last evaluation of the run."""
        if self._pilot is None:
            return
        if last is None or not last.losses:
            tell("halfulp: formats have no price, because rehearsals were not evaluated in this run.")
            return
        if last.step != self._pilot.training.updates:
            self._pilot.notes.append(
                f"the run was last evaluated at update {last.step}, and its twins at the last of "
                f"{self._pilot.training.updates}."
            )
        full = rungs.Reference(start=self._start, real=last.real, again=last.real, as_if=last.losses)
        self.prices = self._pilot.after(self._twins, full)
        tell("", *self.prices.lines)


def _check_alone(processes: int, optimizers: Sequence[Any], scaler: bool) -> None:
    why = (
        f"it has {processes} processes, and twins run in one"
        if processes > 1
        else "its gradients are scaled (fp16)"
        if scaler
        else f"it has {len(optimizers)} optimizers"
        if len(optimizers) != 1
        else "its optimizer stores the weights in a format already (WriteBack)"
        if isinstance(optimizers[0], WriteBack)
        else None
    )
    if why is not None:
        raise UsageError(f"pilot= cannot make twins of this run: {why}. {INSTEAD}")


class _Copied:
    """A model, its optimizer and its schedules, copied together, with batches drawn anew."""

    def __init__(self, model: Any, optimizer: Any, schedules: list[Any], loader: Any, parts: int) -> None:
        if not isinstance(loader, DataLoader):
            raise UsageError(
                f"pilot= takes parts of a DataLoader's batches, and this run has a {type(loader).__name__}. "
                + INSTEAD
            )
        self.model, self.optimizer, self.schedules = copy.deepcopy((model, optimizer, schedules))
        self.loader, self.parts = loader, parts
        self._batches: Iterator[Any] = iter(())

    def batch(self, _: int) -> list[Any]:
        """Return the batches that are accumulated for an update."""
        return [self._next() for _ in range(self.parts)]

    def _next(self) -> Any:
        for _ in range(2):
            for batch in self._batches:
                return batch
            # As torch does it: what libraries put around it keeps count of the run's own batches.
            self._batches = DataLoader.__iter__(self.loader)
        raise UsageError("pilot=: the run's DataLoader gives no batch.")

    def stepped(self, norm: float | None, schedules: Sequence[Any]) -> None:
        """Make the step of an update whose gradients are there."""
        if norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)
        self.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a copied optimizer is not the one whose steps are counted
            for schedule in schedules:
                if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    schedule.step()
        self.model.zero_grad()


class TrainerRun(_Copied):
    """A run of a Hugging Face ``Trainer``, as a pilot takes it."""

    def __init__(self, trainer: Any, optimizer: Any, evaluate: Any) -> None:
        parts = trainer.args.gradient_accumulation_steps
        super().__init__(
            trainer.model, optimizer, [trainer.lr_scheduler], trainer.get_train_dataloader(), parts
        )
        self.trainer, self._evaluate = copy.copy(trainer), evaluate
        vars(self.trainer).update(
            model=self.model, model_wrapped=self.model, optimizer=self.optimizer,
            current_gradient_accumulation_steps=parts,
        )  # fmt: skip

    @staticmethod
    def check(trainer: Any, optimizer: Any) -> None:
        """Refuse what has no twins."""
        args = trainer.args
        several = max(args.world_size, args.n_gpu, 1)
        _check_alone(several, [optimizer], getattr(trainer.accelerator, "scaler", None) is not None)
        if trainer.eval_dataset is None or isinstance(trainer.eval_dataset, dict):
            raise UsageError("pilot= forecasts the loss of an evaluation: give the Trainer one eval_dataset.")

    def step(self, batch: list[Any], _: int) -> None:
        """Make an update by the trainer's own training step."""
        batch, items = self.trainer.get_batch_samples(iter(batch), len(batch), self.trainer.args.device)
        for inputs in batch:
            self.trainer.training_step(self.model, inputs, items)
        self.stepped(self.trainer.args.max_grad_norm, self.schedules)

    def evaluate(self) -> float:
        """Return the loss of the trainer's evaluation."""
        options = {"ignore_keys": None, "metric_key_prefix": "eval"}
        return float(self._evaluate(self.trainer, self.trainer.get_eval_dataloader(), options)["eval_loss"])


class ModuleRun(_Copied):
    """A run of a Lightning module, as a pilot takes it."""

    def __init__(self, trainer: Any, module: Any, validation: Any) -> None:
        attached, module._trainer = module._trainer, None  # or the trainer were copied as well
        configs = trainer.lr_scheduler_configs
        try:
            super().__init__(
                module, trainer.optimizers[0], [c.scheduler for c in configs], trainer.train_dataloader,
                trainer.accumulate_grad_batches,
            )  # fmt: skip
        finally:
            module._trainer = attached
        self.model._trainer = attached
        self.model.__dict__.update(log=_unlogged, log_dict=_unlogged)
        self.trainer, self.configs, self._validation = trainer, configs, validation

    @staticmethod
    def check(trainer: Any, module: Any) -> None:
        """Refuse what has no twins."""
        scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        _check_alone(trainer.world_size, list(trainer.optimizers), scaler)
        if not module.automatic_optimization:
            raise UsageError(f"pilot= cannot make twins of a module that optimizes by itself. {INSTEAD}")
        if not trainer.val_dataloaders:
            raise UsageError("pilot= forecasts the loss of a validation: the run needs one.")

    def step(self, batch: list[Any], update: int) -> None:
        """Make an update by the module's own training step."""
        strategy, self.batches = self.trainer.strategy, getattr(self, "batches", 0)
        self.model.train()
        for inputs in batch:
            inputs = strategy.batch_to_device(
                strategy.precision_plugin.convert_input(inputs), dataloader_idx=0
            )
            with strategy.precision_plugin.train_step_context():
                loss = self.model.training_step(inputs, self.batches)
            self.batches += 1
            loss = loss["loss"] if isinstance(loss, dict) else loss
            if loss is not None:
                (loss / self.parts).backward()
        per_epoch = max(1, int(min(self.trainer.num_training_batches, 1e9)) // self.parts)
        due = [
            s for s, c in zip(self.schedules, self.configs, strict=True)
            if c.interval == "step" or update % per_epoch == 0
        ]  # fmt: skip
        self.stepped(self.trainer.gradient_clip_val, due)

    def evaluate(self) -> float:
        """Return what the module logs of its validation."""
        self.model.eval()
        with torch.no_grad():
            return float(self._validation(self.trainer, self.model))


def _unlogged(*_: Any, **__: Any) -> None:
    """Take the place of a module's ``log``, which is of the run alone."""
