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
from halfulp.kernels import ARRIVED, AUDIT_COUNTS
from halfulp.kernels.simd import kernel_of
from halfulp.trace.reading import SCHEMAS
from halfulp.trace.schema import TABLES

Array = npt.NDArray[Any]

PER_GRID = (*AUDIT_COUNTS, "phase", "expected", *ARRIVED, "frozen_decay", "frozen_gradient")
SHARED = ("zero_proposal", "nonfinite", "weight_sq", "proposal_sq")
COUNTED = {*PER_GRID, *SHARED} - {"expected", *ARRIVED, "weight_sq", "proposal_sq"}
EACH = len(PER_GRID)


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


def numbers(found: kernels.Audited, starts: Sequence[int] = (0,)) -> Array:
    """Everything about tensors at one step, one row each, float64: PER_GRID grid after grid, then SHARED.

    ``starts``: the first tile of every tensor; a tensor alone may be empty (a shard). Not a number where the
    frozen counts of weight decay alone and of the rest alone would be.
    """

    counts = found.counts.numpy()
    made = np.zeros((len(starts), counts.shape[1] * len(PER_GRID) + len(SHARED)))
    parts = (found.phase, found.expected, found.arrived, found.shared, found.sums)
    _add_tiles(counts, *(x.numpy() for x in parts), np.array(starts), made)
    return made


@kernel_of(__file__)
def _add_tiles(
    counts: Any, phase: Any, expected: Any, arrived: Any, shared: Any, sums: Any, starts: Any, made: Any
) -> None:
    """Tile after tile, into the rows that :func:`numbers` gives."""
    tiles, grids, kinds = counts.shape
    for i in range(starts.size):
        row = made[i]
        last = starts[i + 1] if i + 1 < starts.size else tiles
        for t in range(starts[i], last):
            for g in range(grids):
                at = g * EACH
                for j in range(kinds):
                    row[at + j] += counts[t, g, j]
                row[at + kinds] += phase[t, g]
                row[at + kinds + 1] += expected[t, g]
                row[at + kinds + 2] += arrived[t, g, 0]
                row[at + kinds + 3] += arrived[t, g, 1]
            for j in range(2):
                row[grids * EACH + j] += shared[t, j]
                row[grids * EACH + 2 + j] += sums[t, j]
        for g in range(grids):
            row[g * EACH + kinds + 4 : (g + 1) * EACH] = np.nan


def numbers_on_device(found: kernels.Audited) -> torch.Tensor:
    """The row of one tensor, made where its counts are: those of many tiles are not sent over."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=0, dtype=torch.float64)

    counts = total(found.counts)
    apart = torch.full((len(counts), 2), torch.nan, dtype=torch.float64, device=counts.device)
    per_grid = [
        counts, total(found.phase)[:, None], total(found.expected)[:, None], total(found.arrived), apart,
    ]  # fmt: skip
    return torch.cat([torch.cat(per_grid, dim=1).reshape(-1), total(found.shared), total(found.sums)])


def leave_phases_out(made: Array) -> None:
    """Say of rows that phases were not summed."""
    made[:, PER_GRID.index("phase") : -len(SHARED) : EACH] = np.nan


def tables(rows: Sequence[Row], losses: Mapping[int, float], grids: int) -> dict[str, pl.DataFrame]:
    """The tables of a part: ``grids``, ``tensors`` and ``run``."""
    if not rows:  # a part of evaluations alone
        return {name: pl.DataFrame(schema=SCHEMAS[name]) for name in TABLES}
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
    known = {n: c.fill_nan(None) if n in COUNTED or n in ARRIVED else c for n, c in columns.items()}
    return {name: c.cast(pl.Int64) if name in COUNTED else c for name, c in known.items()}
