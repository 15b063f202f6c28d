"""A loop of your own in bf16, with a GradScaler, clipping and a schedule: found, fixed in mid-run, resumed.

python examples/recipes/plain_loop.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import shared
import torch
from torch.nn.utils import clip_grad_norm_

import halfulp as hu

LR = 1e-4


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))


TEACHER = make().requires_grad_(False)


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
    return (model(x.bfloat16()).float() - TEACHER(x) * 2).square().mean()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for step in range(first, last):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()


def held_out(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return sum(loss_of(model, 10_000 + i).item() for i in range(8)) / 8


def main(folder: Path) -> dict[str, Any]:
    model = make().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with hu.Audit(optimizer, ["bf16"], model=model, out=folder / "trace"):
        train(model, optimizer, 0, 50)
    lost = shared.lost(folder / "trace")
    found_at = held_out(model)

    # What would have become of it.
    plain, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    plain_optimizer.load_state_dict(state)
    train(plain, plain_optimizer, 50, 350)

    optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=model)  # in mid-run: weights and moments are kept
    train(model, optimizer, 50, 200)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    train(model, optimizer, 200, 350)
    assert held_out(model) < held_out(plain)

    again = make().bfloat16()
    resumed = hu.WriteBack(torch.optim.AdamW(again.parameters(), lr=LR), "bf16", "sr", model=again)
    saved = torch.load(folder / "state.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(again, resumed, 200, 350)
    shared.assert_equal(model, again)
    return {
        "audit": f"{lost:.0%} lost",
        "fix": f"loss {found_at:.4f} when found; 300 steps on {held_out(plain):.4f} plain, "
        f"{held_out(model):.4f} fixed",
        "resume": "bit for bit",
    }


if __name__ == "__main__":
    shared.report(main)
