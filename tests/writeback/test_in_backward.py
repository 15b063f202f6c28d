"""Steps inside the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from onepass_models import adamw, assert_same_dicts, model_of

import halfulp as hu


def test_an_audit_does_not_see_steps_in_the_backward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so, and the training goes on."""
    model = torch.nn.Linear(16, 16).bfloat16()
    opt = hu.AdamW(model.named_parameters(), lr=1e-3)
    opt.in_backward()
    with hu.Audit(opt, ["bf16"], model=model, out=tmp_path / "run") as audit:
        for _ in range(3):
            model(torch.ones(2, 16).bfloat16()).sum().backward()
            opt.step()
    assert opt.steps == 3
    assert audit.trouble is not None
    assert "given up after step 0: weights move inside the backward" in audit.trouble
    assert capsys.readouterr().err.count("inside the backward") == 1


def test_steps_inside_the_backward_are_those_of_step() -> None:
    """And no gradient is left."""
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(5)).bfloat16()
    models = [model_of(torch.bfloat16), model_of(torch.bfloat16)]
    opts = [adamw(m) for m in models]
    opts[1].in_backward()
    for _ in range(3):
        for model, opt in zip(models, opts, strict=True):
            opt.zero_grad()
            model(x).square().mean().backward()
            if opt is opts[1]:
                assert all(p.grad is None for p in model.parameters())
            opt.step()
        assert opts[0].events.rows
        assert len(opts[0].events.rows) == len(opts[1].events.rows)
    assert_same_dicts([models[0].state_dict()], [models[1].state_dict()])
    model, opt = models[1], opts[1]
    model(x).square().mean().backward()
    with pytest.raises(hu.UsageError, match="second gradient"):
        model(x).square().mean().backward()
