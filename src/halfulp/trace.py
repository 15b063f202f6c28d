"""A trace on disk: what every grid would do to every step of a run.

A folder, readable at any moment::

    manifest.json                what was recorded: version, grids, tensors, optimizer, environment
    parts/000000/                some steps; the folder appears whole, by a rename
        grids.parquet            step, tensor, grid -> counts
        tensors.parquet          step, tensor -> sums, rate
        run.parquet              step -> loss
        state.safetensors        what a resumed recording needs, and the scores (newest part only)
        kept.safetensors         weights before and after every step, if they were kept
        digests.json             SHA-256 of the files beside it

A crash loses at most the steps of the part that was open. Tables open as they are in polars, pandas and
DuckDB (``parts/*/grids.parquet``). There is no pickle anywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from halfulp.audit.crossings import Crossing, crossing
from halfulp.audit.groups import CORE
from halfulp.audit.measures import scalar_rho_map
from halfulp.audit.scores import Scores
from halfulp.errors import CorruptionError, TamperingError, UsageError, VersionError
from halfulp.grids import grid as named

FORMAT = 1
TABLES = ("grids", "tensors", "run")
STATE, KEPT = "state.safetensors", "kept.safetensors"
COUNTS = ("frozen", "symmetric", "endpoint", "subnormal", "zero_code", "never_moved")
SERIES = (*COUNTS, "phase", "expected", "frozen_decay", "frozen_gradient")
Array = npt.NDArray[Any]
Scope = str | Sequence[int]
"""A scope by name, or the ids of its tensors."""


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_aside(path: Path, content: str | bytes) -> None:
    """Replace a file in one go."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_folder(path: Path) -> Path:
    """A folder that is not taken: this one, or ``path-2``, ``path-3`` beside it."""
    return _beside(path)[-1]


def newest_folder(path: Path) -> Path:
    """The last of these that is taken; the first if none is."""
    return _beside(path)[-2:][0]


def _beside(path: Path) -> list[Path]:
    """The folder and those that were made beside it because it was taken, up to the first that is free."""
    found = [path]
    while found[-1].exists():
        found.append(path.with_name(f"{path.name}-{len(found) + 1}"))
    return found


# ---- writing -----------------------------------------------------------------------------------------


class TraceWriter:
    """Appends parts to a trace folder."""

    def __init__(self, path: Path, manifest: dict[str, Any], *, resume: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        self.last_step, self.count = 0, 0
        if (path / "manifest.json").exists():
            if not resume:
                raise UsageError(
                    f"{path} holds a trace already. Choose another folder, remove it, or resume it "
                    "(resume=True)."
                )
            found = Trace.open(path)
            _check_same(path, found.manifest, manifest)
            self.manifest = found.manifest
            self.last_step, self.count = found.last_step, len(found.parts)
        elif path.exists() and not _begun(path):
            raise UsageError(f"{path} is not an empty folder and holds no trace. Choose another folder.")
        else:
            (path / "parts").mkdir(parents=True, exist_ok=True)
            self.write_manifest()
        for stale in (path / "parts").glob(".*"):  # what a crash left half written
            shutil.rmtree(stale, ignore_errors=True)
        for stale in path.glob(".manifest.json.*"):
            stale.unlink(missing_ok=True)

    def write_manifest(self) -> None:
        write_aside(self.path / "manifest.json", json.dumps(self.manifest, indent=1, sort_keys=True) + "\n")

    def commit(
        self,
        tables: dict[str, pl.DataFrame],
        state: dict[str, torch.Tensor],
        kept: dict[str, torch.Tensor] | None = None,
        *,
        last_step: int,
    ) -> None:
        """Make the steps since the last part durable."""
        from safetensors.torch import save_file

        parts = self.path / "parts"
        aside, final = parts / f".{self.count:06d}.{os.getpid()}", parts / f"{self.count:06d}"
        aside.mkdir()
        for name in TABLES:
            tables[name].write_parquet(aside / f"{name}.parquet", compression="zstd")
        save_file(state, aside / STATE)
        if kept:
            save_file(kept, aside / KEPT)
        digests = {file.name: digest(file) for file in sorted(aside.iterdir())}
        (aside / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
        for file in aside.iterdir():
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        sync_folder(aside)
        os.rename(aside, final)
        sync_folder(parts)
        self.count += 1
        self.last_step = last_step
        if self.count > 1:  # only the newest state can be resumed from
            (parts / f"{self.count - 2:06d}" / STATE).unlink(missing_ok=True)

    def discard_if_empty(self) -> bool:
        """Leave nothing behind if no part was committed."""
        if self.count == 0:
            (self.path / "manifest.json").unlink(missing_ok=True)
            for folder in (self.path / "parts", self.path):
                with contextlib.suppress(OSError):  # somebody put something there
                    folder.rmdir()
        return self.count == 0

    def load_state(self) -> dict[str, torch.Tensor]:
        """The state of the newest part."""
        return load_tensors(self.path / "parts" / f"{self.count - 1:06d}" / STATE)


def _begun(path: Path) -> bool:
    """Whether a folder is empty, or holds no more than what a recording that was killed at once left."""
    if not path.is_dir() or any((path / "parts").glob("[!.]*")):
        return False
    return all(p.name == "parts" or p.name.startswith(".manifest.json.") for p in path.iterdir())


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CorruptionError(f"{file} cannot be read: {error}.") from None


def _check_same(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to go on with other settings than those a trace was begun with."""
    pairs = [(key, found[key], wanted[key]) for key in ("grids", "every")]
    pairs += [(key, found["options"].get(key), value) for key, value in wanted["options"].items()]
    for key, old, new in pairs:
        if old != new:
            raise UsageError(f"cannot resume {path}: it was recorded with {key}={old!r}, not {new!r}.")


# ---- reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """A recorded run. Open one with :meth:`open`."""

    path: Path
    manifest: dict[str, Any]
    parts: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Trace:
        """Open a trace folder; what is damaged, foreign or newer is refused with its reason."""
        path = Path(path)
        file = path / "manifest.json"
        if not path.is_dir() or not file.is_file():
            raise CorruptionError(f"{path} is not a trace: expected a folder with a manifest.json.")
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            kind, version = manifest["kind"], manifest["format"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptionError(f"{file} is not the manifest of a trace: {error!r}.") from None
        if kind != "halfulp.trace":
            raise CorruptionError(f"{file} is not the manifest of a trace, but of kind {kind!r}.")
        if version != FORMAT:
            raise VersionError(
                f"{file} has trace format {version}; this halfulp reads format {FORMAT}. "
                "Use the halfulp that wrote it."
            )
        missing = [key for key in ("grids", "every", "options", "tensors") if key not in manifest]
        if missing:
            raise CorruptionError(f"{file} is not a whole manifest: it has no {', '.join(missing)}.")
        parts = tuple(sorted(p for p in (path / "parts").glob("[0-9]*") if p.is_dir()))
        for i, part in enumerate(parts):
            if part.name != f"{i:06d}":
                raise TamperingError(f"{path}: part {i:06d} is missing; the next one found is {part.name}.")
            if verify:
                _verify(part, newest=i == len(parts) - 1)
        return cls(path, manifest, parts)

    # ---- tables ----

    def scan(self, table: str = "grids") -> pl.LazyFrame:
        """A raw table, lazily: ``grids``, ``tensors`` or ``run``."""
        if table not in TABLES:
            raise UsageError(f"a trace has tables {', '.join(TABLES)}, not {table!r}.")
        if not self.parts:
            raise UsageError(f"{self.path} holds no complete part yet: no step was committed.")
        return pl.scan_parquet([p / f"{table}.parquet" for p in self.parts])

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
        return list(self.manifest["tensors"])

    @property
    def last_step(self) -> int:
        if not self.parts:
            return 0
        return int(
            pl.scan_parquet(self.parts[-1] / "run.parquet").select(pl.col("step").max()).collect().item()
        )

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
        return [t["id"] for t in self.tensors if t["stored"] in ("float32", "float64")]

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

    # ---- tensors ----

    def scores(self) -> dict[str, Array]:
        """The sums behind every allocation score, by tensor: (tiles, halfulp.kernels.SCORES)."""
        if not self.manifest["options"]["scores"] or not self.parts:
            raise UsageError(
                f"{self.path} holds no scores: record with scores=(grid, first step, last step)."
            )
        state = load_tensors(self.parts[-1] / STATE)
        found = {str(t["name"]): state.get(f"{t['id']}.scores") for t in self.tensors}
        return {name: value.numpy() for name, value in found.items() if value is not None}

    @property
    def tile(self) -> int:
        """How many consecutive coordinates the scores are summed over."""
        return Scores.of(self.manifest["options"]["scores"]).tile

    def replay(self, grids: Iterable[str], out: str | Path) -> Trace:
        """A new trace, of any grids, from the weights that this one kept (``Audit(keep=True)``)."""
        from halfulp.audit.replay import replay

        return replay(self, grids, Path(out))


def _verify(part: Path, *, newest: bool) -> None:
    try:
        digests = json.loads((part / "digests.json").read_text(encoding="utf-8"))
        names = {str(name): str(value) for name, value in digests.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptionError(f"{part / 'digests.json'} cannot be read: {error}.") from None
    needed = {f"{t}.parquet" for t in TABLES} | (names.keys() & {KEPT}) | ({STATE} if newest else set())
    for name in sorted(needed):
        file = part / name
        if name not in names:
            raise CorruptionError(f"{part / 'digests.json'} has no digest of {name}.")
        if not file.is_file():
            raise CorruptionError(f"{file} is missing.")
        if digest(file) != names[name]:
            raise TamperingError(
                f"{file} is not what was written: its SHA-256 differs from the one in digests.json."
            )
