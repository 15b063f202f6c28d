"""Moments in bfloat16 around torch's optimizers: right on average, and resumed bit for bit."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp.writeback import bf16_moments

KINDS: dict[str, Any] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, amsgrad=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, centered=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
}


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4))


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_bit_for_bit(kind: str) -> None:
    whole = made()
    one = KINDS[kind](whole.parameters())
    bf16_moments(one, seed=3)
    train(whole, one, range(4))
    held = [x for s in one.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.dim()]
    assert {x.dtype for x in held} == {torch.bfloat16}
    file, weights = io.BytesIO(), copy.deepcopy(whole.state_dict())
    torch.save(one.state_dict(), file)
    train(whole, one, range(4, 8))
    file.seek(0)
    again = made()
    again.load_state_dict(weights)
    resumed = KINDS[kind](again.parameters())
    bf16_moments(resumed, seed=3)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(again, resumed, range(4, 8))
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_second_moment_falls_as_in_float32() -> None:
    """Under gradients of zero it falls by a thousandth a step; nearest rounding would leave all of it."""
    weights = [torch.nn.Parameter(torch.zeros(20_000)) for _ in range(2)]
    optimizers = [torch.optim.AdamW([p], lr=0.0) for p in weights]
    end = bf16_moments(optimizers[0])
    for step in range(300):
        for p, optimizer in zip(weights, optimizers, strict=True):
            p.grad = torch.ones_like(p) if step == 0 else torch.zeros_like(p)
            optimizer.step()
    narrow, exact = (o.state[p]["exp_avg_sq"].double() for o, p in zip(optimizers, weights, strict=True))
    assert abs(float(narrow.mean() / exact.mean()) - 1) < 4 * float(narrow.std() / exact.mean()) / 20_000**0.5
    end()
    assert optimizers[0].state[weights[0]]["exp_avg_sq"].dtype == torch.float32


def test_a_write_back_has_its_own() -> None:
    with pytest.raises(hu.UsageError, match="moments='bf16'"):
        bf16_moments(hu.AdamW(made().bfloat16().parameters()))
