"""Other people's implementations: agreement inside the range, and exactly which facts differ outside."""

from __future__ import annotations

import math

import comparison
import ml_dtypes
import numpy as np
import pytest
import torch
from comparison import FORMATS, GFLOAT, PAGE, with_gfloat, with_halfulp, with_ml_dtypes, with_torch
from oracle import Exact, every, patterns

import halfulp as hu

TORCH = [name for name in FORMATS if hasattr(torch, name)]
UNSIGNED_ZERO = [name for name in FORMATS if name.endswith("fnuz")]


def inputs(name: str) -> np.ndarray:
    """All of bfloat16 and float16, a million patterns, and every tie with its neighbours; in range."""
    oracle = Exact(hu.grid(name))
    at = np.concatenate([oracle.midpoints(), oracle.floats()]).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        x = np.concatenate([
            patterns(2**20, seed=2), *(every(d).astype(np.float32) for d in (torch.bfloat16, torch.float16)),
            at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(-np.inf)),
        ])  # fmt: skip
        return x[np.abs(x) <= oracle.floats()[-1]]


def assert_equal_values(got: np.ndarray | None, name: str, x: np.ndarray) -> None:
    """Equal to halfulp's rounding, signs of zero included where the format has them."""
    expected = with_halfulp(name, x)
    assert got is not None
    assert np.array_equal(got, expected)
    if name not in UNSIGNED_ZERO:
        assert np.array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("name", TORCH)
def test_torch_agrees_in_range(name: str) -> None:
    """torch's casts from float32 are our rounding up to the largest code."""
    x = inputs(name)
    assert_equal_values(with_torch(name, x), name, x)


@pytest.mark.parametrize("name", FORMATS)
def test_ml_dtypes_agrees_in_range(name: str) -> None:
    """ml_dtypes' casts (NumPy's for float16) from float32 are our rounding up to the largest code."""
    x = inputs(name)
    assert_equal_values(with_ml_dtypes(name, x), name, x)


@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat_agrees_in_range_and_beyond(name: str) -> None:
    """gfloat's round_ndarray is our rounding up to the largest code; saturating, for every finite value."""
    x = inputs(name)
    assert_equal_values(with_gfloat(name, x), name, x)
    with np.errstate(invalid="ignore"):
        wide = patterns(2**20, seed=3)
        wide = wide[np.isfinite(wide)]
    assert_equal_values(with_gfloat(name, wide, sat=True), name, wide)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_bit_patterns(name: str) -> None:
    """encode gives the bits of the hardware's format; decode reads them."""
    x = inputs(name)
    if name in UNSIGNED_ZERO:
        x = x[with_halfulp(name, x) != 0]
    codes = hu.grid(name).encode(torch.from_numpy(x))
    dtype = np.dtype(np.float16 if name == "float16" else getattr(ml_dtypes, name))
    with np.errstate(all="ignore"):
        theirs = x.astype(dtype).view(f"u{dtype.itemsize}")
    assert np.array_equal(codes.numpy(), theirs & (2 ** hu.grid(name).bits - 1))
    assert np.array_equal(hu.grid(name).decode(codes).numpy(), with_halfulp(name, x))


@pytest.mark.parametrize(
    ("name", "dtype", "scale"), [("e5m2", torch.float8_e5m2, 1), ("e4m3@128", torch.float8_e4m3fn, 128)]
)
def test_six_million_initial_weights(name: str, dtype: torch.dtype, scale: int) -> None:
    """Weights of an initialisation, normal with standard deviation 0.02: no mismatch with torch's cast."""
    rng = np.random.default_rng(6)
    for _ in range(6):
        x = torch.from_numpy(rng.standard_normal(1_000_000, dtype=np.float32)) * 0.02
        cast = (x * scale).to(dtype).float() / scale
        assert int((hu.grid(name).round(x).view(torch.int32) != cast.view(torch.int32)).sum()) == 0


# ---- documented differences -----------------------------------------------------------------------

INF, NAN = math.inf, math.nan
# format, value: torch, ml_dtypes, gfloat, gfloat saturating, halfulp; None where there is no such format
FACTS = {
    ("float8_e4m3fn", 464.0): (448, 448, 448, 448, 448),  # the tie goes to the even code, the largest
    ("float8_e4m3fn", 464.25): (448, NAN, NAN, 448, 448),
    ("float8_e4m3fn", -1e30): (-448, NAN, NAN, -448, -448),
    ("float8_e4m3fn", INF): (448, NAN, NAN, 448, INF),
    ("float8_e5m2", 61439.0): (57344, 57344, 57344, 57344, 57344),
    ("float8_e5m2", 61440.0): (INF, INF, INF, 57344, 57344),  # the tie goes to the even code, infinity's
    ("float8_e5m2", -1e30): (-INF, -INF, -INF, -57344, -57344),
    ("float8_e5m2", INF): (INF, INF, INF, 57344, INF),
    ("float8_e4m3fnuz", 248.0): (NAN, NAN, None, None, 240),
    ("float8_e4m3fnuz", INF): (NAN, NAN, None, None, INF),
    ("float8_e5m2fnuz", 61440.0): (NAN, NAN, None, None, 57344),
    ("float8_e4m3", 248.0): (None, INF, None, None, 240),  # not float8_e4m3fn
    ("bfloat16", 3.4e38): (INF, INF, INF, 3.3895313892515355e38, 3.3895313892515355e38),
    ("float16", 65520.0): (INF, INF, INF, 65504, 65504),
    ("float4_e2m1fn", 1e30): (None, 6, "error", 6, 6),
    ("float4_e2m1fn", NAN): (None, 0, NAN, NAN, NAN),
    **{
        (name, NAN): (NAN, NAN, NAN, NAN, NAN)
        for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    },
}


OLDEST = torch.__version__.startswith("2.8.")
if OLDEST:  # the oldest that halfulp admits did not saturate
    FACTS |= {
        key: (NAN, *FACTS[key][1:])
        for key in (("float8_e4m3fn", 464.25), ("float8_e4m3fn", -1e30), ("float8_e4m3fn", INF))
    }


@pytest.mark.parametrize(("name", "value"), FACTS)
def test_documented_differences(name: str, value: float) -> None:
    """Above the largest value, at infinity and at NaN, each library does what the documentation says."""
    x = np.array([value], dtype=np.float32)
    hows = (with_torch, with_ml_dtypes, with_gfloat, lambda n, v: with_gfloat(n, v, sat=True), with_halfulp)
    for how, expected in zip(hows, FACTS[name, value], strict=True):
        if expected == "error":
            with pytest.raises(ValueError, match="No Infs or NaNs"):
                how(name, x)
            continue
        got = how(name, x)
        assert (got is None) == (expected is None)
        if got is not None:
            np.testing.assert_array_equal(got, np.array([expected], dtype=np.float64))


def test_double_rounding() -> None:
    """torch casts float64 through float32, which turns just-below-a-tie into the tie; we round once."""
    x = np.array([1.1875 - 2.0**-40])
    assert with_torch("float8_e4m3fn", x) == [1.25]
    assert with_halfulp("float8_e4m3fn", x) == [1.125]


@pytest.mark.skipif(OLDEST, reason="the page is of the newest versions")
def test_the_page_has_exactly_these_rows() -> None:
    """docs/comparison.md is what the installed libraries do: the same versions, the same rows, no others."""
    page = PAGE.read_text()
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert table == [comparison.HEAD, comparison.RULE, *comparison.rows()]
    assert comparison.versions() in page.splitlines(), "run python tests/comparison.py"
    assert comparison.rewritten(page) == page
