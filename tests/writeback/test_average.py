"""Averages stored in bfloat16 follow those in float32, resume bit by bit, and move."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfulp as hu
from halfulp.writeback import average_, ema

DECAY, STEPS = 0.999, 3000


def walk(step: int, start: torch.Tensor) -> torch.Tensor:
    """Weights that drift by a fifth of their size over the run, each its own way, and jitter."""
    generator = torch.Generator().manual_seed(step)
    way = torch.randn(start.shape, generator=torch.Generator().manual_seed(-1))
    jitter = torch.randn(start.shape, generator=generator) * 1e-4
    return start + way * 0.004 * min(1.0, step / 1500) + jitter


def test_it_follows_the_float32_average_where_nearest_rounding_stands_still() -> None:
    """Over 3,000 steps at 0.999: most nearest averages never move; others are right to their noise."""
    start = (torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16().float()
    exact, nearest, stored = start.clone(), start.bfloat16(), start.bfloat16()
    moved = {
        "nearest": torch.zeros(20_000, dtype=torch.bool),
        "stored": torch.zeros(20_000, dtype=torch.bool),
    }
    for step in range(1, STEPS + 1):
        weights = walk(step, start)
        exact.lerp_(weights, 1 - DECAY)
        before = nearest.clone(), stored.clone()
        nearest.lerp_(weights.bfloat16(), 1 - DECAY)
        average_([stored], [weights], DECAY, step=step)
        moved["nearest"] |= nearest != before[0]
        moved["stored"] |= stored != before[1]

    def error(average: torch.Tensor) -> float:
        way = exact - start
        return ((average.float() - exact).norm() / way.norm()).item()

    assert moved["nearest"].float().mean() < 0.3
    assert moved["stored"].float().mean() > 0.99
    assert error(nearest) > 0.7
    assert error(stored) < 0.05
    off = stored.double() - exact.double()
    assert off.mean().abs() < 4 * off.std() / 20_000**0.5  # no bias


def test_it_goes_on_bit_by_bit() -> None:
    """In torch's own ``AveragedModel``, whose state is all there is."""

    def run(stop: int | None) -> AveragedModel:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.LayerNorm(20)).bfloat16()
        averaged = AveragedModel(model, multi_avg_fn=ema(0.99, seed=7))
        for step in range(12):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(
                        torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p.dtype) / 10
                    )
            averaged.update_parameters(model)
            if step == stop:
                file = io.BytesIO()
                torch.save(averaged.state_dict(), file)
                file.seek(0)
                averaged = AveragedModel(copy.deepcopy(model), multi_avg_fn=ema(0.99, seed=7))
                averaged.load_state_dict(torch.load(file, weights_only=True))
        return averaged

    whole, resumed, plain = run(None), run(5), run(None)
    for a, b, c in zip(whole.parameters(), resumed.parameters(), plain.parameters(), strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_wide_averages_are_torchs() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 20)
    ours = AveragedModel(model, multi_avg_fn=ema(0.99))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    for _ in range(5):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ours.update_parameters(model)
        theirs.update_parameters(model)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_refusals() -> None:
    x = [torch.ones(3).bfloat16()]
    with pytest.raises(hu.UsageError, match="1 averages and 0 weights"):
        average_(x, [], 0.9, step=1)
    with pytest.raises(hu.UsageError, match="between 0 and 1, not 2"):
        average_(x, x, 2, step=1)
