"""Nearest rounding: kernel, reference and exact arithmetic agree on every grid of at most 16 bits."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from oracle import CASES, NUMPY, Case, Table, array, assert_same, bits, every, patterns, tensor

import halfulp as hu
from halfulp.kernels import reference_rounding

WIDE, NARROW = [torch.float32, torch.float64], [torch.bfloat16, torch.float16]


def cases(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Every case in every container that it fits."""
    found = {}
    for case in CASES.values():
        for dtype in dtypes:
            # limits that are the container's are those of float32 in float64, to keep the codes countable
            inside = case.within(torch.float32) if dtype == torch.float64 else case
            inside = inside and inside.within(dtype)
            if inside is not None:
                found[f"{case.label} in {dtype}"] = (inside, dtype)
    return pytest.mark.parametrize(("case", "dtype"), found.values(), ids=found.keys())


@cases(torch.float32)
def test_a_code_is_itself(case: Case, dtype: torch.dtype) -> None:
    """Rounding, encoding and decoding leave every code where it is; there are no other codes."""
    g, values = case.grid, case.exact.floats()
    assert g.bits <= 16
    x = torch.from_numpy(values).float()
    assert np.array_equal(x.double().numpy(), values)
    seen: set[int] = set()
    for sign in (1.0, -1.0):  # a second zero
        q = torch.where(x == 0, sign * 0.0, x)
        assert_same(case.round(q), q, "kernel")
        assert_same(case.reference(q.numpy()), q.numpy(), "reference")
        codes = g.encode(q, scale=case.scales(tuple(q.shape)))
        assert len(set(codes.tolist())) == len(values)
        seen |= set(codes.tolist())
        back = g.decode(codes, scale=case.scales(tuple(q.shape)))
        assert torch.equal(back, q)
        if not g.integer:
            assert_same(back, q)
    if case.scale is None:
        assert np.array_equal(g.values(), values)
    others = sorted(set(range(-1, 2**g.bits + 1)) - seen)
    for code in [*others[:3], *others[-3:]]:
        with pytest.raises(hu.UsageError, match="not codes of grid"):
            g.decode(torch.tensor([code]), scale=case.scales((1,)))


@cases(*WIDE)
def test_midpoints_and_their_nearest_floats(case: Case, dtype: torch.dtype) -> None:
    """Every midpoint goes to the even neighbour, the floats beside it go to the nearer one, and what lies
    beyond the ends goes to the end, as exact arithmetic says."""
    oracle, real = case.exact, NUMPY[dtype].type
    biggest = np.finfo(real).max
    beyond = np.array([1.0, 1.0 + 2.0**-20, 1.25, 2.0, 2.0**40]) * oracle.floats()[-1]
    tiny = [0.0, np.finfo(real).smallest_subnormal, np.finfo(real).tiny]
    ends = np.concatenate([np.minimum(beyond, biggest), [biggest], tiny])
    points = np.concatenate([oracle.midpoints(), ends, -ends]).astype(real)
    with np.errstate(all="ignore"):
        beside = [np.nextafter(points, real(side)) for side in (np.inf, -np.inf)]
    points = np.concatenate([points, *beside])
    points = points[np.isfinite(points)]
    expected = np.array([oracle.nearest(float(p)) for p in points]).astype(real)
    assert_same(Table(oracle).nearest(points.astype(np.float64)).astype(real), expected, "table")
    assert_same(case.round(tensor(points)), expected, "kernel")
    assert_same(case.reference(points), expected, "reference")


@cases(*NARROW)
def test_every_value_of_a_narrow_container(case: Case, dtype: torch.dtype) -> None:
    """All 65536 patterns of bfloat16 and float16 round to a code or, if not finite, to themselves."""
    x = every(dtype)
    with np.errstate(invalid="ignore"):
        expected = Table(case.exact).nearest(x.astype(np.float64)).astype(x.dtype)
        reference = case.reference(x)
    got = array(case.round(tensor(x)))
    assert_same(got, expected, "kernel")
    assert_same(reference, expected, "reference")
    if dtype == torch.bfloat16:  # float16 passes through float32, which quiets signalling NaNs
        bad = ~torch.isfinite(tensor(x)).numpy()
        assert np.array_equal(bits(got)[bad], bits(x)[bad])


@cache
def float32s() -> np.ndarray:
    """Two million bit patterns and all bfloat16 and float16 values, in order (which makes search fast)."""
    with np.errstate(invalid="ignore"):
        return np.sort(
            np.concatenate([patterns(2**21, seed=16), *(every(d).astype(np.float32) for d in NARROW)])
        )


@cases(torch.float32)
def test_float32_patterns(case: Case, dtype: torch.dtype) -> None:
    """The output is a code, the nearest one, of the table of all codes; NaNs (payload included) and
    infinities come back unchanged."""
    x = float32s()
    with np.errstate(invalid="ignore"):
        expected = Table(case.exact).nearest(x.astype(np.float64)).astype(NUMPY[dtype])
    got = case.round(torch.from_numpy(x)).numpy()
    assert_same(got, expected, "kernel")
    assert_same(case.reference(x), expected, "reference")
    bad = ~np.isfinite(x)
    assert 10_000 < bad.sum() < len(x) / 100
    assert np.array_equal(bits(got)[bad], bits(x)[bad])


def test_float64_patterns() -> None:
    """The same for float64 bit patterns, on one grid of every kind."""
    drawn = np.random.default_rng(64).integers(0, 2**64, 2**18, dtype=np.uint64).view(np.float64)
    scaled = np.random.default_rng(65).standard_normal(2**18) * 0.05  # and 53-bit values in range
    x = np.concatenate([drawn, scaled])
    for label in (
        "bf16",
        "fp16",
        "e4m3",
        "two bits",
        "int8@100",
        "int3@8/asym",
        "nvfp4 scale 0.00317383",
    ):
        case = CASES[label].within(torch.float64)
        assert case is not None
        expected = Table(case.exact).nearest(x)
        assert_same(case.round(torch.from_numpy(x)), expected, f"{label}: kernel")
        assert_same(case.reference(x), expected, f"{label}: reference")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_rounded_to_their_container_as_torch_does(dtype: torch.dtype) -> None:
    drawn = np.random.default_rng(5).integers(0, 2**32, 100_000, dtype=np.uint32)
    drawn[:4] = 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x33000000  # ties, and both ends
    x = drawn.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        found = reference_rounding.contained(x, dtype)
    expected = torch.from_numpy(x).to(dtype).float().numpy()
    assert np.array_equal(found[np.isfinite(x)], expected[np.isfinite(x)])
    assert reference_rounding.contained(x) is x
