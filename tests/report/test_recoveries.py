"""What policies won back in the committed studies, and what `halfulp allocate` says of it."""

from __future__ import annotations

from pathlib import Path

import torch

import halfulp as hu
from halfulp.report import recoveries


def trained(out: Path, attribute: bool) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(16, 64)
    with hu.Audit(
        optimizer, ["e5m2"], model=model, out=out, scores=("e5m2", 1, 3, 64),
        rehearse=["e5m2"] if attribute else None,
    ) as audit:  # fmt: skip
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if attribute:
            audit.attribute("e5m2", lambda: model(x).square().mean(), tile=64)
    return out


def test_what_is_said_of_a_mask(tmp_path: Path) -> None:
    """A forecast where a rehearsal was attributed; evidence by score; what wins back more without masters."""
    plain = trained(tmp_path / "plain", attribute=False)
    told = list(recoveries.of_mask(hu.allocate(plain, 0.1), plain))
    assert told[0].startswith("forecast: none yet. To forecast the loss with this mask: halfulp audit")
    assert any(line.startswith("  P at 10%: ") for line in told)
    assert any("consider policy='sr' first" in line for line in told)
    known = trained(tmp_path / "known", attribute=True)
    costs = hu.Trace.open(known).attribution()["weight"]
    mask = hu.allocate(known, 0.5, score="R")
    told = list(recoveries.of_mask(mask, known))
    inside, whole = float(costs[mask.tiles["weight"].numpy()].sum()), float(costs.sum())
    assert f"({inside:.3g} of {whole:.3g}" in told[0]
    told = list(recoveries.of_mask(hu.allocate(known, 0.1, score="random").shuffled(1), known))
    assert "evidence: none of our studies has masks by random shuffled." in told
