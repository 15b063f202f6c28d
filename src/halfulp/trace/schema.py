"""The schema of a trace's manifest and of the documents of its parts; every reader goes through here.

From format 2 on a trace is bound together: the manifest has a digest and a random id; a part's document
names that id, its own number, the digest of the document before it, the grids and tensors it was recorded
with, and bytes and SHA-256 of each of its files. So a manifest or a part that was edited, copied, moved or
left out does not fit. Format 1 has a digest for each file of a part and nothing else. Formats 2 to 4 have a
Parquet file for each table (:mod:`halfulp.trace.old_parts`), format 5 has one safetensors file
(:mod:`halfulp.trace.columns`); docs/reference/files.md says what each brought.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfulp import canonical, files
from halfulp.documents import DIGEST, MOST_BYTES, Fields, check_digest, is_sha256, parsed, whole
from halfulp.errors import CorruptionError, HalfulpError, TamperingError, VersionError
from halfulp.numbers.grids import grid as named
from halfulp.trace.layout import MANIFEST, PARTS, check_no_link

KIND, PART_KIND, TROUBLE_KIND = "halfulp.trace", "halfulp.part", "halfulp.trouble"
FORMAT, READ = 5, (1, 2, 3, 4, 5)
TABLES = ("grids", "tensors", "run")
REHEARSED = "rehearsals"
"""The table that a trace with rehearsals has beside the others."""
LOSSES = "losses"
"""The table that parts have in which something was evaluated."""
BOUNDS = ("lower", "point", "upper")
"""The bounds of a rehearsal, in the order of their numbers in tables."""
COLUMNS, LAST_PARQUET = "tables.safetensors", 4
"""The file of a part that has its tables; and the last format that had a Parquet file for each."""
STATE, DOCUMENT, DIGESTS = "state.safetensors", "part.json", "digests.json"
KEPT = "kept.safetensors"
"""Weights that earlier releases could keep: the digest is checked, and nothing reads them."""
MOST_ROWS = 1 << 22
"""Most rows in one table of a part: some 400 MB in memory."""
OWNER = "owner"
"""Key in the manifest of a tracked state: the id of the trace that contains it; missing in older ones."""
DTYPES = ("float64", "float32", "bfloat16", "float16")


def read_manifest(file: Path) -> dict[str, Any]:
    """Return the manifest of a trace, checked from its digest to its last tensor."""
    manifest = parsed(files.read(file, MOST_BYTES), file, "the manifest of a trace")
    kind, version = manifest.get("kind"), manifest.get("format")
    if kind != KIND:
        raise CorruptionError(f"{file} is not the manifest of a trace, but of kind {kind!r}.")
    if not whole(version) or version not in READ:
        raise VersionError(
            f"{file} has trace format {version}; this halfulp reads formats {', '.join(map(str, READ))}. "
            "Use the halfulp that wrote it."
        )
    _check_manifest(Fields(manifest, str(file)))
    if version == 1 and DIGEST in manifest:
        raise TamperingError(f"{file} has a digest, which format 1 does not: its format was changed.")
    if version > 1:
        check_digest(manifest, file)
    manifest.pop(DIGEST, None)
    return manifest


def check_id(path: Path, expected: str) -> None:
    """Refuse a folder that no longer holds the trace that it did, which a rank beside the first writes to."""
    actual = read_manifest(path / MANIFEST).get("id")
    if actual != expected:
        raise CorruptionError(
            f"{path} no longer holds the trace {expected}, but {actual}: another recording took its place."
        )


def check_owner(path: Path, role: Mapping[str, Any], expected: str | None) -> None:
    """Refuse a tracked state that was recorded beside another trace, or that has another name.

    ``role`` is its manifest, ``expected`` the id of the trace that it should belong to.
    """
    name = path.name.encode("utf-8", "backslashreplace").decode()
    pairs = (("trace", role.get(OWNER, expected), expected), ("role", role["run"].get("role", name), name))
    for what, actual, here in pairs:
        if actual != here:
            raise TamperingError(
                f"{path} does not belong here: its {what} is {actual!r}, expected {here!r}. It was recorded "
                "beside another run, or the manifest was replaced. Put back what was there, or remove it."
            )


def _check_manifest(manifest: Fields) -> None:
    """Check what readers rely on; the rest is as it was written, which the digest says."""
    if manifest.values["format"] > 1:
        manifest.text("id", 100)
    manifest.whole("every", 1)
    names = manifest.texts("grids", 1000)
    if not names or len(set(names)) != len(names) or not all(map(_is_grid, names)):
        raise CorruptionError(
            f"{manifest.where}: grids is {names}, expected at least one known grid, none of them twice."
        )
    options = manifest.within("options")
    for flag in ("never_moved", "expected_never_moved", "keep"):
        options.flag(flag)
    options.take("sample", "none or a share", lambda v: v is None or (_number(v) and 0 < v <= 1))
    options.take(
        "scores", "none, or a grid and a window of steps", lambda v: v is None or isinstance(v, list)
    )
    if options.values.get("rehearse") is not None:
        rehearsed = options.within("rehearse")
        sizes = {len(rehearsed.texts(key, 1000)) for key in ("specs", "grids", "policies")}
        if len(sizes) != 1 or not set(rehearsed.texts("bounds")) <= set(BOUNDS):
            raise CorruptionError(
                f"{rehearsed.where}: expected a grid and a policy for each spec, and bounds."
            )
    _check_tensors(manifest)
    list(manifest.each("optimizers", 10_000))
    manifest.within("environment")
    manifest.within("run")


def _check_tensors(manifest: Fields) -> None:
    names, ids = set(), set()
    tensors = list(manifest.each("tensors"))
    for tensor in tensors:
        ids.add(tensor.whole("id", 0, len(tensors) - 1))
        names.add(tensor.text("name"))
        tensor.text("group")
        numel, shape = tensor.whole("numel"), tensor.wholes("shape", 64)
        if math.prod(shape) != numel:
            raise CorruptionError(f"{tensor.where}: a tensor of shape {shape} does not have {numel} numbers.")
        tensor.whole("recorded", min(1, numel), numel)
        tensor.take("dtype", f"one of {', '.join(DTYPES)}", lambda v: isinstance(v, str) and v in DTYPES)
        tensor.take(
            "stored", "a dtype or a grid", lambda v: isinstance(v, str) and (v in DTYPES or _is_grid(v))
        )
    if not len(names) == len(ids) == len(tensors):
        raise CorruptionError(
            f"{manifest.where}: two tensors share a name or an id ({len(tensors)} tensors, {len(names)} "
            f"names, {len(ids)} ids)."
        )


def _is_grid(name: str) -> bool:
    if "(" in name:  # a grid that somebody made, whose name is no recipe
        return True
    try:
        named(name)
    except HalfulpError:
        return False
    return len(name) <= 100


def tables_of(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tables that every part of a trace has."""
    return (*TABLES, REHEARSED) if manifest["options"].get("rehearse") else TABLES


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- parts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file as its part states it; format 1 knows its digest only."""

    sha256: str
    size: int | None = None
    rows: int | None = None
    """The number of rows of a Parquet file."""

    def to_json(self) -> dict[str, Any]:
        """Return what a part's document states of it."""
        stated = {"bytes": self.size, "sha256": self.sha256, "rows": self.rows}
        return {key: value for key, value in stated.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class PartDocument:
    """A part by its document."""

    folder: Path
    number: int
    files: Mapping[str, Entry]
    rows: Mapping[str, int]
    """The number of rows of each table; unknown in format 1."""
    state: Entry | None
    """Of the file that a resumed recording needs; only the newest part's is there."""
    state_file: Path
    digest: str = ""
    steps: tuple[int, int] | None = None
    """The first and the last; format 1 does not say."""

    @property
    def state_entry(self) -> Entry:
        """Return what it states of that file.

        Raises:
            CorruptionError: If it states nothing.
        """
        if self.state is None:
            raise CorruptionError(f"{self.folder / DIGESTS} has no digest of {STATE}.")
        return self.state

    def file_of(self, table: str) -> Path:
        """Return the file that has a table."""
        return self.folder / (COLUMNS if COLUMNS in self.files else f"{table}.parquet")

    def has(self, table: str) -> bool:
        """Return True if there is such a table: one of losses only where something was evaluated."""
        return table in self.rows or f"{table}.parquet" in self.files


def inventory_digest(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest that a part is bound to: of the tensors as listed when it was written."""
    return canonical.digest(list(tensors))


class Parts:
    """Reads the parts of one trace, one after the other, each bound to the one before."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.before: PartDocument | None = None
        self._inventories: dict[int, str] = {}

    def next(self, folder: Path) -> PartDocument:
        """Return the next part, from its folder."""
        number = 0 if self.before is None else self.before.number + 1
        before = None if self.before is None else self.before.digest
        self.before = self._read(folder, {"number": number, "before": before})
        return self.before

    def alone(self, folder: Path) -> PartDocument:
        """Return a part from its folder, whatever is before it."""
        return self._read(folder, {"number": int(folder.name)})

    def _read(self, folder: Path, place: Mapping[str, Any]) -> PartDocument:
        first = self.manifest["format"] == 1
        return self._of_format_1(folder, place["number"]) if first else self._of_format_2(folder, place)

    def _of_format_1(self, folder: Path, number: int) -> PartDocument:
        file = folder / DIGESTS
        digests = parsed(files.read(file, MOST_BYTES), file, "a list of digests")
        known = {f"{t}.parquet" for t in TABLES}
        for name in sorted(known - digests.keys()):
            raise CorruptionError(f"{file} has no digest of {name}.")
        for name, value in digests.items():
            if name not in known | {KEPT, STATE} or not is_sha256(value):
                raise CorruptionError(f"{file} is not a list of digests: it has {name!r}.")
        entries = {name: Entry(sha256=value) for name, value in digests.items()}
        state = entries.pop(STATE, None)
        return PartDocument(
            folder=folder, number=number, files=entries, rows={}, state=state, state_file=folder / STATE
        )

    def _of_format_2(self, folder: Path, place: Mapping[str, Any]) -> PartDocument:
        file = folder / DOCUMENT
        document = parsed(files.read(file, MOST_BYTES), file, "the document of a part")
        fields = Fields(document, str(file))
        fields.take("kind", repr(PART_KIND), lambda v: v == PART_KIND)
        version = fields.whole("format", 2, self.manifest["format"])
        check_digest(document, file)
        before = self.before
        expected_here = {"trace": self.manifest["id"], "grids": self.manifest["grids"], **place}
        rehearsed = self.manifest["options"].get("rehearse")
        if rehearsed:
            expected_here["rehearse"] = rehearsed
        for key, expected in expected_here.items():
            if fields.take(key, "", lambda _: True) != expected:
                raise TamperingError(
                    f"{file} does not belong here: its {key} is {document[key]!r}, expected {expected!r}. "
                    "It is a part of another trace or another place, or the manifest was replaced."
                )
        self._check_inventory(fields, file)
        first = fields.whole("first_step", 1)
        last = fields.whole("last_step", first)
        if before is not None and before.steps is not None and first < before.steps[1]:
            raise TamperingError(f"{file} begins at step {first}, before the end of the part before it.")
        entries, rows = _entries(fields, version, self.manifest)
        return PartDocument(
            folder=folder,
            number=place["number"],
            files=entries,
            rows=rows,
            state=_entry(fields.within("state")),
            state_file=state_file(self.path, place["number"]),
            digest=fields.sha256(DIGEST),
            steps=(first, last),
        )

    def _check_inventory(self, document: Fields, file: Path) -> None:
        count = document.whole("tensors")
        listed_now = self.manifest["tensors"]
        if count not in self._inventories and count <= len(listed_now):
            self._inventories[count] = inventory_digest(listed_now[:count])
        if self._inventories.get(count) != document.sha256("inventory"):
            raise TamperingError(
                f"{file} was recorded with {count} tensors that are not those of the manifest, which has "
                f"{len(listed_now)}: the manifest was replaced."
            )


def state_file(path: Path, number: int) -> Path:
    """Return the file with the state of a part: apart from the parts, as it goes when the next one comes."""
    return path / "state" / f"{number:06d}.safetensors"


def _entry(fields: Fields, rows: bool = False) -> Entry:
    return Entry(
        sha256=fields.sha256("sha256"),
        size=fields.whole("bytes"),
        rows=fields.whole("rows", 0, MOST_ROWS) if rows else None,
    )


def _entries(
    document: Fields, version: int, manifest: Mapping[str, Any]
) -> tuple[dict[str, Entry], dict[str, int]]:
    """Return what the document of a part says of its files, and of the rows of its tables."""
    files, tables = document.within("files"), tables_of(manifest)
    parquet = version <= LAST_PARQUET
    needed = [f"{t}.parquet" for t in tables] if parquet else [COLUMNS]
    more = [f"{LOSSES}.parquet", KEPT] if parquet else [KEPT]
    if not set(needed) <= files.values.keys() <= {*needed, *more}:
        raise CorruptionError(f"{files.where} is of {sorted(files.values)}, expected {', '.join(needed)}.")
    entries = {name: _entry(files.within(name), rows=parquet and name != KEPT) for name in files.values}
    if parquet:
        return entries, {n.removesuffix(".parquet"): e.rows for n, e in entries.items() if e.rows is not None}
    rows = document.within("rows")
    if not set(tables) <= rows.values.keys() <= {*tables, LOSSES}:
        raise CorruptionError(f"{rows.where} is of {sorted(rows.values)}, expected {', '.join(tables)}.")
    return entries, {name: rows.whole(name, 0, MOST_ROWS) for name in rows.values}


def listed_parts(path: Path) -> list[Path]:
    """List the folders of parts, numbered without a gap; names that begin with a dot are unfinished."""
    parts = path / PARTS
    try:
        with os.scandir(parts) as entries:
            links = {e.name: e.is_symlink() for e in entries if not e.name.startswith(".")}
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptionError(f"{parts} is missing: expected a folder with the parts of the trace.") from None
    except OSError as error:
        raise files.refused_reading(parts, error) from error
    names = sorted(links, key=lambda name: (len(name), name))
    for i, name in enumerate(names):
        if name != f"{i:06d}":
            raise TamperingError(f"{path}: part {i:06d} is missing; the next one found is {name}.")
        if links[name]:
            check_no_link(parts / name)
    return [parts / name for name in names]
