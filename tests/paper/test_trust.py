from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from margin_oracle import auroc, relative_margin, symmetric_margin

import halfulp as hu
from halfulp import measures
from halfulp.kernels import reference
from halfulp.measures.crossings import persistent_majority
from halfulp.paper import trust
from halfulp.paper.trust import onset_interval, posterior

GRIDS = ["e4m3", "e5m2", "e4m3@128", "e2m1", "m3", "m7", "fp16", "int4@16", "int8@100", "m0"]
DTYPES = [np.float32, np.float64]


def proposals(rng: np.random.Generator, q: np.ndarray, g: hu.Grid, near: float) -> np.ndarray:
    """Proposals of every kind: none, tiny, a gap, on a midpoint or one float beside it, huge, not finite."""
    below, above = (x.double().numpy() for x in g.neighbours(torch.from_numpy(q)))
    x = q.astype(np.float64)
    up = rng.random(q.shape) < 0.5
    gap = np.where(up, above - x, below - x)
    gap = np.where(np.isfinite(gap), gap, np.where(up, x - below, x - above))
    gap = np.where(np.isfinite(gap), gap, 1.0)
    kind = rng.integers(0, 9, q.shape)
    d = gap * rng.uniform(0, 2.5, q.shape)
    d = np.where(kind == 0, 0.0, d)
    d = np.where(kind == 1, gap * 2.0 ** rng.integers(-60, -2, q.shape), d)
    middle = gap * (rng.integers(0, 3, q.shape) + 0.5)
    d = np.where(kind == 2, middle, d)
    beside = np.nextafter(
        middle.astype(q.dtype), np.where(rng.random(q.shape) < 0.5, np.inf, -np.inf).astype(q.dtype)
    )
    d = np.where(kind == 3, beside, d)
    d = np.where(kind == 4, gap / 2 * (1 + near * rng.standard_normal(q.shape)), d)
    d = np.where((kind == 5) & (rng.random(q.shape) < 0.3), np.copysign(1e30, gap), d)
    d = np.where((kind == 6) & (rng.random(q.shape) < 0.1), rng.choice([np.nan, np.inf, -np.inf], q.shape), d)
    return d.astype(q.dtype)


def codes(rng: np.random.Generator, n: int, g: hu.Grid, dtype: type) -> np.ndarray:
    """Codes all over the range, the ends and zero among them."""
    top = min(float(g.largest or 0.0), 1e37)
    x = rng.standard_normal(n) * np.exp2(rng.uniform(-20, 8, n)) * min(top, 1.0)
    x[rng.random(n) < 0.1] = top
    x[rng.random(n) < 0.1] = -top
    x[rng.random(n) < 0.1] = 0.0
    return reference.round(np.clip(x, -top, top).astype(dtype), g)


@settings(max_examples=100)
@given(
    st.sampled_from(GRIDS),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1e-7, 0.1, 1.0]),
)
def test_the_bound_never_fails(name: str, dtype: type, seed: int, drift: float) -> None:
    """|f_a - f_hat| <= c + v, and coordinate by coordinate: where both premises hold the events agree."""
    rng = np.random.default_rng(seed)
    g = hu.grid(name).within(dtype)
    q_hat = codes(rng, 64, g, dtype)
    d_r = proposals(rng, q_hat, g, 1e-6)
    q_a = np.where(rng.random(64) < 0.8, q_hat, codes(rng, 64, g, dtype))
    moved = d_r * (1 + drift * rng.standard_normal(64)).astype(dtype)
    d_a = np.where(rng.random(64) < 0.7, moved, proposals(rng, q_hat, g, 1e-6)).astype(dtype)
    d_a[0] = d_r[0]
    p = posterior(q_a, d_a, q_hat, d_r, g)
    assert p.holds
    assert p.n == 64
    assert p.wrong_same <= p.violated
    assert p.wrong_diverged <= p.diverged
    each = [posterior(q_a[i : i + 1], d_a[i : i + 1], q_hat[i : i + 1], d_r[i : i + 1], g) for i in range(64)]
    for one in each:
        assert one.holds
        if one.certified:
            assert one.f_a == one.f_hat
    total = each[0]
    for one in each[1:]:
        total = total + one
    assert total == p


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_not_empty(dtype: type) -> None:
    """With small drifts most coordinates are certified, some are not, and some of these disagree."""
    rng = np.random.default_rng(3)
    g = hu.grid("e4m3").within(dtype)
    q = codes(rng, 20_000, g, dtype)
    d_r = proposals(rng, q, g, 1e-3)
    d_a = (d_r * (1 + 1e-3 * rng.standard_normal(q.shape))).astype(dtype)
    p = posterior(q, d_a, q, d_r, g)
    assert p.c == 0
    assert 0.4 < p.certified < 0.9
    assert p.wrong_same > 100


def test_parts_by_hand() -> None:
    """One coordinate of each kind: certain, diverged, drifted by just the margin onto a tie, at the end."""
    q_hat = np.array([1.0, 1.0, 1.125, 448.0, 1.0], dtype=np.float32)
    q_a = np.array([1.0, 1.125, 1.125, 448.0, 1.0], dtype=np.float32)
    d_r = np.array([0.0, 0.0, 0.0, 0.0, 0.0], dtype=np.float32)
    d_a = np.array([0.03, 0.0, 0.0625, 0.0, np.nan], dtype=np.float32)
    p = posterior(q_a, d_a, q_hat, d_r, "e4m3")
    assert (p.n, p.diverged, p.violated) == (5, 1, 3)
    assert (p.frozen_hat, p.frozen_actual) == (5, 3)  # the tie at 1.1875 goes to 1.25, the even code
    assert (p.wrong_same, p.wrong_diverged) == (2, 0)
    assert (p.c, p.v, p.bound, p.certified) == (0.2, 0.6, 0.8, 0.2)


def test_the_drift_is_what_the_container_sees() -> None:
    """|d_a - d_r| can be below the margin while q + d rounds onto the boundary; that is a violation too.

    In float32 at q = 1.125 of e4m3, the boundary 1.1875 is reached by any d within half a float of it.
    """
    q = np.array([1.125], dtype=np.float32)
    d_r = np.zeros(1, dtype=np.float32)
    d_a = np.nextafter(np.float32(0.0625), np.float32(0)).reshape(1)
    assert abs(float(d_a[0])) < float(measures.margin(torch.from_numpy(q), torch.from_numpy(d_r), "e4m3")[0])
    p = posterior(q, d_a, q, d_r, "e4m3")
    assert p.f_a == 0.0  # rounded away from q, after the sum was rounded onto the tie
    assert p.f_hat == 1.0
    assert p.violated == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_a": np.array([1.01], dtype=np.float32)}, "q_a are not on grid"),
        ({"q_hat": np.array([1.01], dtype=np.float32)}, "q_hat are not on grid"),
        ({"d_a": np.zeros(1)}, "d_a has shape"),
        ({"d_r": np.zeros(2, dtype=np.float32)}, "d_r has shape"),
        ({"grid": "int8"}, "move with the data"),
    ],
)
def test_posterior_refuses(change: dict[str, object], words: str) -> None:
    one, none = np.ones(1, dtype=np.float32), np.zeros(1, dtype=np.float32)
    with pytest.raises(hu.UsageError, match=words):
        posterior(**{"q_a": one, "d_a": none, "q_hat": one, "d_r": none, "grid": "e4m3"} | change)  # type: ignore[arg-type]
    with pytest.raises(hu.UsageError, match="no coordinates"):
        posterior(one[:0], one[:0], one[:0], one[:0], "e4m3")


# ---- margins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "int4@16", "int8@100"])
def test_relative_margins_over_a_whole_range(name: str) -> None:
    """Zero on every boundary and beyond the ends, one half at the centre of every cell, never more."""
    g = hu.grid(name)
    x = g.values() * float(g.scales(torch.ones(1))[0]) if g.scaling is not None else g.values()
    edges = (x[1:] + x[:-1]) / 2
    centres = (edges[1:] + edges[:-1]) / 2
    for points, expected in ((edges, 0.0), (centres, 0.5), (x[[0, -1]], 0.0)):
        got = relative_margin(np.zeros_like(points), points, g)
        np.testing.assert_allclose(got, expected, rtol=1e-13)
    inside = np.random.default_rng(0).uniform(x[0], x[-1], 5000)
    got = relative_margin(np.zeros_like(inside), inside, g)
    assert (got <= 0.5).all()
    cell = np.searchsorted(edges, inside)
    ok = (cell > 0) & (cell < len(edges))
    low, high = edges[np.maximum(cell - 1, 0)], edges[np.minimum(cell, len(edges) - 1)]
    expected = np.where(ok, np.minimum(inside - low, high - inside) / np.where(ok, high - low, 1), 0.0)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-13)
    assert np.array_equal(relative_margin(np.zeros(3), [np.nan, np.inf, 1e300], g), np.zeros(3))


def test_symmetric_margin_is_that_of_the_symmetric_event() -> None:
    """Zero exactly on its boundary; on the side of the event it is below one half."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal(1000)
    d = rng.standard_normal(1000) * 2.0 ** rng.integers(-8, 1, 1000)
    size = symmetric_margin(w, d, "e4m3")
    unit = np.exp2(np.maximum(np.floor(np.log2(np.abs(w))), -6) - 3)
    np.testing.assert_allclose(size, np.abs(np.abs(d) / unit - 0.5), rtol=1e-12)
    event = measures.symmetric_frozen(torch.from_numpy(w), torch.from_numpy(d), "e4m3").numpy()
    assert event.any()
    assert (size[event] <= 0.5).all()
    assert np.array_equal(symmetric_margin([1.0, np.nan, 1.0], [np.nan, 0.0, 0.0625], "e4m3"), np.zeros(3))


# ---- ranking ----------------------------------------------------------------------------------------


def test_nine_thresholds() -> None:
    assert len(trust.THRESHOLDS) == 9
    assert trust.PRIMARY in trust.THRESHOLDS
    assert list(trust.THRESHOLDS) == sorted(set(trust.THRESHOLDS))
    assert trust.THRESHOLDS[0] == 0
    assert trust.THRESHOLDS[-1] < 0.5


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_auroc_is_the_share_of_ordered_pairs(drawn: list[tuple[int, bool]]) -> None:
    """By comparing every right event with every wrong one; and by the rank-sum statistic."""
    margin, right = np.array([m for m, _ in drawn], dtype=float), np.array([r for _, r in drawn], dtype=bool)
    good, bad = margin[right], margin[~right]
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in good for b in bad]
    got = auroc(margin, right)
    if not pairs:
        assert got is None
        return
    assert got == sum(pairs) / len(pairs)
    statistic = scipy.stats.mannwhitneyu(good, bad, method="asymptotic").statistic
    assert got == pytest.approx(statistic / len(pairs))
    levels = range(6)
    counts = [[int(np.sum(x == k)) for k in levels] for x in (good, bad)]
    assert trust.auroc_of_counts(*counts) == got


def test_auroc_of_counts_does_not_overflow() -> None:
    big = 2**40
    assert trust.auroc_of_counts([0, big], [big, 0]) == 1.0
    assert trust.auroc_of_counts([big, big], [big, big]) == 0.5


# ---- intervals ------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12),
)
def test_onset_interval_holds_every_curve_between(drawn: list[tuple[float, float, float]]) -> None:
    lower, f, upper = (np.array(x) for x in zip(*(sorted(t) for t in drawn), strict=True))
    assert onset_interval(lower, upper).locate(persistent_majority(f)) == "inside"


def test_onset_interval_sides() -> None:
    onset = onset_interval([0.0, 0.0, 0.4], [0.0, 0.9, 0.9])
    assert (onset.earliest, onset.latest) == (2, None)
    assert [onset.locate(s) for s in (1, 2, 3, None)] == ["earlier", "inside", "inside", "inside"]
    never = onset_interval([0.0], [0.4])
    assert [never.locate(s) for s in (1, None)] == ["earlier", "inside"]
    assert onset_interval([0.5, 0.5], [0.6, 0.6]).locate(2) == "later"
    with pytest.raises(hu.UsageError, match="above the upper"):
        onset_interval([0.5], [0.4])
