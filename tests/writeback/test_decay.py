"""Weight decay goes through the policy: 2000 steps of decay alone, each a twentieth of half a gap."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import halfulp as hu
from halfulp.writeback import Kahan

STEPS, LR, DECAY = 2000, 1e-3, 0.1
TARGET = (1 - LR * DECAY) ** STEPS  # 0.81872, exp(-0.2) to 1e-5
GAP = 2.0**-8  # of bf16 in [0.5, 1)
pytestmark = pytest.mark.usefixtures("one_thread")


def decayed(policy: Any, n: int = 64, grid: str = "bf16", **options: Any) -> torch.Tensor:
    """Weights of 1 after STEPS steps with zero gradients."""
    model = torch.nn.Linear(n, n, bias=False)
    torch.nn.init.ones_(model.weight)
    opt = hu.WriteBack(
        torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY), grid, policy, model=model, **options
    )
    model.weight.grad = torch.zeros(n, n)
    for _ in range(STEPS):
        opt.step()
    return model.weight.detach().double()


def test_the_target_is_exponential_decay() -> None:
    assert abs(TARGET - math.exp(-0.2)) < 1e-5


def test_nearest_does_not_decay_at_all() -> None:
    """A step of 1e-4 is below half a gap (2**-9 below 1) for ever."""
    assert torch.equal(decayed("rne", n=8), torch.ones(8, 8).double())


def test_a_master_lands_on_the_nearest_code() -> None:
    """The master rounds 2000 times in float32, 2**-25 each, far less than what separates TARGET from the
    midpoint between its neighbours: the stored value is the code nearest to TARGET."""
    nearest = hu.grid("bf16").round(torch.tensor(TARGET, dtype=torch.float64))
    assert torch.equal(decayed("master", n=8), torch.full((8, 8), float(nearest)).double())
    assert abs(float(nearest) - TARGET) <= GAP / 2


def test_kahan_stays_within_a_gap() -> None:
    """The decay is taken of the stored value, which is within half a gap of the compensated one, so the
    rate is off by up to half a gap in 0.82: 0.2 * 2**-9 in all, beside the half gap of the last rounding."""
    w = decayed("kahan", n=8)
    assert bool(((w - TARGET).abs() <= GAP / 2 + 0.2 * GAP / 2).all())


def test_kahan_with_a_short_carry() -> None:
    """A carry in bfloat16 has eight bits, so that it loses up to 2**-9 of itself, a half gap at most, a step:
    less than 4 % of a step of decay, 0.04 * 0.18 in all."""
    w = decayed(Kahan(torch.bfloat16), n=8)
    assert bool(((w - TARGET).abs() <= GAP / 2 + 0.2 * GAP / 2 + 0.04 * 0.18).all())


def test_stochastic_is_right_on_average() -> None:
    """Unbiased: the mean over 4096 coordinates is TARGET within five standard errors. A coordinate's variance
    is below the sum of its steps' (gap * step - step**2), that is GAP * (1 - TARGET)."""
    w = decayed("sr")
    assert set((w / GAP).frac().unique().tolist()) == {0.0}
    standard_error = math.sqrt(GAP * (1 - TARGET) / w.numel())
    assert abs(float(w.mean()) - TARGET) <= 5 * standard_error
    assert float(w.std()) > GAP  # each on its own


def test_deadzone_stochastic_is_the_same_here() -> None:
    """Every proposal lies in the dead zone, so that the two policies draw the same bits for the same end."""
    assert torch.equal(decayed("deadzone-sr"), decayed("sr"))


def test_eco_decays_too() -> None:
    """With zero gradients v is zero, D = eps and the error is fed back through m / eps: it grows by 1 / b1 a
    step until it crosses half a gap. The moment leads b1 / (1 - b1) = 9 steps of half a gap at most."""
    w = decayed("eco", n=8)
    assert bool((w < 1.0).all())
    assert bool(((w - TARGET).abs() <= 9 * GAP / 2 + GAP).all())
