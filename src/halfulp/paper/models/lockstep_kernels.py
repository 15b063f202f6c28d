"""A reference and a quantized run in lockstep, every coordinate event judged and counted, compiled.

One step of a network with N weights, at reference weights w and stored codes q:

    d_r = -rate grad(w)     q_hat = Q(w)     z_r = q_hat + d_r     forecast: Q(z_r) == q_hat
    d_a = -rate grad(q)                      z_a = q + d_a         event:    Q(z_a) == q
    w <- w + d_r            q <- Q(z_a)

The forecast's confidence is counted, never stored: each event falls on a *level* of a fixed ladder, by its
relative margin (the distance to the nearest boundary of the rounding cell that z_r falls into, over the
cell's width) and again by the symmetric comparator (the distance of |d_r| from half the spacing above |w|,
over that spacing). Mistakes are counted three times: those of the exact forecast
by either score, and those of the symmetric forecast (|d| < u(w) / 2) by its own. A level takes in its upper
end and not its lower one, so that
"margin > t" is "level > level of t" for every threshold used, without rounding:

    x <= 1/4          S levels of equal width, after level 0 for x = 0 itself
    1/4 < x <= 1/2    S levels for each halving of 1/2 - x, down to 2**-13, and one for all beyond
    x > 1/2           S/8 levels for each doubling of x - 1/2, from 2**-12 to 2**12 (the comparator only)

since nearly all margins crowd towards 1/2, where the proposal is small beside the spacing. Everything else is
integer counts. Gradients are those of :mod:`halfulp.paper.models.mlp_kernels`, sums in a fixed order, so a
count is the same on every machine; rounding is that of the grid.

What is not finite is never frozen, has margin zero, and counts as a mistake.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfulp.paper.models.mlp_kernels import gradient
from halfulp.paper.models.rounding_kernels import (
    CUT,
    EMIN,
    EXPONENT,
    TOP,
    bits_of,
    float_like,
    kernel,
    nearest,
)

FINE = 8  # S = 2**FINE
S = 1 << FINE
HALVINGS = 11
COARSE = FINE - 3
DOUBLINGS = 24
MIDDLE = 1 + S + HALVINGS * S  # the level of 1/2
LEVELS = MIDDLE + 1 + DOUBLINGS * (S >> 3)

FORECAST, SURE, OPEN, MEASURED, DIVERGED, VIOLATED = range(6)
"""Columns of a step: forecast frozen; of those, above the primary threshold; all events not above it;
measured frozen; current codes differ; codes agree but proposals differ by the margin or more."""
CODE, TARGET, LANDED, GAMMA, ACTUAL = range(5)
"""Rows of scratch: q_hat, z_r, where a proposal lands, the margin (-1: not finite), z_a."""
APART, TOGETHER, CERTIFIED = range(3)
"""Mistakes where current codes differ, where they agree, and where both premises of the bound hold."""


@kernel
def level(x: Any) -> Any:
    """Return the level of the ladder that a margin stands on."""
    if not x > 0.0:
        return 0
    if x <= 0.25:
        return int(np.ceil(x * (4.0 * S)))
    if x <= 0.5:
        below = ((1021 << FINE) - 1) - (bits_of(0.5 - x) >> (52 - FINE))  # 1021: the exponent of 1/4
        return S + 1 + min(below, HALVINGS * S)
    above = (bits_of(x - 0.5) >> (52 - COARSE)) - (1011 << COARSE)  # 1011: the exponent of 2**-12
    return MIDDLE + 1 + min(max(above, 0), DOUBLINGS * (S >> 3) - 1)


@kernel
def forecast(w: Any, d: Any, k: Any, primary: Any, rows: Any, levels: Any, step: Any, total: Any) -> None:
    """Compute the projected event of every coordinate, its margin and its levels."""
    code, z, landed, gammas = rows[CODE], rows[TARGET], rows[LANDED], rows[GAMMA]
    nearest(w, code, k)
    for i in range(w.size):
        z[i] = code[i] + d[i]
    nearest(z, landed, k)
    one, scale = np.int64(1) << k[CUT], 2.0 ** (k[CUT] - 52)  # 2**-m
    for i in range(w.size):
        x, at = z[i], landed[i]
        finite = abs(x) < np.inf
        holds = finite and at == code[i]
        size = bits_of(abs(at))
        gamma, width = 0.0, 1.0
        if finite and size + one <= k[TOP]:  # neighbours of a pattern are one unit of its last kept bit away
            outer, inner = float_like(x, size + one), float_like(x, size - one)
            if size == 0:
                inner = -outer
            low, high = (inner, outer) if bits_of(at) >= 0 else (-outer, -inner)
            room = min(x - (low + (at - low) / 2.0), (at + (high - at) / 2.0) - x)
            if room > 0.0:
                gamma, width = room, (high - low) / 2.0
        exact, symmetric, small = level(gamma / width), 0, False
        if abs(w[i]) < np.inf and abs(d[i]) < np.inf:
            ulp = float_like(x, max(bits_of(abs(w[i])) & k[EXPONENT], k[EMIN])) * scale
            symmetric = level(abs(abs(d[i]) - ulp / 2.0) / ulp)
            small = abs(d[i]) < ulp / 2.0
        gammas[i] = gamma if finite else -1.0
        levels[0, i], levels[1, i], levels[2, i], levels[3, i] = exact, symmetric, holds, small
        total[0, exact] += 1
        total[1, symmetric] += 1
        step[FORECAST] += holds
        step[SURE] += holds and exact > primary
        step[OPEN] += exact <= primary


@kernel
def settle(
    q: Any, d_a: Any, d_r: Any, k: Any, rows: Any, levels: Any, step: Any, mistakes: Any, wrong: Any
) -> None:
    """Hold every forecast against the event of the measured run; q moves on to its next codes."""
    code, z, y, after, gammas = rows[CODE], rows[TARGET], rows[ACTUAL], rows[LANDED], rows[GAMMA]
    for i in range(q.size):
        y[i] = q[i] + d_a[i]
    nearest(y, after, k)
    for i in range(q.size):
        fine = abs(y[i]) < np.inf
        event = fine and after[i] == q[i]
        same = q[i] == code[i]
        inside = max(abs(d_a[i] - d_r[i]), abs(y[i] - z[i])) < gammas[i]
        step[MEASURED] += event
        step[DIVERGED] += not same
        step[VIOLATED] += same and not inside
        if event != (levels[3, i] == 1) or not fine or gammas[i] < 0.0:
            wrong[2, levels[1, i]] += 1  # the mistakes of the symmetric forecast itself
        if event != (levels[2, i] == 1) or not fine or gammas[i] < 0.0:
            wrong[0, levels[0, i]] += 1
            wrong[1, levels[1, i]] += 1
            mistakes[APART] += not same
            mistakes[TOGETHER] += same
            mistakes[CERTIFIED] += same and inside
        q[i] = after[i]


@kernel
def descend(w: Any, rate: Any, net: Any, batch: Any, scratch: Any, g: Any, d: Any) -> None:
    """Compute the proposal of gradient descent at w."""
    gradient(w, net, batch, scratch, g)
    for i in range(w.size):
        d[i] = -rate * g[i]


@kernel
def lockstep(
    weights: Any, rate: Any, net: Any, batch: Any, k: Any, primary: Any, measure: Any, scratch: Any,
    out: Any,
) -> None:  # fmt: skip
    """Take as many steps as ``steps`` has rows; w moves on and, if the run is measured, q.

    Without ``measure`` only the reference is run: the same w, levels and forecasts, bit for bit.
    """
    w, q = weights
    inner, flat, rows, levels = scratch
    g, d_r, d_a = flat[0], flat[1], flat[2]
    steps, mistakes, total, wrong = out
    for t in range(steps.shape[0]):
        if measure:
            descend(q, rate, net, batch, inner, g, d_a)
        descend(w, rate, net, batch, inner, g, d_r)
        forecast(w, d_r, k, primary, rows, levels, steps[t], total)
        if measure:
            settle(q, d_a, d_r, k, rows, levels, steps[t], mistakes, wrong)
        for i in range(w.size):
            w[i] = w[i] + d_r[i]
