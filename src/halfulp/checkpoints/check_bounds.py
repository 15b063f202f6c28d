"""Bound how far one optimizer step can move a weight, and find the codes that such a step can change.

**The bound.** Adam's step is ``lr * m^ / (sqrt(v^) + eps)``, with m^ and v^ the bias-corrected averages of
the gradients and of their squares: weights ``a_k = (1 - b1) b1^k / (1 - b1^t)`` and ``c_k = (1 - b2) b2^k /
(1 - b2^t)`` on the gradient of k steps ago. By Cauchy and Schwarz ``|sum a_k g_k| <= sqrt(sum a_k^2 / c_k)
sqrt(sum c_k g_k^2)``, so

    |step| <= lr * sqrt(sum_{k < t} a_k^2 / c_k)
            = lr * (1 - b1) / (1 - b1^t) * sqrt((1 - b2^t) (1 - r^t) / ((1 - b2) (1 - r))),  r = b1^2 / b2

with equality for gradients proportional to ``a_k / c_k`` and eps = 0: nothing smaller holds for every
gradient. It is 1 at t = 1 and grows to ``(1 - b1) / sqrt((1 - b2) (1 - r))``: 7.27 for betas (0.9, 0.999),
1.17 for (0.9, 0.95). Where r >= 1 there is none.

**Two bounds.** A weight whose gradients keep one sign and size moves by lr, one with noisy gradients by less:
so ``step``, *one step of size lr* (bound 1), is the typical one. It is not the largest. Weights whose
gradients all but vanished for a long time take larger steps when they come back: after 999 zeros, the step is
2.5 lr with betas (0.9, 0.999), because the mean of the squares forgets more slowly than that of the
gradients. Rows of an embedding that few batches use are such weights. ``worst`` is the number above, the
largest over t: what it does not move, no gradients move. A check states both. Decoupled weight decay adds
``lr * weight_decay * |w|`` towards zero. Lion's step is lr exactly.

**What it reaches.** Rounding is monotone, so a code q leaves its place for some ``|d| <= B`` only if it
does for the largest, in the direction in which it is easier: towards zero, where the gap is never the wider
one and decay helps. With h half the gap to the next code towards zero (away from it, for zero itself), q
moves if and only if ``B + lr * weight_decay * |q| > h``, or equal and its code is odd (ties go to even).
This is decided in rational arithmetic for the given float64 numbers; floats only tell where the two sides
are far apart. An optimizer's own rounding, of the step and of ``q + d`` in its container, is not part of
it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError
from halfulp.numbers.elements import value_of
from halfulp.numbers.grids import Grid

Array = npt.NDArray[Any]
KINDS = ("adamw", "adam", "lion")
UNBOUNDED = {
    "sgd": "its step is lr times a gradient, which can be of any size",
    "adafactor": "its step is bounded on average over a tensor, not for every weight",
    "muon": "its step is bounded as a matrix, and implementations scale it differently",
}
"""Why there is no bound, for those that people ask for."""


@cache
def adam_bound(beta1: float, beta2: float) -> float:
    """Return the largest ``|step| / lr`` of Adam over all gradients and all t, eps = 0; it may be infinite.

    >>> round(adam_bound(0.9, 0.999), 4), round(adam_bound(0.9, 0.95), 4), adam_bound(0.9, 0.8)
    (7.2703, 1.165, inf)
    """
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise UsageError(f"betas are at least 0 and below 1, not {beta1}, {beta2}.")
    if beta1**2 >= beta2:
        return 1.0 if beta2 == 0 else math.inf  # 1: the sign of the newest gradient
    t = np.arange(1, 200_001, dtype=np.float64)
    r = beta1**2 / beta2
    at = np.sqrt(-np.expm1(t * math.log(beta2)) * (1 - r**t)) / (1 - beta1**t)
    top = max(float(at.max()), 1.0)  # 1: where t is without bound
    return top * (1 - beta1) / math.sqrt((1 - beta2) * (1 - r))


@dataclass(frozen=True)
class Reach:
    """The reach of one step: at most ``lr * (bound + decay * |w|)`` towards zero."""

    lr: float
    bound: float
    decay: float
    said: str
    """In words."""

    def moves(self, n: Array, grid: Grid, scale: float = 1.0) -> Array:
        """Find which of the magnitudes with these indices can move; ``scale`` multiplies the code's value."""
        v, half = _half_gaps(n, grid)
        step, decay = Fraction(self.lr) * Fraction(self.bound), Fraction(self.lr) * Fraction(self.decay)
        left, right = float(step) + float(decay) * (v * scale), half * scale
        moving = left > right
        for i in np.flatnonzero(np.abs(left - right) <= 1e-12 * right):
            far = step + decay * Fraction(float(v[i])) * Fraction(scale)
            needed = Fraction(float(half[i])) * Fraction(scale)
            moving[i] = far > needed or (far == needed and n[i] % 2 == 1)
        return moving

    def rates(self, n: Array, grid: Grid, scale: float = 1.0) -> Array:
        """Return the learning rate from which each of these magnitudes can move."""
        v, half = _half_gaps(n, grid)
        return np.asarray(half * scale / (self.bound + self.decay * v * scale))

    def first_moving(self, grid: Grid, binades: int) -> Array:
        """Find the first index of each binade that moves, for a grid too wide to check every code.

        Between two powers of two the gap is one and decay only grows, so one bisection a binade finds it.
        Where nothing decays, a binade moves as a whole, but for ties and the power of two that it begins
        with.
        """
        size = 1 << grid.mantissa
        low = np.arange(binades, dtype=np.int64) * size + 1
        high = low + size - 1
        if self.decay == 0:
            return np.where(self.moves(low + 1, grid), low, high)  # an even one: a tie stays
        while (open_ := low < high).any():
            middle = (low + high) // 2
            moves = self.moves(middle, grid)
            low, high = np.where(open_ & ~moves, middle + 1, low), np.where(moves, middle, high)
        return low


def _half_gaps(n: Array, grid: Grid) -> tuple[Array, Array]:
    """Return magnitudes, and half the gaps on their sides towards zero; both are exact in float64."""
    v = value_of(n, grid)
    return v, np.where(n > 0, v - value_of(np.maximum(n - 1, 0), grid), value_of(np.ones_like(n), grid)) / 2


def is_number(x: Any) -> TypeGuard[float]:
    """Return True for an int or float that float64 holds as a finite number."""
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= sys.float_info.max


def reach(
    lr: float,
    optimizer: str = "adamw",
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    bound: Literal["step", "worst"] | float = "step",
) -> Reach:
    """Return the reach of one step: typical (``step``), largest (``worst``), or a given multiple of lr."""
    if not (is_number(lr) and lr > 0):
        raise UsageError(f"a learning rate is a positive number, not {lr!r}.")
    if not (is_number(weight_decay) and weight_decay >= 0):
        raise UsageError(f"a weight decay is a number from 0 on, not {weight_decay!r}.")
    pair: Any = betas  # whatever a caller gave
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(map(is_number, pair))):
        raise UsageError(f"betas are two numbers, such as (0.9, 0.999), not {betas!r}.")
    given = isinstance(bound, int | float) and not isinstance(bound, bool)
    kind = str(optimizer).lower()
    if kind not in KINDS and not given:
        why = UNBOUNDED.get(kind, "it is not known here")
        raise UsageError(
            f"no bound of one {optimizer} step: {why}. Known: {', '.join(KINDS)}; or say yourself how many "
            "times lr a step is at most (bound=, --bound)."
        )
    if given:
        if not (is_number(bound) and bound > 0):
            raise UsageError(f"a bound is a positive number, not {bound!r}.")
        times, words = float(bound), f"a step of at most {float(bound):g} times lr = {lr:g}"
    elif not isinstance(bound, str) or bound not in ("step", "worst"):
        raise UsageError(f"bound is step, worst or a number, not {bound!r}.")
    elif kind == "lion":
        times, words = 1.0, f"any {optimizer} step: lr = {lr:g}, exactly"
    elif bound == "step":
        times, words = 1.0, f"a step of size lr = {lr:g}, as {optimizer} takes it for steady gradients"
        if math.isinf(adam_bound(*betas)):
            words += f" (the largest step has no bound with betas {betas})"
    else:
        times = adam_bound(*betas)
        words = f"any {optimizer} step: at most {times:.4g} times lr = {lr:g}, with betas {betas}"
        if math.isinf(times):
            raise UsageError(
                f"an Adam step has no bound with betas {betas}: the square of the first is not below the "
                "second. Say how many times lr a step is at most (bound=, --bound)."
            )
    if weight_decay and kind == "adam":
        raise UsageError("Adam's weight decay is part of the gradient, so of the bound: leave it out.")
    if weight_decay:
        words += f", and decay {weight_decay:g}"
    if math.isinf(lr * times) or math.isinf(lr * weight_decay):
        raise UsageError(f"{words}: that is more than a float64 holds. Take a smaller learning rate.")
    return Reach(lr, times, weight_decay, words)
