"""Hugging Face Trainer, a bf16 model at 1e-5, gradient accumulation: found, fixed in mid-run, resumed.

python examples/recipes/hf_trainer.py
torchrun --standalone --nproc-per-node 2 examples/recipes/hf_trainer.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import halfulp as hu
from halfulp.integrations.huggingface import AuditCallback


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=64, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).bfloat16()


def trainer(folder: Path, *, fixed: bool, callbacks: Any = ()) -> Trainer:
    torch.manual_seed(1)
    start = torch.randint(0, 61, (64, 1))
    ids = (start + 7 * torch.arange(32)) % 61  # sequences that can be learned
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(folder), max_steps=60, save_steps=20, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-5, lr_scheduler_type="constant",
        logging_steps=20, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip
    made = Trainer(model(), arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))
    if fixed:
        made.create_optimizer()
        made.optimizer = hu.WriteBack(made.optimizer, "bf16", "sr", model=made.model)
    return made


def main(folder: Path) -> dict[str, Any]:
    plain = trainer(folder / "plain", fixed=False, callbacks=[AuditCallback(["bf16"])])
    plain.train()
    lost = shared.lost(folder / "plain" / "halfulp")

    # Goes on from the plain run's checkpoint at a third of the way: its moments are taken over.
    found = GPT2LMHeadModel.from_pretrained(folder / "plain" / "checkpoint-20", dtype=torch.bfloat16)
    at_20 = Trainer(found, plain.args, eval_dataset=plain.eval_dataset).evaluate()["eval_loss"]
    fixed = trainer(folder / "fixed", fixed=True)
    fixed.train(resume_from_checkpoint=str(folder / "plain" / "checkpoint-20"))
    losses = [run.evaluate()["eval_loss"] for run in (plain, fixed)]
    assert losses[1] < losses[0] < at_20

    again = trainer(folder / "again", fixed=True)
    again.train(resume_from_checkpoint=str(folder / "fixed" / "checkpoint-40"))
    shared.assert_equal(fixed.model, again.model)
    shown = {
        "audit": f"{lost:.0%} lost",
        "fix": f"loss {at_20:.4f} at step 20; at step 60 {losses[0]:.4f} plain, {losses[1]:.4f} fixed",
        "resume": "bit for bit",
    }
    return shown | shared.ranks_agree(fixed.model)


if __name__ == "__main__":
    shared.report(main)
