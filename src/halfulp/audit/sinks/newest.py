"""The newest step in few numbers, for listeners and live views."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from halfulp.audit.meter.rows import PER_GRID, SHARED, Row
from halfulp.audit.meter.tensor import Watched
from halfulp.audit.sources.watchlist import Watchlist
from halfulp.trace.recorded import lost_share
from halfulp.trace.stored_on import in_full, same_values

BESIDE = ("step", "frozen", "tensors", "never_moved", "gain", "measured")
"""The keys reported for a tracked state."""


class Newest:
    """Hold the rows of the newest step, and call listeners with a summary of them.

    Args:
        watchlist: The tensors and grids that the rows are of.
        listeners: Called with :attr:`latest` when a step is over.
        tells_zero: Whether proposals are known, also of values that are stored on a coarse grid.
    """

    def __init__(
        self,
        watchlist: Watchlist,
        listeners: Iterable[Callable[[dict[str, Any]], None]] = (),
        *,
        tells_zero: bool = False,
    ) -> None:
        self.watchlist, self.listeners, self.tells_zero = watchlist, list(listeners), tells_zero
        self.beside: Callable[[], dict[str, Any]] = dict
        """The same of what accumulates beside the weights."""
        self._rows: Sequence[Row] = ()
        self._loss = math.nan
        self._summed: dict[str, Any] = {}

    def take(self, rows: Sequence[Row], loss: float) -> None:
        """Take the rows of a step that is over; of one step, the first time counts."""
        if rows and (not self._rows or self._rows[0].step != rows[0].step):
            self._rows, self._loss = rows, loss
            for listener in self.listeners:
                listener(self.latest)

    @property
    def latest(self) -> dict[str, Any]:
        """Return the newest step in few numbers; empty before the first."""
        if self._rows and self._summed.get("step") != self._rows[0].step:
            self._summed = summary(
                self._rows,
                self._loss,
                {w.id: w for w in self.watchlist.watched.values()},
                [g.name for g in self.watchlist.grids],
                never_moved=self.watchlist.measure.never_moved,
                tells_zero=self.tells_zero,
            )
        return {**self._summed, "roles": self.beside()} if self._summed else {}


def summary(
    rows: Sequence[Row],
    loss: float,
    by_id: Mapping[int, Watched],
    grids: Sequence[str],
    *,
    never_moved: bool,
    tells_zero: bool,
) -> dict[str, Any]:
    """Sum the rows of a step up.

    The shares are those of a trace (:meth:`halfulp.Trace.frozen`): of updates, of the tensors that are
    stored on the grid; where none is, of all.
    """
    tensors = [by_id[i] for row in rows for i in row.ids]
    per_grid = np.concatenate([r.per_grid() for r in rows])
    shared = np.concatenate([r.shared() for r in rows])
    sizes = np.array([w.recorded for w in tensors])
    frozen, never, arrived = (per_grid[:, :, PER_GRID.index(c)] for c in ("frozen", "never_moved", "arrived"))
    zero, bad, weight, proposal = (
        shared[:, SHARED.index(c)] for c in ("zero_proposal", "nonfinite", "weight_sq", "proposal_sq")
    )
    full = np.array([tells_zero or in_full(w.stored) for w in tensors])
    idle = np.where(full, zero, 0)
    dtypes = [str(w.tensor.dtype).removeprefix("torch.") for w in tensors]
    made: dict[str, Any] = {"frozen": {}, "never_moved": {}, "gain": {}, "measured": []}
    for j, grid in enumerate(grids):
        home = np.array([same_values(w.stored, grid, d) for w, d in zip(tensors, dtypes, strict=True)])
        if home.any():
            made["measured"].append(grid)
        mine = home if home.any() else np.ones_like(home)
        counts = (x[mine].sum() for x in (frozen[:, j], idle, bad, sizes))
        made["frozen"][grid] = float(lost_share(*counts))
        if never_moved:
            made["never_moved"][grid] = float(never[mine, j].sum() / sizes[mine].sum())
        known, proposed = mine & full, proposal[mine & full].sum()
        if proposed > 0 and np.isfinite(arrived[known, j]).all():
            made["gain"][grid] = float(arrived[known, j].sum() / proposed)
    each = lost_share(frozen, idle[:, None], bad[:, None], sizes[:, None])
    return {
        "step": rows[0].step,
        "loss": loss,
        "lr": rows[0].rates[0],
        "tensors": {
            w.name: dict(zip(grids, shares, strict=True))
            for w, shares in zip(tensors, each.tolist(), strict=True)
        },
        **made,
        "update_ratio": math.sqrt(proposal.sum() / max(weight.sum(), 1e-300)),
        "nonfinite": int(bad.sum()),
    }
