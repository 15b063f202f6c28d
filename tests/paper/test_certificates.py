"""Certificates against exact recursions, and the construction that shows why they need premises."""

from __future__ import annotations

import itertools
import math
import runpy
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import ONE, Exact, oracle_of

import halfulp as hu
from halfulp.kernels import reference
from halfulp.paper import certificates
from halfulp.paper.certificates import (
    Certificate,
    Descent,
    Objective,
    certify_hessian,
    certify_quadratic,
    descend,
    reachable_prefix,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "prefix.py"
GRIDS = ["e4m3", "e5m2", "e4m3@128", "int8@4", "e3m4", "m3"]


# ---- quadratics, in exact arithmetic ------------------------------------------------------------------


def nearest(x: Fraction, values: Exact) -> float:
    """Nearest grid value of a rational number, ties to the even index, beyond the ends the end."""
    side = values.down if x < 0 else values.up
    a = min(abs(x) * ONE, Fraction(side[-1]))
    i = bisect_right(side, a) - 1
    if i + 1 < len(side):
        excess = 2 * a - side[i] - side[i + 1]
        i += excess > 0 or (excess == 0 and i % 2 == 1)
    return math.copysign(side[i] / ONE, x)


class Quadratic:
    """A random quadratic, start, rate and grid, of a kind that moves, freezes, grows or jumps."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.n = n = int(rng.integers(1, 4))
        self.grid = hu.grid(str(rng.choice(GRIDS))).within(np.float64)
        noise = rng.standard_normal((n, n)) * 10.0 ** rng.integers(-6, 1)
        noise = noise + noise.T
        kind = rng.integers(0, 5)
        rates = (2.0 ** -int(rng.integers(4, 14)), 0.5, 1.0, 1.0, 0.25)
        base = (1.0, 1.0, 1.0, -1.0, 1.0)[kind] * np.eye(n)
        self.eta = rates[kind] * (1.0 if rng.random() < 0.6 else float(rng.uniform(0.8, 1.2)))
        self.h = base + noise * (1.0 if kind else 0.1)
        self.b = rng.standard_normal(n) * rng.choice([0.0, 0.01, 1.0])
        scale = float(self.grid.largest or 1.0) if self.grid.largest and self.grid.largest < 1e5 else 100.0
        self.w0 = rng.standard_normal(n) * scale * 2.0 ** -rng.integers(1, 8)
        if rng.random() < 0.7:
            self.w0 = reference.round(self.w0, self.grid)
        self.steps = int(rng.integers(3, 13))

    def rounded(self, dtype: type) -> Quadratic:
        """The same with numbers that are exact in a container."""
        self.h, self.b = (x.astype(dtype).astype(np.float64) for x in (self.h, self.b))
        self.eta = float(dtype(self.eta))
        return self

    def certify(self, arithmetic: type = np.float64) -> Certificate:
        return certify_quadratic(
            self.h, self.b, self.w0, self.eta, self.steps, self.grid, arithmetic=arithmetic
        )

    def exact(self, updates: int) -> Iterator[np.ndarray]:
        """The recursion in rational arithmetic."""
        values = oracle_of(self.grid)
        h, b = [[Fraction(x) for x in row] for row in self.h], [Fraction(x) for x in self.b]
        q = [nearest(Fraction(x), values) for x in self.w0]
        yield np.array(q)
        for _ in range(updates):
            at = [Fraction(x) for x in q]
            gradient = [
                sum(r * x for r, x in zip(row, at, strict=True)) + c for row, c in zip(h, b, strict=True)
            ]
            z = [x - Fraction(self.eta) * g for x, g in zip(at, gradient, strict=True)]
            q = [nearest(x, values) for x in z]
            yield np.array(q)

    def executed(self, updates: int, dtype: type, *, backwards: bool) -> Iterator[np.ndarray]:
        """The recursion as a program runs it, summing in one order or the other."""
        order = range(self.n)[:: -1 if backwards else 1]
        q = reference.round(self.w0, self.grid).astype(dtype)
        h, b, eta = self.h.astype(dtype), self.b.astype(dtype), dtype(self.eta)
        yield q
        for _ in range(updates):
            g = b.copy() if backwards else np.zeros_like(b)
            for j in order:
                g = g + h[:, j] * q[j]
            g = g if backwards else g + b
            q = reference.round((q - eta * g).astype(dtype), self.grid)
            yield q


def agrees(codes: np.ndarray, run: Iterator[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(codes, run, strict=True))


def test_no_certified_quadratic_disagrees() -> None:
    """Search 1000 random problems: up to the horizon the exact recursion and two floating-point ones are
    at the certified codes. The search would be empty if few steps were certified, or none that move."""
    certified = moved = 0
    for seed in range(1000):
        problem = Quadratic(seed)
        c = problem.certify()
        codes = c.codes[: c.horizon + 1]
        assert agrees(codes, problem.exact(c.horizon)), seed
        for backwards in (False, True):
            assert agrees(codes, problem.executed(c.horizon, np.float64, backwards=backwards)), seed
        certified += c.horizon
        moved += int((~c.frozen).any(axis=1).sum())
    assert certified > 1500
    assert moved > 500


def test_no_certified_quadratic_disagrees_in_float32() -> None:
    """The same for runs executed in float32, whose rounding errors are a billion times larger."""
    certified = moved = 0
    for seed in range(400):
        problem = Quadratic(10_000 + seed).rounded(np.float32)
        if problem.grid.name == "m3":
            problem.grid = hu.grid("m3").within(np.float32)
        c = problem.certify(np.float32)
        for backwards in (False, True):
            run = problem.executed(c.horizon, np.float32, backwards=backwards)
            assert agrees(c.codes[: c.horizon + 1], run), seed
        assert c.horizon <= problem.certify().horizon
        certified += c.horizon
        moved += int((~c.frozen).any(axis=1).sum())
    assert certified > 450
    assert moved > 70


@pytest.mark.parametrize("premise", ["transition", "cell", "bound"])
def test_every_premise_is_needed(premise: str) -> None:
    """Without any one of them the same search finds a run that leaves the certified codes."""
    for seed in range(1500):
        problem = Quadratic(seed)
        c = problem.certify()
        if c.stopped_by != premise:
            continue
        ignored = {premise: np.ones_like(c.cell)}
        if premise == "cell":  # a margin of zero is no bound either
            ignored["bound"] = c.bound | ~c.cell
        weaker = replace(c, **ignored)
        if not agrees(weaker.codes[: weaker.horizon + 1], problem.exact(weaker.horizon)):
            return
    pytest.fail(f"no counterexample without {premise}: the search proves nothing about it")


def test_bounds_and_margins_are_outside_exact_ones() -> None:
    """Not below the exact eta |H e|, not above the exact distance to a boundary; and nearly equal."""
    for seed in range(200):
        problem = Quadratic(seed)
        c = problem.certify()
        values = oracle_of(problem.grid)
        w = problem.w0.astype(np.float64)
        for t in range(min(problem.steps, 3)):
            e = [Fraction(a) - Fraction(b) for a, b in zip(c.codes[t], w, strict=True)]
            d = -problem.eta * (problem.h @ w + problem.b)
            for i in range(problem.n):
                b = Fraction(problem.eta) * abs(
                    sum(Fraction(h) * x for h, x in zip(problem.h[i], e, strict=True))
                )
                assert Fraction(float(c.drift[t, i])) >= b
                slack = 1e-12 * (abs(problem.h[i]) @ abs(w) + 1 + abs(problem.b[i])) * (1 + problem.eta)
                assert float(c.drift[t, i]) <= float(b) * (1 + 1e-12) + slack
                z = float(c.codes[t, i] + d[i])
                at = nearest(Fraction(z), values)
                edges = [
                    (Fraction(at) + Fraction(x)) / 2
                    for x in (values.below(at), values.above(at))
                    if math.isfinite(x)
                ]
                gamma = min(abs(Fraction(z) - x) for x in edges) if len(edges) == 2 else Fraction(0)
                assert Fraction(float(c.margin[t, i])) <= gamma
                assert float(c.margin[t, i]) == pytest.approx(float(gamma), rel=1e-12, abs=1e-300)
            w = w + d


def test_rounding_errors_of_the_run_count() -> None:
    """At q = 1.125 of e4m3 a proposal ends 2**-25 short of the boundary: float64 keeps q, and float32
    rounds the sum onto the tie and moves to 1.25. Only the first is certified."""
    b = [-(0.0625 - 2.0**-25)]
    wide, narrow = (
        certify_quadratic([[0.0]], b, [1.125], 1.0, 1, "e4m3", arithmetic=k) for k in (np.float64, np.float32)
    )
    assert (wide.horizon, wide.codes[1].tolist()) == (1, [1.125])
    assert reference.round(np.float32([1.125]) - np.float32(b), hu.grid("e4m3")).tolist() == [1.25]
    assert (narrow.horizon, narrow.stopped_by) == (0, "bound")


def test_exact_halving_is_certified_and_ends_at_a_tie() -> None:
    """w' = w / 2 on integers: no drift at all, so certain until 1 / 2 lies on a boundary."""
    c = certify_quadratic([[1.0]], [0.0], [64.0], 0.5, 10, "int8@1")
    assert c.codes[: c.horizon + 1].ravel().tolist() == [64, 32, 16, 8, 4, 2, 1]
    assert (c.horizon, c.stopped_by) == (6, "cell")
    assert not c.frozen.any()


def test_freezing_ends_where_the_reference_crosses() -> None:
    """A reference that creeps is certified frozen until it crosses a midpoint that storage never reaches."""
    c = certify_quadratic([[1.0]], [0.0], [1.0], 2.0**-10, 200, "e4m3")
    crosses = 1 + next(t for t in range(200) if (1 - 2.0**-10) ** (t + 1) < 1 - 2.0**-5)
    assert (c.horizon, c.stopped_by) == (crosses - 1, "transition")
    assert c.frozen.all()
    assert c.frozen.shape == (crosses - 1, 1)


def test_one_uncertain_coordinate_ends_the_horizon() -> None:
    sure = certify_quadratic([[1.0]], [0.0], [64.0], 0.5, 5, "int8@1")
    both = certify_quadratic(np.eye(2), [0.0, 0.0], [64.0, 3.0], 0.5, 5, "int8@1")
    assert sure.horizon == 5
    assert (both.horizon, both.stopped_by) == (0, "cell")
    assert (both.margin[0] > 0).tolist() == [True, False]


def test_another_start_certifies_nothing() -> None:
    c = certify_quadratic([[1.0]], [0.0], [64.0], 0.5, 5, "int8@1", start=[63.0])
    assert (c.horizon, c.stopped_by, c.frozen.shape) == (0, "start", (0, 1))
    assert certify_quadratic([[1.0]], [0.0], [64.2], 0.5, 1, "int8@1", start=[64.0]).common_start


def test_a_run_that_blows_up_is_not_certified() -> None:
    c = certify_quadratic([[-1e200]], [0.0], [1.0], 1e200, 3, "m7")
    assert c.horizon == 0
    assert len(c.updates) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hessian": [[1.0, 2.0], [3.0, 1.0]]}, "symmetric"),
        ({"linear": [0.0]}, "symmetric"),
        ({"eta": 0.0}, "positive rate"),
        ({"steps": 0}, "one step"),
        ({"w0": [1.0, math.inf]}, "w0 must be"),
        ({"grid": "int8"}, "move with the data"),
        ({"arithmetic": np.float16}, "float16"),
        ({"arithmetic": np.float32, "eta": 0.1}, "eta is not exact"),
        ({"arithmetic": np.float32, "linear": [0.1, 0.0]}, "linear term is not exact"),
    ],
)
def test_quadratic_refuses(change: dict[str, object], words: str) -> None:
    good = {
        "hessian": np.eye(2),
        "linear": [0.0, 0.0],
        "w0": [1.0, 1.0],
        "eta": 0.5,
        "steps": 1,
        "grid": "e4m3",
    }
    with pytest.raises(hu.UsageError, match=words):
        certify_quadratic(**good | change)  # type: ignore[arg-type]


# ---- Hessian envelopes ----------------------------------------------------------------------------------


class Logistic:
    """mean softplus(-y x'w) + ridge |w|**2 / 2; |second derivatives| <= mean |x_i x_j| / 4 + ridge."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.n = n = int(rng.integers(1, 4))
        self.x = rng.standard_normal((16, n)) * rng.choice([0.3, 1.0, 3.0])
        self.y = np.where(rng.random(16) < 0.5, 1.0, -1.0)
        self.ridge = float(rng.choice([0.0, 0.1, 1.0]))
        self.w0 = rng.standard_normal(n) * rng.choice([0.1, 1.0, 4.0])
        self.eta = float(rng.choice([1e-3, 1e-2, 0.1, 1.0]))
        self.grid = hu.grid(str(rng.choice(GRIDS))).within(np.float64)

    def gradient(self, w: np.ndarray) -> np.ndarray:
        slope = -self.y / (1 + np.exp(self.y * (self.x @ w)))
        return np.asarray(self.x.T @ slope / 16 + self.ridge * w)

    def envelope(self) -> np.ndarray:
        bound = np.abs(self.x).T @ np.abs(self.x) / 64 + self.ridge * np.eye(self.n)
        return np.asarray(bound * (1 + 1e-14))  # outwards

    def gradient_error(self, w: np.ndarray) -> np.ndarray:
        """First order: 2**-53 times the terms, times how they amplify; with a hundredfold reserve."""
        inner = 1 + np.abs(self.x) @ np.abs(w)
        return np.asarray(100 * 2.0**-53 * (np.abs(self.x).T @ inner / 16 + self.ridge * np.abs(w)))


def test_no_certified_logistic_regression_disagrees() -> None:
    """Up to the horizon the run is at the certified codes, also when gradients are off by what is allowed."""
    certified = moved = 0
    for seed in range(300):
        f = Logistic(seed)
        h = f.envelope()
        envelope = h if seed % 2 else lambda w, q, h=h: h
        c = certify_hessian(envelope, f.gradient, f.w0, f.eta, 20, f.grid, gradient_error=f.gradient_error)
        rng = np.random.default_rng(seed)
        for reach in (0.0, 1.0, 1.0):
            q = c.codes[0]
            for t in range(c.horizon):
                g = f.gradient(q) + reach * f.gradient_error(q) * rng.choice([-0.9, 0.9], f.n)
                q = reference.round(q - f.eta * g, f.grid)
                assert np.array_equal(q, c.codes[t + 1]), seed
        certified += c.horizon
        moved += int((~c.frozen).any(axis=1).sum())
    assert certified > 400
    assert moved > 50


def test_an_envelope_is_wider_than_the_quadratic_it_bounds() -> None:
    """On a quadratic, |H| certifies what |H e| certifies, or less."""
    less = 0
    for seed in range(200):
        p = Quadratic(seed)
        sharp = p.certify()
        theirs = (p.n + 2) * 2.0**-53 * 1.001
        wide = certify_hessian(
            np.abs(p.h),
            lambda w, p=p: p.h @ w + p.b,
            p.w0,
            p.eta,
            p.steps,
            p.grid,
            gradient_error=lambda x, p=p, k=theirs: k * (np.abs(p.h) @ np.abs(x) + np.abs(p.b)),
        )
        assert wide.horizon <= sharp.horizon
        assert np.array_equal(wide.codes, sharp.codes)
        less += wide.horizon < sharp.horizon
    assert less > 0


def test_an_inexact_gradient_can_end_it() -> None:
    def certificate(error: float) -> Certificate:
        return certify_hessian([[1.0]], np.tanh, [2.0], 0.01, 3, "e4m3", gradient_error=error)

    assert certificate(1e-15).horizon == 3
    assert certificate(100.0).stopped_by == "bound"
    for bad in (-1.0, math.nan):
        with pytest.raises(hu.UsageError, match="gradient_error"):
            certificate(bad)


@pytest.mark.parametrize("envelope", [[1.0], [[-1.0]], [[math.nan]], np.eye(2)])
def test_envelope_refusals(envelope: object) -> None:
    with pytest.raises(hu.UsageError, match="envelope"):
        certify_hessian(envelope, np.tanh, [2.0], 0.01, 3, "e4m3", gradient_error=0.0)  # type: ignore[arg-type]


def test_gradient_shape_is_checked() -> None:
    with pytest.raises(hu.UsageError, match="shape"):
        certify_hessian(np.eye(2), lambda w: w[:1], [2.0, 1.0], 0.01, 3, "e4m3", gradient_error=0.0)


# ---- the construction -----------------------------------------------------------------------------------


def bowl(n: int, seed: int) -> Objective:
    """Coercive and smooth: a quadratic and a ripple."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((n, n))
    h, centre = a @ a.T / n + np.eye(n), rng.standard_normal(n)
    return Objective(
        lambda x: float((x - centre) @ h @ (x - centre) / 2 + np.sin(x).sum()),
        lambda x: np.asarray(h @ (x - centre) + np.cos(x)),
    )


@pytest.mark.parametrize("seed", range(12))
def test_one_past_two_futures(seed: int) -> None:
    """Both objectives give all recorded states and values bit for bit, and part at coordinate i."""
    rng = np.random.default_rng(seed)
    n, name = int(rng.integers(1, 5)), ["e4m3", "m7", "int8@32"][seed % 3]
    f = bowl(n, seed)
    sources = [Descent(rng.standard_normal(n), [0.1] * 30) for _ in range(3)]
    sources.append(Descent(reference.round(rng.standard_normal(n), hu.grid("e5m2")), [0.05] * 20, "e5m2"))
    start = reference.round(3 * rng.standard_normal(n), hu.grid(name))
    updates, i = 1 + seed % 3, int(rng.integers(n))
    target = Descent(start, [0.1] * updates + [0.07], name)
    p = reachable_prefix(f, sources, target, coordinate=i)

    assert p.target.tobytes() == descend(f.gradient, Descent(start, [0.1] * updates, name)).tobytes()
    for g in (p.stay, p.cross):
        for run, states in zip(sources, p.sources, strict=True):
            assert descend(g.gradient, run).tobytes() == states.tobytes()
            assert all(g.value(x) == f.value(x) for x in states)
        whole = descend(g.gradient, target)
        assert whole[:-1].tobytes() == p.target.tobytes()
        assert g.value(p.q) == f.value(p.q)  # even on arrival
    q, up = p.q, float(hu.grid(name).neighbours(torch.from_numpy(p.q))[1][i])
    assert np.array_equal(p.next_stay, q)
    expected = q.copy()
    expected[i] = up
    assert np.array_equal(p.next_cross, expected)
    np.testing.assert_allclose(p.stay.gradient(q), 0, atol=0)
    far = q + 2 * p.radius * np.eye(n)[0]
    assert p.stay.value(far) == f.value(far) == p.cross.value(far)


def test_the_gradient_of_the_bump_is_its_gradient() -> None:
    """By central differences, in the plateau, in the transition and outside; and smooth at both seams."""
    f = bowl(2, 0)
    p = reachable_prefix(f, [], Descent([2.0, 1.0], [0.1, 0.1], "e4m3"))
    for part in (0.2, 0.499, 0.501, 0.6, 0.75, 0.9, 0.99, 1.01):
        x = p.q + part * p.radius * np.array([0.6, -0.8])
        for objective in (p.stay, p.cross):
            for k in range(2):
                step = 1e-5 * p.radius * np.eye(2)[k]
                slope = (objective.value(x + step) - objective.value(x - step)) / (2e-5 * p.radius)
                assert slope == pytest.approx(objective.gradient(x)[k], rel=1e-4, abs=1e-4)


def test_the_cutoff_goes_from_one_to_zero() -> None:
    q = np.array([1.0, 2.0])
    direction = np.array([0.6, 0.8])
    parts = np.linspace(0, 1.2, 200)
    chi = [certificates._cutoff(q + s * 0.5 * direction, q, 0.5)[0] for s in parts]
    assert all(a >= b for a, b in itertools.pairwise(chi))
    assert all(c == 1 for c, s in zip(chi, parts, strict=True) if s < 0.5)
    assert all(c == 0 for c, s in zip(chi, parts, strict=True) if s > 1)
    assert 0 < min(c for c, s in zip(chi, parts, strict=True) if 0.55 < s < 0.95) < 1


def test_a_bound_on_derivatives_would_tell_them_apart() -> None:
    """The bump needs curvature: its second derivatives exceed those of F, so a certificate for F
    does not speak of it."""
    f = bowl(1, 3)
    p = reachable_prefix(f, [], Descent([2.0], [0.1, 0.1], "e4m3"))
    points = p.q + p.radius * np.linspace(-1, 1, 400)[:, None]
    curvature = [np.abs(np.diff([g.gradient(x)[0] for x in points])).max() for g in (f, p.cross)]
    assert curvature[1] > 3 * curvature[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": Descent([1.0], [0.1, 0.1])}, "needs a grid"),
        ({"target": Descent([1.0], [0.1], "e4m3")}, "one update at least"),
        ({"target": Descent([1.0], [0.1, 0.0], "e4m3")}, "positive one"),
        ({"target": Descent([1.01], [0.1, 0.1], "e4m3")}, "not on grid"),
        ({"target": Descent([1.0], [1e-9, 0.1], "e4m3")}, "seen before"),
        ({"target": Descent([1.0], [-4e3, 0.1], "e4m3")}, "nothing lies above"),
        ({"sources": [Descent([0.5], [0.1])]}, "seen before"),
        ({"sources": [Descent([0.5, 0.5], [0.1])]}, "1 coordinates"),
        ({"coordinate": 1}, "1 coordinates"),
    ],
)
def test_construction_refuses(change: dict[str, object], words: str) -> None:
    f = Objective(lambda x: float(x @ x / 2), lambda x: x)
    good = {"sources": [], "target": Descent([1.0], [0.5, 0.5], "e4m3")}
    assert reachable_prefix(f, **good).q.tolist() == [0.5]  # type: ignore[arg-type]
    with pytest.raises(hu.UsageError, match=words):
        reachable_prefix(f, **good | change)  # type: ignore[arg-type]


def test_an_objective_that_changes_its_mind_is_noticed() -> None:
    calls = iter(range(10_000))
    f = Objective(lambda x: float(x @ x / 2), lambda x: x * (1 + 1e-9 * next(calls)))
    with pytest.raises(hu.UsageError, match="pure function"):
        reachable_prefix(f, [Descent([3.0], [0.1] * 5)], Descent([1.0], [0.5, 0.5], "e4m3"))


def test_the_example_tells_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    told = capsys.readouterr().out
    assert "frozen" in told
    assert "moved" in told
    assert "bit for bit" in told
