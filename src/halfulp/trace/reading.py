"""Reading a trace: opening checks what it says and binds its parts; the rest is questions to its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from halfulp import files, tensors
from halfulp.audit.crossings import Crossing, crossing
from halfulp.audit.groups import CORE
from halfulp.audit.measures import scalar_rho_map
from halfulp.audit.scores import Scores
from halfulp.documents import MOST_BYTES, Fields, check_digest, parsed
from halfulp.errors import CorruptionError, DiskError, TamperingError, UsageError
from halfulp.grids import grid as named
from halfulp.trace.schema import (
    DIGESTS,
    KEPT,
    MOST_ROWS,
    STATE,
    TABLES,
    TROUBLE_KIND,
    Part,
    Parts,
    listed_parts,
    read_manifest,
)

if TYPE_CHECKING:
    from halfulp.audit.verdict import Verdict

COUNTS = ("frozen", "symmetric", "endpoint", "subnormal", "zero_code", "never_moved")
SERIES = (*COUNTS, "phase", "expected", "frozen_decay", "frozen_gradient")
SCHEMAS: dict[str, dict[str, pl.DataType | type[pl.DataType]]] = {
    "grids": {
        "step": pl.Int64, "tensor": pl.Int32, "grid": pl.Int16,
        **{name: pl.Float64 if name == "expected" else pl.Int64 for name in SERIES},
    },
    "tensors": {
        "step": pl.Int64, "tensor": pl.Int32, "zero_proposal": pl.Int64, "nonfinite": pl.Int64,
        "weight_sq": pl.Float64, "proposal_sq": pl.Float64, "lr": pl.Float64,
    },
    "run": {"step": pl.Int64, "loss": pl.Float64},
}  # fmt: skip
RACES = 1000
"""How often a reader looks again for a state that a writer has just replaced."""
Array = npt.NDArray[Any]
Scope = str | Sequence[int]
"""A scope by name, or the ids of its tensors."""


@dataclass(frozen=True)
class Trace:
    """A recorded run. Open one with :meth:`open`."""

    path: Path
    manifest: dict[str, Any]
    parts: tuple[Path, ...]
    documents: tuple[Part, ...] = field(repr=False)
    """What each part says of itself."""
    _checked: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Files whose digest was found right."""
    _counted: set[str] = field(default_factory=set, repr=False, compare=False)

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Trace:
        """Open a trace folder; what is damaged, foreign or newer is refused with its reason.

        Every file is held against its digest now; with ``verify=False`` each only when it is first read, so
        that a damaged file does not keep one from the others. None is parsed before that.
        """
        path = Path(path)
        file = path / "manifest.json"
        try:
            there = path.is_dir() and (file.is_symlink() or file.exists())
        except OSError as error:
            raise files.refused_reading(file, error) from error
        if not there:
            raise CorruptionError(f"{path} is not a trace: expected a folder with a manifest.json.")
        folders = listed_parts(path)  # before the manifest: it is never older than a part that is there
        manifest = read_manifest(file)
        reader = Parts(path, manifest)
        trace = cls(path, manifest, tuple(folders), tuple(reader.next(folder) for folder in folders))
        if verify:
            for document in trace.documents:
                for name in document.files:
                    trace._check(document, name)
            if trace.documents:
                trace._check_state(trace.documents[-1])
        return trace

    def _check(self, part: Part, name: str) -> None:
        """Hold a file of a part against its digest, once."""
        file, entry = part.folder / name, part.files[name]
        if file in self._checked:
            return
        if files.sha256(file, entry.size) != entry.sha256:
            raise TamperingError(
                f"{file} is not what was written: its SHA-256 differs from the one that its part states."
            )
        self._checked.add(file)

    def _check_state(self, newest: Part) -> None:
        if newest.state is None:
            raise CorruptionError(f"{newest.folder / DIGESTS} has no digest of {STATE}.")
        try:
            found = files.sha256(newest.state_file, newest.state.size)
        except CorruptionError:
            if self._superseded(newest):  # a writer is at work: the next part has its own
                return
            raise
        if found != newest.state.sha256 and not self._superseded(newest):
            raise TamperingError(
                f"{newest.state_file} is not what was written: its SHA-256 differs from the one that its "
                "part states."
            )

    def _superseded(self, part: Part) -> bool:
        return (self.path / "parts" / f"{part.number + 1:06d}").is_dir()

    @property
    def trouble(self) -> str | None:
        """Why the recording stopped before the run did, if it did."""
        file = self.path / "trouble.json"
        if not file.is_symlink() and not file.exists():
            return None
        found = parsed(files.read(file, MOST_BYTES), file, "a note of trouble")
        check_digest(found, file)
        said = Fields(found, str(file))
        said.take("kind", repr(TROUBLE_KIND), lambda v: v == TROUBLE_KIND)
        return said.text("what")

    # ---- tables ----

    def scan(self, table: str = "grids") -> pl.LazyFrame:
        """A raw table, lazily: ``grids``, ``tensors`` or ``run``."""
        if table not in TABLES:
            raise UsageError(f"a trace has tables {', '.join(TABLES)}, not {table!r}.")
        if not self.parts:
            raise UsageError(f"{self.path} holds no complete part yet: no step was committed.")
        return pl.scan_parquet(self.table_files(table))

    def table_files(self, table: str) -> list[Path]:
        """The Parquet files of a table, one a part, checked: digests first, then columns and rows."""
        name = f"{table}.parquet"
        found = [part.folder / name for part in self.documents]
        if table not in self._counted:
            for part in self.documents:
                self._check(part, name)
            self._count(table, found)
            self._counted.add(table)
        return found

    def _count(self, table: str, found: list[Path]) -> None:
        """Hold a table's columns and rows, which its files state at their ends, against what is expected."""
        try:
            frame = pl.scan_parquet(found)
            columns = dict(frame.collect_schema())
            rows = int(frame.select(pl.len()).collect().item())
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise CorruptionError(f"{self.path}: the table {table} cannot be read: {error}.") from None
        if columns != SCHEMAS[table]:
            raise CorruptionError(f"{self.path}: the table {table} has columns {list(columns)}.")
        stated = [part.files[f"{table}.parquet"].rows for part in self.documents]
        if None not in stated and rows != sum(n or 0 for n in stated):
            raise CorruptionError(f"{self.path}: {table} has {rows:,} rows; its parts state another number.")
        if rows > MOST_ROWS * len(found):
            raise CorruptionError(
                f"{self.path}: {table} has {rows:,} rows in {len(found)} files, more than a part may have."
            )

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
    def last_step(self) -> int:
        if not self.parts:
            return 0
        steps = self.documents[-1].steps
        return int(self.steps[-1]) if steps is None else steps[1]

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
        return self._share(self.scan().filter(chosen, pl.col(column).is_not_null()), column)

    def _share(self, rows: pl.LazyFrame, column: str) -> Array:
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
        if by == "symmetric":
            return self.series("symmetric", grid, scope)
        if by == "phase":
            return self.series("phase", grid, scope) / 2.0**16
        if by == "rho":
            return scalar_rho_map(self.update_ratio(scope) / named(grid).epsilon)
        raise UsageError(f"by= takes code, symmetric, phase or rho, not {by!r}.")

    def zero_proposals(self, scope: Scope = "all") -> Array:
        """The share of coordinates that a step was not asked to move, one value a recorded step.

        Known of weights in full precision only: where they are on a grid, a lost update looks like none.
        """
        rows = self.scan("tensors").filter(pl.col("tensor").is_in(self.ids(scope)))
        known = pl.col("zero_proposal") * pl.col("tensor").is_in(self.in_full())
        return self._share(rows.with_columns(known), "zero_proposal")

    def nonfinite(self, scope: Scope = "all") -> Array:
        """The share of coordinates whose weight or proposal is not finite, one value a recorded step.

        They are in no other count; shares of frozen weights are of all coordinates all the same.
        """
        return self._share(self.scan("tensors").filter(pl.col("tensor").is_in(self.ids(scope))), "nonfinite")

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

    def crossing(self, grid: str, scope: str = "all") -> Crossing:
        """First and persistent majority crossing, and the category."""
        return crossing(self.frozen(grid, scope), steps=self.steps_of(scope))

    def verdict(self) -> Verdict:
        """The answer in words, as the command line prints it: ``print(trace.verdict())``."""
        from halfulp.audit.verdict import verdict

        return verdict(self)

    # ---- tensors ----

    def scores(self) -> dict[str, Array]:
        """The sums behind every allocation score, by tensor: (tiles, halfulp.kernels.SCORES)."""
        if not self.manifest["options"]["scores"] or not self.parts:
            raise UsageError(
                f"{self.path} holds no scores: record with scores=(grid, first step, last step)."
            )
        state = self.state()
        found = {str(t["name"]): state.get(f"{t['id']}.scores") for t in self.tensors}
        return {name: value.numpy() for name, value in found.items() if value is not None}

    @property
    def tile(self) -> int:
        """How many consecutive coordinates the scores are summed over."""
        return Scores.of(self.manifest["options"]["scores"]).tile

    def state(self) -> dict[str, torch.Tensor]:
        """What was followed over steps, as of the newest part; of a newer one if the trace has grown."""
        newest = self.documents[-1]
        for _ in range(RACES):
            if newest.state is None:
                raise CorruptionError(f"{newest.folder / DIGESTS} has no digest of {STATE}.")
            try:
                return tensors.read(newest.state_file, sha256=newest.state.sha256)[0]
            except CorruptionError:
                if not self._superseded(newest):
                    raise
            folder = listed_parts(self.path)[-1]
            newest = Parts(self.path, read_manifest(self.path / "manifest.json")).alone(folder)
        raise DiskError(f"{self.path} is written faster than it can be read: try again when it is not.")

    def kept(self, part: Path) -> dict[str, torch.Tensor]:
        """The weights before and after every step of a part (``Audit(keep=True)``)."""
        document = self.documents[self.parts.index(part)]
        if KEPT not in document.files:
            raise CorruptionError(f"{part} has no {KEPT}, although this trace kept weights.")
        return tensors.read(part / KEPT, sha256=document.files[KEPT].sha256)[0]

    def replay(self, grids: Iterable[str], out: str | Path) -> Trace:
        """A new trace, of any grids, from the weights that this one kept (``Audit(keep=True)``)."""
        from halfulp.audit.replay import replay

        return replay(self, grids, Path(out))
