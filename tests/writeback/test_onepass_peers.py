"""What others promise of stochastic rounding and of error bits, asked of ours.

torchao (test_low_bit_optim): the mean of many draws is the value, and bfloat16 weights follow a float32 run
at a rate of 1e-5. heavyball (test_stochastic_utils_cpu): the mean error and the largest are below its bounds.
FlashOptim (test_ecc_invariants): seven invariants of error bits over every mantissa, exceptions as counts.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import onepass_reference
from halfulp.kernels.onepass_reference import away, composed, kept_master
from halfulp.numbers.streams import Stream

real = np.float32


def test_torchao_the_mean_of_draws_is_the_value() -> None:
    """32 values below 100, 100,000 draws each, to 3e-5 absolute and relative."""
    x = torch.rand(32, generator=torch.Generator().manual_seed(0)) * 100
    many = x.view(-1, 1).repeat(1, 100_000)
    drawn = kernels.round(many, hu.grid("bf16"), Stream(seed=0, name="x", step=1))
    torch.testing.assert_close(drawn.double().mean(1), x.double(), atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_torchao_bfloat16_follows_float32_at_a_small_rate(moments: Any) -> None:
    """Five steps of AdamW at 1e-5 on one sample: the loss is that of mixed precision. Nearest is behind."""
    torch.manual_seed(2024)
    parts = [torch.nn.Linear(32, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 128)]
    wide = torch.nn.Sequential(*parts)
    narrow, stuck = (copy.deepcopy(wide).bfloat16() for _ in range(2))
    x = torch.randn(4, 32)
    mixed = torch.optim.AdamW(wide.parameters(), lr=1e-5)
    ours = [
        hu.AdamW(m.named_parameters(), lr=1e-5, weight_decay=0.01, policy=policy, moments=moments)
        for m, policy in ((narrow, "sr"), (stuck, "rne"))
    ]
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = wide(x)
        loss = out.sum()
        mixed.zero_grad()
        loss.backward()
        mixed.step()
        losses = []
        for model, opt in zip((narrow, stuck), ours, strict=True):
            losses.append(model(x.bfloat16()).sum())
            opt.zero_grad()
            losses[-1].backward()
            opt.step()
        torch.testing.assert_close(losses[0].float(), loss.float(), rtol=1.6e-2, atol=1e-5)
    drawn, nearest = (abs(float((x - loss).detach())) for x in losses)
    assert nearest > 2 * drawn


def test_heavyball_draws_stay_close_to_the_source() -> None:
    """2048 normal values times 3, 256 draws: below 5e-3 on average and 2.5e-2 at most."""
    x = torch.randn(2048, generator=torch.Generator().manual_seed(0)) * 3
    total = torch.zeros(2048, dtype=torch.float64)
    for step in range(256):
        total += kernels.round(x, hu.grid("bf16"), Stream(seed=0, name="x", step=step)).double()
    off = (total / 256 - x.double()).abs()
    assert float(off.mean()) < 5e-3
    assert float(off.max()) < 2.5e-2


@pytest.mark.parametrize("up", [False, True], ids=["drawn down", "drawn up"])
@pytest.mark.parametrize("exponent", [0, 1, 127])
def test_flashoptim_invariants_of_error_bits(
    exponent: int, up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mantissa of subnormal, smallest normal and ordinary numbers. Sixteen bits are exact, so four of
    the seven hold without exception; eight bits are exact where the weight alone is, and the seventh (sixteen
    better than eight) fails exactly where eight bits lose nothing."""
    monkeypatch.setattr(
        onepass_reference.reference, "stochastic_up", lambda part, _: (part > 0) & np.full(part.shape, up)
    )
    z = (np.arange(2**23, dtype=np.uint32) | np.uint32(exponent << 23)).view(real)
    errors = []
    for kind in (np.int16, np.int8):
        kept = kept_master(z, np.dtype(kind), Stream(seed=0, name="z"))
        weight = away(kept)
        rest = ((kept.view(np.int32) - weight.view(np.int32)) >> (8 if kind == np.int8 else 0)).astype(kind)
        errors.append(np.abs(composed(weight, rest).astype(np.float64) - z))
    e16, e8 = errors
    e0 = np.abs(away(z).astype(np.float64) - z)
    assert not e16.any()  # the second, third, fourth and sixth
    assert not e8[e0 == 0].any()  # the first
    relative = np.maximum(np.abs(z.astype(np.float64)), 2.0**-149)
    if exponent:
        assert (e8 / relative).max() < 2.0**-15  # so the fifth has no case
    r0 = e0 / relative
    middle = (r0 >= 1 / 32767) & (r0 < 1 / 127)
    assert np.array_equal(middle & (e16 >= e8), middle & (z.view(np.uint32) & 255 == 0))
