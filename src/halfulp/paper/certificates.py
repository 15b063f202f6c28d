"""Certify the codes of a run before it starts, and show why so little can be promised.

**A certificate for full-batch gradient descent** (paper, appendix B). A reference run w_t with proposals
d_t = -eta grad F(w_t) is projected to codes q_t = Q(w_t), e_t = q_t - w_t. The real run is
q' = Q(q - eta grad F(q)). If it is at q_t, its proposal differs from d_t by at most

    B_i = eta sum_j H_ij |e_j|      H_ij >= |second derivative ij of F| between w_t and q_t     (Eq. 14)
    B_i = eta |[H e]_i|             for F = w'Hw/2 + b'w + c, where it is the difference itself

and if B_i is below the margin gamma_i (see :mod:`halfulp.paper.trust`) for *every* coordinate, the next code
is certain. So the premises, for each update up to a horizon, are

    start        the run starts at q_0
    transition   Q(q_t + d_t) == q_{t+1}: the projected codes follow their own proposals
    cell         every q_t + d_t lies inside an open rounding cell with two finite boundaries
    bound        B < gamma in every coordinate: one that is not certain changes later gradients

The second is what ends most horizons: the reference accumulates what rounding loses, so sooner or
later it crosses a boundary that the stored weight does not.

*Rounding errors are part of the promise.* The run is executed in floating point, and so is this module.
Every bound here is enlarged by the worst case of the gradient evaluation (in any order of summation), of
the product with eta and of the sum q + d, in the run's arithmetic and in ours, and margins are rounded
down. The certificate therefore covers the recursion in exact arithmetic and every execution whose errors
stay within those bounds. It covers no other optimizer, no minibatches, no other function.

**Why a finite trace alone promises nothing.** :func:`reachable_prefix` is the paper's construction, executed.
Take any objective F, any recorded source runs, and a quantized run that has just reached q. With a
smooth cutoff chi, one near q and zero at every state seen so far,

    F_d(x) = F(x) + v'(x - q) chi(x),      v = -d / eta - grad F(q)                           (Eq. 12)

has the same value and derivatives at all those states, so it gives the same runs, bit for bit; but at q
its proposal is d, and d is ours to choose. One choice stays, another crosses. Only a bound on
derivatives, such as H above, can tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.measures import events
from halfulp.measures.events import GridLike
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named

Array = npt.NDArray[Any]
Gradient = Callable[[Array], Array]
Envelope = Callable[[Array, Array], Array]

OURS = 2.0**-53
"""Unit roundoff of the arithmetic in which certificates are computed."""


# ---- certificates -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Certificate:
    """The premises of every update, and how far they carry."""

    common_start: bool
    transition: Array
    """(steps,) Whether the projected codes follow their own proposals."""
    cell: Array
    """(steps,) Whether every proposal lies inside an open cell with finite boundaries."""
    bound: Array
    """(steps,) Whether the drift bound is below the margin in every coordinate."""
    drift: Array
    """(steps, n) B with all rounding errors added."""
    margin: Array
    """(steps, n) gamma, rounded down."""
    codes: Array
    """(steps + 1, n) The projected codes; up to the horizon they are the run's own."""

    @property
    def updates(self) -> Array:
        """(steps,) True where all premises of an update hold, apart from the start."""
        return np.asarray(self.transition & self.cell & self.bound)

    @property
    def horizon(self) -> int:
        """The number of updates that are certain: codes[0] to codes[horizon] are the run's codes."""
        broken = np.flatnonzero(~self.updates)
        return 0 if not self.common_start else int(broken[0]) if broken.size else len(self.updates)

    @property
    def frozen(self) -> Array:
        """(horizon, n) The certain events."""
        h = self.horizon
        return np.asarray(self.codes[1 : h + 1] == self.codes[:h])

    @property
    def stopped_by(self) -> str | None:
        """The first premise that fails: start, transition, cell or bound; None if all steps are certain."""
        if not self.common_start:
            return "start"
        if self.horizon == len(self.updates):
            return None
        at = self.horizon
        return "transition" if not self.transition[at] else "cell" if not self.cell[at] else "bound"


def certify_quadratic(
    hessian: npt.ArrayLike,
    linear: npt.ArrayLike,
    w0: npt.ArrayLike,
    eta: float,
    steps: int,
    grid: GridLike,
    *,
    start: npt.ArrayLike | None = None,
    arithmetic: npt.DTypeLike = np.float64,
) -> Certificate:
    """Certify gradient descent on w'Hw/2 + b'w, with B = eta |H e|.

    ``start``: the codes at which the run starts, if not Q(w0). ``arithmetic``: float64 or float32, in
    which the run evaluates H q + b, multiplies by eta and adds; H, b and eta must be exact in it.

    >>> certificate = certify_quadratic(np.eye(2), [0.0, 0.0], [1.0, -3.0], 0.5, 3, "int8@1")
    >>> certificate.horizon, certificate.stopped_by, certificate.codes[:2].tolist()
    (0, 'cell', [[1.0, -3.0], [0.0, -2.0]])
    >>> certify_quadratic(np.eye(2), [0.0, 0.0], [1.0, -3.0], 0.0625, 100, "int8@1").horizon
    2
    """
    h, b = np.asarray(hessian, dtype=np.float64), np.asarray(linear, dtype=np.float64)
    n = b.size
    if h.shape != (n, n) or b.shape != (n,) or not np.array_equal(h, h.T):
        raise UsageError(
            f"expected a symmetric matrix (n, n) and a vector (n,): found {h.shape} and {b.shape}."
        )
    kind = _arithmetic(arithmetic)
    for name, x in (("the Hessian", h), ("the linear term", b), ("eta", np.float64(eta))):
        if not np.array_equal(x.astype(kind), x):
            raise UsageError(f"{name} is not exact in {kind.name}: round it first, as the run does.")
    size, ours = np.abs(h), _gamma(n + 3, OURS)
    theirs = _gamma(n + 2, float(np.finfo(kind).eps) / 2)

    def drift(w: Array, q: Array) -> Array:
        e = q - w
        return np.asarray(eta * (np.abs(h @ e) + ours * (size @ np.abs(e))))

    def error(x: Array) -> Array:
        return np.asarray(theirs * (size @ np.abs(x) + np.abs(b)))

    return _certify(lambda w: h @ w + b, drift, error, w0, eta, steps, grid, start, kind)


def certify_hessian(
    envelope: Envelope | npt.ArrayLike,
    gradient: Gradient,
    w0: npt.ArrayLike,
    eta: float,
    steps: int,
    grid: GridLike,
    *,
    gradient_error: float | Gradient,
    start: npt.ArrayLike | None = None,
    arithmetic: npt.DTypeLike = np.float64,
) -> Certificate:
    """Certify gradient descent on a smooth function, with B = eta H |e| from an envelope H.

    ``envelope``: a matrix that bounds every |second derivative| everywhere, or a function of (w, q) that
    bounds them between w and q. It is believed, not checked. ``gradient_error``: how far a computed
    gradient may be from the true one in any coordinate, here and in the run; a number or a function
    of the point. It has no default, because no one else knows. ``start``, ``arithmetic``: as above.

    >>> gradient = lambda w: np.tanh(w)  # of log cosh, whose second derivative is at most one
    >>> certificate = certify_hessian(np.eye(1), gradient, [2.0], 0.01, 100, "e4m3", gradient_error=1e-15)
    >>> certificate.horizon, certificate.stopped_by, bool(certificate.frozen.all())
    (6, 'transition', True)
    """
    fixed = None if callable(envelope) else np.asarray(envelope, dtype=np.float64)

    def drift(w: Array, q: Array) -> Array:
        h = np.asarray(envelope(w, q)) if callable(envelope) else fixed
        assert h is not None
        if h.shape != (w.size, w.size) or not np.all(h >= 0):
            raise UsageError(
                f"an envelope is a matrix of bounds from 0 up, {w.size} by {w.size}: found shape {h.shape}."
            )
        return np.asarray(eta * (h @ np.abs(q - w)))

    def error(x: Array) -> Array:
        size = gradient_error(x) if callable(gradient_error) else gradient_error
        if not np.all(np.asarray(size) >= 0):
            raise UsageError(f"gradient_error is a bound from 0 up: found {size!r}.")
        return np.asarray(np.broadcast_to(size, x.shape))

    return _certify(gradient, drift, error, w0, eta, steps, grid, start, _arithmetic(arithmetic))


def _certify(
    gradient: Gradient,
    drift: Envelope,
    error: Gradient,
    w0: npt.ArrayLike,
    eta: float,
    steps: int,
    grid: GridLike,
    start: npt.ArrayLike | None,
    arithmetic: np.dtype[Any],
) -> Certificate:
    w = _vector(w0, "w0")
    if not (math.isfinite(eta) and eta > 0) or steps < 1:
        raise UsageError(f"expected a positive rate and at least one step: found eta={eta!r}, steps={steps}.")
    g = _fixed(grid).within(arithmetic)
    codes = [_round(w, g)]
    rows: list[tuple[bool, bool, bool, Array, Array]] = []
    for _ in range(steps):
        q = codes[-1]
        with np.errstate(over="ignore", invalid="ignore"):
            d = -eta * _gradient(gradient, w)
            b = _with_rounding(drift(w, q), q, d, eta * (error(w) + error(q)), arithmetic)
            gamma = np.nextafter(events.margin(torch.from_numpy(q), torch.from_numpy(d), g).numpy(), 0.0)
            landed, w = _round(q + d, g), w + d
        codes.append(_round(w, g))
        rows.append(
            (np.array_equal(landed, codes[-1]), bool(np.all(gamma > 0)), bool(np.all(b < gamma)), b, gamma)
        )
    transition, cell, bound, bounds, margins = (np.array(column) for column in zip(*rows, strict=True))
    return Certificate(
        common_start=start is None or np.array_equal(_vector(start, "start"), codes[0]),
        transition=transition,
        cell=cell,
        bound=bound,
        drift=bounds,
        margin=margins,
        codes=np.array(codes),
    )


def _with_rounding(b: Array, q: Array, d: Array, gradients: Array, arithmetic: np.dtype[Any]) -> Array:
    """Return a bound on |z of the run - z of the reference|, both as computed.

    To first order in the unit roundoff u: the gradients' own errors; u |d| for each product with eta
    and u (|q| + |d|) for each sum q + d, where the run's |d| is at most ``size``. The constants are
    about twice what that adds up to, which covers the higher orders; the last factor covers the
    evaluation of bounds of n terms here.
    """
    limits = np.finfo(arithmetic)
    u, tiny = float(limits.eps) / 2, float(limits.smallest_subnormal)
    size = np.abs(d) + b + gradients
    total = b + gradients + 4 * u * np.abs(q) + 8 * u * size + 8 * tiny
    return np.asarray(total * (1 + (q.size + 16) * 2 * OURS))


# ---- the construction -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective:
    """A smooth function with its gradient."""

    value: Callable[[Array], float]
    gradient: Gradient


@dataclass(frozen=True, eq=False)
class Descent:
    """A full-batch gradient descent, fixed apart from its objective: x' = Q(x - rate grad F(x)).

    Without a grid nothing is rounded (beyond float64).
    """

    start: npt.ArrayLike
    rates: Sequence[float]
    grid: GridLike | None = None


def descend(gradient: Gradient, run: Descent) -> Array:
    """Return the states of a run, the start first: shape (updates + 1, n).

    >>> descend(lambda x: x, Descent([1.0], [0.5, 0.05], "e4m3")).ravel().tolist()
    [1.0, 0.5, 0.46875]
    """
    g = None if run.grid is None else _fixed(run.grid).within(np.float64)
    x = _vector(run.start, "start")
    if g is not None and not np.array_equal(_round(x, g), x):
        raise UsageError(f"the start {x.tolist()} is not on grid {g.name}.")
    states = [x]
    for rate in run.rates:
        x = x - rate * _gradient(gradient, x)
        x = x if g is None else _round(x, g)
        states.append(x)
    return np.array(states)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Two objectives that no recorded state can tell apart, and what they do next."""

    coordinate: int
    stay: Objective
    cross: Objective
    sources: tuple[Array, ...]
    """The states of every source run, the same under F, ``stay`` and ``cross``."""
    target: Array
    """The states of the quantized run up to its arrival at q, the same under all three."""
    next_stay: Array
    next_cross: Array
    radius: float
    """Within this distance of q the objectives differ; no earlier state is nearer than twice it."""

    @property
    def q(self) -> Array:
        """Return the codes at the end of the prefix."""
        return np.asarray(self.target[-1])


def reachable_prefix(
    objective: Objective, sources: Sequence[Descent], target: Descent, *, coordinate: int = 0
) -> Prefix:
    """Construct two objectives with the same past and opposite next events at a coordinate (Eqs. 11 to 13).

    The target's last rate is that of the next update; the ones before lead to q. Everything is then
    executed under both objectives and compared bit for bit, so what comes back has been verified.
    """
    if target.grid is None or len(target.rates) < 2 or not target.rates[-1] > 0:
        raise UsageError(
            "the target needs a grid, a rate for one update at least, and a positive one for the next."
        )
    past = Descent(target.start, target.rates[:-1], target.grid)
    prefix = descend(objective.gradient, past)
    traces = tuple(descend(objective.gradient, run) for run in sources)
    q, eta = prefix[-1], float(target.rates[-1])
    if any(trace.shape[1] != q.size for trace in traces) or not 0 <= coordinate < q.size:
        raise UsageError(
            f"the target has {q.size} coordinates: expected as many in every source, and one of them."
        )
    seen = np.concatenate([*traces, prefix[:-1]])
    distance = float(np.min(np.linalg.norm(seen - q, axis=1)))
    if distance == 0:
        raise UsageError(f"q = {q.tolist()} has been seen before: by a source, or earlier by the target.")
    grid = _fixed(target.grid).within(np.float64)
    above = float(grid.neighbours(torch.from_numpy(q))[1][coordinate])
    if not math.isfinite(above):
        raise UsageError(
            f"coordinate {coordinate} is at the largest code, {q[coordinate]!r}: nothing lies above."
        )
    jump = np.zeros_like(q)
    jump[coordinate] = 3 * (above - q[coordinate]) / 4
    stay, cross = (_bumped(objective, q, d, eta, distance / 2) for d in (np.zeros_like(q), jump))
    ends = []
    for other in (stay, cross):
        _check_same_past(objective, other, zip((*sources, past), (*traces, prefix), strict=True))
        ends.append(descend(other.gradient, target)[-1])
    if ends[0][coordinate] != q[coordinate] or ends[1][coordinate] != above:
        raise UsageError(
            f"the gradient at q = {q.tolist()} is too large beside gap / rate for float64 to turn: "
            f"the next codes are {ends[0][coordinate]!r} and {ends[1][coordinate]!r}."
        )
    return Prefix(coordinate, stay, cross, traces, prefix, ends[0], ends[1], distance / 2)


def _bumped(f: Objective, q: Array, d: Array, eta: float, radius: float) -> Objective:
    """F_d(x) = F(x) + v'(x - q) chi(x), which proposes d at q."""
    v = -d / eta - f.gradient(q)

    def value(x: Array) -> float:
        chi, _ = _cutoff(x, q, radius)
        return f.value(x) if chi == 0 else f.value(x) + float(v @ (x - q)) * chi

    def gradient(x: Array) -> Array:
        chi, slope = _cutoff(x, q, radius)
        return f.gradient(x) if chi == 0 else f.gradient(x) + v * chi + float(v @ (x - q)) * slope

    return Objective(value, gradient)


def _cutoff(x: Array, q: Array, radius: float) -> tuple[float, Array]:
    """Return a C-infinity cutoff and its gradient: one within radius / 2 of q, zero from radius on.

    In between, with t from 0 to 1 in the squared distance, a / (a + b) of a = exp(-1 / (1 - t)) and
    b = exp(-1 / t), all of whose derivatives vanish at both ends.
    """
    offset = (x - q) / radius
    t = (float(offset @ offset) - 0.25) / 0.75
    if t <= 0 or t >= 1:
        return (1.0 if t <= 0 else 0.0), np.zeros_like(offset)
    chi = 1 / (1 + math.exp(min(1 / (1 - t) - 1 / t, 700.0)))
    slope = -chi * (1 - chi) * (1 / t**2 + 1 / (1 - t) ** 2)
    return chi, slope / 0.75 * 2 * offset / radius


def _check_same_past(f: Objective, other: Objective, runs: Iterable[tuple[Descent, Array]]) -> None:
    """Compare every state, value and gradient of the runs, bit for bit.

    At its last state a run asks nothing more, so there the gradient may differ (it does where the target
    arrives at q).
    """
    for run, states in runs:
        again = descend(other.gradient, run)
        same = again.tobytes() == states.tobytes()
        same &= all(f.value(x) == other.value(x) for x in states)
        same &= all(f.gradient(x).tobytes() == other.gradient(x).tobytes() for x in states[:-1])
        if not same:
            raise UsageError("the objective does not give the same numbers twice: expected a pure function.")


# ---- arguments ------------------------------------------------------------------------------------------


def _gamma(k: int, u: float) -> float:
    """Return k u / (1 - k u), the relative error of k roundings in any order."""
    return k * u / (1 - k * u)


def _arithmetic(kind: npt.DTypeLike) -> np.dtype[Any]:
    dtype = np.dtype(kind)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise UsageError(f"certificates know float32 and float64 arithmetic, not {dtype.name}.")
    return dtype


def _fixed(grid: GridLike) -> Grid:
    g = named(grid)
    if g.scaling is not None and g.scaling.moves:
        raise UsageError(f"the cells of grid {g.name} move with the data: nothing can be certified there.")
    return g


def _round(x: Array, grid: Grid) -> Array:
    return np.asarray(grid.round(torch.from_numpy(x)).numpy())


def _gradient(gradient: Gradient, x: Array) -> Array:
    g = np.asarray(gradient(x), dtype=np.float64)
    if g.shape != x.shape:
        raise UsageError(f"the gradient at {x.size} coordinates has shape {g.shape}.")
    return g


def _vector(x: npt.ArrayLike, name: str) -> Array:
    values = np.array(x, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise UsageError(f"{name} must be a vector of finite numbers: found shape {values.shape}.")
    return values
