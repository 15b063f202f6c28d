"""What one step did to its tensors, as rows of numbers, and the tables that are made of them.

A tensor's row holds every count and sum of one step side by side. All rows are equally long, so that those of
shards on several ranks add up in one reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from halfulp import kernels
from halfulp.kernels import AUDIT_COUNTS

Array = npt.NDArray[Any]

PER_GRID = (*AUDIT_COUNTS, "phase", "expected", "frozen_decay", "frozen_gradient")
SHARED = ("zero_proposal", "nonfinite", "weight_sq", "proposal_sq")
COUNTED = {*PER_GRID, *SHARED} - {"expected", "weight_sq", "proposal_sq"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step of one optimizer."""

    step: int
    ids: Sequence[int]
    """Its tensors."""
    rates: Sequence[float]
    numbers: Array
    """(tensors, numbers of :func:`numbers`)."""

    def per_grid(self) -> Array:
        """(tensors, grids, PER_GRID)."""
        return self.numbers[:, : -len(SHARED)].reshape(len(self.ids), -1, len(PER_GRID))

    def shared(self) -> Array:
        """(tensors, SHARED)."""
        return self.numbers[:, -len(SHARED) :]


def numbers(found: kernels.Audit, starts: Sequence[int] = (0,)) -> Array:
    """Everything about tensors at one step, one row each, float64: PER_GRID grid after grid, then SHARED.

    ``starts``: the first tile of every tensor; a tensor alone may be empty (a shard). Not a number where the
    frozen counts of weight decay alone and of the rest alone would be.
    """

    def count(x: torch.Tensor) -> Array:
        if not len(x):
            return np.zeros((1, *x.shape[1:]))
        return np.add.reduceat(x.numpy(), starts, axis=0, dtype=np.float64)  # whole numbers: in any order

    def total(x: torch.Tensor) -> Array:
        if not len(x):
            return np.zeros((1, *x.shape[1:]))
        parts = np.split(x.numpy(), starts[1:])
        return np.stack([np.add.accumulate(part, axis=0)[-1] for part in parts])  # tile after tile

    counts = count(found.counts)
    apart = np.full((*counts.shape[:2], 2), np.nan)
    per_grid = [counts, count(found.phase)[..., None], total(found.expected)[..., None], apart]
    laid = np.concatenate(per_grid, axis=2).reshape(len(starts), -1)
    return np.concatenate([laid, count(found.shared), total(found.sums)], axis=1)


def numbers_on_device(found: kernels.Audit) -> torch.Tensor:
    """The row of one tensor, made where its counts are: those of many tiles are not sent over."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=0, dtype=torch.float64)

    counts = total(found.counts)
    apart = torch.full((len(counts), 2), torch.nan, dtype=torch.float64, device=counts.device)
    per_grid = [counts, total(found.phase)[:, None], total(found.expected)[:, None], apart]
    return torch.cat([torch.cat(per_grid, dim=1).reshape(-1), total(found.shared), total(found.sums)])


def tables(rows: Sequence[Row], losses: Mapping[int, float], grids: int) -> dict[str, pl.DataFrame]:
    """The tables of a part: ``grids``, ``tensors`` and ``run``."""
    step = np.concatenate([np.full(len(r.ids), r.step, dtype=np.int64) for r in rows])
    ids = np.concatenate([np.asarray(r.ids, dtype=np.int32) for r in rows])
    per_grid = np.concatenate([r.per_grid() for r in rows]).reshape(-1, len(PER_GRID))
    shared = np.concatenate([r.shared() for r in rows])
    steps = np.unique(step)
    return {
        "grids": pl.DataFrame(
            {
                "step": np.repeat(step, grids),
                "tensor": np.repeat(ids, grids),
                "grid": np.tile(np.arange(grids, dtype=np.int16), len(step)),
                **_columns(PER_GRID, per_grid),
            }
        ),
        "tensors": pl.DataFrame(
            {
                "step": step,
                "tensor": ids,
                **_columns(SHARED, shared),
                "lr": np.concatenate([np.asarray(r.rates, dtype=np.float64) for r in rows]),
            }
        ),
        "run": pl.DataFrame(
            {"step": steps, "loss": np.array([losses.get(int(s), np.nan) for s in steps], dtype=np.float64)}
        ),
    }


def _columns(names: Sequence[str], values: Array) -> dict[str, pl.Series]:
    """Columns; counts are whole numbers, and null where nothing was counted."""
    columns = {name: pl.Series(np.ascontiguousarray(values[:, i])) for i, name in enumerate(names)}
    return {name: c.fill_nan(None).cast(pl.Int64) if name in COUNTED else c for name, c in columns.items()}
