from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfulp as hu
from halfulp.measures.crossings import (
    Crossing,
    TimingPair,
    crossing,
    first_majority,
    persistent_majority,
    timing_pair,
)

trajectories = st.lists(st.sampled_from([0.0, 0.25, 0.4999, 0.5, 0.5001, 1.0]), min_size=1, max_size=12)


def at(step: int | None) -> Crossing:
    kind = "absent" if step is None else "at-initialisation" if step == 1 else "later"
    return Crossing(first=step, persistent=step, category=kind)


@given(trajectories)
def test_crossings_are_their_definitions(f: list[float]) -> None:
    """Step by step, as the definitions table words it."""
    firsts = [t for t in range(1, len(f) + 1) if f[t - 1] >= 0.5]
    lasting = [t for t in range(1, len(f) + 1) if all(x >= 0.5 for x in f[t - 1 :])]
    c = crossing(f)
    assert c.first == (firsts[0] if firsts else None)
    assert c.persistent == (lasting[0] if lasting else None)
    assert c.category == ("absent" if not firsts else "at-initialisation" if firsts[0] == 1 else "later")
    if c.persistent is not None:
        assert c.first is not None
        assert c.first <= c.persistent


@given(trajectories, st.integers(1, 7))
def test_recorded_steps_only_relabel(f: list[float], every: int) -> None:
    """With every k-th step from step 1 on, the crossing is the same record and the category is the same."""
    steps = 1 + every * np.arange(len(f))
    whole, sampled = crossing(f), crossing(f, steps=steps)
    assert sampled.category == whole.category
    for a, b in ((whole.first, sampled.first), (whole.persistent, sampled.persistent)):
        assert b == (None if a is None else steps[a - 1])


def test_a_majority_that_alternates_is_a_majority() -> None:
    """Exactly one half counts, on every step."""
    assert crossing([0.5] * 4) == Crossing(1, 1, "at-initialisation")
    assert crossing(np.nextafter([0.5, 0.5], 0)).category == "absent"
    assert first_majority([0.5, 0.7], threshold=0.6) == 2
    assert persistent_majority([0.7, 0.5, 0.7], threshold=0.6) == 3


def test_a_record_that_starts_late_decides_nothing() -> None:
    frozen_already = crossing([0.9, 0.9], steps=[10, 20])
    assert frozen_already == Crossing(10, 10, "undecided")
    pair = timing_pair(frozen_already, at(10))
    assert not pair.eligible
    assert not pair.disagrees
    recrossed = crossing([0.9, 0.1, 0.9], steps=[10, 20, 30])  # the persistent one is known to be later
    assert timing_pair(recrossed, at(30), "persistent").ratio == 1.0


@pytest.mark.parametrize(
    ("f", "steps", "words"),
    [
        ([], None, "one value a step"),
        ([[0.1]], None, "one value a step"),
        ([0.1, float("nan")], None, "position 1"),
        ([0.1, 1.5], None, "position 1"),
        ([0.1, 0.2], [1], "2 increasing"),
        ([0.1, 0.2], [2, 2], "2 increasing"),
        ([0.1, 0.2], [0, 1], "from 1 up"),
        ([0.1, 0.2], [1.0, 2.0], "whole numbers"),
    ],
)
def test_refusals(f: list[float], steps: list[int] | None, words: str) -> None:
    with pytest.raises(hu.UsageError, match=words):
        crossing(f, steps=steps)


def test_only_crossings_after_step_one_are_timed() -> None:
    steps: list[int | None] = [None, 1, 2, 300]
    for forecast in steps:
        for measured in steps:
            pair = timing_pair(at(forecast), at(measured))
            both = forecast not in (None, 1) and measured not in (None, 1)
            assert pair.eligible == both
            assert (pair.ratio is not None) == both
            assert (pair.within() is not None) == both
    with pytest.raises(hu.UsageError, match="persistent"):
        timing_pair(at(2), at(2), "last")  # type: ignore[arg-type]


def test_within_is_exact_at_its_edge() -> None:
    """|forecast - measured| <= 0.15 measured, for every measured step that makes the edge whole."""
    for measured in range(20, 20_001, 20):
        edge = measured * 15 // 100
        assert TimingPair(at(measured + edge), at(measured)).within()
        assert TimingPair(at(measured - edge), at(measured)).within()
        assert not TimingPair(at(measured + edge + 1), at(measured)).within()
        assert not TimingPair(at(measured - edge - 1), at(measured)).within()


def test_the_character_gpt_of_the_paper() -> None:
    """Measured 1644 and 1666, forecast 1640 and 1669: persistent crossings within a quarter of a percent."""
    pairs = [timing_pair(at(p), at(m), "persistent") for p, m in ((1640, 1644), (1669, 1666))]
    assert all(pair.within(0.0025) for pair in pairs)
