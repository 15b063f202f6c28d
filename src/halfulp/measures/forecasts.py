"""Scores of forecasts of a frozen fraction: how good they are, and whether that means anything.

A frozen fraction that hardly varies is easy to forecast: a constant does it. So accuracy alone is
no evidence, and three separate gates are asked of a forecast (paper, appendix C). Write E for the
RMSE against the measured trajectory, E_const for that of the best constant chosen in hindsight,
and V for the 95th minus the 5th percentile of the measured trajectory:

    accurate                  E <= 0.05
    informative               V >= 0.10  and  E <= 0.8 E_const
    directional added value   E <= 0.9 min(E_symmetric, E_rho)

The last asks whether the exact event, with its gap in the direction of the proposal, beats the
symmetric spacing and the pooled scalar rho. All are taken over the same steps, after the warmup.

An error has two parts, E**2 = centred**2 + signed**2: the shape (each trajectory minus its own
mean) and the level (mean of forecast minus measured). *Skill* is the share of the measured
variance that a forecast explains,

    skill = 1 - (E / E_const)**2

The paper prints a least skill of 0.9568 where the largest E is 0.00882 and the constant 1 has
0.068. The best constant cannot be worse than that, which rules out 1 - E / E_const (at most 0.87).

Baselines cost nothing and see the outcome, or need not look at it: the constant 1, the best
constant, and the best non-decreasing curve (by pooling adjacent violators). A forecast that does
not beat the last has found "more freezes as the rate decays", and no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.errors import UsageError
from halfulp.measures.crossings import recorded_steps

Array = npt.NDArray[Any]

ACCURATE_RMSE = 0.05
INFORMATIVE_RANGE = 0.10
INFORMATIVE_RATIO = 0.8
ADDED_VALUE_RATIO = 0.9
RECOVERED = 0.90
"""The recovery that the matched runs asked of every cell."""
PERCENTILES = (5.0, 95.0)


# ---- one forecast against one outcome -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A forecast against the measured trajectory, over ``steps`` steps after the warmup."""

    steps: int
    rmse: float
    centred_rmse: float
    signed_error: float
    """Mean of forecast minus measured."""
    measured_range: float
    """95th minus 5th percentile of the measured trajectory."""
    fixed_one_rmse: float
    constant_rmse: float
    monotone_rmse: float
    symmetric_rmse: float | None = None
    rho_rmse: float | None = None

    @property
    def skill(self) -> float | None:
        """The share of the measured variance explained; None if there is no variance."""
        return None if self.constant_rmse == 0 else 1 - (self.rmse / self.constant_rmse) ** 2

    @property
    def accurate(self) -> bool:
        """True if E <= 0.05."""
        return self.rmse <= ACCURATE_RMSE

    @property
    def informative(self) -> bool:
        """True if V >= 0.10 and E <= 0.8 E_const."""
        better = self.rmse <= INFORMATIVE_RATIO * self.constant_rmse
        return self.measured_range >= INFORMATIVE_RANGE and better

    @property
    def directional_added_value(self) -> bool | None:
        """True if E <= 0.9 min(E_symmetric, E_rho); None unless both of these are known."""
        if self.symmetric_rmse is None or self.rho_rmse is None:
            return None
        return self.rmse <= ADDED_VALUE_RATIO * min(self.symmetric_rmse, self.rho_rmse)


def compare(
    forecast: npt.ArrayLike,
    measured: npt.ArrayLike,
    *,
    warmup: int = 0,
    symmetric: npt.ArrayLike | None = None,
    scalar_rho: npt.ArrayLike | None = None,
    steps: npt.ArrayLike | None = None,
) -> Comparison:
    """Compare a forecast with the outcome, over the steps after ``warmup``.

    Args:
        forecast: Forecast frozen shares, one per recorded step.
        measured: Measured frozen shares.
        warmup: The last step to leave out.
        symmetric: Trajectory of the symmetric-spacing forecast.
        scalar_rho: Trajectory of the scalar forecast.
        steps: The steps that the values belong to, if not all were recorded.

    Raises:
        UsageError: If the trajectories do not fit together.

    >>> measured = np.linspace(0.5, 0.9, 101)
    >>> c = compare(measured + 0.01, measured, warmup=1)
    >>> c.steps, round(c.rmse, 4), round(c.centred_rmse, 4), round(c.signed_error, 4)
    (100, 0.01, 0.0, 0.01)
    >>> c.accurate, c.informative, c.directional_added_value, round(c.skill, 4)
    (True, True, None, 0.9925)
    """
    outcome = _values(measured, "measured")
    keep = recorded_steps(len(outcome), steps) > warmup
    if warmup < 0 or not keep.any():
        raise UsageError(f"no step is left after a warmup of {warmup}: there are {len(outcome)} values.")
    y = outcome[keep]

    def after_warmup(x: npt.ArrayLike, name: str) -> Array:
        values = _values(x, name)
        if values.shape != outcome.shape:
            raise UsageError(
                f"{name} has {len(values)} values, measured {len(outcome)}: expected one a step."
            )
        return values[keep]

    x = after_warmup(forecast, "forecast")
    error = x - y
    low, high = np.percentile(y, PERCENTILES)
    return Comparison(
        steps=len(y),
        rmse=rmse(x, y),
        centred_rmse=rmse(x - x.mean(), y - y.mean()),
        signed_error=float(error.mean()),
        measured_range=float(high - low),
        fixed_one_rmse=rmse(np.ones_like(y), y),
        constant_rmse=rmse(np.full_like(y, y.mean()), y),
        monotone_rmse=rmse(monotone_fit(y), y),
        symmetric_rmse=None if symmetric is None else rmse(after_warmup(symmetric, "symmetric"), y),
        rho_rmse=None if scalar_rho is None else rmse(after_warmup(scalar_rho, "scalar_rho"), y),
    )


def rmse(x: Array, y: Array) -> float:
    """Return the root mean square of x - y."""
    return float(np.sqrt(np.mean(np.square(x - y))))


def monotone_fit(y: npt.ArrayLike) -> Array:
    """Return the non-decreasing curve nearest to y in least squares, by pooling adjacent violators.

    >>> monotone_fit([1.0, 3.0, 2.0, 4.0])
    array([1. , 2.5, 2.5, 4. ])
    """
    sums: list[float] = []
    counts: list[int] = []
    for value in _values(y, "y"):
        total, count = float(value), 1
        while sums and sums[-1] * count >= total * counts[-1]:  # the block before has no smaller mean
            total, count = total + sums.pop(), count + counts.pop()
        sums.append(total)
        counts.append(count)
    return np.repeat(np.array(sums) / np.array(counts), counts)


# ---- the pooled scalar --------------------------------------------------------------------------------


def pooled_rho(proposal_sq: npt.ArrayLike, weight_sq: npt.ArrayLike, epsilon: float) -> Array:
    """Return ||d|| / (epsilon ||w||) from sums of squares (Eq. 3), with epsilon = 2**-(m+1).

    Args:
        proposal_sq: Sums of squares of the proposals.
        weight_sq: Sums of squares of the weights.
        epsilon: Half the relative spacing of the grid.

    Returns:
        The ratios: zero without a proposal, infinite for a proposal where every weight is zero.

    >>> pooled_rho([1.0, 0.0], [4.0, 0.0], 0.25)
    array([2., 0.])
    """
    d, w = (np.sqrt(np.asarray(x, dtype=np.float64)) for x in (proposal_sq, weight_sq))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(d == 0, 0.0, d / (epsilon * w)))


def scalar_rho_map(rho: npt.ArrayLike) -> Array:
    """Return the frozen fraction that uniform phases give a pooled rho: clip(-log2 rho, 0, 1) (appendix A).

    The fraction is one half at rho = 1 / sqrt(2). This is a heuristic for homogeneous populations, not the
    exact event.

    Raises:
        UsageError: If a ratio is negative or NaN.

    >>> scalar_rho_map([0.0, 0.5, 2**-0.5, 1.0, np.inf])
    array([1. , 1. , 0.5, 0. , 0. ])
    """
    values = np.asarray(rho, dtype=np.float64)
    if not np.all(values >= 0):
        raise UsageError("rho is a ratio of norms: expected numbers from 0 up, found a negative one or NaN.")
    with np.errstate(divide="ignore"):
        return np.clip(0.0 - np.log2(values), 0.0, 1.0)


# ---- losses -------------------------------------------------------------------------------------------


def recovery(*, rne: float, arm: float, fp32: float, smallest_gap: float = 0.0) -> float:
    """Return R_A = (L_rne - L_A) / (L_rne - L_fp32), the share of the loss gap that an arm wins back (Eq. 5).

    This describes an arm against one anchor; it is not a causal fraction.

    Args:
        rne: Loss with nearest rounding.
        arm: Loss of the arm.
        fp32: Loss with fp32 weights.
        smallest_gap: The gap that the loss gap must exceed.

    Raises:
        UsageError: If a loss is not finite, or the gap is not above ``smallest_gap``.

    >>> round(recovery(rne=6.412, arm=4.512, fp32=4.283), 4)
    0.8924
    """
    if not all(math.isfinite(loss) for loss in (rne, arm, fp32)):
        raise UsageError(f"recovery needs finite losses: found rne={rne!r}, arm={arm!r}, fp32={fp32!r}.")
    gap = rne - fp32
    if not gap > max(smallest_gap, 0.0):
        raise UsageError(
            f"there is no gap to recover: nearest rounding has loss {rne!r}, fp32 {fp32!r}, a gap of "
            f"{gap:g}; expected more than {max(smallest_gap, 0.0):g}. Report the losses instead."
        )
    return (rne - arm) / gap


def _values(x: npt.ArrayLike, name: str) -> Array:
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise UsageError(f"{name} must be finite, one value a step: found shape {values.shape}.")
    return values
