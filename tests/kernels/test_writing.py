"""Write-back kernels against the NumPy reference, to the last bit: modes, carries, counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_inputs import STATIC, draw, grids_for, quiet
from oracle import assert_same, tensor

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import reference


@pytest.mark.parametrize(
    ("options", "written", "left"),
    [({}, 1 + 2**-7, -(2**-9)), ({"carry_in": True}, 1 + 2**-7, -(2**-9)), ({"carry_in": False}, 1.0, 2**-9)],
)
def test_what_is_carried_by_hand(options: dict[str, bool], written: float, left: float) -> None:
    """Beside 1.0 bfloat16 has gaps of 2**-7: a quarter of one is lost, three quarters are not."""
    q, z = torch.ones(1), torch.ones(1) + 2**-9
    carry = torch.full((1,), 2**-8)
    r, _ = reference.write_back(
        q.numpy(), z.numpy(), hu.grid("bf16"), carry=(rest := carry.numpy().copy()), **options
    )
    assert (r.item(), rest.item()) == (written, left)
    given = kernels.Carry(carry, options.get("carry_in", True))
    out = kernels.write_back(q, z, "bf16", carry=given).out
    assert (out.item(), carry.item()) == (written, left)


def test_a_carry_that_would_leave_the_range() -> None:
    """It is not added: the proposal is as it was, and what is summed of it is finite."""
    largest = float(np.finfo(np.float32).max)
    q, z = torch.ones(2), torch.tensor([largest, -largest])
    carry = torch.tensor([largest, -largest])
    r, facts = reference.write_back(
        q.numpy(), z.numpy(), hu.grid("bf16"), carry=(rest := carry.numpy().copy())
    )
    assert r.tolist() == [hu.grid("bf16").largest, -hu.grid("bf16").largest]
    assert np.isfinite(facts["sums"]).all()
    got = kernels.write_back(q, z, "bf16", carry=carry, sums=True)
    assert_same(got.out, r)
    assert_same(got.sums, facts["sums"])
    assert_same(carry, rest)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("mode", reference.MODES)
def test_write_back(dtype: torch.dtype, shape: tuple[int, ...], mode: str, bad: bool) -> None:
    """New values, counts, sums and moved bits, over two steps, so that moved bits accumulate."""
    w, d, _ = draw(shape, dtype, seed=3, bad=bad)
    for g in grids_for(dtype):
        q = quiet(reference.round, w, g)
        q = np.where(np.isfinite(q), q, 0).astype(q.dtype)
        moved = np.zeros((q.size + 7) // 8, dtype=np.uint8)
        moved_kernel = tensor(moved)
        for step in range(2):
            stream = hu.Stream(seed=4, name=g.name, step=step, offset=2**33 + 5 * step)
            z = quiet(lambda q, step: (q + (d if step == 0 else -d)).astype(q.dtype), q, step)
            r, facts = quiet(reference.write_back, q, z, g, reference.MODES[mode], stream, moved=moved)
            proposed = tensor(z)
            got = kernels.write_back(tensor(q), proposed, g, mode, stream, moved=moved_kernel, sums=True)
            what = f"{g.name} {mode} step {step}"
            assert got.out.data_ptr() == proposed.data_ptr()
            assert_same(proposed, r, what)
            assert_same(got.counts, facts["counts"], f"{what} counts")
            assert_same(got.sums, facts["sums"], f"{what} sums")
            assert_same(moved_kernel, moved, f"{what} moved")
            plain = kernels.write_back(tensor(q), tensor(z), g, mode, stream, out=torch.empty_like(proposed))
            assert_same(plain.out, r, f"{what} out=")
            assert_same(plain.counts[:, :4], facts["counts"][:, :4], f"{what} without moved bits")
            assert not plain.counts[:, 4].any()
            assert not plain.sums.any()
            q = r


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("mode", reference.MODES)
def test_write_back_over_what_is_stored(mode: str, bad: bool) -> None:
    """The result may go where the stored values were."""
    w, d, _ = draw((2000,), torch.float32, seed=31, bad=bad)
    q = np.where(np.isfinite(w), quiet(reference.round, w, hu.grid("bf16")), 0).astype(np.float32)
    stream = hu.Stream(seed=1, name="over", step=1)
    aside = kernels.write_back(tensor(q), tensor(q + d), "bf16", mode, stream, out=torch.empty(2000))
    stored = tensor(q)
    over = kernels.write_back(stored, tensor(q + d), "bf16", mode, stream, out=stored)
    assert_same(stored, aside.out.numpy(), mode)
    assert_same(over.counts, aside.counts.numpy(), mode)


@pytest.mark.parametrize("static", [n for n in STATIC if n != "float32"])
def test_write_back_of_any_finite_value_rounds_it(static: str) -> None:
    """All bit patterns' kinds, in whole tiles: the one-pass loop writes what rounding alone gives."""
    bits = np.random.default_rng(5).integers(0, 2**32, 768 * 300, dtype=np.uint32)
    z = np.where(np.isfinite(bits.view(np.float32)), bits.view(np.float32), np.float32(0.1))
    q, stream = torch.zeros(z.size), hu.Stream(seed=1, name=static, step=1)
    for mode, drawn in (("nearest", None), ("stochastic", stream)):
        expected = kernels.round(tensor(z), static, drawn)
        assert_same(kernels.write_back(q, tensor(z), static, mode, stream).out, expected.numpy(), mode)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("carry_in", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_write_back_with_a_carry(
    dtype: torch.dtype, shape: tuple[int, ...], carry_in: bool, bad: bool
) -> None:
    """What is not written is kept in the carry and, if asked, proposed again."""
    w, d, _ = draw(shape, dtype, seed=30, bad=bad)
    for g in grids_for(dtype):
        q = quiet(reference.round, w, g)
        q = np.where(np.isfinite(q), q, 0).astype(q.dtype)
        carry = np.zeros(q.shape, dtype=q.dtype)
        for step in range(2):
            mode = ("nearest", "stochastic")[step]
            stream = hu.Stream(seed=4, name=g.name, step=step)
            z, kept = quiet(lambda q: (q + d).astype(q.dtype), q), tensor(carry)
            r, facts = quiet(
                reference.write_back, q, z, g, reference.MODES[mode], stream, carry=carry, carry_in=carry_in
            )
            given = kernels.Carry(kept, add=carry_in)
            got = kernels.write_back(tensor(q), tensor(z), g, mode, stream, sums=True, carry=given)
            what = f"{g.name} {mode}"
            assert_same(got.out, r, what)
            assert_same(kept, carry, f"{what} carry")
            assert_same(got.counts, facts["counts"], f"{what} counts")
            assert_same(got.sums, facts["sums"], f"{what} sums")
            q = r


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "non-finite"])
@pytest.mark.parametrize("n", [1, 767, 768, 5000])
def test_two_byte_companions(n: int, bad: bool) -> None:
    """Stored values in bfloat16 are those in float32; a short carry is the exact one, rounded at the end."""
    w, d, _ = draw((n,), torch.float32, seed=31, bad=bad)
    tiny = np.float32(1e-39) * np.arange(n, dtype=np.float32)  # subnormal carries are rounded too
    for name in ("bf16", "e4m3@128", "m3", "int4@16/asym", "mxfp4"):
        rounded = kernels.round(tensor(np.where(np.isfinite(w), w, 0).astype(np.float32)), name)
        for mode in reference.MODES:
            stream, z = hu.Stream(seed=4, name=name), rounded + tensor(d)
            carries = (torch.float32, torch.bfloat16, torch.float16) if mode == "nearest" else ()
            for dtype in (None, *carries):
                start = None if dtype is None else tensor(tiny).to(dtype)
                exact = None if start is None else start.float().clone()
                wide = kernels.write_back(rounded, z.clone(), name, mode, stream, sums=True, carry=exact)
                short = kernels.write_back(
                    rounded.bfloat16(), z.clone(), name, mode, stream, sums=True, carry=start
                )
                for field in ("out", "counts", "sums"):
                    assert_same(getattr(short, field), getattr(wide, field), f"{name} {mode} {dtype}")
                if exact is not None and start is not None:
                    assert_same(start, exact.to(start.dtype), f"{name} {mode} {dtype}")


def test_prepared_is_work_still_to_be_done() -> None:
    """Everything is checked at once, nothing written before the work is called."""
    q = torch.zeros(1000)
    z, view = torch.ones(1000), torch.ones(1000, 2)[:, 0]
    carry = torch.zeros(1000, dtype=torch.float16)
    prepared = [kernels.prepare(q, x, "e4m3", carry=carry) for x in (z, view)]
    with pytest.raises(hu.UsageError, match="must match"):
        kernels.prepare(q[:5], z, "e4m3")
    assert not any(p.written.counts.any() for p in prepared)
    for call in [call for p in prepared for call in p.work]:
        call()
    assert [p.written.counts[:, 0].sum() for p in prepared] == [0, 0]
    assert bool((z == 1).all() and (view == 1).all())


@pytest.mark.parametrize("n", [0, 1, 15, 16, 768, 100_001])
def test_set_aside(n: int) -> None:
    """The bfloat16 values of a tensor, and whether they are all of it: in one value of any position not."""
    x = torch.randn(n).bfloat16().float()
    off = x.clone()
    off[-1:] = 1.0 + 2.0**-9
    places = [torch.empty(n, dtype=torch.bfloat16), torch.empty(n + 1, dtype=torch.bfloat16)[1:]]
    assert kernels.set_aside([x, off], places) == [True, n == 0]
    assert_same(places[0], x.bfloat16())
    column = torch.stack([x, x], dim=1)[:, 0]
    assert kernels.set_aside([column], places[1:]) == [True]
    assert_same(places[1], x.bfloat16())
    with pytest.raises(hu.UsageError, match="float32 into contiguous bfloat16 of the same shape"):
        kernels.set_aside([x.double()], places[:1])


def test_counts_by_definition() -> None:
    """What the counts mean, spelled out once on a tile: frozen, endpoint, subnormal, zero, non-finite."""
    w = torch.tensor([1.0, 1.0, 448.0, -1000.0, 2.0**-8, 2.0**-11, 0.0, math.nan, 1.0])
    d = torch.tensor([0.05, 0.07, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, math.inf])
    a = kernels.audit(w, d, ["e4m3"])
    assert dict(zip(kernels.AUDIT_COUNTS, a.counts[0, 0].tolist(), strict=True)) == {
        "frozen": 5, "symmetric": 5, "endpoint": 2, "subnormal": 1, "zero_code": 2, "never_moved": 0,
        "dragged": 0,
    }  # fmt: skip
    assert dict(zip(kernels.SHARED_COUNTS, a.shared[0].tolist(), strict=True)) == {
        "zero_proposal": 3,
        "nonfinite": 2,
    }
    moved = torch.zeros(2, dtype=torch.uint8)
    q = torch.tensor([1.0, 1.0, 448.0, -448.0, 2.0**-8, 0.0, 0.0, 3.0, 1.0])
    z = torch.tensor([1.05, 1.07, 448.0, -447.0, 2.0**-8, 2.0**-11, 1.0, math.nan, math.inf])
    r = kernels.write_back(q, z, "e4m3", moved=moved, sums=True)
    assert r.out.tolist() == [1.0, 1.125, 448.0, -448.0, 2.0**-8, 0.0, 1.0, 3.0, 1.0]
    assert dict(zip(kernels.WRITE_COUNTS, r.counts[0].tolist(), strict=True)) == {
        "frozen": 5, "zero_proposal": 2, "endpoint": 2, "nonfinite": 2, "never_moved": 7,
    }  # fmt: skip
    assert moved.tolist() == [0b01000010, 0]


def test_deadzone_is_nearest_except_where_nearest_loses() -> None:
    """Dead-zone mode: nearest where that moves the code, stochastic where a proposal would vanish."""
    w, d, _ = draw((20_000,), torch.float32, seed=9, bad=False)
    for name in ("e4m3", "bf16", "int4@16"):
        stream = hu.Stream(seed=9, name=name)
        q = hu.grid(name).round(tensor(w))
        z = q + tensor(d)
        modes = {m: kernels.write_back(q, z.clone(), name, m, stream).out for m in reference.MODES}
        lost = (modes["nearest"] == q) & (z != q)
        assert lost.any()
        expected = torch.where(lost, modes["stochastic"], modes["nearest"])
        assert_same(modes["deadzone"], expected)
