"""accelerate: the optimizer is wrapped before ``prepare``; ``save_state`` and ``load_state`` resume it.

python examples/recipes/accelerate_loop.py
torchrun --standalone --nproc-per-node 2 examples/recipes/accelerate_loop.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import halfulp as hu


def run(folder: Path, *, fixed: bool, load: Path | None = None, audit: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    AcceleratorState._reset_state(reset_partial_state=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if fixed:
        optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=model)
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(torch.randn(256, 32, generator=generator), batch_size=8)
    watched = hu.Audit(optimizer, ["bf16"], model=model, out=folder / "trace") if audit else None
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if load is not None:
        accelerator.load_state(str(load))
        first = 1
    with watched or torch.no_grad(), torch.enable_grad():
        for epoch in range(first, 2):
            for x in loader:
                with accelerator.accumulate(prepared):
                    loss = (prepared(x.bfloat16()) - x).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == 0:
                accelerator.save_state(str(folder / "state"))
    return model


def main(folder: Path) -> dict[str, Any]:
    run(folder / "plain", fixed=False, audit=True)
    lost = shared.lost(folder / "plain" / "trace")
    model = run(folder / "fixed", fixed=True)
    again = run(folder / "again", fixed=True, load=folder / "fixed" / "state")
    shared.assert_equal(model, again)
    taken = run(folder / "taken", fixed=True, load=folder / "plain" / "state")
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), taken.parameters(), strict=True))
    shown = {"audit": f"{lost:.0%} lost", "fix": "in mid-run, from a plain state", "resume": "bit for bit"}
    return shown | shared.ranks_agree(model)


if __name__ == "__main__":
    shared.report(main)
