"""Stochastic rounding has exactly the probabilities it should: no sampling, sweeps and digits.

Rounding goes away from zero when U < f, with f the fraction of the gap and U the digits that a
stream gives an element, 32 a level. Replace the stream by a sweep over all first digits and the
number of roundings up is the probability; hold the first digits equal and the next ones decide.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import CASES, ONE, Case, array, assert_same, bits, exact, tensor

import halfulp as hu
from halfulp.kernels import native, reference
from halfulp.kernels.params import SCALED, params
from halfulp.kernels.reference import TILE

N = 2**16
SWEPT = ["bf16", "fp16", "e5m2", "e4m3", "e4m3@128", "float8_e4m3b11fnuz", "e3m4", "e2m1", "m0", "m3", "m7"]
SWEPT += ["int4@16", "int8@128", "int3@8/asym", "two bits", "no normals", "near float32's smallest"]


class Sweep:
    """Words chosen by the test, an array a level, in place of a stream."""

    bits = 32

    def __init__(self, *levels: np.ndarray) -> None:
        self.levels = levels

    def words_of(self, index: np.ndarray, level: int = 0) -> np.ndarray:
        return self.levels[level][index] if level < len(self.levels) else np.zeros(len(index), np.uint32)


def by_reference(x: np.ndarray, grid: hu.Grid, *levels: np.ndarray) -> np.ndarray:
    return reference.round(x, grid, reference.STOCHASTIC, Sweep(*levels))  # type: ignore[arg-type]


def by_kernel(x: np.ndarray, grid: hu.Grid, words: np.ndarray) -> tuple[np.ndarray, int]:
    """The first 31 digits alone; also how many of them equalled the fraction's."""
    p, n = params(grid, x.dtype.name), x.size
    whole = np.zeros(-(-n // TILE) * TILE, dtype=x.dtype)  # whole tiles, whose rest draws 1 for a 0: no tie
    draws, opened = np.ones(whole.size, dtype=np.uint32) * 2, np.zeros(1, dtype=np.int64)
    whole[:n], draws[:n] = x.reshape(-1), words.reshape(-1)
    out = np.empty_like(whole)
    call = native.call_of(
        "round", mode=reference.STOCHASTIC, stored=native.OF_ARRAY[x.dtype], x=whole, out=out,
        floats=p.floats, ints=p.ints, size=whole.size, words=draws, open=opened,
    )  # fmt: skip
    native.run("round", whole.size // TILE, call, grain=2**60)
    return out[:n].reshape(x.shape), int(opened[0])


def has_kernel(grid: hu.Grid, real: type) -> bool:
    """Not those that need a division by their scale, nor m0 with another type's exponents."""
    if grid.mantissa == 0 and real is np.float64:
        return False
    return params(grid, np.dtype(real).name).kind != SCALED


def strata(seed: int) -> np.ndarray:
    """One word for each value of the top 16 bits; the rest drawn."""
    low = np.random.default_rng(seed).integers(0, N, N, dtype=np.uint32)
    return (np.arange(N, dtype=np.uint32) << np.uint32(16)) | low


def gaps(case: Case, how_many: int, seed: int) -> list[tuple[int, int]]:
    """Pairs of adjacent codes as exact magnitudes with a sign: the first, the last and some others."""
    values = case.exact.values
    chosen = np.random.default_rng(seed).integers(0, len(values) - 1, how_many)
    middle = values.index(0)
    return [
        (values[i], values[i + 1]) for i in sorted({0, middle - 1, middle, len(values) - 2, *chosen.tolist()})
    ]


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("label", SWEPT)
def test_full_sweep_counts_the_fraction(label: str, real: type) -> None:
    """For x at k/2**16 of a gap, exactly k of the 2**16 strata go away from zero, whatever the lower
    digits are, and the mean over the sweep is x in exact arithmetic."""
    case = CASES[label].within(torch.float32)
    assert case is not None
    words, tried = strata(1), 0
    for j, (a, b) in enumerate(gaps(case, 6, seed=len(label))):
        low, high = sorted((a, b), key=abs)
        for k in (0, 1, N // 2, N - 1, 9973 * (j + 1) % N):
            at = low + Fraction((high - low) * k, N)
            x = real(float(at / ONE))
            if exact(x) != at:
                continue  # not a number of this container
            tried += 1
            xs = np.full(N, x)
            expected = np.where(np.arange(N) < k, high / ONE, low / ONE).astype(real)
            if label == "bf16" and real is np.float32:
                assert int(xs.view(np.uint32)[0]) % N == k  # the 16 digits that bf16 drops
            slow = by_reference(xs, case.grid, words)
            assert np.array_equal(slow, expected)
            assert (
                sum(exact(v) * int(n) for v, n in zip(*np.unique(slow, return_counts=True), strict=True))
                == N * at
            )
            if has_kernel(case.grid, real):
                fast, ties = by_kernel(xs, case.grid, words)
                assert_same(fast, slow)
                assert ties == int(np.sum(words >> 1 == k << 15))
    assert tried >= 10


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("label", SWEPT)
def test_any_value_any_words(label: str, real: type) -> None:
    """For arbitrary values and words, up means U < f in exact arithmetic."""
    case = CASES[label].within(torch.float32)
    assert case is not None
    rng = np.random.default_rng(7)
    pairs = gaps(case, 1500, seed=11)
    pairs = [pairs[i] for i in rng.integers(0, len(pairs), 3000)]
    ends = np.array([sorted((a / ONE, b / ONE), key=abs) for a, b in pairs])
    x = (ends[:, 0] + (ends[:, 1] - ends[:, 0]) * rng.random(3000)).astype(real)
    words = rng.integers(0, 2**32, (2, 3000), dtype=np.uint32)
    expected = np.empty_like(x)
    for i, (a, b) in enumerate(pairs):
        low, high = sorted((a, b), key=abs)
        fraction = Fraction(exact(x[i]) - low, high - low)
        if i % 3 == 0:  # the same first digits: the next level decides
            words[0, i] = min(int(fraction * 2**32), 2**32 - 1)
        u = Fraction(int(words[0, i]) << 32 | int(words[1, i]), 2**64)
        expected[i] = (high if u < fraction else low) / ONE
    expected = np.copysign(expected, x)
    assert_same(by_reference(x, case.grid, *words), expected)


@pytest.mark.parametrize("label", ["e4m3", "bf16", "int8@128", "mxfp4 scale 0.03125"])
def test_digits_decide_level_by_level(label: str) -> None:
    """With words equal to the first digits of f, one less goes up, one more stays, and equality asks
    the next level, to the last digit; so P(up) = d0/2**32 + d1/2**64 + ... = f."""
    case = CASES[label].within(torch.float64)
    assert case is not None
    g = case.grid
    rng = np.random.default_rng(5)
    at = np.array([0.37, 0.5 - 2.0**-40, 2.0**-33, 2.0**-50, 1 / 3, *rng.random(200)])
    low, high = (v / ONE for v in case.exact.up[5:7])
    x = low + (high - low) * at
    fraction = [Fraction(exact(v) - case.exact.up[5], case.exact.up[6] - case.exact.up[5]) for v in x]
    digits = np.array(
        [[int(f * 2 ** (32 * (k + 1))) % 2**32 for f in fraction] for k in range(4)], dtype=np.int64
    )
    scale = case.scales(x.shape)
    shifts = np.zeros(4, dtype=np.int64)
    for level in range(4):
        for delta in (-1, 1):
            shifts[:] = 0
            shifts[level] = delta
            words = digits + shifts[:, None]
            fits = (words[level] >= 0) & (words[level] < 2**32)
            got = reference.round(
                x, g, reference.STOCHASTIC, Sweep(*(words % 2**32).astype(np.uint32)),  # type: ignore[arg-type]
                scale=None if scale is None else scale.numpy(),
            )  # fmt: skip
            open_ = fits & np.array([(f * 2 ** (32 * level)).denominator > 1 for f in fraction])
            assert open_[:3].any() or level > 1
            assert np.array_equal(got[open_] == high, np.full(open_.sum(), delta < 0))
    equal = reference.round(
        x, g, reference.STOCHASTIC, Sweep(*digits.astype(np.uint32)),  # type: ignore[arg-type]
        scale=None if scale is None else scale.numpy(),
    )  # fmt: skip
    assert np.array_equal(equal, np.full(len(x), low))  # U == f is not below it


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("label", SWEPT)
def test_the_ends_are_certain(label: str, real: type) -> None:
    """At and beyond the largest code every word gives the largest code; non-finite values come back."""
    case = CASES[label].within(torch.float32)
    assert case is not None
    words = np.concatenate([strata(3), np.array([0, 2**32 - 1], dtype=np.uint32)])
    top, low = case.exact.values[-1] / ONE, case.exact.values[0] / ONE
    biggest = float(np.finfo(real).max)
    for end in (top, low):
        for x in (
            end,
            np.nextafter(real(end), real(np.copysign(biggest, end))),
            end * 1.5,
            np.copysign(biggest, end),
        ):
            xs = np.full(len(words), np.clip(x, -biggest, biggest), dtype=real)
            assert np.array_equal(by_reference(xs, case.grid, words), np.full(len(words), end))
            if has_kernel(case.grid, real):
                assert_same(by_kernel(xs, case.grid, words)[0], np.full(len(words), end, dtype=real))
    for x in (np.nan, -np.nan, np.inf, -np.inf):
        xs = np.full(len(words), x, dtype=real)
        assert_same(by_reference(xs, case.grid, words), xs)
        if has_kernel(case.grid, real):
            assert np.array_equal(bits(by_kernel(xs, case.grid, words)[0]), bits(xs))


# ---- further digits in compiled code ---------------------------------------------------------------


def uniform(stream: hu.Stream, n: int) -> list[int]:
    """U of the first elements, three levels deep, in units of 2**-96."""
    words = [stream.words(n, level).tolist() for level in range(3)]
    return [(a << 64) + (b << 32) + c for a, b, c in zip(*words, strict=True)]


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 2**58 - 1), st.integers(0, 2**32))
def test_exact_up(fraction: float, index: int, seed: int) -> None:
    """U < fraction rounds up, also where fraction agrees with U in all but the last of 53 bits."""
    stream = hu.Stream(seed=seed, name="x", offset=index)
    u = uniform(stream, 1)[0]
    near = [((u >> (96 - b)) + extra) / 2**b for b in (31, 32, 33, 50, 53) for extra in (0, 1)]
    for f in (fraction, *(v for v in near if v < 1)):
        value = torch.tensor([f * 2.0**-9], dtype=torch.float64)  # between 0 and the first code of e4m3
        up = hu.grid("e4m3").round(value, stream) > 0
        assert bool(up) == (Fraction(u, 2**96) < Fraction(value.item() * 2.0**9))


@pytest.mark.parametrize(
    ("label", "dtype", "digits"),
    [
        ("e4m3", torch.float64, 48), ("fp16", torch.float64, 41), ("int4@16", torch.float64, 44),
        ("mxfp8_e4m3 scale 0.0078125", torch.float64, 48), ("bf16", torch.float64, 44),
        ("e4m3", torch.float32, 19), ("bf16", torch.float32, 16), ("e4m3", torch.bfloat16, 3),
        ("int8@128", torch.float32, 16), ("mxfp8_e4m3 scale 0.0078125", torch.float32, 19),
    ],
)  # fmt: skip
def test_forced_ties_are_settled(label: str, dtype: torch.dtype, digits: int) -> None:
    """Values made so that f equals the first digits of U (never up), or exceeds them by one unit
    (always up): the compiled kernels decide by the digits beyond the first 31."""
    n = 16_000
    case = CASES[label].within(dtype)
    assert case is not None
    stream = hu.Stream(seed=12, name=label, step=1, offset=2**35 + 11)
    u = uniform(stream, n)
    for low, high in (case.exact.up[5:7], case.exact.up[-3:-1]):
        for extra, end in ((0, low), (1, high)):
            exactly = [low + ((high - low) * ((v >> (96 - digits)) + extra) >> digits) for v in u]
            x = torch.tensor([v / ONE for v in exactly], dtype=torch.float64).to(dtype)
            assert [exact(v) for v in x.double().tolist()] == exactly
            got = case.grid.round(x, stream, scale=case.scales((n,)))
            assert torch.equal(got, torch.full((n,), end / ONE, dtype=dtype))


def test_ties_that_need_settling_occur() -> None:
    """The float32 case above really meets ties: some of its words equal the 31 digits of f."""
    stream = hu.Stream(seed=12, name="e4m3", step=1, offset=2**35 + 11)
    assert int(np.sum(stream.words(16_000) >> 1 & 0xFFF == 0)) > 0


@pytest.mark.parametrize("label", ["e4m3", "bf16", "int4@10", "mxfp4 scale 0.03125"])
def test_stochastic_stays_beside_the_value(label: str) -> None:
    """A stochastic result is one of the two codes around the value, and a code stays where it is."""
    case = CASES[label].within(torch.float32)
    assert case is not None
    scale = min(case.exact.values[-1] / ONE, 2.0**100)
    x = (np.random.default_rng(9).standard_normal(20_000) * scale).astype(np.float32)
    stream = hu.Stream(seed=0, name="w")
    got = array(case.grid.round(tensor(x), stream, scale=case.scales(x.shape)))
    values = case.exact.floats()
    i = np.searchsorted(values, got.astype(np.float64))
    assert np.array_equal(values[i], got.astype(np.float64))
    inside = np.clip(x.astype(np.float64), values[0], values[-1])
    assert np.all(np.concatenate([[-np.inf], values])[i] < inside)
    assert np.all(np.concatenate([values, [np.inf]])[i + 1] > inside)
    again = case.grid.round(tensor(got), stream.at(7), scale=case.scales(x.shape))
    assert_same(again, got)


@pytest.mark.parametrize("largest", [3.5, 0.035])
def test_ends_of_a_scaled_grid_are_counted_in_codes(largest: float) -> None:
    """Of each block the largest value has the largest code, however large its scale is."""
    z = np.full(32, largest / 2, dtype=np.float32)
    z[[3, 20]] = largest
    for name, ends in (("int4/g16", 2), ("int4/g32", 2), ("int4/g4", 6 * 4 + 2)):
        _, found = reference.write_back(np.zeros_like(z), z, hu.grid(name))
        assert int(found["counts"][:, 2].sum()) == ends
