"""Timing over many cells, and the share of curves that time explains."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from halfulp.measures.crossings import Crossing, timing_pair
from halfulp.paper.studies._timing import summarise
from halfulp.paper.studies.template_challenge import time_effect


def at(step: int | None) -> Crossing:
    kind = "absent" if step is None else "at-initialisation" if step == 1 else "later"
    return Crossing(first=step, persistent=step, category=kind)


def test_a_summary_like_the_principal_grid() -> None:
    """72 cells, 55 eligible, 52 within 15%, 4 of other categories, steps 11 to 4222: a span of 384."""
    measured = np.unique(np.geomspace(11, 4222, 55).round().astype(int))
    measured = np.concatenate([np.arange(12, 12 + 55 - len(measured)), measured])
    forecast = measured.copy()
    forecast[[10, 20]] = measured[[10, 20]] * 2
    forecast[30] = measured[30] // 2
    forecast[-1] = 4575
    pairs = [timing_pair(at(int(p)), at(int(m))) for p, m in zip(forecast, measured, strict=True)]
    pairs += [timing_pair(at(1), at(1))] * 9 + [timing_pair(at(None), at(None))] * 4
    pairs += [timing_pair(at(None), at(900)), timing_pair(at(900), at(None))]
    pairs += [timing_pair(at(1), at(2)), timing_pair(at(2), at(1))]
    s = summarise(pairs)
    assert (s.cells, s.eligible, s.within, s.disagreements) == (72, 55, 52, 4)
    assert s.median_ratio == 1.0
    assert s.measured_range == (11, 4222)
    assert s.forecast_range == (11, 4575)
    assert s.span is not None
    assert round(s.span) == 384
    assert s.share_within is not None
    assert f"{s.share_within:.1%}" == "94.5%"
    assert s.mean_ratio == np.mean([p.ratio for p in pairs if p.ratio is not None])


def test_a_summary_of_nothing_has_no_numbers() -> None:
    s = summarise([timing_pair(at(1), at(None))])
    assert (s.cells, s.eligible, s.disagreements) == (1, 0, 1)
    assert (s.median_ratio, s.mean_ratio, s.share_within, s.span) == (None, None, None, None)


@given(arrays(np.float64, (3, 7), elements=st.floats(0, 1, width=16)).filter(lambda y: np.ptp(y) > 0.01))
def test_time_effect_is_the_two_way_table(y: np.ndarray) -> None:
    """Shares add up to one, and the residual is what least squares on both sets of dummies leaves."""
    parts = time_effect(y)
    assert sum(parts.values()) == pytest.approx(1, rel=1e-12)
    rows, columns = np.indices(y.shape)
    design = np.concatenate([np.eye(3)[rows.ravel()], np.eye(7)[columns.ravel()]], axis=1)
    fit = design @ np.linalg.lstsq(design, y.ravel())[0]
    total = np.square(y - y.mean()).sum()
    assert parts["residual"] == pytest.approx(np.square(y.ravel() - fit).sum() / total, abs=1e-12)


def test_time_effect_of_parts_made_to_measure() -> None:
    """The paper's split, 99.650% common and 0.346% residual, comes back from a table built that way."""
    rng = np.random.default_rng(7)
    time = rng.standard_normal(200)
    own = rng.standard_normal((3, 200))
    own -= own.mean(axis=0) + own.mean(axis=1, keepdims=True) - own.mean()
    level = np.array([[1.0], [0.0], [-1.0]])
    time -= time.mean()
    shares = {"common": 0.99650, "offset": 0.00004, "residual": 0.00346}
    sizes = {"common": 3 * np.sum(time**2), "offset": 200 * np.sum(level**2), "residual": np.sum(own**2)}
    scale = {k: math.sqrt(shares[k] / sizes[k]) for k in shares}
    parts = time_effect(0.7 + scale["common"] * time + scale["offset"] * level + scale["residual"] * own)
    for name, share in shares.items():
        assert parts[name] == pytest.approx(share, abs=1e-12)
