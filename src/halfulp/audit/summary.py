"""A step in few numbers, for listeners and live views."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halfulp.audit.rows import PER_GRID, SHARED, Row
from halfulp.audit.watched import Watched


def summary(
    rows: Sequence[Row], loss: float, by_id: Mapping[int, Watched], grids: Sequence[str], never_moved: bool
) -> dict[str, Any]:
    """The newest step in few numbers, for listeners and live views."""
    tensors = [by_id[i] for row in rows for i in row.ids]
    per_grid, shared = (
        np.concatenate([r.per_grid() for r in rows]),
        np.concatenate([r.shared() for r in rows]),
    )
    sizes = np.array([w.recorded for w in tensors])
    frozen, never = (per_grid[:, :, PER_GRID.index(c)] for c in ("frozen", "never_moved"))
    weight, proposal, bad = (
        shared[:, SHARED.index(c)].sum() for c in ("weight_sq", "proposal_sq", "nonfinite")
    )

    def shares(counts: np.ndarray[Any, Any], size: float) -> dict[str, float]:
        return {g: float(c / size) for g, c in zip(grids, counts, strict=True)}

    # Zero proposals are nothing lost, where weights are stored in full: elsewhere rounding made them zero.
    full = np.array([w.stored in ("float32", "float64") for w in tensors])
    idle = np.where(full, shared[:, SHARED.index("zero_proposal")], 0)
    asked = sizes - idle - shared[:, SHARED.index("nonfinite")]
    lost = np.maximum(frozen - idle[:, None], 0) / np.maximum(asked, 1)[:, None]
    arrived = per_grid[full, :, PER_GRID.index("arrived")].sum(axis=0)
    proposed = shared[full, SHARED.index("proposal_sq")].sum()
    return {
        "step": rows[0].step,
        "loss": loss,
        "lr": rows[0].rates[0],
        "frozen": shares(frozen.sum(axis=0), sizes.sum()),
        "tensors": {w.name: shares(f, n) for w, f, n in zip(tensors, frozen, sizes, strict=True)},
        "lost": {w.name: shares(x, 1) for w, x in zip(tensors, lost, strict=True)},
        "never_moved": shares(never.sum(axis=0), sizes.sum()) if never_moved else {},
        "gain": shares(arrived, proposed) if proposed > 0 and np.isfinite(arrived).all() else {},
        "update_ratio": math.sqrt(proposal / max(weight, 1e-300)),
        "nonfinite": int(bad),
    }
