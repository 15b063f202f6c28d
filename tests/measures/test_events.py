"""The exact event and what approximates it, coordinate by coordinate."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, CONTAINERS, NUMPY, ONE, Case, array, assert_same, exact, tensor

import halfulp as hu
from halfulp import kernels, measures
from halfulp.kernels import reference
from halfulp.measures import events

LABELS = ["bf16", "fp16", "e5m2", "e4m3", "e4m3@128", "float8_e4m3b11fnuz", "e2m1", "m2", "two bits"]
LABELS += ["int4@16", "int3@8/asym", "int8@100", "int3@3/asym", "near float32's smallest"]


def case_of(label: str, dtype: torch.dtype = torch.float32) -> Case:
    case = CASES[label].within(dtype)
    assert case is not None
    return case


def fitting(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Every label in every container that it fits."""
    found = [(name, dtype) for name in LABELS for dtype in dtypes if CASES[name].within(dtype)]
    return pytest.mark.parametrize(
        ("label", "dtype"), found, ids=[f"{name} in {dtype}" for name, dtype in found]
    )


def some_codes(case: Case, n: int, seed: int) -> np.ndarray:
    """Codes of a grid: both ends, zero, and others drawn."""
    values = case.exact.floats()
    chosen = np.random.default_rng(seed).integers(0, len(values), n)
    chosen[:6] = [0, 1, len(values) - 1, len(values) - 2, np.searchsorted(values, 0), 0]
    return values[chosen]


def proposals(q: np.ndarray, case: Case, seed: int) -> np.ndarray:
    """Changes of the order of the gaps at q: half gaps exactly, less, more, none, many gaps, not finite."""
    rng = np.random.default_rng(seed)
    gaps = np.array([min(case.exact.above(v) - v, v - case.exact.below(v)) for v in q.tolist()])
    gaps = np.where(np.isfinite(gaps), gaps, np.nan_to_num(np.abs(q)) / 4)
    scale = rng.choice([0.0, 0.5, 0.25, 1.0, 0.499999, 0.500001, 3.7, 1e-9], len(q))
    d = gaps * np.where(rng.random(len(q)) < 0.3, rng.random(len(q)), scale) * rng.choice([-1, 1], len(q))
    d[-3:] = [np.nan, np.inf, -np.inf]
    return d


@fitting(*CONTAINERS)
def test_frozen_is_its_definition(label: str, dtype: torch.dtype) -> None:
    """Frozen means that the nearest code of q + d, in the container, is q; never for a non-finite sum."""
    case = case_of(label, dtype)
    q64 = some_codes(case, 3000, seed=1)
    real = NUMPY[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        q, d = q64.astype(real), proposals(q64, case, seed=2).astype(real)
        z = (q + d).astype(real).astype(np.float64)
    expected = [
        math.isfinite(v) and case.exact.nearest(v) == a for v, a in zip(z.tolist(), q64.tolist(), strict=True)
    ]
    got = hu.frozen(tensor(q), tensor(d), case.grid)
    assert got.tolist() == expected
    assert 0.1 < np.mean(expected) < 0.9
    counts = kernels.audit(tensor(q), tensor(d), [case.grid]).counts
    assert int(counts[:, 0, 0].sum()) == sum(expected)


def test_minus_zero_is_zero() -> None:
    """A weight at zero that rounds back to -0 is frozen, and so is a zero proposal at -0."""
    q = torch.tensor([0.0, -0.0, 0.0, -0.0])
    d = torch.tensor([-1e-9, 1e-9, 0.0, 0.0])
    assert hu.frozen(q, d, "e4m3").all()
    assert not (hu.grid("e4m3").round(q) != q).any()


@pytest.mark.parametrize("label", LABELS)
def test_neighbours_and_gap(label: str) -> None:
    """Neighbours are the adjacent members of the sorted list of values, and the gap is the distance to
    the one in the direction of the proposal; infinite where there is none."""
    case = case_of(label)
    codes = some_codes(case, 800, seed=3).astype(np.float32)
    rng = np.random.default_rng(4)
    with np.errstate(over="ignore"):
        between = (codes * (1 + rng.standard_normal(len(codes)) * 0.2)).astype(np.float32)
        beside = [np.nextafter(codes, np.float32(s)) for s in (np.inf, -np.inf)]
    top = np.float32(case.exact.values[-1] / ONE)
    more = np.array([0.0, -0.0, 1e-45, -1e-45, top / 3, 3e38, -3e38], dtype=np.float32)
    x = np.concatenate([codes, between, *beside, more])
    x = x[np.isfinite(x)]
    below, above = case.grid.neighbours(tensor(x))
    want = [(case.exact.below(v), case.exact.above(v)) for v in x.tolist()]
    assert below.tolist() == [b for b, _ in want]
    assert above.tolist() == [a for _, a in want]
    up, down = (case.grid.gap(tensor(codes), torch.full((len(codes),), s)) for s in (1.0, -1.0))
    assert_same(up, (np.array([case.exact.above(v) for v in codes.tolist()]) - codes).astype(np.float32))
    assert_same(down, (codes - np.array([case.exact.below(v) for v in codes.tolist()])).astype(np.float32))
    assert_same(case.grid.gap(tensor(codes), torch.zeros(len(codes))), up)


def test_neighbours_of_what_is_not_finite() -> None:
    """NaN has none; an infinity has the end of the range on one side."""
    below, above = hu.grid("e4m3").neighbours(torch.tensor([math.nan, math.inf, -math.inf]))
    assert_same(below, torch.tensor([math.nan, 448.0, -math.inf]))
    assert_same(above, torch.tensor([math.nan, math.inf, -448.0]))


@pytest.mark.parametrize("grid", ["bf16", "e4m3@128", "int8", "int8/row", "mxfp4", "nvfp4"])
def test_a_scalar_is_a_tensor_of_one(grid: str) -> None:
    """A parameter without dimensions, such as CLIP's logit_scale, has the neighbours and events of one."""
    q, d = torch.tensor(1.3), torch.tensor(-0.01)
    for f in (events.gap, measures.symmetric_frozen, measures.frozen):
        assert_same(f(q, d, grid), f(q.reshape(1), d.reshape(1), grid).reshape(()))
    for alone, one in zip(events.neighbours(q, grid), events.neighbours(q.reshape(1), grid), strict=True):
        assert_same(alone, one.reshape(()))


@pytest.mark.parametrize("dtype", CONTAINERS, ids=str)
def test_gap_at_a_power_of_two(dtype: torch.dtype) -> None:
    """At a normal power of two the gap towards zero is half the gap away from it; below, they are equal."""
    g = hu.grid("e4m3")
    for exponent in range(-6, 9):
        for sign in (1.0, -1.0):
            q = torch.tensor([sign * 2.0**exponent], dtype=dtype)
            away, toward = g.gap(q, q.float()), g.gap(q, -q)
            assert away.dtype == dtype
            assert float(away) == 2.0 ** (exponent - 3)
            assert float(toward) == (2.0 ** (exponent - 4) if exponent > -6 else 2.0**-9)


@pytest.mark.parametrize("label", ["bf16", "e5m2", "e4m3@128", "m2"])
def test_symmetric_spacing_rho_and_phase(label: str) -> None:
    """For normal values in range, rho < 2**-phase exactly when |d| is less than half the symmetric
    spacing: both say |d| < 2**-(m+1) 2**floor(log2 |w|)."""
    case = case_of(label)
    g = case.grid
    rng = np.random.default_rng(5)
    low = max(g.smallest_normal, 2.0**-60)
    span = math.log2(min(g.largest, 2.0**60) / low) - 1
    w = (low * 2.0 ** rng.uniform(0, span, 4000) * rng.choice([-1, 1], 4000)).astype(np.float32)
    w[:100] = np.ldexp(1.0, np.frexp(w[:100])[1] - 1)  # phase zero
    half = np.ldexp(1.0, np.frexp(np.abs(w))[1] - 1 - g.mantissa - 1).astype(np.float64)
    ratio = rng.choice([1.0, 0.5, 0.9999, 1.0001, 2.0, 0.0, 1.5], 4000)
    d = (half * ratio * rng.choice([-1, 1], 4000)).astype(np.float32)
    symmetric = measures.symmetric_frozen(tensor(w), tensor(d), g)
    assert symmetric.tolist() == (np.abs(d.astype(np.float64)) < half).tolist()
    rho, phase = measures.rho(tensor(w), tensor(d), g).double(), measures.phase(tensor(w)).double()
    # Both are float32 numbers, wrong by 2**-22 at most, which decides only where |d| is half a gap.
    clear = torch.from_numpy(ratio != 1.0)
    assert (rho < 2.0**-phase)[clear].tolist() == symmetric[clear].tolist()
    assert torch.all(((rho * 2.0**phase) - 1).abs()[~clear] < 2.0**-21)
    assert bool((phase >= 0).all() and (phase < 1).all())
    count = kernels.audit(tensor(w), tensor(d), [g]).counts[:, 0, 1].sum()
    assert int(count) == int(symmetric.sum())


def test_symmetric_spacing_at_and_below_the_smallest_normal() -> None:
    """Subnormal weights and zero have the spacing of the smallest binade."""
    w = torch.tensor([0.0, 2.0**-9, 2.0**-7, 2.0**-6])
    just = torch.full((4,), 2.0**-10)
    assert not measures.symmetric_frozen(w, just, "e4m3").any()
    assert measures.symmetric_frozen(w, just * (1 - 2.0**-20), "e4m3").all()


@pytest.mark.parametrize("dtype", CONTAINERS, ids=str)
def test_phase_of_every_kind_of_value(dtype: torch.dtype) -> None:
    """Powers of two have phase 0, zero has none, and no value has phase 1."""
    powers = torch.tensor([1.0, -2.0, 0.25, 2.0**-14], dtype=dtype)
    assert measures.phase(powers).tolist() == [0.0] * 4
    assert measures.phase(torch.zeros(2, dtype=dtype)).isnan().all()
    one = torch.tensor([1.0], dtype=torch.float64)
    last = torch.tensor(
        [2.0 - 2.0 ** -{"bfloat16": 7, "float16": 10, "float32": 23}.get(NUMPY[dtype].name, 52)]
    )
    almost = measures.phase((last.double() if dtype == torch.float64 else last).to(dtype))
    assert bool((almost <= one).all())


def test_rho_at_zero() -> None:
    """A proposal at a zero weight is infinitely large beside it; none is undefined."""
    rho = measures.rho(torch.tensor([0.0, 0.0, 2.0]), torch.tensor([1.0, 0.0, 0.0]), "e4m3")
    assert_same(rho, torch.tensor([math.inf, math.nan, 0.0]))


@fitting(torch.float32, torch.float64, torch.bfloat16)
def test_margin(label: str, dtype: torch.dtype) -> None:
    """The exact distance from q + d to the nearer end of its rounding cell, correctly rounded; zero in
    the cells at the ends of the range, on a boundary, and for anything not finite."""
    case = case_of(label, dtype)
    real = NUMPY[dtype]
    q64 = some_codes(case, 1500, seed=6)
    with np.errstate(over="ignore", invalid="ignore"):
        q, d = q64.astype(real), proposals(q64, case, seed=7).astype(real)
        z = (q + d).astype(real).astype(np.float64)
    got = measures.margin(tensor(q), tensor(d), case.grid)
    assert got.dtype == torch.float64
    expected = []
    for v in z.tolist():
        room = 0
        if math.isfinite(v):
            at = case.exact.nearest(v)
            below, above = case.exact.below(at), case.exact.above(at)
            if math.isfinite(below) and math.isfinite(above):
                middles = exact(below) + exact(at), exact(above) + exact(at)
                room = max(min(2 * exact(v) - middles[0], middles[1] - 2 * exact(v)), 0)
        expected.append(room / (2 * ONE))
    assert got.tolist() == expected
    assert sum(r > 0 for r in expected) > 150
    assert sum(r == 0 for r in expected) >= 5


def test_margin_decides_small_disturbances() -> None:
    """A change of q + d by less than the margin does not change where it lands; by more, it can."""
    q = torch.full((1000,), 1.0, dtype=torch.float64)
    d = torch.linspace(-0.5, 0.5, 1000, dtype=torch.float64)
    g = hu.grid("e4m3")
    room, landed = measures.margin(q, d, g), g.round(q + d)
    for sign in (-1, 1):
        assert torch.equal(g.round(q + d + sign * room * 0.999), landed)
    moved = (g.round(q + d + room * 1.001) != landed) | (g.round(q + d - room * 1.001) != landed)
    assert moved[room > 0].all()


# ---- uniform phase ----------------------------------------------------------------------------------


def test_log2_ratio_error() -> None:
    """The fixed-point logarithm is within 0.8e-5 of the true one for every float32 mantissa, so that of
    a ratio is within 1.6e-5; exponents add exactly."""
    mantissas = np.float32(1) + np.arange(2**23, dtype=np.float32) * np.float32(2.0**-23)
    one = np.ones(1, dtype=np.float32)
    points = reference.log2_ratio(mantissas, one)
    assert np.abs(points / reference.PHASE_ONE - np.log2(mantissas.astype(np.float64))).max() < 0.8e-5
    some = mantissas[:: 2**12]
    for exponent in (-149, -126, -40, 0, 99, 127):
        scaled = np.ldexp(some.astype(np.float64), exponent)
        expected = points[:: 2**12] + exponent * reference.PHASE_ONE
        assert np.array_equal(reference.log2_ratio(scaled, np.ones(1)), expected)
        assert np.array_equal(reference.log2_ratio(np.ones(1), -scaled), -expected)


@given(
    st.floats(2.0**-100, 2.0**100, width=32), st.floats(2.0**-100, 2.0**100, width=32), st.integers(0, 23),
)  # fmt: skip
def test_phase_points(w: float, d: float, mantissa: int) -> None:
    """The uniform-phase contribution is clip(-log2 rho, 0, 1), within the error of the logarithm."""
    got = int(reference.phase_points(np.array([w], np.float32), np.array([-d], np.float32), mantissa)[0])
    exactly = math.log2(Fraction(w) / Fraction(d)) - (mantissa + 1)
    assert abs(got / reference.PHASE_ONE - min(max(exactly, 0.0), 1.0)) < 1.6e-5


def test_phase_sums() -> None:
    """The kernel's sum over a tile is the sum of the points; zero proposals count one, zero weights none."""
    rng = np.random.default_rng(8)
    w, d = rng.standard_normal(2000).astype(np.float32), (rng.standard_normal(2000) * 0.05).astype(np.float32)
    w[:50], d[25:75] = 0, 0
    for g in (hu.grid("e4m3"), hu.grid("bf16"), hu.grid("mxfp4")):
        points = reference.phase_points(w, d, g.mantissa)
        assert points[:25].sum() == 0
        assert points[25:75].tolist() == [reference.PHASE_ONE] * 50
        got = kernels.audit(tensor(w), tensor(d), [g]).phase[:, 0]
        assert got.tolist() == [int(points[i : i + 768].sum()) for i in range(0, 2000, 768)]
    assert array(kernels.audit(tensor(w), tensor(d), ["bf16"], phase=False).phase).sum() == 0
