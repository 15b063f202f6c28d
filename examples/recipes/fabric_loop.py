"""Lightning Fabric: the optimizer is wrapped before ``fabric.setup``.

python examples/recipes/fabric_loop.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch
from lightning.fabric import Fabric

import halfulp as hu


def run(folder: Path, *, fixed: bool, first: int = 0, load: Path | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    ranks = shared.ranks()
    fabric = Fabric(
        accelerator="cpu", devices=ranks, precision="bf16-true", strategy="ddp" if ranks > 1 else "auto"
    )
    fabric.launch()
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if fixed:
        optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=model)
    prepared, prepared_optimizer = fabric.setup(model, optimizer)
    if load is not None:
        fabric.load(load, {"model": prepared, "optimizer": prepared_optimizer})
    with hu.Audit(optimizer, ["bf16"], model=model, out=folder / "trace"):
        for step in range(first, 40):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            prepared_optimizer.zero_grad()
            fabric.backward((prepared(x) - x).float().square().mean())
            fabric.clip_gradients(prepared, prepared_optimizer, max_norm=1.0)
            prepared_optimizer.step()
            if step == 19:
                fabric.save(folder / "state.ckpt", {"model": prepared, "optimizer": prepared_optimizer})
    return model


def main(folder: Path) -> dict[str, Any]:
    run(folder / "plain", fixed=False)
    lost = shared.lost(folder / "plain" / "trace")
    model = run(folder / "fixed", fixed=True)
    again = run(folder / "again", fixed=True, first=20, load=folder / "fixed" / "state.ckpt")
    shared.assert_equal(model, again)
    run(folder / "taken", fixed=True, first=20, load=folder / "plain" / "state.ckpt")
    shown = {"audit": f"{lost:.0%} lost", "fix": "in mid-run, from a plain state", "resume": "bit for bit"}
    return shown | shared.ranks_agree(model)


if __name__ == "__main__":
    shared.report(main)
