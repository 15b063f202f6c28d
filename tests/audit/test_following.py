"""Coordinates that are followed with torch operations: the bits and counts of the reference, on any grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from audit_reference import GRIDS, Brute, made, train

import halfulp as hu
from halfulp.audit.meter import device_moved as following
from halfulp.kernels import reference


def hard(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after: many magnitudes, ties, zeros, the ends of the range, what is not finite."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) * np.exp2(rng.integers(-12, 5, shape))
    w = np.where(rng.random(shape) < 0.5, np.round(w * 32) / 32, w)
    d = rng.normal(size=shape) * np.exp2(rng.integers(-16, 1, shape))
    w, d = torch.from_numpy(w).float(), torch.from_numpy(d).float()
    d[rng.random(shape) < 0.3] = 0.0
    flat, change = w.view(-1), d.view(-1)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.3e38, -3.3e38, 448.0, 1e-40])
    flat[: len(special)] = special[: flat.numel()]
    change[5:7] = torch.tensor([3.3e38, -3.3e38])
    return w, w + d


@pytest.mark.parametrize("grid", [*GRIDS, "e2m1"])
def test_bits_and_counts_are_those_of_the_reference(grid: str) -> None:
    g = hu.grid(grid).within(torch.float32)
    shape = (5, 317)
    bits = np.zeros((1, (5 * 317 + 7) // 8), dtype=np.uint8)
    ours = torch.from_numpy(bits.copy())
    for step in range(3):
        w, after = hard(shape, step)
        with np.errstate(invalid="ignore", over="ignore"):
            expected = reference.audit(w.numpy(), after.numpy() - w.numpy(), [g], phase=False, moved=bits)
        never = following.follow(w, after, [g], ours)
        np.testing.assert_array_equal(ours.numpy(), bits)
        np.testing.assert_array_equal(never.numpy(), expected["counts"][:, :, following.NEVER])
    assert 0 < never.sum() < never.numel() * 768


@pytest.mark.parametrize("count", [1, 7, 8, 9, 800])
def test_bits_there_and_back(count: int) -> None:
    flags = torch.rand(count, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = following.packed(flags)
    np.testing.assert_array_equal(bits.numpy(), np.packbits(flags.numpy(), bitorder="little"))
    assert torch.equal(following.unpacked(bits, count), flags)


def test_an_audit_that_follows_so_has_the_numbers_of_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder's way on a device, taken on the CPU: without the kernel's own following of coordinates."""

    def apart(before: Any, after: Any, grids: Any, *, moved: Any, stay: Any, phase: bool) -> Any:
        assert stay is None
        found = following.kernels.audit(before, after, grids, after=True, phase=phase)
        found.counts[:, :, following.NEVER] = following.follow(before, after, grids, moved)
        return found

    monkeypatch.setattr(following, "audit", apart)
    grids = ["bf16", "e5m2", "int8/row"]
    model, brute, memory = made("mlp"), Brute(grids), hu.Memory()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    audit = hu.Audit(opt, grids, model=model, out=memory)
    audit.pipeline.meter.batching = False  # batches are for the CPU
    with audit:
        train(model, opt, 4, brute=brute, audit=audit)
    brute.assert_equal(memory.trace)
