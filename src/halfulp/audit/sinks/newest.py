"""The newest step in a few numbers, for listeners and live views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from halfulp.audit.meter.rows import PER_GRID, SHARED, Row
from halfulp.audit.sources.watchlist import Watchlist
from halfulp.trace.shares import known_zero, lost_share
from halfulp.trace.stored_on import in_full, same_values

BESIDE = ("step", "frozen", "tensors", "never_moved", "gain", "measured")
"""The keys reported for a tracked state."""


def summary(rows: Sequence[Row], loss: float, watchlist: Watchlist, *, tells_zero: bool) -> dict[str, Any]:
    """Sum up the rows of a step.

    The shares are those of a trace (:meth:`halfulp.Trace.frozen`): of updates, of the tensors that are
    stored on the grid; where none is, of all.

    Args:
        rows: The rows.
        loss: The loss of the step.
        watchlist: The tensors and grids that the rows are of.
        tells_zero: Whether proposals are known, also of values that are stored on a coarse grid.
    """
    grids, by_id = [g.name for g in watchlist.grids], {w.id: w for w in watchlist.watched.values()}
    tensors = [by_id[i] for row in rows for i in row.ids]
    per_grid = np.concatenate([r.per_grid() for r in rows])
    shared = np.concatenate([r.shared() for r in rows])
    sizes = np.array([w.recorded for w in tensors])
    frozen, never, arrived = (per_grid[:, :, PER_GRID.index(c)] for c in ("frozen", "never_moved", "arrived"))
    zero, bad, weight, proposal = (
        shared[:, SHARED.index(c)] for c in ("zero_proposal", "nonfinite", "weight_sq", "proposal_sq")
    )
    full = np.array([tells_zero or in_full(w.stored) for w in tensors])
    rates = np.concatenate([np.asarray(r.rates, dtype=np.float64) for r in rows])
    idle = known_zero(zero, full, rates, sizes - bad)
    dtypes = [str(w.tensor.dtype).removeprefix("torch.") for w in tensors]
    by_grid: dict[str, Any] = {"frozen": {}, "never_moved": {}, "gain": {}, "measured": []}
    for j, grid in enumerate(grids):
        home = np.array([same_values(w.stored, grid, d) for w, d in zip(tensors, dtypes, strict=True)])
        if home.any():
            by_grid["measured"].append(grid)
        mine = home if home.any() else np.ones_like(home)
        counts = (x[mine].sum() for x in (frozen[:, j], idle, bad, sizes))
        by_grid["frozen"][grid] = float(lost_share(*counts))
        if watchlist.measure.never_moved:
            by_grid["never_moved"][grid] = float(never[mine, j].sum() / sizes[mine].sum())
        known, proposed = mine & full, proposal[mine & full].sum()
        if proposed > 0 and np.isfinite(arrived[known, j]).all():
            by_grid["gain"][grid] = float(arrived[known, j].sum() / proposed)
    each = lost_share(frozen, idle[:, None], bad[:, None], sizes[:, None])
    return {
        "step": rows[0].step,
        "loss": loss,
        "lr": rows[0].rates[0],
        "tensors": {
            w.name: dict(zip(grids, shares, strict=True))
            for w, shares in zip(tensors, each.tolist(), strict=True)
        },
        **by_grid,
        "update_ratio": math.sqrt(proposal.sum() / max(weight.sum(), 1e-300)),
        "nonfinite": int(bad.sum()),
    }
