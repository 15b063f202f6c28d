"""timm: a ViT in bf16 with an optimizer of ``create_optimizer_v2``: found, fixed, resumed.

python examples/recipes/timm_loop.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import timm
import torch
from timm.optim import create_optimizer_v2

import halfulp as hu


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=2, num_classes=10
    ).bfloat16()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return create_optimizer_v2(model, opt="adamw", lr=1e-5, weight_decay=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step % 8)
        x, y = torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        optimizer.step()


def main(folder: Path) -> dict[str, Any]:
    model = make()
    optimizer = optimizer_of(model)
    with hu.Audit(optimizer, ["bf16"], model=model, out=folder / "trace"):
        train(model, optimizer, 0, 30)
    lost = shared.lost(folder / "trace")

    optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=model)
    train(model, optimizer, 30, 50)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    train(model, optimizer, 50, 70)

    again = make()
    resumed = hu.WriteBack(optimizer_of(again), "bf16", "sr", model=again)
    saved = torch.load(folder / "state.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, 50, 70)
    shared.assert_equal(model, again)
    return {"audit": f"{lost:.0%} lost", "fix": "in mid-run, both groups", "resume": "bit for bit"}


if __name__ == "__main__":
    shared.report(main)
