"""Read a trace: opening it validates its documents and links its parts, and queries read its tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from halfulp import files, tensors
from halfulp.documents import MOST_BYTES, Fields, check_digest, parsed
from halfulp.errors import RESTORE, CorruptionError, DiskError, TamperingError, UsageError
from halfulp.trace import columns, layout, old_parts
from halfulp.trace.columns import SCHEMAS, Columns
from halfulp.trace.recorded import Recorded
from halfulp.trace.schema import (
    BOUNDS,
    COLUMNS,
    LOSSES,
    TROUBLE_KIND,
    Entry,
    PartDocument,
    Parts,
    check_owner,
    listed_parts,
    read_manifest,
    tables_of,
)

ROLES = layout.ROLES
"""The folder of a trace that holds the traces of tracked states."""
CACHED_ROWS = 1 << 20
"""Most rows (of up to 130 bytes each) kept in memory between queries."""
RACES = 1000
"""Number of times a reader retries when a writer has just replaced the state."""


def _read(part: PartDocument, table: str, *names: str) -> Columns:
    reader = columns.read if COLUMNS in part.files else old_parts.read
    return reader(part.file_of(table), table, names)


def _check_file(file: Path, entry: Entry) -> None:
    if files.sha256(file, entry.size) != entry.sha256:
        raise TamperingError(
            f"{file} is not what was written: its SHA-256 differs from the one that its part states. "
            f"{RESTORE}"
        )


def _what_instead(path: Path) -> str:
    """Say what is at a path that holds no trace, and what to give instead."""
    if not path.exists():
        return "there is no such folder. Give the one that halfulp audit named, such as runs/train"
    if not path.is_dir():
        return "it is a file" + (f". Give its folder, {path.parent}" if path.name == layout.MANIFEST else "")
    inside = sorted(p.parent for p in path.glob(f"*/{layout.MANIFEST}"))
    if inside:
        more = f" or {inside[1]}" if len(inside) > 1 else ""
        return f"it is a folder with traces in it. Give one of them, such as {inside[0]}{more}"
    return "expected a folder with a manifest.json"


@dataclass(frozen=True)
class Trace(Recorded):
    """A recorded run in a folder. Open one with :meth:`open`.

    >>> import tempfile
    >>> from halfulp.audit import Audit
    >>> model, folder = torch.nn.Linear(8, 8), tempfile.mkdtemp() + "/run"
    >>> _ = torch.nn.init.ones_(model.weight)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    >>> with Audit(optimizer, ["bf16", "e5m2"], model=model, out=folder):
    ...     _ = model(torch.ones(1, 8)).sum().backward()
    ...     optimizer.step()
    >>> trace = Trace.open(folder)
    >>> trace.grids, trace.last_step, trace.tensors[0]["name"]
    (['bf16', 'e5m2'], 1, 'weight')

    Shares are arrays, one value per step; a scope is a group, a tensor's name, or ``all``:

    >>> trace.frozen("bf16", "weight"), trace.gain("bf16", "weight"), trace.never_moved("bf16", "weight")
    (array([1.]), array([0.]), array([1.]))
    >>> trace.crossing("bf16", "weight").persistent, trace.lost_by_tensor("bf16")[0]
    (1, 1.0)
    >>> print(f"{trace.update_ratio('weight')[0]:.0e}")
    1e-06
    >>> table = trace.table()  # columns, of one row per step, tensor and grid
    >>> sorted(table["tensor"]), int(table["frozen"].sum())
    (['bias', 'bias', 'weight', 'weight'], 144)
    """

    path: Path
    manifest: dict[str, Any]
    parts: tuple[Path, ...]
    documents: tuple[PartDocument, ...] = field(repr=False)
    """The document that describes each part."""
    _files_checked: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Files whose digest has been verified."""
    _tables_checked: set[str] = field(default_factory=set, repr=False, compare=False)
    """Tables whose rows have passed the consistency checks."""
    _cached: dict[tuple[int, str], Columns] = field(default_factory=dict, repr=False, compare=False)
    """Cached tables of parts, while they are small: a small part takes longer to open than to read."""

    @property
    def roles(self) -> dict[str, Trace]:
        """Return the traces of optimizer states, gradients and copies, by name."""
        layout.check_folders(self.path)
        roles: dict[str, Trace] = {}
        for folder in layout.roles(self.path):
            if os.path.lexists(folder / layout.MANIFEST):
                roles[folder.name] = Trace.open(folder)
                check_owner(folder, roles[folder.name].manifest, self.manifest.get("id"))
            elif (folder / layout.PARTS).is_dir() and listed_parts(folder):
                raise CorruptionError(f"{folder} has parts, but no manifest.json: it was removed.")
        return roles

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> Trace:
        """Open the folder of a trace.

        Args:
            path: The folder.
            verify: Check every file against its digest now. If False, each file is checked when it is first
                read, so that a damaged file does not prevent access to the others.

        Returns:
            The trace.

        Raises:
            CorruptionError: If the folder holds no trace, or a damaged one.
            TamperingError: If a file is not what was written, or does not belong there.
            VersionError: If it was written by a newer halfulp.
        """
        path = files.path_of(path, "a trace")
        file = path / "manifest.json"
        try:
            there = path.is_dir() and (file.is_symlink() or file.exists())
        except OSError as error:
            raise files.refused_reading(file, error) from error
        if not there:
            raise CorruptionError(f"{path} is not a trace: {_what_instead(path)}.")
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
        if part.folder / name not in self._files_checked:
            _check_file(part.folder / name, part.files[name])
            self._files_checked.add(part.folder / name)

    def _check_state(self, newest: PartDocument) -> None:
        try:
            _check_file(newest.state_file, newest.state_entry)
        except CorruptionError:
            if not self._superseded(newest):  # else a writer is at work: the next part has its own
                raise

    def _superseded(self, part: PartDocument) -> bool:
        return (self.path / "parts" / f"{part.number + 1:06d}").is_dir()

    @property
    def trouble(self) -> str | None:
        """The reason why the recording stopped before the run, or None."""
        file = self.path / "trouble.json"
        if not file.is_symlink() and not file.exists():
            return None
        document = parsed(files.read(file, MOST_BYTES), file, "a note of trouble")
        check_digest(document, file)
        fields = Fields(document, str(file))
        fields.take("kind", repr(TROUBLE_KIND), lambda v: v == TROUBLE_KIND)
        return fields.text("what")

    @property
    def where(self) -> str:
        """Name the trace in messages: its path."""
        return str(self.path)

    @property
    def recorded(self) -> bool:
        """Return True if a step was recorded."""
        return bool(self.parts)

    # ---- tables ----

    @cached_property
    def _largest_ids(self) -> dict[str, int]:
        rehearsed = self.manifest["options"].get("rehearse") or {"specs": []}
        listed = {"tensor": self.manifest["tensors"], "grid": self.grids, "rehearsal": rehearsed["specs"]}
        return {"bound": len(BOUNDS) - 1, **{name: len(known) - 1 for name, known in listed.items()}}

    def _check_rows(self, part: PartDocument, name: str, table: Columns) -> None:
        """Refuse rows of what the manifest does not list; all else is as written, which the digest says."""
        where = f"{part.file_of(name)}: {name}"
        if len(table) != part.rows.get(name, len(table)):
            raise CorruptionError(f"{where} has {len(table):,} rows; its part states {part.rows[name]:,}.")
        least = -1 if name == LOSSES else 0  # the run itself
        for key in (k for k in table.columns if k in self._largest_ids and len(table)):
            low, high = table[key].min(), table[key].max()
            if low < least or high > self._largest_ids[key]:
                raise CorruptionError(
                    f"{where}: {key} is from {low} to {high}, expected {least} to {self._largest_ids[key]}."
                )

    def scan(self, table: str = "grids", *names: str) -> Columns:
        """Return a raw table of all parts: ``grids``, ``tensors``, ``run``, ``losses``, ``rehearsals``.

        Args:
            table: Name of the table; ``rehearsals`` exists if something was rehearsed.
            names: The columns to read; by default all.

        Raises:
            UsageError: If the trace has no such table, or no part yet.
            CorruptionError: If a file is not what was written, or has rows that no recording gives.
        """
        known = (*tables_of(self.manifest), LOSSES)
        if table not in known:
            raise UsageError(f"{self.path} has tables {', '.join(known)}, not {table!r}.")
        if not self.parts:
            raise UsageError(f"{self.path} holds no complete part yet: no step was committed.")
        return columns.concat(list(self.by_part(table, *names)))

    def by_part(self, table: str, *names: str) -> Iterator[Columns]:
        """Yield a table part by part, checked: digests first, then columns, then rows."""
        if table not in self._tables_checked:
            cached = sum(map(len, self._cached.values()))
            for part in self.documents:
                if part.has(table):
                    self._check(part, part.file_of(table).name)
                    rows = _read(part, table, *SCHEMAS[table])
                    self._check_rows(part, table, rows)
                    if (cached := cached + len(rows)) <= CACHED_ROWS:
                        self._cached[part.number, table] = rows
            self._tables_checked.add(table)
        chosen = names or tuple(SCHEMAS[table])
        for part in self.documents:
            if (part.number, table) in self._cached:
                yield self._cached[part.number, table].select(*chosen)
            else:
                yield _read(part, table, *chosen) if part.has(table) else columns.empty(table).select(*chosen)

    @property
    def last_step(self) -> int:
        """Return the number of the last recorded step, 0 without one."""
        if not self.parts:
            return 0
        steps = self.documents[-1].steps
        return int(self.steps[-1]) if steps is None else steps[1]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state followed over steps, as of the newest part (or a newer one if the trace grew).

        Raises:
            CorruptionError: If the state file is damaged.
            DiskError: If the trace is written faster than it can be read.
        """
        newest = self.documents[-1]
        for _ in range(RACES):
            try:
                return tensors.read(newest.state_file, sha256=newest.state_entry.sha256)[0]
            except CorruptionError:
                if not self._superseded(newest):
                    raise
            folder = listed_parts(self.path)[-1]
            newest = Parts(self.path, read_manifest(self.path / "manifest.json")).alone(folder)
        raise DiskError(f"{self.path} changed again and again while it was read: try again later.")
