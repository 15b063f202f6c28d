"""Forecasts of a rehearsal: how many updates the run that did not happen would lose, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from halfulp.errors import UsageError
from halfulp.measures.crossings import Crossing, crossing
from halfulp.trace.columns import Array, Columns, last_rows
from halfulp.trace.schema import BOUNDS

if TYPE_CHECKING:
    from halfulp.trace.recorded import Recorded

REAL = -1
"""The id of the run itself in the table of losses."""


@dataclass(frozen=True)
class Forecast:
    """A rehearsal of a recorded run, by its spec.

    The argument ``bound`` of its methods is ``point``, ``upper`` (nothing is compensated) or ``lower`` (the
    projection). The bounds are observed, not proved. Shares are of the coordinates of rehearsed tensors.
    """

    trace: Recorded = field(repr=False)
    spec: str

    @property
    def bounds(self) -> list[str]:
        """The bounds that were recorded; the lower one needs no recording."""
        return list(self.trace.manifest["options"]["rehearse"]["bounds"])

    @property
    def grid(self) -> str:
        """Return the grid that was rehearsed."""
        rehearse = self.trace.manifest["options"]["rehearse"]
        return str(rehearse["grids"][rehearse["specs"].index(self.spec)])

    def ids(self, scope: str | Sequence[int] = "all") -> list[int]:
        """Return the ids of the rehearsed tensors in a scope.

        Raises:
            UsageError: If no tensor in the scope was rehearsed.
        """
        rehearsed = {t["id"] for t in self.trace.tensors if t.get("rehearsed")}
        ids = [i for i in self.trace.ids(scope) if i in rehearsed]
        if not ids:
            raise UsageError(f"no tensor in scope {scope!r} was rehearsed.")
        return ids

    def _rows(self, bound: str, scope: str | Sequence[int]) -> Columns:
        if bound not in self.bounds:
            raise UsageError(
                f"bound {bound!r} of {self.spec!r} was not kept; this trace has {', '.join(self.bounds)}."
            )
        at = self.trace.rehearsals.index(self.spec)
        rows = self.trace.scan("rehearsals")
        mine = (rows["rehearsal"] == at) & (rows["bound"] == BOUNDS.index(bound))
        return rows.take(mine & np.isin(rows["tensor"], self.ids(scope)))

    def steps(self, scope: str | Sequence[int] = "all") -> Array:
        """Return the recorded steps in which a rehearsed tensor of the scope took part."""
        return self.trace.steps_of(self.ids(scope))

    def frozen(self, scope: str | Sequence[int] = "all", bound: str = "point") -> Array:
        """Return f_t, the share of coordinates that a step leaves unchanged, one value per recorded step.

        This is comparable to ``trace.frozen(..., of="weights")`` of a run on the grid, which cannot tell a
        proposal of zero from one that is lost. The lower bound comes from the audit, so its grid must have
        been audited.

        Args:
            scope: A scope or tensor ids, as for :meth:`Recorded.frozen`.
            bound: ``point``, ``upper`` or ``lower``.

        Raises:
            UsageError: If the bound was not recorded, or no tensor in the scope was rehearsed.
        """
        if bound == "lower":
            return self.trace.frozen(self.grid, self.ids(scope), of="weights")
        return self.trace.share(self._rows(bound, scope), "frozen")

    def never_moved(self, scope: str | Sequence[int] = "all", bound: str = "point") -> Array:
        """Return the share of coordinates that no step so far has moved."""
        if bound == "lower":
            return self.trace.never_moved(self.grid, self.ids(scope))
        return self.trace.share(self._rows(bound, scope), "never_moved")

    def crossing(self, scope: str | Sequence[int] = "all", bound: str = "point") -> Crossing:
        """Return the first and persistent majority crossing and their category."""
        return crossing(self.frozen(scope, bound), steps=self.steps(scope))

    def compared(self) -> Columns:
        """Return the evaluations at steps where the run itself was evaluated as well."""
        losses = self.losses
        return losses.take(np.isin(losses["step"], list(self.trace.real_losses())))

    @property
    def losses(self) -> Columns:
        """Every evaluation: ``step``, ``bound``, ``loss``, and the run's own loss as ``real``.

        ``real`` is NaN where the run itself was not evaluated.
        """
        own, rows = self.trace.real_losses(), self.trace.scan("losses")
        rows = rows.take(rows["rehearsal"] == self.trace.rehearsals.index(self.spec))
        rows = last_rows(rows, "step", "bound").sort("step", "bound")
        return Columns(
            {
                "step": rows["step"],
                "bound": np.array(BOUNDS, dtype=object)[rows["bound"]],
                "loss": rows["loss"],
                "real": np.array([own.get(step, np.nan) for step in rows["step"].tolist()]),
            }
        )
