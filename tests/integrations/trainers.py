"""Small models and what reads their logs, for the tests of trainers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from audit_reference import Brute, batches, made, weights

from halfulp.audit.rehearsal.as_if import RandomState
from halfulp.pilots.prices import Prices


def records(file: Path) -> list[Any]:
    """A W&B run file: a LevelDB log (blocks of 32 KiB, records in pieces) of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768  # the rest of a block is padding
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data) or kind == 0:
            break  # not written yet
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            found.append(wandb_internal_pb2.Record())
            found[-1].ParseFromString(whole)
            whole = b""
    return found


def history(file: Path) -> list[dict[str, float]]:
    """The rows of a run, once W&B's own process has written the last record."""
    deadline = time.monotonic() + 300
    while not any(r.WhichOneof("record_type") == "exit" for r in records(file)):
        assert time.monotonic() < deadline, "W&B does not finish its file"
        time.sleep(0.1)
    rows = [r.history.item for r in records(file) if r.WhichOneof("record_type") == "history"]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in rows]


def trainer(
    folder: Path,
    model: Any,
    callbacks: list[Any],
    optimizers: Any = (None, None),
    made_by: Any = None,
    **changed: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    ids = torch.randint(0, 61, (64, 12), generator=batches())
    data = [{"input_ids": row, "labels": row} for row in ids]
    settings = {
        "output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "lr_scheduler_type": "linear", "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 1, **changed,
    }  # fmt: skip
    return Trainer(
        model, TrainingArguments(**settings), train_dataset=data, callbacks=callbacks, optimizers=optimizers,
        optimizer_cls_and_kwargs=made_by,
    )  # fmt: skip


def lit_model(pl: Any, brute: Brute | None = None, *, manual: bool = False, fail_at: int = 0) -> Any:
    """The MLP as a Lightning module, which copies weights around every step for brute force."""

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = made("mlp")
            self.automatic_optimization = not manual
            self.taken = 0
            self.losses: list[float] = []

        def training_step(self, batch: Any, _: int) -> Any:
            x = batch[0]
            loss = torch.nn.functional.cross_entropy(self.net(x), (x[:, 0] > 0).long())
            self.losses.append(loss.item())
            if not manual:
                return loss
            for o in self.optimizers():
                o.zero_grad()
            self.manual_backward(loss)
            before = weights(self)
            lr = {n: 0.1 if p.dim() >= 2 else 1e-3 for n, p in self.named_parameters()}
            for o in self.optimizers():
                o.step()
            self.taken += 1
            brute.step(self.taken, before, weights(self), lr, loss.item())
            return None

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
            self.losses.clear() if self.trainer.accumulate_grad_batches == 1 else None
            before, lr = weights(self), optimizer.param_groups[0]["lr"]
            super().optimizer_step(epoch, index, optimizer, closure)
            self.taken += 1
            loss = sum(self.losses) / len(self.losses)
            self.losses.clear()
            if brute is not None:
                brute.step(self.taken, before, weights(self), dict.fromkeys(before, lr), loss)
            if self.taken == fail_at:
                raise RuntimeError("no more batches")

        def configure_optimizers(self) -> Any:
            if manual:
                matrices = [p for p in self.parameters() if p.dim() >= 2]
                rest = [p for p in self.parameters() if p.dim() < 2]
                return [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=1e-3)]
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.randn(64, 16, generator=batches()))
            return torch.utils.data.DataLoader(data, batch_size=8)

    return Lit()


def lit_trainer(pl: Any, folder: Path, callbacks: list[Any], **changed: Any) -> Any:
    settings = {
        "max_steps": 4, "max_epochs": 9, "default_root_dir": str(folder), "accelerator": "cpu",
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "callbacks": callbacks, **changed,
    }  # fmt: skip
    return pl.Trainer(**settings)


def board(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard reads below a folder: values by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for place in sorted({file.parent for file in folder.rglob("events.out.tfevents*")}):
        read = EventAccumulator(str(place))
        read.Reload()
        for name in read.Tags()["scalars"]:
            found.setdefault(name, {}).update({e.step: e.value for e in read.Scalars(name)})
    return found


def single(shares: Any) -> list[float]:
    return np.asarray(shares).astype(np.float32).tolist()


SPECS = ["e4m3@128", "e5m2:sr"]


PRICED = ["e4m3@128", "bf16:sr"]


def walked(run: Any, updates: int) -> list[torch.Tensor]:
    """The weights of a run on whole batches, made before that of its trainer."""
    drawn = RandomState()
    for update in range(1, updates + 1):
        run.step(run.batch(update), update)
    drawn.put_back()
    return list(run.model.parameters())


def assert_priced(found: Prices | None, said: str) -> None:
    assert found is not None
    assert sorted(p.spec for p in found.prices) == sorted(PRICED)
    for price in found.prices:
        assert price.seen.twin is not None
        assert price.seen.upper >= price.seen.reference - 1e-3
    assert "What each format costs this run in loss" in said
    assert not found.notes
