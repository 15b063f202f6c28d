"""Reading a trace: opening checks what it says and binds its parts; the rest is questions to its tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import polars as pl
import torch

from halfulp import files, tensors
from halfulp.documents import MOST_BYTES, Fields, check_digest, parsed
from halfulp.errors import CorruptionError, DiskError, TamperingError, UsageError
from halfulp.trace import layout, parquet
from halfulp.trace.checking import Rows
from halfulp.trace.recorded import ARRIVED, COLUMNS, Recorded
from halfulp.trace.schema import (
    DIGESTS,
    KEPT,
    LOSSES,
    MOST_ROWS,
    STATE,
    TROUBLE_KIND,
    PartDocument,
    Parts,
    check_owner,
    listed_parts,
    read_manifest,
    tables_of,
)

SCHEMAS: dict[str, dict[str, pl.DataType | type[pl.DataType]]] = {
    "grids": {
        "step": pl.Int64, "tensor": pl.Int32, "grid": pl.Int16,
        **{name: pl.Float64 if name in ("expected", *ARRIVED) else pl.Int64 for name in COLUMNS},
    },
    "tensors": {
        "step": pl.Int64, "tensor": pl.Int32, "zero_proposal": pl.Int64, "nonfinite": pl.Int64,
        "weight_sq": pl.Float64, "proposal_sq": pl.Float64, "lr": pl.Float64,
    },
    "run": {"step": pl.Int64, "loss": pl.Float64},
    "rehearsals": {
        "step": pl.Int64, "tensor": pl.Int32, "rehearsal": pl.Int16, "bound": pl.Int8, "frozen": pl.Int64,
        "never_moved": pl.Int64, "nonfinite": pl.Int64,
    },
    "losses": {"step": pl.Int64, "rehearsal": pl.Int16, "bound": pl.Int8, "loss": pl.Float64},
}  # fmt: skip
ROLES = layout.ROLES
"""The folder of a trace that holds those of what accumulates beside the weights."""
RACES = 1000
"""How often a reader looks again for a state that a writer has just replaced."""


def _batches(parts: Sequence[PartDocument], name: str) -> Iterator[list[PartDocument]]:
    """Parts whose rows of a table are looked at together: a call costs more than many small parts."""
    batch: list[PartDocument] = []
    rows = 0
    for part in parts:
        count = part.files[name].rows
        many = MOST_ROWS if count is None else count
        if batch and rows + many > MOST_ROWS:
            yield batch
            batch, rows = [], 0
        batch.append(part)
        rows += many
    if batch:
        yield batch


def _read(parts: Sequence[PartDocument], table: str) -> tuple[list[int], pl.DataFrame]:
    """A table of parts, one after the other, and how many of its rows are of each. Sizes, numbers of rows and
    columns, which files state, are held against what may be before anything is read."""
    known = SCHEMAS[table]
    before = {name: kind for name, kind in known.items() if name not in ARRIVED}  # formats 1 to 3
    name, counts, found = f"{table}.parquet", [], []
    for part in parts:
        file, stated = part.folder / name, part.files[name].rows
        rows, content = parquet.rows(file), source(file)
        if rows != (rows if stated is None else stated):
            raise CorruptionError(f"{file} has {rows:,} rows; its part states {stated:,}.")
        if rows > MOST_ROWS:
            raise CorruptionError(f"{file} has {rows:,} rows; at most {MOST_ROWS:,} are expected there.")
        with parquet.refusing(file):
            there = dict(_scanned([content]).collect_schema())
        if there not in (known, before):
            raise CorruptionError(f"{file} has columns {list(there)}, expected {list(known)}.")
        counts.append(rows)
        found.append(content)
    first = parts[0].folder / name  # of one that is alone; of many, each is tried again
    with parquet.refusing(first):
        frame = scan_files(found, table).collect()
    if len(frame) != sum(counts):
        raise CorruptionError(f"{first} has {len(frame):,} rows; it states {sum(counts):,}.")
    return counts, frame


def scan_files(found: Sequence[Path | bytes], table: str) -> pl.LazyFrame:
    """Files of a table, lazily; without the shortcuts that a filter would take through other parts of a file
    than those that were read when its rows were checked."""
    schema = pl.Schema(SCHEMAS[table])
    return _scanned(found, schema=schema, missing_columns="insert", parallel="columns", use_statistics=False)


def _scanned(found: Sequence[Path | bytes], **options: Any) -> pl.LazyFrame:
    """Parquet files as :func:`source` gives them; ``glob`` would read ``run1`` in the place of ``run[1]``."""
    return pl.scan_parquet(cast(list[Path], found), glob=False, **options)  # or all are bytes


def source(file: Path) -> Path | bytes:
    """A file as polars takes it: by its name, or its content where the name is not UTF-8."""
    file = file.absolute()  # polars would take a folder ~ for the user's own
    try:
        str(file).encode()
    except UnicodeEncodeError:
        return files.read(file)
    return file


@dataclass(frozen=True)
class Trace(Recorded):
    """A recorded run. Open one with :meth:`open`."""

    path: Path
    manifest: dict[str, Any]
    parts: tuple[Path, ...]
    documents: tuple[PartDocument, ...] = field(repr=False)
    """What each part says of itself."""
    _checked: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Files whose digest was found right."""
    _counted: set[str] = field(default_factory=set, repr=False, compare=False)
    """Tables whose rows were found possible."""

    @property
    def roles(self) -> dict[str, Trace]:
        layout.check_folders(self.path)
        found: dict[str, Trace] = {}
        for folder in layout.roles(self.path):
            if os.path.lexists(folder / layout.MANIFEST):
                found[folder.name] = Trace.open(folder)
                check_owner(folder, found[folder.name].manifest, self.manifest.get("id"))
            elif (folder / layout.PARTS).is_dir() and listed_parts(folder):
                raise CorruptionError(f"{folder} has parts, but no manifest.json: it was removed.")
        return found

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
        layout.check_folders(path)
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

    def _check(self, part: PartDocument, name: str) -> None:
        """Hold a file of a part against its digest, once."""
        file, entry = part.folder / name, part.files[name]
        if file in self._checked:
            return
        if files.sha256(file, entry.size) != entry.sha256:
            raise TamperingError(
                f"{file} is not what was written: its SHA-256 differs from the one that its part states."
            )
        self._checked.add(file)

    def _check_state(self, newest: PartDocument) -> None:
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

    def _superseded(self, part: PartDocument) -> bool:
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

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def recorded(self) -> bool:
        return bool(self.parts)

    # ---- tables ----

    @cached_property
    def _rows(self) -> Rows:
        return Rows(self.manifest)

    def scan(self, table: str = "grids") -> pl.LazyFrame:
        """A raw table, lazily: ``grids``, ``tensors``, ``run``, ``losses``; with rehearsals theirs."""
        known = (*tables_of(self.manifest), LOSSES)
        if table not in known:
            raise UsageError(f"{self.path} has tables {', '.join(known)}, not {table!r}.")
        if not self.parts:
            raise UsageError(f"{self.path} holds no complete part yet: no step was committed.")
        found = self.table_files(table)
        if not found:
            return pl.LazyFrame(schema=SCHEMAS[table])
        return scan_files(found, table)

    def table_files(self, table: str) -> list[Path | bytes]:
        """The Parquet files of a table, checked: digests first, then columns, then rows.

        One a part; of losses, one a part in which something was evaluated.
        """
        name = f"{table}.parquet"
        parts = [part for part in self.documents if table != LOSSES or name in part.files]
        if table not in self._counted:
            for part in parts:
                self._check(part, name)
            for together in _batches(parts, name):
                self._check_rows(together, table)
            self._counted.add(table)
        return [source(part.folder / name) for part in parts]

    def _check_rows(self, parts: Sequence[PartDocument], table: str) -> None:
        """Hold the rows of parts against what may be: together, and one by one to say where it is not."""
        try:
            counts, frame = _read(parts, table)
        except CorruptionError:
            for part in parts if len(parts) > 1 else ():
                self._check_rows([part], table)
            raise
        self._rows.check(table, parts, counts, frame)

    @property
    def last_step(self) -> int:
        if not self.parts:
            return 0
        steps = self.documents[-1].steps
        return int(self.steps[-1]) if steps is None else steps[1]

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
