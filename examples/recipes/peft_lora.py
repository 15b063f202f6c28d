"""PEFT LoRA with bf16 adapters: found, fixed, resumed. PEFT keeps adapters in float32 unless told otherwise.

python examples/recipes/peft_lora.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import halfulp as hu


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=61
    )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"])
    return get_peft_model(LlamaForCausalLM(config).bfloat16(), lora, autocast_adapter_dtype=False)


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        ids = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(step % 8))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def main(folder: Path) -> dict[str, Any]:
    model = make()
    assert {p.dtype for p in trained(model)} == {torch.bfloat16}
    optimizer = torch.optim.AdamW(trained(model), lr=2e-5)
    with hu.Audit(optimizer, ["bf16"], model=model, out=folder / "trace"):
        train(model, optimizer, 0, 40)
    lost = shared.lost(folder / "trace", at_least=0.3)

    optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=model)
    train(model, optimizer, 40, 60)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "state.pt")
    train(model, optimizer, 60, 80)

    again = make()
    resumed = hu.WriteBack(torch.optim.AdamW(trained(again), lr=2e-5), "bf16", "sr", model=again)
    saved = torch.load(folder / "state.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, 60, 80)
    shared.assert_equal(model, again)
    return {"audit": f"{lost:.0%} lost", "fix": "in mid-run", "resume": "bit for bit"}


if __name__ == "__main__":
    shared.report(main)
