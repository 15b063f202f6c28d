"""Scales that move with the data: their rules, and that storing a stored tensor changes nothing."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import CONTAINERS, NUMPY, assert_same, fits, tensor

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import reference
from halfulp.numbers.containers import container

BLOCKS = {
    "mxfp8_e4m3": 8,
    "mxfp8_e5m2": 15,
    "mxfp6_e2m3": 2,
    "mxfp6_e3m2": 4,
    "mxfp4": 2,
}  # name: emax (OCP MX 1.0)
INTEGERS = [f"int{b}{per}" for b in range(2, 9) for per in ("", "/row", "/g16")]
DQT = [f"int{b}/dqt" for b in (2, 3, 4, 8)]
IDEMPOTENT = [*INTEGERS, *DQT, "int4/asym", "int8/row/asym", *BLOCKS, "nvfp4"]


def fitting(names: list[str]) -> pytest.MarkDecorator:
    """Every grid in every container that it fits."""
    found = [(name, dtype) for name in names for dtype in CONTAINERS if fits(name, dtype)]
    return pytest.mark.parametrize(
        ("name", "dtype"), found, ids=[f"{name} in {dtype}" for name, dtype in found]
    )


def samples(dtype: torch.dtype, n: int = 40) -> list[torch.Tensor]:
    """Tensors of 5 by 70 values: rows of very different sizes, zero rows, one row of equal values,
    negative ones only, and the smallest numbers there are."""
    found = []
    for seed in range(n):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((5, 70)) * 0.05 * 10.0 ** rng.uniform(-5, 1, (5, 1))
        if seed % 4 == 1:
            x[2], x[3] = 0.0, 0.0371
        if seed % 4 == 2:
            x = -np.abs(x)
        if seed % 8 == 3:
            x *= 10.0 ** rng.uniform(-6, -3)
        found.append(torch.from_numpy(x).to(dtype))
    return found


@fitting(IDEMPOTENT)
def test_rounding_twice_is_rounding_once(name: str, dtype: torch.dtype) -> None:
    """The scales of a rounded tensor leave it as it is, and so a zero proposal is always frozen."""
    g = hu.grid(name)
    if g.integer and g.scaling is not None and torch.finfo(dtype).bits == 16:
        bits = {torch.bfloat16: 8, torch.float16: 11}[dtype] - (g.bits - 1)
        if bits < 8:  # too few for a scale
            with pytest.raises(hu.UsageError, match="bits for the scale"):
                g.round(torch.ones(4, dtype=dtype))
            return
    for x in samples(dtype):
        q = g.round(x)
        assert_same(g.round(q), q, name)
        assert bool(hu.frozen(q, torch.zeros_like(q), g).all())
        audit = kernels.audit(x, torch.zeros_like(x), [g])
        assert int(audit.counts[:, 0, 0].sum()) == x.numel()
        written = kernels.write_back(q, q.clone(), g)
        assert int(written.counts[:, 0].sum()) == q.numel()


@pytest.mark.parametrize(
    "name", ["int8", "int4/g16", "int3/dqt", "mxfp4", "nvfp4", "int4/absmean", "int8@100"]
)
@pytest.mark.parametrize("shape", [(), (1,), (40,), (3, 50), (0,), (2, 0)])
def test_nothing_but_zeros(name: str, shape: tuple[int, ...]) -> None:
    """All-zero and empty tensors have finite positive scales and stay as they are."""
    zeros = torch.zeros(shape)
    g = hu.grid(name)
    scales = g.scales(zeros)
    assert bool((scales > 0).all() and scales.isfinite().all())
    for x in (zeros, -zeros):
        assert_same(g.round(x), x)
        assert_same(g.round(x, hu.Stream(seed=0, name="z")), x)
    assert bool(hu.frozen(zeros, zeros, g).all())


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", CONTAINERS, ids=str)
def test_mx_scales(name: str, dtype: torch.dtype) -> None:
    """A block of 32 has the factor 2**(floor(log2 of its largest magnitude) - emax), an E8M0 number."""
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((4, 100)) * 10.0 ** rng.uniform(-4, 3, (4, 1))).astype(NUMPY[dtype])
    x[0, 40], x[1, 3] = np.nan, np.inf
    got = hu.grid(name).scales(tensor(x)).reshape(4, 4)
    for i in range(4):
        for j in range(4):
            block = [abs(Fraction(float(v))) for v in x[i, 32 * j : 32 * j + 32] if math.isfinite(v)]
            biggest, exponent = max(block), -200
            while Fraction(2) ** (exponent + 1) <= biggest:
                exponent += 1
            assert float(got[i, j]) == 2.0 ** max(exponent - BLOCKS[name], -127)
    assert float(hu.grid(name).scales(torch.full((1,), 1e-45))[0]) == 2.0**-127


def test_nv_scales() -> None:
    """Block scales of nvfp4 are positive e4m3 numbers times one power of two, and the largest magnitude
    of a block lands on 6 unless the block is four thousand times smaller than the largest."""
    rng = np.random.default_rng(4)
    e4m3 = set(hu.grid("e4m3").values().tolist())
    for seed in range(20):
        sizes = 10.0 ** rng.uniform(-3 if seed % 2 else -8, 0, (6, 1))
        x = torch.from_numpy(rng.standard_normal((6, 16)) * sizes).float()
        scales = hu.grid("nvfp4").scales(x).reshape(6)
        peak = x.abs().max().item()
        fits = 2.0 ** math.floor(math.log2(448 * 6 / peak))
        assert any(all(s > 0 and s * factor in e4m3 for s in scales.tolist()) for factor in (fits, 2 * fits))
        biggest = x.abs().amax(dim=1)
        codes = hu.grid("nvfp4").round(x).abs().amax(dim=1).double() / scales
        assert bool((codes[biggest * 4096 > peak] == 6).all())


TOP = [*IDEMPOTENT, "int4/absmean", "int8/absmean/row", "int4/g16/asym", "int3/dqt/row"]


@fitting(TOP)
def test_finite_values_stay_finite(name: str, dtype: torch.dtype) -> None:
    """At the container's largest numbers, where a scale that was rounded up would make the largest code
    infinite: every leading bit pattern of the last four binades, alone and among smaller ones."""
    g = hu.grid(name)
    box = container(dtype)
    kinds = np.array([1 + i / 256 for i in range(256)]), np.array([0, 2.0**-20, 2.0**-8, 1 - 2.0**-9])
    fine = np.unique((kinds[0][:, None] + kinds[1] / 256).reshape(-1))
    sizes = np.concatenate([np.ldexp(fine, e) for e in range(box.emax - 3, box.emax + 1)] + [[box.largest]])
    with np.errstate(over="ignore"):  # what is not a number of the container is its largest
        x = np.minimum(sizes, box.largest).astype(NUMPY[dtype])
    x = np.where(np.isfinite(x.astype(np.float64)), x, NUMPY[dtype].type(box.largest))
    rows = np.zeros((3 * len(x), 16), dtype=NUMPY[dtype])
    rows[:, 0] = np.concatenate([x, -x, x])
    rows[2 * len(x) :, 1:] = -x[:, None]
    rows[: len(x), 5] = x / 3
    stream = hu.Stream(seed=1, name="top")
    assert g.scaling is not None
    parts = [rows]
    if (
        g.scaling.per == "tensor" or g.scaling.rule == "nv"
    ):  # the largest of all decides, so one row at a time
        last = np.abs(rows[:, 0].astype(np.float64)) >= 0.95 * box.largest
        parts = [row[None] for row in (*rows[:: len(rows) // 50], *rows[last])]
    for part in parts:
        t = tensor(part)
        scales = g.scales(t)
        assert bool((scales > 0).all() and scales.isfinite().all())
        with np.errstate(over="ignore"):
            expected = reference.round(part, g.within(dtype))
        assert bool(np.isfinite(expected.astype(np.float64)).all())
        q = g.round(t)
        assert_same(q, tensor(expected), name)
        assert bool(g.round(t, stream).isfinite().all())
        if "absmean" not in name:  # the mean of rounded values is another one
            assert_same(g.round(q), q, name)
            assert bool(hu.frozen(q, torch.zeros_like(q), g).all())
        assert bool(g.decode(g.encode(t, scale=scales), scale=scales, dtype=dtype).isfinite().all())


def test_a_given_scale_must_leave_the_largest_code_finite() -> None:
    """With @S the scale is the user's: a grid whose largest code the container does not hold does not fit."""
    for name in ("int4@1e-38", "int8@3e-37", "int4@2.2e-38/asym"):
        with pytest.raises(hu.UsageError, match="does not fit float32: its largest magnitude"):
            hu.grid(name).round(torch.ones(3))
        assert bool(hu.grid(name).round(torch.ones(3).double()).isfinite().all())


@fitting(["int8", "int4", "int2/row", "int8/row", "int4/g16", "int4/absmean", "int8/absmean/row"])
def test_integer_scales(name: str, dtype: torch.dtype) -> None:
    """Absmax and absmean, per tensor, row or group, to as many bits as the container leaves room for;
    every multiple of the scale that has a code is a number of the container."""
    g = hu.grid(name)
    assert g.scaling is not None
    bits = min({"bfloat16": 8, "float16": 11, "float32": 24}.get(NUMPY[dtype].name, 53), 24) - (g.mantissa)
    x = np.random.default_rng(5).standard_normal((4, 70)).astype(NUMPY[dtype])
    row = {"tensor": 280, "row": 70, "group": 16}[g.scaling.per]
    wide = x.astype(np.float64)
    segments = [wide.reshape(-1)] if row == 280 else [r[i : i + row] for r in wide for i in range(0, 70, row)]
    scales = g.scales(tensor(x)).tolist()
    assert len(scales) == len(segments) == g.scaling.segments((4, 70))
    for scale, segment in zip(scales, segments, strict=True):
        size = np.abs(segment).max() if g.scaling.rule == "absmax" else np.abs(segment).mean()
        assert math.frexp(scale)[0] * 2**bits % 1 == 0
        half = 2.0 ** (
            math.frexp(scale)[1] - bits - 1
        )  # the nearest of those, but for a double's last digits
        assert abs(scale - size / g.largest) <= half * (1 + 2.0**-20)
        multiples = torch.arange(-g.largest, g.largest + 1, dtype=torch.float64) * scale
        assert torch.equal(multiples.to(dtype).double(), multiples)


def test_a_given_scale_is_the_given_scale() -> None:
    """@S divides by S: exactly for a power of two, to the bits that the container leaves otherwise."""
    for factor in (16, 0.25, 1):
        g = hu.grid(f"int4@{factor}")
        assert g.scaling is None
        assert g.largest == 7 / factor
    assert abs(float(hu.grid("int8@100").scales(torch.ones(1))[0]) * 100 - 1) <= 2.0**-17


@given(st.integers(0, 2**32), st.integers(2, 8), st.floats(-6, 2))
def test_dqt_scale(seed: int, bits: int, size: float) -> None:
    """Stochastic write-back at s = Qp / max(W_old), as published: x = W' s; x >= Qp gives Qp, x <= Qn
    gives Qn, otherwise floor or ceil; divided by s. The scale is rounded to 25 - bits bits, so values
    agree to 2**(bits - 25) relative and which of two neighbours is drawn only where words are."""
    rng = np.random.default_rng(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    old = rng.integers(low, high + 1, 300) * 10.0**size
    old[0] = high * 10.0**size  # the grid is kept while a weight sits at the top
    new = old + rng.standard_normal(300) * 10.0**size
    w_old, w_new = (torch.from_numpy(v).float() for v in (old, new))
    g = hu.grid(f"int{bits}/dqt")
    assert (g.lowest, g.largest) == (low, high)
    out = kernels.write_back(w_old, w_new.clone(), g, "stochastic", hu.Stream(seed=seed, name="w")).out

    s = high / float(w_old.max())
    x = w_new.double().numpy() * s
    code = out.double().numpy() * s
    tolerance = 2.0 ** (bits - 24) * (high + 1)
    assert np.abs(code - np.rint(code)).max() <= tolerance
    code = np.rint(code)
    top, bottom = x >= high + tolerance, x <= low - tolerance
    assert (code[top] == high).all()
    assert (code[bottom] == low).all()
    inside = ~(top | bottom)
    assert (np.abs(code - x)[inside] < 1 + tolerance).all()
    assert code.min() >= low
    assert code.max() <= high


def test_dqt_at_the_start() -> None:
    """Absmean projection, as published: s = Qp / mean|W|; clamp(round(W s), Qn, Qp) / s."""
    w = torch.from_numpy(np.random.default_rng(6).standard_normal(5000) * 0.02).float()
    g = hu.grid("int3/absmean/asym")
    s = 3 / w.abs().double().mean()
    expected = (w.double() * s).round().clamp(-4, 3) / s
    clear = ((w.double() * s) % 1 - 0.5).abs() > 1e-4
    got = g.round(w).double()
    assert torch.allclose(got[clear], expected[clear], rtol=2.0**-21, atol=0)  # the scale has 22 bits
    assert len(got.unique()) == 8


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ([-3.0, -1.0, 0.0], 1.0),  # no positive weight: the largest magnitude stands in
        ([-3.0, -1.0, -0.5], 1.0),
        ([0.0, 0.0, 0.0], 1.0),  # nothing at all: one
        ([math.nan, -3.0, math.inf], 1.0),  # what is not finite has no say
        ([6.0, -30.0, 1.0], 2.0),  # the signed maximum, however large the negative ones
    ],
)
def test_dqt_fallbacks(old: list[float], expected: float) -> None:
    """Where the published rule divides by zero or turns its grid around, ours has a scale."""
    g, w = hu.grid("int3/dqt"), torch.tensor(old)
    assert g.scales(w).tolist() == [expected]
    out = kernels.write_back(torch.nan_to_num(w, 0, 0, 0), torch.tensor([100.0, -100.0, 0.4]), g).out
    assert out.tolist() == [3 * expected, -4 * expected, 0.0]


def test_a_quotient_that_hides_its_side_of_a_midpoint() -> None:
    """A given scale of all 53 bits: x / scale can round to a midpoint that x is above, or below. Midpoint
    times scale tells, by rational arithmetic, unless it is x when rounded: then that counts as a tie."""
    rng = np.random.default_rng(7)
    scale = rng.uniform(0.001, 1.0, (3, 1))
    middle = (rng.integers(-64, 64, (3, 4000)) + 0.5) * scale
    x = np.concatenate([middle, np.nextafter(middle, 9e9), np.nextafter(middle, -9e9)], axis=1)
    ratio = x / scale
    x = np.where((np.abs(ratio) % 1 == 0.5) & (ratio * scale != x), x, 0.0)
    assert (np.abs(x) > np.abs(ratio * scale))[x != 0].any()
    assert (np.abs(x) < np.abs(ratio * scale))[x != 0].any()
    codes = [[round(Fraction(v) / Fraction(*s)) for v in row] for s, row in zip(scale, x, strict=True)]
    g = hu.grid("int8/row").within(torch.float64)
    expected = np.array(codes) * scale
    assert np.array_equal(reference.round(x, g, scale=scale[:, 0]), expected)
    assert np.array_equal(g.round(torch.from_numpy(x), scale=torch.from_numpy(scale[:, 0])).numpy(), expected)


def test_scales_can_be_held() -> None:
    """scale= fixes the scales of a moving grid, one a segment, whatever the data are."""
    x = torch.from_numpy(np.random.default_rng(7).standard_normal((3, 64))).float()
    g = hu.grid("mxfp4")
    scales = g.scales(x) * 2
    rounded = g.round(x, scale=scales)
    assert not torch.equal(rounded, g.round(x))
    codes = g.encode(x, scale=scales)
    assert_same(g.decode(codes, scale=scales), rounded)
    each = scales.reshape(3, 2).repeat_interleave(32, dim=1)
    assert set((rounded.double() / each).abs().unique().tolist()) <= {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    q = rounded
    assert_same(kernels.write_back(q, q.clone(), g, scale=scales).out, q)


def test_small_block_scales_are_rounded_down() -> None:
    """Below e4m3's normal numbers, to at least one quantum: the largest of a block gets the largest code."""
    x = torch.zeros(5 * 16, dtype=torch.float32)
    for block, scale in enumerate((448.0, 0.25 / 512, 1 / 512, 3 / 512, 5.75 / 512)):
        x[16 * block] = 6 * scale
    expected = [448.0, 1 / 512, 1 / 512, 3 / 512, 5 / 512]
    assert hu.grid("nvfp4").scales(x).tolist() == expected
    assert reference.scales(x.numpy(), hu.grid("nvfp4").within(torch.float32)).tolist() == expected


def test_the_smallest_scale_is_the_smallest_number() -> None:
    """Rounded down where bits are missing, but never to nothing."""
    grid, smallest = hu.grid("int8/row"), 2.0**-149
    rows = torch.tensor([[1.0], [127.0], [253.0], [254.0]], dtype=torch.float64).mul(smallest).float()
    expected = [smallest, smallest, smallest, 2 * smallest]
    assert grid.scales(rows).tolist() == expected
    assert reference.scales(rows.numpy(), grid.within(torch.float32)).tolist() == expected


def test_ends_of_block_scales() -> None:
    """An exponent of eight bits, of which one is taken; a float64 asks for more."""
    x, grid = torch.zeros(3 * 32, dtype=torch.float64), hu.grid("mxfp4")
    x[0], x[32], x[64] = 2.0**200, 2.0**-200, 2.0**129
    expected = [2.0**127, 2.0**-127, 2.0**127]
    assert grid.scales(x).tolist() == expected
    assert reference.scales(x.numpy(), grid.within(torch.float64)).tolist() == expected


def test_the_mean_of_one() -> None:
    x, grid = torch.tensor([[3.5], [-7.0]]), hu.grid("int4/absmean/row")
    assert grid.scales(x).tolist() == [0.5, 1.0]
    assert reference.scales(x.numpy(), grid.within(torch.float32)).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "mxfp6_e2m3"])
def test_a_block_of_zeros_has_the_smallest_scale(name: str) -> None:
    x, grid = torch.tensor([0.0] * 32 + [1.0] * 32), hu.grid(name)
    scales = grid.scales(x).tolist()
    assert scales[0] == 2.0**-127 < scales[1]
    assert reference.scales(x.numpy(), grid.within(torch.float32)).tolist() == scales


def test_the_smallest_block_scale_is_twice_the_smallest_number() -> None:
    """Half of it, which is nvfp4's smallest element times the scale, is the smallest number of a float32."""
    x = torch.zeros(16)
    x[0] = 6 * 2.0**-148
    assert hu.grid("nvfp4").scales(x).tolist() == [2.0**-148]
    assert reference.scales(x.numpy(), hu.grid("nvfp4").within(torch.float32)).tolist() == [2.0**-148]


def test_a_block_scale_that_the_container_cannot_hold_is_the_one_below() -> None:
    """65504 / 6 wants 341.17 * 32; e4m3's nearest is 352, but 6 * 352 * 32 is more than a float16 holds."""
    x = torch.zeros(32, dtype=torch.float16)
    x[0], x[16] = 65504.0, 1000.0  # 5.2 of the same unit is a number of e4m3's: 5.0
    assert hu.grid("nvfp4").scales(x).tolist() == [320.0 * 32, 5.0 * 32]
    assert reference.scales(x.numpy(), hu.grid("nvfp4").within(torch.float16)).tolist() == [
        320.0 * 32,
        5.0 * 32,
    ]
    assert hu.grid("nvfp4").round(x).tolist()[0] == 6 * 320.0 * 32


def test_what_arrives_of_the_largest_proposals() -> None:
    """Products stay finite by a power of two that is the binade of the largest, and of no other."""
    d = np.zeros(5, np.float32)
    d[1] = 1.5 * 2.0**126
    assert reference.arrival(np.zeros_like(d), d, d).tolist() == [[2.25 * 2.0**252] * 2]
    d[1] = 2.0**127  # in the last binade, whose unit has no normal inverse, they do not
    with np.errstate(over="ignore"):
        assert reference.arrival(np.zeros_like(d), d, d).tolist() == [[np.inf] * 2]
    d[:2] = 2.0**-120, 2.0**-134  # whose square is 2**-14 * 2**-134, just above nothing, in that unit
    assert reference.arrival(np.zeros_like(d), d, d).tolist() == [[2.0**-240 + 2.0**-268] * 2]


def test_codes_of_the_reference_with_its_own_scales_and_with_given_ones() -> None:
    grid, x = hu.grid("int8/row").within(torch.float32), np.array([[1.0, -2.0], [3.0, 0.5]], np.float32)
    own = reference.scales(x, grid)
    codes = reference.encode(x, grid)
    np.testing.assert_array_equal(codes, reference.encode(x, grid, own))
    np.testing.assert_array_equal(codes, kernels.encode(torch.from_numpy(x), grid).numpy())
    twice = reference.encode(x, grid, 2 * own)
    np.testing.assert_array_equal(
        twice, kernels.encode(torch.from_numpy(x), grid, scale=torch.from_numpy(2 * own))
    )
    assert twice.tolist() != codes.tolist()
    each = (codes.astype(np.int64) ^ 128) - 128  # two's complement of eight bits
    np.testing.assert_array_equal(reference.decode(codes, grid), each)  # the elements, without their scales
    np.testing.assert_array_equal(reference.decode(codes, grid, own), each * own[:, None])


def test_the_spacing_where_a_quotient_underflows() -> None:
    """A weight that is as good as zero beside its block has the spacing of the subnormal codes."""
    w = np.zeros((1, 32))
    w[0, :2] = 1e100, 1e-290
    d = np.full_like(
        w, 2.0**100
    )  # of the block's scale, 2**127, it is 2**-27; the smallest half gap is 2**-10
    found = reference.audit(w, d, [hu.grid("mxfp8_e4m3")])["counts"]
    assert found[0, 0, reference.AUDIT_COUNTS.index("symmetric")] == 32
    kernel = kernels.audit(torch.from_numpy(w), torch.from_numpy(d), ["mxfp8_e4m3"]).counts
    assert kernel.numpy().tolist() == found.tolist()


def test_the_spacing_of_the_largest_scale() -> None:
    """Half a spacing is compared, because twice a proposal may be beyond what a double holds."""
    w, d = torch.full((32,), 1.7e308, dtype=torch.float64), torch.full((32,), 1.2e307, dtype=torch.float64)
    found = kernels.audit(w, d, ["int4/absmean"], phase=False).counts
    assert found[0, 0, reference.AUDIT_COUNTS.index("symmetric")] == 32
