from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import halfulp as hu
from halfulp.measures import forecasts as measures
from halfulp.measures.forecasts import compare, monotone_fit, recovery, scalar_rho_map

# range, directional, constant, symmetric, scalar rho; the paper's tab:modern-forecast, all "No / No"
MODERN = {
    "271828 core": (0.05212, 0.008770, 0.018607, 0.008806, 0.028405),
    "271828 all 2-D": (0.03179, 0.009346, 0.011387, 0.009374, 0.017242),
    "314159 core": (0.05290, 0.008851, 0.018604, 0.008887, 0.028383),
    "314159 all 2-D": (0.03232, 0.009382, 0.011393, 0.009409, 0.017234),
}
# fp32, rne, sr, recovery in percent; tab:e3-seeds
MATCHED = {
    ("E5M2", 1337): (4.283, 6.412, 4.512, 89.24),
    ("E5M2", 1338): (4.275, 6.419, 4.501, 89.43),
    ("E4M3", 1337): (4.283, 5.710, 4.395, 92.16),
    ("E4M3", 1338): (4.275, 5.714, 4.389, 92.07),
}
# rmse, centred, signed; tab:source-template (means over three targets)
TEMPLATES = {
    "B_Y": (0.003599, 0.003585, 0.000144),
    "X_S": (0.008580, 0.005207, -0.006818),
    "H_S": (0.004379, 0.004370, 0.000028),
    "X_M": (0.007764, 0.003914, -0.006699),
    "H_M": (0.002829, 0.002806, 0.000147),
}

fractions = arrays(np.float64, st.integers(2, 30), elements=st.floats(0, 1, width=32))


def gated(rmse: float, constant: float = 1.0, spread: float = 0.0, **others: float) -> measures.Comparison:
    """A comparison of which only what gates read is known."""
    known = {f"{name}_rmse": value for name, value in others.items()}
    rest = dict.fromkeys(("centred_rmse", "signed_error", "fixed_one_rmse", "monotone_rmse"), 0.0)
    return measures.Comparison(
        steps=1, rmse=rmse, measured_range=spread, constant_rmse=constant, **rest, **known
    )


# ---- the paper's rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("row", MODERN)
def test_modern_decoder_gates(row: str) -> None:
    """Accurate everywhere; informative nowhere, for want of range; no directional added value."""
    spread, directional, constant, symmetric, rho = MODERN[row]
    assert gated(directional).accurate
    assert not gated(directional, constant, spread).informative
    assert not gated(directional, symmetric=symmetric, rho=rho).directional_added_value
    # what fails is the range in core, and both halves for all 2-D
    assert gated(directional, constant, 0.10).informative == ("core" in row)
    # the symmetric forecast is the one that is not beaten
    assert gated(directional, symmetric=1.0, rho=rho).directional_added_value


def test_gates_include_their_thresholds() -> None:
    assert gated(0.05).accurate
    assert not gated(math.nextafter(0.05, 1)).accurate
    assert gated(0.8, 1.0, 0.10).informative
    assert not gated(0.8, 1.0, math.nextafter(0.10, 0)).informative
    assert not gated(math.nextafter(0.8, 1), 1.0, 0.10).informative
    assert gated(0.9, symmetric=1.0, rho=2.0).directional_added_value
    assert gated(0.9, symmetric=2.0, rho=1.0).directional_added_value
    assert not gated(math.nextafter(0.9, 1), symmetric=1.0, rho=2.0).directional_added_value


@pytest.mark.parametrize("cell", MATCHED)
def test_matched_recoveries(cell: tuple[str, int]) -> None:
    """The printed recovery is one that losses within half a unit of the printed ones can give."""
    fp32, rne, sr, percent = MATCHED[cell]
    half = (-0.0005, 0.0005)
    possible = [
        100 * recovery(rne=rne + a, arm=sr + b, fp32=fp32 + c) for a, b, c in product(half, half, half)
    ]
    assert min(possible) - 0.005 <= percent <= max(possible) + 0.005
    assert max(possible) - min(possible) < 0.15  # so it is a test


def test_the_ninety_percent_rule() -> None:
    """E4M3 passes in both seeds, E5M2 narrowly fails in both; the printed losses decide the same way."""
    for name, passes in (("E5M2", False), ("E4M3", True)):
        rows = [row for (label, _), row in MATCHED.items() if label == name]
        printed = [percent / 100 for *_, percent in rows]
        computed = [recovery(rne=rne, arm=sr, fp32=fp32) for fp32, rne, sr, _ in rows]
        assert [r >= measures.RECOVERED for r in (*printed, *computed)] == [passes] * 4


@pytest.mark.parametrize("row", TEMPLATES)
def test_error_parts_of_the_templates(row: str) -> None:
    """rmse**2 = centred**2 + signed**2 in each target, so for means over targets the left is not below.

    Printed numbers carry an error of half a unit of the sixth digit each.
    """
    rmse, centred, signed = TEMPLATES[row]
    together = math.hypot(centred, signed)
    assert together <= rmse + 1.5e-6
    assert together == pytest.approx(rmse, rel=0.01)


def test_skill_is_explained_variance() -> None:
    """Least skill 0.9568, largest RMSE 0.00882, fixed-one 0.06834 (its mean over three targets).

    No constant beats the best one, so E_const <= fixed-one; 1 - E / E_const = 0.9568 would need
    E_const = 0.204. The squared form needs 0.0424.
    """
    assert 0.00882 / (1 - 0.9568) > 0.06834
    best = 0.00882 / math.sqrt(1 - 0.9568)
    assert best < 0.06834
    y = np.concatenate([np.full(500, 1 - best), np.full(500, 1 + best)])
    c = compare(y + 0.00882, y)
    assert c.constant_rmse == pytest.approx(best, rel=1e-12)
    assert c.skill == pytest.approx(0.9568, abs=1e-12)


# ---- comparisons ------------------------------------------------------------------------------------


@given(fractions, st.integers(0, 2**32 - 1))
def test_parts_of_an_error(y: np.ndarray, seed: int) -> None:
    """Shape and level add up; baselines are ordered; every constant is worse than the best one."""
    x = np.random.default_rng(seed).random(len(y))
    c = compare(x, y)
    assert c.rmse**2 == pytest.approx(c.centred_rmse**2 + c.signed_error**2, rel=1e-12, abs=1e-15)
    assert c.monotone_rmse <= c.constant_rmse + 1e-12
    for constant in (*np.linspace(0, 1, 11), *y):
        assert c.constant_rmse <= compare(np.full_like(y, constant), y).rmse + 1e-12
    assert compare(np.ones_like(y), y).rmse == c.fixed_one_rmse
    assert compare(y, y).rmse == 0


def test_every_number_of_a_comparison_by_hand() -> None:
    y = np.array([9.0, 0.0, 0.4, 0.2, 0.6])
    c = compare([0.0, 0.1, 0.4, 0.3, 0.8], y, warmup=1, symmetric=y + 1, scalar_rho=y - 2)
    assert c.steps == 4
    assert c.rmse == pytest.approx(math.sqrt(0.06 / 4))
    assert c.signed_error == pytest.approx(0.1)
    assert c.centred_rmse == pytest.approx(math.sqrt(0.02 / 4))
    assert c.measured_range == pytest.approx(0.57 - 0.03)  # linear between order statistics
    assert c.constant_rmse == pytest.approx(math.sqrt(0.05))
    assert c.skill == pytest.approx(1 - 0.015 / 0.05)
    assert c.fixed_one_rmse == pytest.approx(math.sqrt((1 + 0.36 + 0.64 + 0.16) / 4))
    assert c.monotone_rmse == pytest.approx(math.sqrt(0.02 / 4))
    assert (c.symmetric_rmse, c.rho_rmse) == (1.0, 2.0)
    assert (c.accurate, c.informative, c.directional_added_value) == (False, True, True)


def test_the_warmup_counts_steps_not_values() -> None:
    y, steps = np.array([0.1, 0.2, 0.3, 0.4]), [1, 100, 101, 201]
    assert compare(y, y, warmup=100, steps=steps).steps == 2
    assert compare(y, y, warmup=100, steps=steps).measured_range == pytest.approx(0.09)
    with pytest.raises(hu.UsageError, match="warmup of 100"):
        compare(y, y, warmup=100)


def test_added_value_needs_both_rivals() -> None:
    y = np.array([0.1, 0.9])
    assert compare(y, y, symmetric=y).directional_added_value is None
    assert compare(y, y, scalar_rho=y).directional_added_value is None


def test_no_variation_no_skill() -> None:
    c = compare([0.5, 0.6], [0.5, 0.5])
    assert c.skill is None
    assert not c.informative


@pytest.mark.parametrize("bad", [[0.1], [0.1, math.nan], [[0.1, 0.2]], []])
def test_refuses_what_is_no_trajectory(bad: list[float]) -> None:
    good = [0.1, 0.2]
    with pytest.raises(hu.UsageError):
        compare(bad, good)
    with pytest.raises(hu.UsageError):
        compare(good, good, symmetric=bad)
    if bad != [0.1]:
        with pytest.raises(hu.UsageError):
            compare(good, bad)


# ---- parts --------------------------------------------------------------------------------------------


@given(fractions)
def test_monotone_fit_is_isotonic_regression(y: np.ndarray) -> None:
    """Against scipy's, which pools in another way."""
    np.testing.assert_allclose(
        monotone_fit(y), scipy.optimize.isotonic_regression(y).x, rtol=1e-12, atol=1e-15
    )


def test_uniform_phases_give_the_map() -> None:
    """Weights spread evenly over a binade, all with one rho: the symmetric event happens to that share."""
    phases = (np.arange(4096) + 0.5) / 4096
    for rho in (0.4, 0.5, 0.6, 2**-0.5, 0.8, 0.99, 1.3):
        exact = np.mean(rho < 2.0**-phases)
        assert abs(float(scalar_rho_map(rho)) - exact) <= 1 / 4096
    for bad in (-1.0, math.nan):
        with pytest.raises(hu.UsageError, match="from 0 up"):
            scalar_rho_map(bad)


def test_pooled_rho() -> None:
    g = hu.grid("e4m3")
    w, d = np.array([3.0, 4.0]), np.array([0.6, 0.8])
    rho = measures.pooled_rho(np.sum(d * d), np.sum(w * w), g.epsilon)
    assert float(rho) == pytest.approx(0.2 * 16)
    assert np.array_equal(measures.pooled_rho([1.0, 0.0], [0.0, 0.0], 0.5), [np.inf, 0.0])


@pytest.mark.parametrize(
    "losses",
    [
        {"rne": math.nan, "arm": 1.0, "fp32": 1.0},
        {"rne": 2.0, "arm": math.inf, "fp32": 1.0},
        {"rne": 1.0, "arm": 1.0, "fp32": 1.0},
        {"rne": 0.9, "arm": 1.0, "fp32": 1.0},
        {"rne": 1.05, "arm": 1.0, "fp32": 1.0, "smallest_gap": 0.1},
    ],
)
def test_recovery_without_meaning_is_refused(losses: dict[str, float]) -> None:
    with pytest.raises(hu.UsageError):
        recovery(**losses)
