"""Audits of many tensors in one call, and of whole tiles in lanes, against the NumPy reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kernel_inputs import draw, grids_for, quiet
from oracle import array, assert_same, tensor

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import TILE, reference
from halfulp.kernels.auditing import Layout, Together
from halfulp.kernels.plan import plan_for

SHAPES = [(5, 700), (2,), (3, 768), (64, 24), (1, 769)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def plain(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[np.ndarray, ...]:
    """Weights before and after a step with nothing rare in them: zeros, but nothing subnormal or infinite."""
    rng = np.random.default_rng([seed, *shape])
    w, d = rng.standard_normal(shape) * 0.02, rng.standard_normal(shape) * 2.0 ** -rng.integers(4, 20, shape)
    w[rng.random(shape) < 0.05] = 0
    d[rng.random(shape) < 0.05] = 0
    kind = array(torch.empty(0, dtype=dtype)).dtype
    return w.astype(kind), (w.astype(kind) + d).astype(kind)


def rare(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[np.ndarray, ...]:
    w, d, _ = draw(shape, dtype, seed)
    return w, quiet(lambda: (w + d).astype(w.dtype))


def change(w: np.ndarray, after: np.ndarray) -> np.ndarray:
    work = np.float64 if w.dtype == np.float64 else np.float32
    return quiet(lambda: after.astype(work) - w.astype(work))


def fixed(dtype: torch.dtype) -> list[hu.Grid]:
    return [g for g in grids_for(dtype) if not plan_for(g, dtype).scaled]


def check(found: Any, expected: dict[str, np.ndarray], what: str, at: slice = slice(None)) -> None:
    for field, value in expected.items():
        assert_same(getattr(found, field)[at], value, f"{field}, {what}")


@pytest.mark.parametrize("drawn", [plain, rare])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("odds", [False, True], ids=["moved", "moved and odds"])
def test_every_number_is_that_of_each_tensor(dtype: torch.dtype, drawn: Any, odds: bool) -> None:
    """Two steps by what was made ready once; what is followed goes on in memory that all share."""
    grids = fixed(dtype)
    layout = Layout([int(np.prod(s)) for s in SHAPES])
    work = torch.float64 if dtype == torch.float64 else torch.float32
    moved = torch.zeros((len(grids), layout.total * TILE // 8), dtype=torch.uint8)
    stay = torch.ones((len(grids), layout.total * TILE), dtype=work) if odds else None
    g, kind = len(grids), np.float64 if odds and work == torch.float64 else np.float32
    kept = [(np.zeros((g, (n + 7) // 8), np.uint8), np.ones((g, n), kind)) for n in layout.sizes]
    before = torch.zeros(layout.total * TILE, dtype=dtype)
    together = Together(before, layout, grids, moved=moved, stay=stay)
    for seed in (1, 2):
        pairs = [drawn(shape, dtype, seed) for shape in SHAPES]
        then, after = ([tensor(x) for x in each] for each in zip(*pairs, strict=True))
        for tensors in (then, after):
            tensors[0] = torch.zeros(5, 1400, dtype=dtype)[:, ::2].copy_(tensors[0])  # not in place
        together.set_aside(then)
        for x, start in zip(then, layout.starts, strict=True):
            place = before[start * TILE :][: -(-x.numel() // TILE) * TILE]
            assert_same(place[: x.numel()], array(x.reshape(-1)))
            assert not place[x.numel() :].any()
        found = together.audit(after)
        for i, (w, then) in enumerate(pairs):
            bits, chances = kept[i]
            more = {"moved": bits, "stay": chances if odds else None}
            expected = quiet(reference.audit, w, change(w, then), grids, **more)
            first, tiles = layout.starts[i], len(expected["counts"])
            check(found, expected, f"{SHAPES[i]}", slice(first, first + tiles))
            assert_same(moved[:, first * TILE // 8 :][:, : bits.shape[1]], bits)


def elsewhere(x: torch.Tensor) -> None:
    x.data = x.data.clone()


def in_one_memory_but_turned(x: torch.Tensor) -> None:
    x.data = x.data.t()


def in_another_type(x: torch.Tensor) -> None:
    x.data = x.data.bfloat16()


def negated_on_reading(x: torch.Tensor) -> None:
    x.data = torch._neg_view(x.data)


@pytest.mark.parametrize("move", [elsewhere, in_one_memory_but_turned, in_another_type, negated_on_reading])
def test_values_are_found_wherever_a_tensor_has_them_now(move: Any) -> None:
    layout, grids = Layout([900, 900]), [hu.grid("bf16")]
    tensors = [torch.from_numpy(plain((30, 30), torch.float32, seed)[0].copy()) for seed in (1, 2)]
    together = Together(before := torch.zeros(layout.total * TILE), layout, grids)
    together.set_aside(tensors)
    for seed in (3, 4):
        for x in tensors:
            x.copy_(torch.from_numpy(plain((30, 30), torch.float32, seed)[1]))
        found = together.audit(tensors)
        for i, x in enumerate(tensors):
            then = before[2 * i * TILE :][:900].view(30, 30)
            alone = kernels.audit(then, x.to(torch.float32, copy=True).contiguous(), grids, after=True)
            for field in ("counts", "shared", "sums", "phase", "arrived"):
                assert_same(getattr(found, field)[2 * i :][:2], getattr(alone, field), f"{field} of {i}")
        move(tensors[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_tiles_with_nothing_rare(dtype: torch.dtype) -> None:
    for phase in (True, False):
        for grids in ([hu.grid("bf16")], fixed(dtype)):
            w, after = plain((4, 768), dtype, 3)
            expected = quiet(reference.audit, w, change(w, after), grids, phase)
            found = kernels.audit(tensor(w), tensor(after), grids, after=True, phase=phase)
            check(found, expected, str(phase))


def test_every_place_of_a_rare_value() -> None:
    """A value that is not finite, or subnormal, or large, anywhere in a tile, in weights or in proposals."""
    grids = [hu.grid(n) for n in ("bf16", "e5m2", "e4m3@128")]
    rng = np.random.default_rng(5)
    for what in range(2):
        for value in (np.nan, -np.inf, 1e-40, 2.0**-126, 3e38, 1.0):
            w, d = (rng.standard_normal(96 * 768).astype(np.float32) * s for s in (0.02, 2e-5))
            (w, d)[what][np.arange(96) * 776] = value
            expected = quiet(reference.audit, w, d, grids)
            check(kernels.audit(tensor(w), tensor(d), grids), expected, f"{value} at {what}")


def test_what_cannot_be_audited_together() -> None:
    layout, x = Layout([8, 4]), torch.zeros(2 * TILE)
    together = Together(x, layout, [hu.grid("bf16")])
    with pytest.raises(hu.UsageError, match="expected 4 values, as at the first step, found 5"):
        together.audit([torch.zeros(8), torch.zeros(5)])
    with pytest.raises(hu.UsageError, match="expected 2 tensors to audit together, found 1"):
        together.set_aside([torch.zeros(8)])
    with pytest.raises(hu.UsageError, match="laid out tile by tile"):
        Together(x[:TILE], layout, [hu.grid("bf16")])
    with pytest.raises(hu.UsageError, match="with fixed scales"):
        Together(x, layout, [hu.grid("int8")])


def test_a_sum_of_nothing_is_not_negative() -> None:
    """What arrives of proposals that all vanish is 0, not -0: kernels and ranks add in other orders."""
    q, d = np.ones(5, dtype=np.float32), np.full(5, -1e-9, dtype=np.float32)
    found = reference.arrival(q, q, d)
    assert not found.any()
    assert not np.signbit(found).any()


@pytest.mark.parametrize(("kind", "least"), [(np.float32, 1e-40), (np.float64, 1e-310)])
def test_what_arrives_of_the_smallest_proposals(kind: Any, least: float) -> None:
    """Where the inverse of their binade is beyond the type: all of it arrives, to a subnormal's digits."""
    d = np.full(5, least, dtype=kind)
    dot, square = reference.arrival(np.zeros_like(d), d, d)[0]
    assert dot == square == pytest.approx(5 * float(d[0]) ** 2, rel=1e-3, abs=0)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
def test_audit(dtype: torch.dtype, shape: tuple[int, ...], bad: bool) -> None:
    """Counts, shared counts, sums and phase sums of all grids in one pass."""
    w, d, _ = draw(shape, dtype, seed=2, bad=bad)
    grids = grids_for(dtype)
    for chosen in (
        grids,
        [g for g in grids if g.scaling is None][:1],
        [g for g in grids if g.scaling][-1:],
        [],
    ):
        expected = quiet(reference.audit, w, d, chosen)
        got = kernels.audit(tensor(w), tensor(d), chosen)
        for field, value in expected.items():
            assert_same(getattr(got, field), value, f"{field} of {[g.name for g in chosen]}")
        assert got.numel == w.size
        frozen = expected["counts"][:, :, 0].sum(axis=0)
        assert np.allclose(got.frozen().numpy() * max(w.size, 1), frozen, rtol=2.0**-22, atol=0)  # a float32
        without = kernels.audit(tensor(w), tensor(d), chosen, phase=False)
        assert_same(without.counts, got.counts)
        assert not without.phase.any()


@pytest.mark.parametrize("odds", [False, True], ids=["moved", "moved and odds"])
def test_audit_that_follows_coordinates(dtype: torch.dtype, shape: tuple[int, ...], odds: bool) -> None:
    """Over three steps: what ever moved, and how probably stochastic rounding never moved it."""
    grids, n = grids_for(dtype), math.prod(shape)
    moved = np.zeros((len(grids), (n + 7) // 8), dtype=np.uint8)
    stay = np.ones((len(grids), n), dtype=np.float64 if dtype == torch.float64 else np.float32)
    followed = {"moved": moved, "stay": stay} if odds else {"moved": moved}
    kept = {name: tensor(x) for name, x in followed.items()}
    for seed in range(3):
        w, d, _ = draw(shape, dtype, seed=20 + seed, bad=seed > 0)
        expected = quiet(reference.audit, w, d, grids, **followed)
        got = kernels.audit(tensor(w), tensor(d), grids, **kept)
        for field, value in expected.items():
            assert_same(getattr(got, field), value, f"{field} at step {seed}")
        for name, x in followed.items():
            assert_same(kept[name], x, name)


def test_proposals_in_a_wider_container() -> None:
    """float32 proposals for bfloat16 weights: the sum is rounded to the container once."""
    w, _, _ = draw((3000,), torch.bfloat16, seed=8)
    _, d, _ = draw((3000,), torch.float32, seed=8)
    grids = grids_for(torch.bfloat16)
    expected = quiet(reference.audit, w, d, grids)
    got = kernels.audit(tensor(w), tensor(d), grids)
    for field, value in expected.items():
        assert_same(getattr(got, field), value, field)
    q = hu.grid("e4m3").round(tensor(np.where(np.isfinite(w), w, 0).astype(w.dtype)))
    one = kernels.audit(q, tensor(d), ["e4m3"])
    assert int(one.counts[:, 0, 0].sum()) == int(hu.frozen(q, tensor(d), "e4m3").sum())
