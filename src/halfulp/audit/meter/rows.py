"""Hold the effect of one step on its tensors as rows of numbers, and build tables from them.

A tensor's row holds every count and sum of one step side by side. All rows have the same length, so that the
rows of shards on several ranks can be summed in one reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import kernels
from halfulp.kernels import ARRIVED, AUDIT_COUNTS
from halfulp.kernels.auditing import TileSums
from halfulp.trace.columns import SCHEMAS, Columns, empty
from halfulp.trace.schema import TABLES

Array = npt.NDArray[Any]

PER_GRID = (*AUDIT_COUNTS, "phase", "expected", *ARRIVED, "frozen_decay", "frozen_gradient")
SHARED = ("zero_proposal", "nonfinite", "weight_sq", "proposal_sq")
EACH = len(PER_GRID)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step of one optimizer."""

    step: int
    ids: Sequence[int]
    """Its tensors."""
    rates: Sequence[float]
    numbers: Array
    """(tensors, numbers of :class:`Summing`)."""

    def per_grid(self) -> Array:
        """(tensors, grids, PER_GRID)."""
        return self.numbers[:, : -len(SHARED)].reshape(len(self.ids), -1, len(PER_GRID))

    def shared(self) -> Array:
        """(tensors, SHARED)."""
        return self.numbers[:, -len(SHARED) :]


class Summing:
    """Make the rows of tensors from what an audit found tile by tile, in the same place at every step.

    Args:
        audited: What the audit found, on the CPU.
        starts: The first tile of every tensor; a tensor alone may be empty (a shard).
    """

    def __init__(self, audited: kernels.Audited, starts: Sequence[int] = (0,)) -> None:
        grids = audited.counts.shape[1]
        self._sums = TileSums(audited, starts, EACH, grids * EACH + len(SHARED))

    def __call__(self) -> Array:
        """Everything about the tensors, one row each, float64: PER_GRID grid after grid, then SHARED.

        Not a number where the frozen counts of weight decay alone and of the rest alone would be.
        """
        rows = self._sums()
        mark_unmeasured(rows, "frozen_decay", "frozen_gradient")
        return rows


def numbers_on_device(audited: kernels.Audited) -> torch.Tensor:
    """Return the row of one tensor, made where its counts are: those of many tiles are not sent over."""

    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum(dim=0, dtype=torch.float64)

    counts = total(audited.counts)
    apart = torch.full((len(counts), 2), torch.nan, dtype=torch.float64, device=counts.device)
    phase, expected = total(audited.phase)[:, None], total(audited.expected)[:, None]
    per_grid = [counts, phase, expected, total(audited.arrived), apart]
    return torch.cat([torch.cat(per_grid, dim=1).reshape(-1), total(audited.shared), total(audited.sums)])


def row_of(audited: kernels.Audited) -> torch.Tensor | Array:
    """Return the row of one tensor, where its counts are."""
    return Summing(audited)()[0] if audited.counts.device.type == "cpu" else numbers_on_device(audited)


def mark_unmeasured(rows: Array, *columns: str) -> None:
    """Say of rows that some columns were not measured: kernels leave zeros there."""
    for name in columns:
        rows[:, PER_GRID.index(name) : -len(SHARED) : EACH] = np.nan


def tables(rows: Sequence[Row], losses: Mapping[int, float], grids: int) -> dict[str, Columns]:
    """Return the tables of a part: ``grids``, ``tensors`` and ``run``."""
    if not rows:  # a part of evaluations alone
        return {name: empty(name) for name in TABLES}
    step = np.concatenate([np.full(len(r.ids), r.step, dtype=np.int64) for r in rows])
    ids = np.concatenate([np.asarray(r.ids, dtype=np.int32) for r in rows])
    per_grid = np.concatenate([r.per_grid() for r in rows]).reshape(-1, len(PER_GRID))
    shared = np.concatenate([r.shared() for r in rows])
    steps = np.unique(step)
    return {
        "grids": Columns(
            {
                "step": np.repeat(step, grids),
                "tensor": np.repeat(ids, grids),
                "grid": np.tile(np.arange(grids, dtype=np.int16), len(step)),
                **_columns("grids", PER_GRID, per_grid),
            }
        ),
        "tensors": Columns(
            {
                "step": step,
                "tensor": ids,
                **_columns("tensors", SHARED, shared),
                "lr": np.concatenate([np.asarray(r.rates, dtype=np.float64) for r in rows]),
            }
        ),
        "run": Columns(
            {"step": steps, "loss": np.array([losses.get(int(s), np.nan) for s in steps], dtype=np.float64)}
        ),
    }


def _columns(table: str, names: Sequence[str], values: Array) -> dict[str, Array]:
    return {name: values[:, i].astype(SCHEMAS[table][name]) for i, name in enumerate(names)}
