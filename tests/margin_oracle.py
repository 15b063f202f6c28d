"""Margins, abstention and ranking as one would write them down: what the compiled ladder is held against."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import halfulp as hu
from halfulp import kernels
from halfulp.kernels import reference
from halfulp.measures import events
from halfulp.paper.trust import auroc_of_counts

Array = npt.NDArray[Any]


def relative_margin(q: npt.ArrayLike, d: npt.ArrayLike, grid: str | hu.Grid) -> Array:
    """Gamma over the width of the destination cell: 0 on a boundary, 1/2 at the centre of the cell."""
    g = hu.grid(grid)
    at, by = (torch.from_numpy(np.array(x)) for x in (q, d))
    gamma = events.margin(at, by, g).numpy()
    below, above = events.neighbours(events.written(at, at + by, g), g)
    width = (above.double() - below.double()).numpy() / 2
    return np.where(gamma > 0, gamma / np.where(gamma > 0, width, 1.0), 0.0)


def symmetric_margin(w: npt.ArrayLike, d: npt.ArrayLike, grid: str | hu.Grid) -> Array:
    """The comparator: distance of |d| from half the spacing above |w|, in units of that spacing.

    Zero for what is not finite.

    The boundary of the symmetric approximation (Eq. 6), which knows no direction and no destination.
    """
    at, by = (torch.from_numpy(np.array(x, np.float64)) for x in (w, d))
    g = hu.grid(grid).within(at.dtype)
    finite = (torch.isfinite(at) & torch.isfinite(by)).numpy()
    x, size = (np.where(finite, v.double().numpy(), 0.0) for v in (at, by))
    scales = kernels.scales(at, g).numpy() if g.scaling is not None else None
    unit = reference._unit_at(x.reshape(-1), g, scales, x.shape).reshape(x.shape)
    return np.where(finite, np.abs(np.abs(size) - unit / 2) / unit, 0.0)


def answered(margin: Array, wrong: Array, threshold: float) -> tuple[float, float | None]:
    """Coverage, and risk (None of nothing), when only margins above a threshold are answered."""
    above = margin > threshold
    risk = float(wrong[above].sum() / above.sum()) if above.any() else None
    return float(above.sum() / above.size), risk


def auroc(margin: Array, correct: Array) -> float | None:
    """P(margin of a right event > margin of a wrong one), ties counting half; None without both kinds."""
    levels, level = np.unique(margin, return_inverse=True)
    return auroc_of_counts(*(np.bincount(level[kind], minlength=len(levels)) for kind in (correct, ~correct)))
