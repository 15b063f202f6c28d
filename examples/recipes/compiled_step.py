"""``torch.compile`` around the model: the write-back steps outside of the graph, and names stay the model's.

python examples/recipes/compiled_step.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shared
import torch

import halfulp as hu


def run(folder: Path, *, fixed: bool, compiled: bool, first: int = 0, load: Path | None = None) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if fixed:
        optimizer = hu.WriteBack(optimizer, "bf16", "sr", model=model)
    if load is not None:
        saved = torch.load(load, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    # "inductor" where a compiler is at hand; the graphs are the same
    called = torch.compile(model, backend="aot_eager") if compiled else model
    with hu.Audit(optimizer, ["bf16"], model=model, out=folder / "trace"):
        for step in range(first, 40):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.zero_grad()
            (called(x) - x).float().square().mean().backward()
            optimizer.step()
            if step == 19:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / "state.pt")
    return model


def main(folder: Path) -> dict[str, Any]:
    for name in ("plain", "fixed", "again", "eager"):
        (folder / name).mkdir()
    run(folder / "plain", fixed=False, compiled=True)
    lost = shared.lost(folder / "plain" / "trace")
    model = run(folder / "fixed", fixed=True, compiled=True)
    shared.assert_equal(model, run(folder / "eager", fixed=True, compiled=False))
    shared.assert_equal(
        model, run(folder / "again", fixed=True, compiled=True, first=20, load=folder / "fixed" / "state.pt")
    )
    return {"audit": f"{lost:.0%} lost", "fix": "the bits of the eager run", "resume": "bit for bit"}


if __name__ == "__main__":
    shared.report(main)
