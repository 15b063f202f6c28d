"""Problems for the `theory` study: objectives whose quantized descent can be certified, and executed.

A problem is a pure function of (seed, family, grid, number). It can say what its certificate says, and
it can run, in ways that share nothing with the certificate: in rational arithmetic, where only the
stored weight is rounded, and in float64 with every sum taken forwards or backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.numbers.elements import index_of
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named
from halfulp.paper.certificates import Certificate, Objective, certify_hessian, certify_quadratic

Array = npt.NDArray[Any]

FAMILIES = ("slow", "jump", "logistic")
EXAMPLES = 32
GRADIENT_ERROR = 1e-12
"""Of a logistic gradient, the mean of 32 terms x s(z) with |x| < 6, |w| < 20 and s between 0 and 1. With
u = 2**-53: z sums at most 4 products below 120, so it is wrong by at most 4 * 4 * 120 u, and s, whose slope
is at most 1/4, by 480 u and a few u of its own; a term by 6 times that, 3.3e-13; adding 32 terms below 6
and dividing by 32 costs 33 * 6 u more. Together below 4e-13."""


class CertifiableProblem:
    """One objective with its start and rate: a pure function of the key."""

    def __init__(self, family: str, grid: str, seed: int, number: int) -> None:
        rng = np.random.default_rng([seed, FAMILIES.index(family), *grid.encode(), number])
        self.grid = named(grid).within(np.float64)
        self.family = family
        n = 1 + number % 4
        self.x, self.y = rng.standard_normal((EXAMPLES, n)), np.sign(rng.standard_normal(EXAMPLES))
        noise = rng.standard_normal((n, n))
        spread, small = np.diag(rng.uniform(0.5, 2.0, n)), 10.0 ** -int(rng.integers(1, 5))
        slow, fast = 2.0 ** -int(rng.integers(4, 12)), float(rng.choice([0.5, 1.0]))
        self.rate = fast if family == "jump" else slow
        self.h = (
            (np.eye(n) + small * (noise + noise.T)) if family == "jump" else spread + (noise + noise.T) / 8
        )
        self.b = rng.standard_normal(n) * float(rng.choice([0.0, 0.01, 1.0]))
        w0 = rng.standard_normal(n) * 2.0 ** int(rng.integers(-2, 3))
        self.w0 = self.store(w0) if number % 2 else w0  # a reference may start on the grid, or off it
        assert np.abs(self.x).max() < 6  # see GRADIENT_ERROR

    def store(self, x: Array) -> Array:
        """Round values to the grid."""
        return np.asarray(self.grid.round(torch.from_numpy(x)).numpy())

    def certify(self, steps: int) -> Certificate:
        """Certify the first ``steps`` steps."""
        if self.family != "logistic":
            return certify_quadratic(self.h, self.b, self.w0, self.rate, steps, self.grid)
        size = np.abs(self.x)
        envelope = size.T @ size / (4 * EXAMPLES) * (1 + 2.0**-40)  # |s'| <= 1/4; the factor covers the sum
        return certify_hessian(
            envelope, self.gradient, self.w0, self.rate, steps, self.grid, gradient_error=GRADIENT_ERROR
        )

    def gradient(self, w: Array, *, backwards: bool = False) -> Array:
        """Return the gradient in float64, with sums in one order or the other."""
        order = slice(None, None, -1) if backwards else slice(None)
        if self.family != "logistic":
            return _ordered_sum((self.h * w)[:, order].T) + self.b
        assert np.abs(w).max() < 20
        score = self.y * _ordered_sum((self.x * w)[:, order].T)
        terms = self.x * (-self.y / (1 + np.exp(score)))[:, None]
        return _ordered_sum(terms[order]) / EXAMPLES

    def executed(self, steps: int, *, backwards: bool) -> Iterator[Array]:
        """Yield the codes of the quantized descent, as a program in float64 runs it."""
        q = self.store(self.w0)
        yield q
        for _ in range(steps):
            q = self.store(q - self.rate * self.gradient(q, backwards=backwards))
            yield q

    def exact(self, steps: int) -> Iterator[Array]:
        """Yield the codes of the quantized descent on a quadratic in rational arithmetic."""
        h, b = [[Fraction(x) for x in row] for row in self.h.tolist()], [Fraction(x) for x in self.b.tolist()]
        q, rate = self.store(self.w0), Fraction(self.rate)
        yield q
        for _ in range(steps):
            at = [Fraction(x) for x in q.tolist()]
            slopes = [
                sum((a * x for a, x in zip(row, at, strict=True)), c) for row, c in zip(h, b, strict=True)
            ]
            q = np.array([nearest(x - rate * g, self.grid) for x, g in zip(at, slopes, strict=True)])
            yield q

    def runs(self, steps: int) -> dict[str, Array]:
        """Return every execution of this problem, by name."""
        paths = {
            "forwards": self.executed(steps, backwards=False),
            "backwards": self.executed(steps, backwards=True),
        }
        if self.family != "logistic":
            paths["rational"] = self.exact(steps)
        return {name: np.array(list(codes)) for name, codes in paths.items()}


def nearest(x: Fraction, grid: Grid) -> float:
    """Return the grid value nearest to a rational number, ties to the even index, by comparing rationals.

    The float nearest to x lies at most one code from the answer, so three candidates suffice.

    >>> (
    ...     nearest(Fraction(17, 16), named("e4m3")),
    ...     nearest(Fraction(17, 16) + Fraction(1, 10**30), named("e4m3")),
    ... )
    (1.0, 1.125)
    """
    start = grid.round(torch.tensor([float(x)], dtype=torch.float64))
    around = [float(v) for v in (start, *grid.neighbours(start))]
    finite = [v for v in around if np.isfinite(v)]
    odd = [int(index_of(np.array([abs(v)]), grid)[0]) % 2 for v in finite]
    return min(zip(finite, odd, strict=True), key=lambda c: (abs(Fraction(c[0]) - x), c[1]))[0]


def _ordered_sum(terms: Array) -> Array:
    """Add along the first axis, one by one."""
    total = np.zeros(terms.shape[1:])
    for term in terms:
        total = total + term
    return total


# ---- objectives without a certificate ----------------------------------------------------------------


def rippled_bowl(rng: np.random.Generator) -> Objective:
    """Return a smooth, coercive objective: log cosh around a centre, with a ripple."""
    centre, wave, height = rng.standard_normal(2), rng.standard_normal(2), 0.1 * rng.random()

    def value(x: Array) -> float:
        return float(np.sum(np.log(np.cosh(x - centre))) + height * np.cos(wave @ x))

    def gradient(x: Array) -> Array:
        return np.asarray(np.tanh(x - centre) - height * wave * np.sin(wave @ x))

    return Objective(value, gradient)


def arrival(objective: Objective, start: Array, grid: Grid, most: int) -> int:
    """Count the updates, at most ``most``, that reach a state not seen before, and add one for the next."""
    x, seen = start, [start]
    for _ in range(most):
        x = grid.round(torch.from_numpy(x - 0.2 * objective.gradient(x))).numpy()
        if any(np.array_equal(x, s) for s in seen):
            break
        seen.append(x)
    return len(seen)
