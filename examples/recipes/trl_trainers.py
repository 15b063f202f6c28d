"""TRL, SFT, DPO and GRPO on a bf16 model: found by the callback, fixed from the plain checkpoint, resumed.

python examples/recipes/trl_trainers.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import halfulp as hu
from halfulp.integrations.huggingface import AuditCallback

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(50))]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_base(folder: Path) -> None:
    """A checkpoint as one would download it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=len(WORDS), pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def text(seed: int, length: int) -> str:
    return " ".join(f"w{(seed * 7 + i * 3) % 50}" for i in range(length))


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def trainer(kind: str, folder: Path, *, fixed: bool, callbacks: Any = ()) -> Any:
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 12, "save_steps": 4, "per_device_train_batch_size": 4,
        "learning_rate": 1e-5, "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True,
        "bf16": False, "disable_tqdm": True, "logging_steps": 6, "seed": 1, "gradient_checkpointing": False,
    }  # fmt: skip
    base = folder.parents[1] / "base"
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer(), "callbacks": list(callbacks)}
    if kind == "SFT":
        data = Dataset.from_list([{"text": text(i, 12)} for i in range(32)])
        made = SFTTrainer(args=SFTConfig(**settings), train_dataset=data, **given)
    elif kind == "GRPO":
        data = Dataset.from_list([{"prompt": text(i, 4)} for i in range(32)])
        settings |= {"num_generations": 4, "max_completion_length": 8}
        made = GRPOTrainer(
            args=GRPOConfig(**settings), reward_funcs=different_words, train_dataset=data, **given
        )
    else:
        rows = [
            {"prompt": text(i, 4), "chosen": " " + text(i, 6), "rejected": " " + text(i + 9, 6)}
            for i in range(32)
        ]
        made = DPOTrainer(args=DPOConfig(**settings), train_dataset=Dataset.from_list(rows), **given)
    if fixed:
        made.create_optimizer()
        made.optimizer = hu.WriteBack(made.optimizer, "bf16", "sr", model=made.model)
    return made


def main(folder: Path) -> dict[str, Any]:
    lost = []
    make_base(folder / "base")
    for kind in ("SFT", "DPO", "GRPO"):
        here = folder / kind
        plain = trainer(kind, here / "plain", fixed=False, callbacks=[AuditCallback(["bf16"])])
        plain.train()
        lost.append(f"{kind} {shared.lost(here / 'plain' / 'halfulp'):.0%}")
        fixed = trainer(kind, here / "fixed", fixed=True)
        fixed.train(resume_from_checkpoint=str(here / "plain" / "checkpoint-4"))
        again = trainer(kind, here / "again", fixed=True)
        again.train(resume_from_checkpoint=str(here / "fixed" / "checkpoint-8"))
        shared.assert_equal(fixed.model, again.model)
    return {"audit": f"lost: {', '.join(lost)}", "fix": "in mid-run, all three", "resume": "bit for bit"}


if __name__ == "__main__":
    shared.report(main)
