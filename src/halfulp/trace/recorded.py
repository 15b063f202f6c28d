"""Query a recording, on disk or in memory: tables, series over steps, crossings and scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.measures.crossings import Crossing, Majority, crossing, majority
from halfulp.measures.forecasts import scalar_rho_map
from halfulp.measures.groups import CORE
from halfulp.numbers.grids import grid as named
from halfulp.trace.columns import ARRIVED, OPTIONAL, SERIES, Array, Columns, sums
from halfulp.trace.forecast import REAL, Forecast
from halfulp.trace.scores import Scores
from halfulp.trace.shares import known_zero, lost_share
from halfulp.trace.stored_on import default_scope, in_full

Scope = str | Sequence[int]
"""A scope by name, or the ids of its tensors."""
ATTRIBUTED_TILE = "attributed.tile"
"""In the state: the size of the tiles of attributions."""
BY = {"code": "frozen", "symmetric": "symmetric", "phase": "phase"}
"""Criteria for the coordinates that a step leaves unchanged, and their columns."""


class Recorded(ABC):
    """A recorded run."""

    manifest: dict[str, Any]

    @property
    @abstractmethod
    def where(self) -> str:
        """The name of the recording in error messages."""

    @property
    @abstractmethod
    def recorded(self) -> bool:
        """True if any step was recorded."""

    @property
    def roles(self) -> Mapping[str, Recorded]:
        """The traces of tracked states beside the weights, by name: copies such as an EMA, moments."""
        return {}

    @property
    def trouble(self) -> str | None:
        """The reason why the recording stopped before the run, or None."""
        return None

    @abstractmethod
    def scan(self, table: str = "grids", *names: str) -> Columns:
        """Return a raw table, or some of its columns.

        Args:
            table: ``grids``, ``tensors``, ``run``, ``losses``, or ``rehearsals`` if something was rehearsed.
            names: The columns to read; by default all.
        """

    @abstractmethod
    def state(self) -> dict[str, torch.Tensor]:
        """Return the state followed over steps, as of the last one."""

    # ---- tables ----

    def table(self) -> Columns:
        """Return one row per step, tensor and grid: names, counts and fractions."""
        counted = self.scan()
        listed: dict[int, dict[str, Any]] = {t["id"]: t for t in self.manifest["tensors"]}
        names, groups, sizes = (
            np.array([listed[i][key] for i in range(len(listed))], dtype=kind)
            for key, kind in (("name", object), ("group", object), ("recorded", np.int64))
        )
        tensor, grid = counted["tensor"], counted["grid"]
        ranks = [np.argsort(np.argsort(x))[at] for x, at in ((np.array(self.grids), grid), (names, tensor))]
        numel = sizes[tensor]
        labelled = {
            "step": counted["step"],
            "tensor": names[tensor],
            "group": groups[tensor],
            "grid": np.array(self.grids, dtype=object)[grid],
            "numel": numel,
            **{name: counted[name] for name in counted.columns if name not in ("step", "tensor", "grid")},
            **{f"{c}_fraction": counted[c] / numel for c in ("frozen", "symmetric", "never_moved")},
        }
        return Columns(labelled).take(np.lexsort((*ranks, counted["step"])))

    @property
    def grids(self) -> list[str]:
        """Return the names of the audited grids."""
        return list(self.manifest["grids"])

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """The manifest entries of the tensors, without those that have no weights."""
        return [t for t in self.manifest["tensors"] if t["recorded"]]

    @property
    def steps(self) -> Array:
        """The recorded steps, in increasing order."""
        return np.sort(self.scan("run", "step")["step"])

    def steps_of(self, scope: Scope = "all") -> Array:
        """Return the recorded steps in which a tensor of the scope took part: the steps of its series."""
        return np.unique(self._of_tensors(scope, "step")["step"])

    def _of_tensors(self, scope: Scope, *names: str) -> Columns:
        """Return columns of the table of tensors, of a scope."""
        rows = self.scan("tensors", "tensor", *names)
        return rows.take(np.isin(rows["tensor"], self.ids(scope)))

    @property
    def lost_by(self) -> str:
        """The criterion for an unchanged weight on grids whose scales move with the data.

        ``code``; ``value`` in traces before format 5; ``mixed`` if a recording continued one of those.
        """
        return str(self.manifest.get("lost", "value"))

    @property
    def older_counts(self) -> str | None:
        """A warning if unchanged weights on some grids were determined by an older criterion, or None."""
        scalings = {g: named(g).scaling for g in self.grids if "(" not in g}
        moving = [g for g, s in scalings.items() if s is not None and s.moves]
        if self.lost_by == "code" or not moving:
            return None
        part = "" if self.lost_by == "value" else "in part "
        return (
            f"Recorded {part}by an older halfulp, which took weights on {', '.join(moving)} for updated when "
            "only their scale had moved: too few updates count as lost there. To compare these grids with "
            "others, record again."
        )

    # ---- series ----

    def ids(self, scope: Scope = "all") -> list[int]:
        """Return the ids of the tensors in a scope.

        Args:
            scope: ``all``, ``all-2d``, ``core``, a group or a tensor's name; ids are returned as they are.

        Raises:
            UsageError: If no tensor is in the scope.
        """
        given: Any = scope  # whatever a caller gave
        if not isinstance(given, str | Iterable):
            raise UsageError(f"a scope is the name of one, or ids of tensors, not {given!r:.60}.")
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
        """Return the ids of the tensors that are stored in full precision."""
        return [t["id"] for t in self.tensors if in_full(t["stored"])]

    def tells_zero(self) -> list[int]:
        """Return the ids of the tensors for which it is known whether a proposal was zero.

        If weights are stored on a grid and only their change is seen, a lost update looks like no update.
        """
        known = self.manifest["run"].get("proposals") == "known"
        return [t["id"] for t in self.tensors] if known else self.in_full()

    def numel(self, scope: Scope = "all") -> int:
        """Return the number of coordinates recorded in a scope."""
        ids = set(self.ids(scope))
        return sum(int(t["recorded"]) for t in self.tensors if t["id"] in ids)

    def _grid_id(self, grid: str) -> int:
        if grid not in self.grids:
            raise UsageError(f"grid {grid!r} was not recorded; this trace has {', '.join(self.grids)}.")
        return self.grids.index(grid)

    def _scope(self, grid: str, scope: Scope | None) -> list[int]:
        """Return the tensors of a scope; of None, those of the grid's default scope."""
        self._grid_id(grid)
        return self.ids(default_scope(self, grid) if scope is None else scope)

    def series(self, column: str, grid: str, scope: Scope | None = None) -> Array:
        """Return a column of the grids table as a share of a scope's coordinates, one value per step.

        A tensor counts at a step only if it has the column there (it took part, it has decay).

        Args:
            column: One of ``SERIES``.
            grid: One of the audited grids.
            scope: A scope or tensor ids, as for :meth:`frozen`.

        Raises:
            UsageError: If there is no such column, grid or scope.
        """
        if column not in SERIES:
            raise UsageError(f"a series is one of {', '.join(SERIES)}, not {column!r}.")
        return self.share(self._column(column, grid, scope), column)

    def _column(self, column: str, grid: str, scope: Scope | None) -> Columns:
        """Return the rows of a grid and scope that have a value in a column."""
        rows = self._on(grid, column)
        mine = np.isin(rows["tensor"], self._scope(grid, scope))
        return rows.take(mine if column not in OPTIONAL else mine & ~np.isnan(rows[column]))

    def _on(self, grid: str, *names: str) -> Columns:
        """Return columns of the rows of one grid: as many as the table of tensors has, in its order."""
        rows = slice(self._grid_id(grid), None, len(self.grids))
        return self.scan("grids", "step", "tensor", *names).take(rows)

    def share(self, rows: Columns, column: str) -> Array:
        """Sum a column by step and divide by the coordinates of the tensors that have a row at that step."""
        total = self._sums(rows, column)
        return np.asarray(total[column] / total["numel"])

    def _sums(self, rows: Columns, *columns: str, by: str = "step") -> dict[str, Array]:
        """Sum columns by step (or by tensor), and the coordinates of the tensors that have a row there."""
        sizes = np.zeros(len(self.manifest["tensors"]), dtype=np.int64)
        for t in self.tensors:
            sizes[t["id"]] = t["recorded"]
        numel = sizes[rows["tensor"]]
        return sums(Columns({**dict(rows), "numel": numel}).take(numel > 0), by, *columns, "numel")

    def frozen(
        self, grid: str, scope: Scope | None = None, by: str = "code", *, of: str = "updates"
    ) -> Array:
        """Return the share of updates that is lost, one value per recorded step.

        An update is a finite proposal other than zero, and it is lost if its weight is frozen
        (:mod:`halfulp.kernels.reference`). NaN at a step without an update: no proposal was finite, or all
        were zero, as at a learning rate of 0.

        Args:
            grid: One of the audited grids.
            scope: ``all``, ``all-2d``, ``core``, a group, or a tensor's name. By default the tensors that are
                stored on the grid (measured); where none is, all (a forecast).
            by: ``code`` (the exact event: :attr:`lost_by` says which), ``symmetric`` (spacing), ``phase``
                (the uniform-phase coordinate check), or ``rho`` (the pooled scalar through the uniform-phase
                map).
            of: ``updates``, or ``weights`` for the paper's f_t: the share of all coordinates that a step
                leaves unchanged, including those it was not asked to move.

        Raises:
            UsageError: If an argument names nothing that was recorded.
        """
        if of not in ("updates", "weights"):
            raise UsageError(f"of= takes updates or weights, not {of!r}.")
        if by == "rho":
            return scalar_rho_map(self.update_ratio(self._scope(grid, scope)) / named(grid).epsilon)
        if by not in BY:
            raise UsageError(f"by= takes code, symmetric, phase or rho, not {by!r}.")
        ids = self._scope(grid, scope)
        total = self._sums(self._column(BY[by], grid, ids), BY[by])
        frozen = total[BY[by]]
        if by != "code" and not len(frozen):
            raise UsageError(f"{self.where} has no {by!r}: only traces of weights with a recorded step do.")
        frozen = frozen / 2.0**16 if by == "phase" else frozen
        if of == "weights":
            return np.asarray(frozen / total["numel"])
        beside = self._sums(self._shared(ids), "zero_proposal", "nonfinite")
        return lost_share(frozen, beside["zero_proposal"], beside["nonfinite"], beside["numel"])

    def lost_by_tensor(self, grid: str) -> dict[int, float]:
        """Return the share of each tensor's updates that the run loses, by id; NaN if it had none."""
        total = self._sums(self._column("frozen", grid, "all"), "frozen", by="tensor")
        beside = self._sums(self._shared("all"), "zero_proposal", "nonfinite", by="tensor")
        shares = lost_share(total["frozen"], beside["zero_proposal"], beside["nonfinite"], beside["numel"])
        return dict(zip(total["tensor"].tolist(), shares.tolist(), strict=True))

    def _shared(self, scope: Scope) -> Columns:
        """Return what is known of tensors whatever the grid; zero proposals only where they can be told."""
        rows = self._of_tensors(scope, "step", "lr", "zero_proposal", "nonfinite")
        sizes = np.array([t["recorded"] for t in self.manifest["tensors"]])
        known = np.isin(rows["tensor"], self.tells_zero())
        movable = sizes[rows["tensor"]] - rows["nonfinite"]
        zero = known_zero(rows["zero_proposal"], known, rows["lr"], movable)
        return Columns({**dict(rows), "zero_proposal": zero})

    def zero_proposals(self, scope: Scope = "all") -> Array:
        """Return the share of coordinates that a step was not asked to move, one value per recorded step.

        Of tensors that are not in :meth:`tells_zero`, only steps at a learning rate of 0 contribute.
        """
        return self.share(self._shared(scope), "zero_proposal")

    def nonfinite(self, scope: Scope = "all") -> Array:
        """Return the share of coordinates with a non-finite weight or proposal, one value per recorded step.

        No other count includes them.
        """
        return self.share(self._shared(scope), "nonfinite")

    def never_moved(self, grid: str, scope: Scope | None = None) -> Array:
        """Return the share of coordinates that no step so far has moved, under nearest rounding.

        Args:
            grid: One of the audited grids.
            scope: A scope or tensor ids, as for :meth:`frozen`.

        Raises:
            UsageError: If the trace was recorded without ``never_moved``.
        """
        self._followed("never_moved")
        return self.series("never_moved", grid, scope)

    def expected_never_moved(self, grid: str, scope: Scope | None = None) -> Array:
        """Return the expected share of coordinates that no step has moved, under stochastic rounding."""
        self._followed("expected_never_moved")
        return self.series("expected", grid, scope)

    def _followed(self, option: str) -> None:
        if not self.manifest["options"][option]:
            raise UsageError(f"this trace was recorded without {option}: record the run again with it.")

    def update_ratio(self, scope: Scope = "all") -> Array:
        """Return ||d|| / ||w|| over a scope, one value per step."""
        squares = ("weight_sq", "proposal_sq")
        total = sums(self._of_tensors(scope, "step", *squares), "step", *squares)
        return np.asarray(np.sqrt(total["proposal_sq"] / np.maximum(total["weight_sq"], 1e-300)))

    def gain(self, grid: str, scope: Scope | None = None) -> Array:
        """Return the share of the update that arrives, ``<u, d> / |d|**2``, by step; NaN without a proposal.

        d is the change that the optimizer made, and u the part of it that remains on the grid. Only tensors
        whose proposals are known count (:meth:`tells_zero`): if weights are stored on a coarse grid and only
        their change is seen, all of it has arrived. Below 1, updates are lost; rounding up may enlarge single
        updates, to up to twice their size. Empty for traces before format 4.
        """
        dot, _, proposed = self._arrived(grid, scope)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(proposed > 0, dot / proposed, np.nan)

    def cosine(self, grid: str, scope: Scope | None = None) -> Array:
        """Return the cosine of the proposed and the arriving update, by step; NaN if nothing arrives."""
        dot, written, proposed = self._arrived(grid, scope)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(written * proposed > 0, dot / np.sqrt(written * proposed), np.nan)

    def _arrived(self, grid: str, scope: Scope | None) -> tuple[Array, Array, Array]:
        """Return ``<u, d>``, |u|**2 and |d|**2 by step, summed in tensor order whatever the threads."""
        ids = sorted(set(self._scope(grid, scope)) & set(self.tells_zero()))
        proposed_sq = self.scan("tensors", "proposal_sq")["proposal_sq"]
        rows = Columns({**dict(self._on(grid, *ARRIVED)), "proposal_sq": proposed_sq})
        rows = rows.take(np.isin(rows["tensor"], ids) & ~np.isnan(rows["arrived"])).sort("step", "tensor")
        _, first = np.unique(rows["step"], return_index=True)
        columns = (rows[name] for name in (*ARRIVED, "proposal_sq"))
        dot, written, proposed = (np.add.reduceat(c, first) if len(c) else c for c in columns)
        return dot, written, proposed

    def majority(self, grid: str, scope: Scope | None = None) -> Majority | None:
        """Return the lasting majority of lost updates, see :func:`halfulp.measures.crossings.majority`."""
        f, steps = self._finite(grid, scope, "updates")
        return majority(f, steps=steps) if len(f) else None

    def crossing(self, grid: str, scope: Scope | None = None, *, of: str = "updates") -> Crossing:
        """Return the first and persistent majority crossing and their category, as defined in the paper.

        Args:
            grid: One of the audited grids.
            scope: A scope or tensor ids, as for :meth:`frozen`.
            of: ``updates`` or ``weights``, as for :meth:`frozen`.
        """
        f, steps = self._finite(grid, scope, of)
        return crossing(f, steps=steps)

    def _finite(self, grid: str, scope: Scope | None, of: str) -> tuple[Array, Array]:
        """Return shares and their steps, without steps that have none."""
        ids = self._scope(grid, scope)
        f, steps = self.frozen(grid, ids, of=of), self.steps_of(ids)
        there = ~np.isnan(f)
        return f[there], steps[there]

    # ---- rehearsals ----

    def real_losses(self) -> dict[int, float]:
        """Return the loss of the run's own weights by step, wherever it was evaluated."""
        rows = self.scan("losses")
        own = rows.take(rows["rehearsal"] == REAL).sort("step")
        return dict(own.select("step", "loss").rows())

    @property
    def rehearsals(self) -> list[str]:
        """The specs that were rehearsed."""
        return list((self.manifest["options"].get("rehearse") or {"specs": []})["specs"])

    def forecast(self, spec: str) -> Forecast:
        """Return the forecast of a rehearsal.

        Args:
            spec: One of :attr:`rehearsals`.

        Raises:
            UsageError: If it was not rehearsed.
        """
        if spec not in self.rehearsals:
            known = ", ".join(self.rehearsals) or "none (record with rehearse=)"
            raise UsageError(f"{spec!r} was not rehearsed in {self.where}; rehearsed: {known}.")
        return Forecast(self, spec)

    # ---- tensors ----

    def scores(self) -> dict[str, Array]:
        """Return the sums behind every allocation score, by tensor: (tiles, halfulp.kernels.SCORES).

        Raises:
            UsageError: If the trace was recorded without ``scores=``.
        """
        if not self.manifest["options"]["scores"] or not self.recorded:
            how = "--scores e5m2:1-600, in Python scores=(grid, first step, last step)"
            raise UsageError(f"{self.where} holds no scores. Record the run again with them: {how}.")
        state = self.state()
        summed = {str(t["name"]): state.get(f"{t['id']}.scores") for t in self.tensors}
        return {name: value.numpy() for name, value in summed.items() if value is not None}

    def missed_scores(self) -> str | None:
        """Say which steps of the scores' window were not audited; None if all were, or without scores."""
        requested = self.manifest["options"]["scores"]
        steps = self.steps.tolist() if requested and self.recorded else []
        return Scores.of(requested).missed(steps, self.manifest["every"]) if requested else None

    def attribution(self, spec: str | None = None) -> dict[str, Array]:
        """Return the cost of each tile in a rehearsal, by tensor: score R, summed over the moments.

        Args:
            spec: The rehearsal; optional if only one was attributed (:meth:`halfulp.Audit.attribute`).

        Raises:
            UsageError: If it was not attributed, or the choice is ambiguous.
        """
        state = self.state() if self.recorded else {}
        attributed = [
            s for j, s in enumerate(self.rehearsals) if any(k.endswith(f".{j}.attributed") for k in state)
        ]
        if not attributed:
            raise UsageError(f"no rehearsal was attributed in {self.where}: call Audit.attribute in the run.")
        if spec is None and len(attributed) == 1:
            (spec,) = attributed
        if spec not in attributed:
            problem = "which rehearsal" if spec is None else f"{spec!r} was not attributed"
            raise UsageError(f"{problem} in {self.where}? Attributed: {', '.join(attributed)}.")
        j = self.rehearsals.index(spec)
        costs = {str(t["name"]): state.get(f"{t['id']}.{j}.attributed") for t in self.tensors}
        return {name: value.numpy() for name, value in costs.items() if value is not None}

    @property
    def tile(self) -> int:
        """The number of consecutive coordinates that scores and attributions are summed over."""
        if self.manifest["options"]["scores"]:
            return Scores.of(self.manifest["options"]["scores"]).tile
        state = self.state() if self.recorded else {}
        if ATTRIBUTED_TILE not in state:
            raise UsageError(
                f"{self.where} has no tiles: it holds neither scores (record with scores=) nor attributions "
                "(Audit.attribute)."
            )
        return int(state[ATTRIBUTED_TILE])
