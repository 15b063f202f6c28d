"""What a rehearsal forecasts: how many updates the run that did not happen would lose, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from halfulp.errors import UsageError
from halfulp.measures.crossings import Crossing, crossing
from halfulp.trace.schema import BOUNDS

if TYPE_CHECKING:
    from halfulp.trace.recorded import Recorded

Array = npt.NDArray[Any]
REAL = -1
"""The run itself, in the table of losses."""


@dataclass(frozen=True)
class Forecast:
    """A rehearsal of a recorded run, by its spec.

    ``bound``: ``point``, or ``upper`` (nothing is compensated) and ``lower`` (the projection) around it:
    bounds as observed, not proved. Shares are of the coordinates of rehearsed tensors.
    """

    trace: Recorded = field(repr=False)
    spec: str

    @property
    def bounds(self) -> list[str]:
        """The bounds that were kept; the lower one needs nothing."""
        return list(self.trace.manifest["options"]["rehearse"]["bounds"])

    @property
    def grid(self) -> str:
        told = self.trace.manifest["options"]["rehearse"]
        return str(told["grids"][told["specs"].index(self.spec)])

    def ids(self, scope: str | Sequence[int] = "all") -> list[int]:
        """The rehearsed tensors of a scope."""
        rehearsed = {t["id"] for t in self.trace.tensors if t.get("rehearsed")}
        found = [i for i in self.trace.ids(scope) if i in rehearsed]
        if not found:
            raise UsageError(f"no tensor in scope {scope!r} was rehearsed.")
        return found

    def _rows(self, bound: str, scope: str | Sequence[int]) -> pl.LazyFrame:
        if bound not in self.bounds:
            raise UsageError(
                f"bound {bound!r} of {self.spec!r} was not kept; this trace has {', '.join(self.bounds)}."
            )
        at = self.trace.rehearsals.index(self.spec)
        return self.trace.scan("rehearsals").filter(
            pl.col("rehearsal") == at,
            pl.col("bound") == BOUNDS.index(bound),
            pl.col("tensor").is_in(self.ids(scope)),
        )

    def steps(self, scope: str | Sequence[int] = "all") -> Array:
        """The recorded steps that moved some rehearsed tensor of a scope."""
        return self.trace.steps_of(self.ids(scope))

    def frozen(self, scope: str | Sequence[int] = "all", bound: str = "point") -> Array:
        """f_t: the share of coordinates that a step leaves unchanged, one value a recorded step.

        The lower bound is that of the audit: its grid must have been audited.
        """
        if bound == "lower":
            return self.trace.frozen(self.grid, self.ids(scope))
        return self.trace.share(self._rows(bound, scope), "frozen")

    def never_moved(self, scope: str | Sequence[int] = "all", bound: str = "point") -> Array:
        """The share of coordinates that no step so far has moved."""
        if bound == "lower":
            return self.trace.never_moved(self.grid, self.ids(scope))
        return self.trace.share(self._rows(bound, scope), "never_moved")

    def crossing(self, scope: str | Sequence[int] = "all", bound: str = "point") -> Crossing:
        """First and persistent majority crossing, and the category."""
        return crossing(self.frozen(scope, bound), steps=self.steps(scope))

    @property
    def losses(self) -> pl.DataFrame:
        """Every evaluation: ``step``, ``bound``, ``loss``, and the reference's own as ``real``."""
        at = self.trace.rehearsals.index(self.spec)
        rows = self.trace.scan("losses").filter(pl.col("rehearsal").is_in([at, REAL]))
        both = rows.unique(["step", "rehearsal", "bound"], keep="last", maintain_order=True).collect()
        own = both.filter(pl.col("rehearsal") == REAL).select("step", pl.col("loss").alias("real"))
        names = pl.DataFrame({"bound": np.arange(len(BOUNDS), dtype=np.int8), "name": list(BOUNDS)})
        return (
            both.filter(pl.col("rehearsal") == at)
            .join(names, on="bound")
            .join(own, on="step", how="left")
            .sort("step", "bound")
            .select("step", pl.col("name").alias("bound"), "loss", "real")
        )
