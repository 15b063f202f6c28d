"""What can be asked of a recording, wherever it lies: its tables, series over steps, crossings, scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from halfulp import pictures
from halfulp.errors import UsageError
from halfulp.grids import grid as named
from halfulp.measures.crossings import Crossing, crossing
from halfulp.measures.forecasts import scalar_rho_map
from halfulp.measures.groups import CORE
from halfulp.trace.forecast import REAL, Forecast
from halfulp.trace.scores import Scores

COUNTS = ("frozen", "symmetric", "endpoint", "subnormal", "zero_code", "never_moved")
SERIES = (*COUNTS, "phase", "expected", "frozen_decay", "frozen_gradient")
ARRIVED = ("arrived", "written_sq")
"""Of a tensor on a grid, with d what is proposed and u what is written: <u, d> and |u|**2; since format 4."""
COLUMNS = (*SERIES[:8], *ARRIVED, *SERIES[8:])
"""What the table of grids says."""
Array = npt.NDArray[Any]
Scope = str | Sequence[int]
"""A scope by name, or the ids of its tensors."""


class Recorded(ABC):
    """A recorded run."""

    manifest: dict[str, Any]

    @property
    @abstractmethod
    def where(self) -> str:
        """What to call it in an error."""

    @property
    @abstractmethod
    def recorded(self) -> bool:
        """Whether there is any step."""

    @property
    def roles(self) -> Mapping[str, Recorded]:
        """The traces of what accumulates beside the weights: copies such as an EMA, moments."""
        return {}

    @property
    def trouble(self) -> str | None:
        """Why the recording stopped before the run did, if it did."""
        return None

    def _repr_html_(self) -> str:
        """In a notebook: what each grid leaves unchanged, by step, and on the first one by tensor."""
        if not self.recorded or not self.tensors:
            return pictures.pre(f"{self.where}: no step was recorded.")
        steps, shown_grids = self.steps_of(), self.grids[: len(pictures.COLOURS)]
        lines = {g: (steps, self.frozen(g)) for g in shown_grids}
        chosen = pl.col("grid") == 0
        total = self.scan().filter(chosen).group_by("tensor").agg(pl.col("frozen").mean()).collect()
        mean = dict(zip(total["tensor"], total["frozen"], strict=True))
        rows = [
            (t["name"], mean[t["id"]] / t["recorded"], f"{t['recorded']:,} weights, {t['stored']}")
            for t in self.tensors
            if t["id"] in mean
        ]
        rows.sort(key=lambda row: (-row[1], row[0]))
        size = f"{len(self.steps):,} steps, {len(self.tensors):,} tensors, {self.numel():,} weights"
        return pictures.framed(
            f"{self.where}: {size}",
            "<div>share of weights that a step leaves unchanged</div>",
            pictures.curves(lines),
            f"<div>by tensor, on {pictures.safe(self.grids[0])}</div>",
            pictures.bars(rows),
        )

    @abstractmethod
    def scan(self, table: str = "grids") -> pl.LazyFrame:
        """A raw table, lazily: ``grids``, ``tensors``, ``run``, ``losses``; with rehearsals theirs."""

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """What was followed over steps, as of the last."""

    # ---- tables ----

    def table(self) -> pl.DataFrame:
        """One row a step, tensor and grid: names, counts and fractions."""
        counted = self.scan()
        tensors = pl.DataFrame(self.manifest["tensors"]).select(
            pl.col("id").alias("tensor"), pl.col("name"), pl.col("group"), pl.col("recorded").alias("numel")
        )
        grids = pl.DataFrame({"grid": range(len(self.grids)), "grid_name": self.grids})
        counts = [
            (pl.col(c) / pl.col("numel")).alias(f"{c}_fraction")
            for c in ("frozen", "symmetric", "never_moved")
        ]
        return (
            counted.join(tensors.lazy().with_columns(pl.col("tensor").cast(pl.Int32)), on="tensor")
            .join(grids.lazy().with_columns(pl.col("grid").cast(pl.Int16)), on="grid")
            .with_columns(counts)
            .drop("tensor", "grid")
            .rename({"name": "tensor", "grid_name": "grid"})
            .sort("step", "tensor", "grid")
            .collect()
        )

    @property
    def grids(self) -> list[str]:
        return list(self.manifest["grids"])

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """What the manifest says of each tensor; one without weights has nothing to lose and is left out."""
        return [t for t in self.manifest["tensors"] if t["recorded"]]

    @property
    def steps(self) -> Array:
        """The recorded steps."""
        return self.scan("run").select("step").sort("step").collect()["step"].to_numpy()

    def steps_of(self, scope: Scope = "all") -> Array:
        """The recorded steps that moved some tensor of a scope: those that its series have a value for."""
        frame = self.scan("tensors").filter(pl.col("tensor").is_in(self.ids(scope))).select("step")
        return frame.unique().sort("step").collect()["step"].to_numpy()

    # ---- series ----

    def ids(self, scope: Scope = "all") -> list[int]:
        """The tensors of a scope: all, all-2d, core, a group, a tensor's name; or ids as they are."""
        if not isinstance(scope, str):
            return list(scope)

        def chosen(t: dict[str, Any]) -> bool:
            matrix = scope == "all-2d" and len(t["shape"]) >= 2
            core = scope == "core" and t["group"] in CORE
            return scope == "all" or matrix or core or scope in (t["group"], t["name"])

        ids = [t["id"] for t in self.tensors if chosen(t)]
        if not ids:
            groups = sorted({t["group"] for t in self.tensors})
            example = f", such as {self.tensors[0]['name']!r}" if self.tensors else ""
            raise UsageError(
                f"nothing in scope {scope!r}. Scopes: all, all-2d, core (attention and mlp), the groups "
                f"{', '.join(groups) or '(none yet)'}, or a tensor's name{example}."
            )
        return ids

    def in_full(self) -> list[int]:
        """The tensors that are stored in full precision."""
        return [t["id"] for t in self.tensors if t["stored"] in ("float32", "fp32", "float64")]

    def tells_zero(self) -> list[int]:
        """The tensors of which it is known whether a proposal was zero: where weights are on a grid, and only
        their change is seen, a lost update looks like none."""
        known = self.manifest["run"].get("proposals") == "known"
        return [t["id"] for t in self.tensors] if known else self.in_full()

    def numel(self, scope: Scope = "all") -> int:
        """Coordinates recorded in a scope."""
        ids = set(self.ids(scope))
        return sum(int(t["recorded"]) for t in self.tensors if t["id"] in ids)

    def _grid_id(self, grid: str) -> int:
        if grid not in self.grids:
            raise UsageError(f"grid {grid!r} was not recorded; this trace has {', '.join(self.grids)}.")
        return self.grids.index(grid)

    def series(self, column: str, grid: str, scope: Scope = "all") -> Array:
        """A column of the grids table summed over a scope, as a share of its coordinates, one value a step.

        Only tensors that have the column at a step (were part of it, have decay) count there.
        """
        if column not in SERIES:
            raise UsageError(f"a series is one of {', '.join(SERIES)}, not {column!r}.")
        chosen = (pl.col("grid") == self._grid_id(grid)) & pl.col("tensor").is_in(self.ids(scope))
        return self.share(self.scan().filter(chosen, pl.col(column).is_not_null()), column)

    def share(self, rows: pl.LazyFrame, column: str) -> Array:
        """A column summed by step, over the coordinates of the tensors that have a row there."""
        sizes = pl.LazyFrame(
            {"tensor": [t["id"] for t in self.tensors], "numel": [t["recorded"] for t in self.tensors]}
        )
        frame = (
            rows.join(sizes.with_columns(pl.col("tensor").cast(pl.Int32)), on="tensor")
            .group_by("step")
            .agg(pl.col(column).sum(), pl.col("numel").sum())
            .sort("step")
            .collect()
        )
        return np.asarray(frame[column].to_numpy() / frame["numel"].to_numpy())

    def frozen(self, grid: str, scope: Scope = "all", by: str = "code") -> Array:
        """f_t: the share of coordinates that a step leaves unchanged, one value a recorded step.

        ``by``: ``code`` (the exact event), ``symmetric`` (spacing), ``phase`` (the uniform-phase coordinate
        check), or ``rho`` (the pooled scalar through the uniform-phase map).
        """
        if by == "code":
            return self.series("frozen", grid, scope)
        if by in ("symmetric", "phase"):
            found = self.series(by, grid, scope)
            if not len(found):
                raise UsageError(
                    f"{self.where} does not say {by!r}: it is of casts or moments, which have no phases, or "
                    "has no step."
                )
            return found if by == "symmetric" else found / 2.0**16
        if by == "rho":
            return scalar_rho_map(self.update_ratio(scope) / named(grid).epsilon)
        raise UsageError(f"by= takes code, symmetric, phase or rho, not {by!r}.")

    def zero_proposals(self, scope: Scope = "all") -> Array:
        """The share of coordinates that a step was not asked to move, one value a recorded step.

        Where that is known, :meth:`tells_zero`; elsewhere none.
        """
        rows = self.scan("tensors").filter(pl.col("tensor").is_in(self.ids(scope)))
        known = pl.col("zero_proposal") * pl.col("tensor").is_in(self.tells_zero())
        return self.share(rows.with_columns(known), "zero_proposal")

    def nonfinite(self, scope: Scope = "all") -> Array:
        """The share of coordinates whose weight or proposal is not finite, one value a recorded step.

        They are in no other count; shares of frozen weights are of all coordinates all the same.
        """
        return self.share(self.scan("tensors").filter(pl.col("tensor").is_in(self.ids(scope))), "nonfinite")

    def never_moved(self, grid: str, scope: Scope = "all") -> Array:
        """The share of coordinates that no step so far has moved, under nearest rounding."""
        self._followed("never_moved")
        return self.series("never_moved", grid, scope)

    def expected_never_moved(self, grid: str, scope: str = "all") -> Array:
        """The same share, in expectation, under stochastic rounding."""
        self._followed("expected_never_moved")
        return self.series("expected", grid, scope)

    def _followed(self, option: str) -> None:
        if not self.manifest["options"][option]:
            raise UsageError(f"this trace was recorded without {option}.")

    def update_ratio(self, scope: Scope = "all") -> Array:
        """||d|| / ||w|| over a scope, one value a step."""
        frame = (
            self.scan("tensors")
            .filter(pl.col("tensor").is_in(self.ids(scope)))
            .group_by("step")
            .agg(pl.col("weight_sq").sum(), pl.col("proposal_sq").sum())
            .sort("step")
            .collect()
        )
        return np.asarray(
            np.sqrt(frame["proposal_sq"].to_numpy() / np.maximum(frame["weight_sq"].to_numpy(), 1e-300))
        )

    def gain(self, grid: str, scope: Scope = "all") -> Array:
        """How much of the update arrives: <u, d> / |d|**2, one value a step; NaN where nothing was proposed.

        d is the change that the optimizer made, and u what is left of it on a grid. Of tensors whose
        proposals are known, :meth:`tells_zero`: where weights are stored on a coarse grid and only their
        change is seen, it has all arrived. Below 1, updates are lost; single ones may become larger, to twice
        their size, by rounding up. Empty for traces of before format 4.
        """
        dot, _, proposed = self._arrived(grid, scope)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(proposed > 0, dot / proposed, np.nan)

    def cosine(self, grid: str, scope: Scope = "all") -> Array:
        """The cosine of the angle between what is proposed and what arrives of it; NaN where nothing does."""
        dot, written, proposed = self._arrived(grid, scope)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(written * proposed > 0, dot / np.sqrt(written * proposed), np.nan)

    def _arrived(self, grid: str, scope: Scope) -> tuple[Array, Array, Array]:
        """By step: <u, d>, |u|**2 and |d|**2, of the tensors that have them, in their order: threads may not
        decide a sum."""
        ids = sorted(set(self.ids(scope)) & set(self.tells_zero()))
        here = pl.col("tensor").is_in(ids)
        mine = (pl.col("grid") == self._grid_id(grid)) & here
        rows = (
            self.scan()
            .filter(mine)
            .join(self.scan("tensors").filter(here), on=["step", "tensor"])
            .sort("step", "tensor")
            .select("step", "arrived", "written_sq", "proposal_sq")
            .collect()
            .drop_nulls("arrived")  # not as a filter: polars 1.31 lets rows of files without the column pass
        )
        _, first = np.unique(rows["step"].to_numpy(), return_index=True)
        columns = (rows[name].to_numpy() for name in ("arrived", "written_sq", "proposal_sq"))
        dot, written, proposed = (np.add.reduceat(c, first) if len(c) else c for c in columns)
        return dot, written, proposed

    def crossing(self, grid: str, scope: str = "all") -> Crossing:
        """First and persistent majority crossing, and the category."""
        return crossing(self.frozen(grid, scope), steps=self.steps_of(scope))

    # ---- rehearsals ----

    def real_losses(self) -> pl.DataFrame:
        """What the run's own weights gave wherever it was evaluated: ``step``, ``loss``."""
        rows = self.scan("losses").filter(pl.col("rehearsal") == REAL)
        last = rows.unique("step", keep="last", maintain_order=True)
        return last.sort("step").select("step", "loss").collect()

    @property
    def rehearsals(self) -> list[str]:
        """The specs that were rehearsed."""
        return list((self.manifest["options"].get("rehearse") or {"specs": []})["specs"])

    def forecast(self, spec: str) -> Forecast:
        """What a rehearsal says of the run that did not happen."""
        if spec not in self.rehearsals:
            known = ", ".join(self.rehearsals) or "none (record with rehearse=)"
            raise UsageError(f"{spec!r} was not rehearsed in {self.where}; rehearsed: {known}.")
        return Forecast(self, spec)

    # ---- tensors ----

    def scores(self) -> dict[str, Array]:
        """The sums behind every allocation score, by tensor: (tiles, halfulp.kernels.SCORES)."""
        if not self.manifest["options"]["scores"] or not self.recorded:
            raise UsageError(
                f"{self.where} holds no scores: record with scores=(grid, first step, last step)."
            )
        state = self.state()
        found = {str(t["name"]): state.get(f"{t['id']}.scores") for t in self.tensors}
        return {name: value.numpy() for name, value in found.items() if value is not None}

    def attribution(self, spec: str | None = None) -> dict[str, Array]:
        """What each tile costs in a rehearsal, by tensor: score R, summed over the moments it was asked at.

        ``spec`` may be left out where one rehearsal was attributed (:meth:`halfulp.Audit.attribute`).
        """
        state = self.state() if self.recorded else {}
        known = [
            s for j, s in enumerate(self.rehearsals) if any(k.endswith(f".{j}.attributed") for k in state)
        ]
        if not known or (spec is None and len(known) > 1) or (spec is not None and spec not in known):
            if not known:
                raise UsageError(f"no rehearsal was attributed in {self.where}: Audit.attribute does that.")
            asked = "which rehearsal" if spec is None else f"{spec!r} was not attributed"
            raise UsageError(f"{asked} in {self.where}? Attributed: {', '.join(known)}.")
        j = self.rehearsals.index(known[0] if spec is None else spec)
        found = {str(t["name"]): state.get(f"{t['id']}.{j}.attributed") for t in self.tensors}
        return {name: value.numpy() for name, value in found.items() if value is not None}

    @property
    def tile(self) -> int:
        """How many consecutive coordinates scores and attributions are summed over."""
        if self.manifest["options"]["scores"]:
            return Scores.of(self.manifest["options"]["scores"]).tile
        return int(self.state()["attributed.tile"])
