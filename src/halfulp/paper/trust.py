"""Measure how far a projected reference can be trusted, coordinate by coordinate.

A reference trace forecasts the event at a code q_hat that the real run may have left. Afterwards,
with the real code q_a and proposal d_a at hand, the error splits into two causes (paper, appendix B).
For a reference proposal d_r let z_r = q_hat + d_r, and let

    gamma = distance of z_r to the nearest boundary of the rounding cell that it falls into,
            zero if that cell has no finite boundary on both sides, or z_r lies on one

Then with f_a, f_hat the realized and the projected frozen fraction,

    c = share of coordinates with q_a != q_hat                        the paths have diverged
    v = share with q_a == q_hat and |d_a - d_r| >= gamma              the proposals differ too much
    |f_a - f_hat| <= c + v                                            (Eq. 8)

because a coordinate in neither set has both proposals in the same open cell, so the same next code.
It is deterministic, and *posterior*: it needs the run that it speaks of. It explains an error; it
forecasts none. :mod:`halfulp.paper.certificates` says what a forecast would need.

Arithmetic: events use z in the container, z = fl(q + d), where the theorem has real numbers. So the
drift here is the larger of |d_a - d_r| and |z_a - z_r|: v is never below the paper's, and the
inequality holds as executed. Differences are rounded to float64 once; rounding is monotone, so a
drift of at least gamma never looks smaller than gamma. What is not finite is a violation.

*Abstention* turns the same margin into a forecast with a confidence: answer only where the relative
margin (gamma over the width of the cell, 1/2 at its centre) exceeds a threshold. Coverage is the
share answered, risk the error rate among the answered; a margin worth having makes risk fall with
coverage and has an AUROC above one half. Coordinates that are not answered may go either way, which
gives an interval for the frozen fraction, and a trajectory of intervals one for the onset. The study
`margin` counts all of that in compiled code (:mod:`halfulp.paper.models.lockstep_kernels`); in the
paper's locked test none of it held up, because paths diverge at update 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.measures import events
from halfulp.measures.crossings import persistent_majority
from halfulp.measures.events import GridLike
from halfulp.numbers.grids import Grid
from halfulp.numbers.grids import grid as named

Values = npt.ArrayLike | torch.Tensor

THRESHOLDS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 7 / 16)
"""Nine relative margins; the largest possible is 1/2."""
PRIMARY = 1 / 8
"""The threshold at which the paper's gates are read."""


# ---- the posterior bound ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Why a projected frozen fraction differs from the realized one. Counts, so that steps add up."""

    n: int
    frozen_actual: int
    frozen_hat: int
    diverged: int
    """Coordinates whose current codes differ."""
    violated: int
    """Coordinates with equal codes whose proposals differ by the margin or more."""
    wrong_diverged: int
    """Mistaken events where the codes differ."""
    wrong_same: int
    """Mistaken events where the codes agree."""

    @property
    def f_a(self) -> float:
        """Return the frozen share of the actual events."""
        return self.frozen_actual / self.n

    @property
    def f_hat(self) -> float:
        """Return the frozen share of the forecast events."""
        return self.frozen_hat / self.n

    @property
    def c(self) -> float:
        """Return the share of diverged events."""
        return self.diverged / self.n

    @property
    def v(self) -> float:
        """Return the share of violated events."""
        return self.violated / self.n

    @property
    def bound(self) -> float:
        """Return c + v."""
        return (self.diverged + self.violated) / self.n

    @property
    def certified(self) -> float:
        """Share of coordinates for which both premises hold; their events agree for certain."""
        return (self.n - self.diverged - self.violated) / self.n

    @property
    def holds(self) -> bool:
        """|f_a - f_hat| <= c + v, in whole numbers. It always does; a False is a defect here."""
        return abs(self.frozen_actual - self.frozen_hat) <= self.diverged + self.violated

    def __add__(self, other: Posterior) -> Posterior:
        return Posterior(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})


def posterior(q_a: Values, d_a: Values, q_hat: Values, d_r: Values, grid: GridLike) -> Posterior:
    """Split the error of a projected event, given the real codes and proposals (Eqs. 8 and 10).

    >>> q = np.ones(4, dtype=np.float32)
    >>> d_r = np.array([0.00, 0.05, 0.05, 0.10], dtype=np.float32)
    >>> d_a = np.array([0.01, 0.06, 0.07, 0.10], dtype=np.float32)
    >>> p = posterior(q, d_a, q, d_r, "e4m3")
    >>> p.f_a, p.f_hat, p.c, p.v, p.holds
    (0.5, 0.75, 0.0, 0.25, True)
    """
    g = _fixed(grid)
    qa, da, qh, dr = _tensors({"q_a": q_a, "d_a": d_a, "q_hat": q_hat, "d_r": d_r})
    if qa.numel() == 0:
        raise UsageError("no coordinates: a fraction of nothing has no meaning.")
    for name, q in (("q_a", qa), ("q_hat", qh)):
        _check_codes(name, q, g)
    event_a, event_hat = events.frozen(qa, da, g), events.frozen(qh, dr, g)
    drift = torch.maximum((da.double() - dr.double()).abs(), ((qa + da).double() - (qh + dr).double()).abs())
    inside = drift < events.margin(qh, dr, g)  # false for whatever is not finite
    same = qa == qh
    wrong = event_a != event_hat
    return Posterior(
        n=qa.numel(),
        frozen_actual=int(event_a.sum()),
        frozen_hat=int(event_hat.sum()),
        diverged=int((~same).sum()),
        violated=int((same & ~inside).sum()),
        wrong_diverged=int((wrong & ~same).sum()),
        wrong_same=int((wrong & same).sum()),
    )


# ---- ranking ----------------------------------------------------------------------------------------


def auroc_of_counts(correct: npt.ArrayLike, wrong: npt.ArrayLike) -> float | None:
    """Return the AUROC from counts of right and wrong events per margin, smallest margin first.

    For streams too long to sort: count into fine bins (events of one bin are ties) and add up.
    """
    right = [int(k) for k in np.asarray(correct)]  # Python's integers do not overflow
    below, twice = 0, 0
    for r, w in zip(right, (int(k) for k in np.asarray(wrong)), strict=True):
        twice += r * (2 * below + w)
        below += w
    pairs = sum(right) * below
    return twice / (2 * pairs) if pairs else None


# ---- intervals --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnsetInterval:
    """Between which steps the persistent majority begins; None: not within the record."""

    earliest: int | None
    latest: int | None

    def locate(self, measured: int | None) -> Literal["inside", "earlier", "later"]:
        """Return where a measured onset lies; one that does not come counts as later than every step."""
        first, last, at = (float("inf") if s is None else s for s in (self.earliest, self.latest, measured))
        if at < first:
            return "earlier"
        return "later" if at > last else "inside"


def onset_interval(lower: npt.ArrayLike, upper: npt.ArrayLike) -> OnsetInterval:
    """Compute the interval of the onsets of all curves between two trajectories of ends of frozen intervals.

    >>> onset = onset_interval([0.1, 0.3, 0.4, 0.6], [0.2, 0.6, 0.7, 0.8])
    >>> onset, onset.locate(3), onset.locate(1), onset.locate(None)
    (OnsetInterval(earliest=2, latest=4), 'inside', 'earlier', 'later')
    """
    low, high = np.asarray(lower), np.asarray(upper)
    if low.shape != high.shape or bool(np.any(low > high)):
        raise UsageError("the lower ends must not lie above the upper ones.")
    return OnsetInterval(earliest=persistent_majority(high), latest=persistent_majority(low))


# ---- arguments --------------------------------------------------------------------------------------


def _fixed(grid: GridLike) -> Grid:
    g = named(grid)
    if g.scaling is not None and g.scaling.moves:
        raise UsageError(
            f"the cells of grid {g.name} move with the data: margins and bounds have no meaning there. "
            "Use a grid with a given scale."
        )
    return g


def _tensors(values: dict[str, Values]) -> list[torch.Tensor]:
    """Return arrays as tensors of one shape and container."""
    tensors = {
        name: x.detach().cpu() if isinstance(x, torch.Tensor) else torch.tensor(np.asarray(x), device="cpu")
        for name, x in values.items()
    }
    first, *rest = tensors.items()
    for name, x in rest:
        if x.shape != first[1].shape or x.dtype != first[1].dtype:
            raise UsageError(
                f"{name} has shape {tuple(x.shape)} and type {x.dtype}, {first[0]} {tuple(first[1].shape)} "
                f"and {first[1].dtype}: expected the same."
            )
    return list(tensors.values())


def _check_codes(name: str, q: torch.Tensor, grid: Grid) -> None:
    off = (events.written(q, q, grid) != q) & torch.isfinite(q)
    if bool(off.any()):
        raise UsageError(
            f"{int(off.sum())} of {q.numel()} values in {name} are not on grid {grid.name}: expected codes. "
            f"Project them first, grid('{grid.name}').round(w)."
        )
