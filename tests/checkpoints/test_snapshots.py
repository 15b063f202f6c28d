"""One byte of a bf16 value finds every change within its bound; places are coded and decoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp.checkpoints import places, snapshots


def bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("bound", [1e-39, 1e-6, 7.27e-6, 0.001, 1.0, 3e38])
def test_no_change_within_the_bound_hides(bound: float) -> None:
    """All 65,536 values by all 256 values with the same lower byte: what the byte does not see and the bound
    allows is among the values of which all bits are kept."""
    old = np.repeat(np.arange(65536), 256)
    new = (old & 0xFF) | (np.tile(np.arange(256), 65536) << 8)
    a, b = bf16(old).double(), bf16(new).double()
    within = (b - a).abs() < bound + a.abs() / 4
    unseen = torch.from_numpy(old != new) & within & b.isfinite()
    assert unseen.any()
    kept = snapshots.LowByte(bf16(np.arange(65536)).view(torch.int16), bound)
    small = torch.zeros(65536, dtype=torch.bool)
    small[kept.small] = True
    assert bool(small[torch.from_numpy(old)][unseen].all())


@pytest.mark.parametrize("seed", range(5))
def test_one_byte_finds_what_two_find(seed: int) -> None:
    """Steps of all sizes below the bound, zeros that change their sign, values that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(20_000, generator=generator) * 4
    x = {"w": (torch.randn(20_000, generator=generator) * 10**-size).bfloat16(), "b": torch.zeros(30)}
    x["w"][:100] = 0
    one, two = hu.Sync(x, bound=1e-5), hu.Sync(x)
    assert one.kept_bytes < two.kept_bytes
    for step in range(6):
        move = (torch.rand(20_000, generator=generator) * 2 - 1) * 1e-5 * 0.99
        some = torch.rand(20_000, generator=generator) < 0.3
        x["w"][some] = (x["w"].double() + move)[some].bfloat16()
        if step == 2:
            x["w"][:50] *= -1
        if step == 3:
            x["w"][-3:] = torch.tensor([np.inf, -np.inf, np.nan])
        assert one.density() == two.density() > 0
        a, b = one.take(), two.take()
        assert torch.equal(a.parts["w"].indices, b.parts["w"].indices)
        assert a.target == b.target
        assert one.full().to_bytes() == two.full().to_bytes()


def test_a_bias_that_begins_at_zero_is_why_a_bound_is_needed() -> None:
    """The lower byte of 2^-11 is that of 0."""

    def followed(bound: float, old: float, new: float) -> int:
        x = {"w": torch.cat([torch.ones(100), torch.tensor([old])]).bfloat16()}
        sync = hu.Sync(x, bound=bound)
        x["w"][100] = new
        return sync.take().changed

    assert followed(1e-9, 0, 2**-11) == 1  # 0 is below every bound
    assert followed(0.01, 2**-9, 2**-11) == 1
    assert followed(1e-9, 2**-9, 2**-11) == 0  # it moved by far more than the bound


def test_what_one_byte_cannot_tell_is_refused() -> None:
    x = {"w": torch.ones(100).bfloat16()}
    sync = hu.Sync(x, bound=0.01)
    assert sync.full().changed == 100
    x["w"][3] = 1.01
    with pytest.raises(hu.UsageError, match=r"call take\(\) first"):
        sync.full()
    sync.take()
    assert sync.full().parts["w"].values[3] == x["w"][3]
    x["w"] = x["w"][:50]
    with pytest.raises(hu.UsageError, match="begin again with another Sync"):
        sync.take()
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(hu.UsageError, match="bound="):
            hu.Sync(x, bound=wrong)


@pytest.mark.parametrize("numel", [1, 7, 8, 1000, 2**21])
@pytest.mark.parametrize("share", [0.0, 1e-3, 0.05, 0.3, 1.0])
def test_places_survive_every_form(numel: int, share: float) -> None:
    at = np.flatnonzero(np.random.default_rng(0).random(numel) < share)
    form, where = places.smallest(at, numel)
    assert places.why_unfit(form, where, numel, at.size) is None
    assert places.from_gaps(places.to_gaps(at)).tolist() == at.tolist()  # type: ignore[union-attr]
    assert places.of_mask(places.to_mask(at, numel), at.size).tolist() == at.tolist()
    assert where.nbytes <= min((numel + 7) // 8, 4 * at.size) or (at.size, numel) == (0, 1)


def test_wide_gaps() -> None:
    at = np.array([0, 127, 128, 255, 2**14, 2**21 + 2**14, 2**31, 2**40, 2**57])
    assert places.from_gaps(places.to_gaps(at)).tolist() == at.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("coded", [[128], [0, 255], [128] * 9 + [1], [255] * 8 + [127] + [0], [255] * 10])
def test_bytes_that_are_no_gaps(coded: list[int]) -> None:
    assert places.from_gaps(np.array(coded, dtype=np.uint8)) is None
