"""Tables of a trace: columns of numbers, equally long, in memory and in a safetensors file.

A part of a trace has one file with the columns of all its tables, each a one-dimensional tensor named
``table/column``. Whole numbers take the narrowest integers that hold them. A number that was not counted is
NaN in memory and -1 in the file; a column of which nothing was counted is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, KeysView, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import tensors
from halfulp.errors import CorruptionError, UsageError

Array = npt.NDArray[Any]
Schema = Mapping[str, type[np.generic]]

COUNTS = ("frozen", "symmetric", "endpoint", "subnormal", "zero_code", "never_moved", "dragged")
SERIES = (*COUNTS, "phase", "expected", "frozen_decay", "frozen_gradient")
ARRIVED = ("arrived", "written_sq")
"""Of a tensor on a grid, with d what is proposed and u what is written: <u, d> and |u|**2; since format 4."""
COLUMNS = (*SERIES[:9], *ARRIVED, *SERIES[9:])
"""The numbers in the table of grids."""
OPTIONAL = ("symmetric", "subnormal", "zero_code", "dragged", "phase", "frozen_decay", "frozen_gradient")
"""Counts that need not have been made: in memory they are floats, NaN where nothing was counted."""
ABSENT = {*OPTIONAL, "expected", *ARRIVED}
"""Columns that a file may lack."""
_KEYS: dict[str, type[np.generic]] = {"step": np.int64, "tensor": np.int32}
SCHEMAS: dict[str, Schema] = {
    "grids": {
        **_KEYS, "grid": np.int16,
        **{n: np.float64 if n in (*OPTIONAL, "expected", *ARRIVED) else np.int64 for n in COLUMNS},
    },
    "tensors": {
        **_KEYS, "zero_proposal": np.int64, "nonfinite": np.int64,
        "weight_sq": np.float64, "proposal_sq": np.float64, "lr": np.float64,
    },
    "run": {"step": np.int64, "loss": np.float64},
    "rehearsals": {
        **_KEYS, "rehearsal": np.int16, "bound": np.int8,
        "frozen": np.int64, "never_moved": np.int64, "nonfinite": np.int64,
    },
    "losses": {"step": np.int64, "rehearsal": np.int16, "bound": np.int8, "loss": np.float64},
}  # fmt: skip
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
SHOWN_ROWS = 10


class Columns:
    """Columns by name, equally long: ``table["step"]`` is an array, ``len(table)`` counts the rows.

    ``dict(table)`` is what pandas and polars make a frame of.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._columns = dict(columns)
        if len({len(c) for c in self._columns.values()}) > 1:
            raise UsageError(f"columns of different lengths: {[len(c) for c in self._columns.values()]}.")

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return list(self._columns)

    def keys(self) -> KeysView[str]:
        """Return the names of the columns: with ``table[name]``, enough for ``dict(table)``."""
        return self._columns.keys()

    def __getitem__(self, name: str) -> Array:
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the rows, as tuples of Python's numbers."""
        return zip(*(c.tolist() for c in self._columns.values()), strict=True)

    def take(self, rows: Array | slice) -> Columns:
        """Return the rows of a mask, of a slice, or with these numbers."""
        return Columns({name: column[rows] for name, column in self._columns.items()})

    def select(self, *names: str) -> Columns:
        """Return some of the columns."""
        return Columns({name: self._columns[name] for name in names})

    def sort(self, *names: str) -> Columns:
        """Return the rows ordered by these columns, first by the first; equal ones stay as they are."""
        return self.take(np.lexsort([self._columns[name] for name in reversed(names)]))

    def equals(self, other: Columns) -> bool:
        """Compare all columns; NaN equals NaN."""
        return self.columns == other.columns and all(
            np.array_equal(self[n], other[n], equal_nan=self[n].dtype.kind == "f") for n in self.columns
        )

    def to_polars(self) -> Any:
        """Return a polars frame, with null for what was not counted; polars must be installed."""
        polars = importlib.import_module("polars")
        absent = [name for name in self.columns if name in (*OPTIONAL, *ARRIVED)]
        return polars.DataFrame(self._plain()).with_columns(polars.col(absent).fill_nan(None))

    def to_pandas(self) -> Any:
        """Return a pandas frame; pandas must be installed."""
        return importlib.import_module("pandas").DataFrame(self._plain())

    def _plain(self) -> dict[str, Any]:
        return {n: c.tolist() if c.dtype == object else c for n, c in self._columns.items()}

    def __repr__(self) -> str:
        shown = [self.columns, *([_text(x) for x in row] for row in self.take(slice(SHOWN_ROWS)).rows())]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in shown]
        more = [f"... {len(self) - SHOWN_ROWS:,} more rows"] if len(self) > SHOWN_ROWS else []
        return "\n".join([*lines, *more])


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def empty(table: str) -> Columns:
    """Return a table without rows."""
    return Columns({name: np.zeros(0, kind) for name, kind in SCHEMAS[table].items()})


def concat(tables: Sequence[Columns]) -> Columns:
    """Return the rows of tables with the same columns, one after the other."""
    if len(tables) == 1:
        return tables[0]
    return Columns({name: np.concatenate([t[name] for t in tables]) for name in tables[0].columns})


def groups(key: Array) -> tuple[Array, Array]:
    """Return the distinct values of a column, in order, and for each row the number of its value."""
    if len(key) and (key[1:] >= key[:-1]).all():  # as steps are: nothing to sort
        new = np.concatenate([[True], key[1:] != key[:-1]])
        return key[new], np.cumsum(new) - 1
    distinct, inverse = np.unique(key, return_inverse=True)
    return distinct, inverse


def sums(table: Columns, by: str, *names: str) -> dict[str, Array]:
    """Sum columns over the rows that have one value of ``by``, row after row; the values are in order."""
    distinct, row_of = groups(table[by])
    return {by: distinct, **{n: np.bincount(row_of, table[n], len(distinct)) for n in names}}


def last_rows(table: Columns, *names: str) -> Columns:
    """Keep the last of the rows that agree in some columns, and their order."""
    place = {key: i for i, key in enumerate(table.select(*names).rows())}
    return table.take(np.sort(np.fromiter(place.values(), np.int64, len(place))))


# ---- files -------------------------------------------------------------------------------------------


def packed(tables: Mapping[str, Columns]) -> dict[str, torch.Tensor]:
    """Return tables as the tensors of one file."""
    columns = {f"{t}/{name}": (name, table[name]) for t, table in tables.items() for name in table.columns}
    return {
        key: torch.from_numpy(_narrowed(column) if column.dtype.kind == "i" or name in OPTIONAL else column)
        for key, (name, column) in columns.items()
        if name not in ABSENT or not np.isnan(column).all()
    }


def _narrowed(column: Array) -> Array:
    """Return whole numbers as the narrowest integers that hold them, with -1 for NaN."""
    if column.dtype.kind == "f":
        column = np.nan_to_num(column, nan=-1.0)
    least, most = (column.min(), column.max()) if len(column) else (0, 0)
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return column.astype(kind)
    return column.astype(np.int64)


def unpacked(columns: Mapping[str, torch.Tensor], table: str, names: Sequence[str], place: object) -> Columns:
    """Return columns of a table from the tensors of a file.

    Raises:
        CorruptionError: If a column is missing, is not a list of numbers of its kind, or has another length.
    """
    chosen = {name: columns.get(f"{table}/{name}") for name in names}
    lengths = {tuple(t.shape) for t in chosen.values() if t is not None}
    if len(lengths) != 1 or len(*lengths) != 1:
        raise CorruptionError(
            f"{place}: {table}: the columns of one table must be equally long; found lengths "
            f"{sorted(lengths)}."
        )
    ((length,),) = lengths
    return Columns({name: _widened(chosen[name], table, name, length, place) for name in names})


def _widened(t: torch.Tensor | None, table: str, name: str, length: int, place: object) -> Array:
    kind: np.dtype[Any] = np.dtype(SCHEMAS[table][name])
    if t is None:
        if name not in ABSENT:
            raise CorruptionError(f"{place} has no column {name} of {table}.")
        return np.full(length, np.nan)
    whole = kind.kind == "i" or name in OPTIONAL
    allowed = INTEGERS if whole else (torch.float64,)
    if t.dtype not in allowed:
        raise CorruptionError(f"{place}: {table}/{name} has dtype {t.dtype}, expected one of {allowed}.")
    column: Array = t.numpy()
    if kind.kind == "f":
        return np.where(column == -1, np.nan, column) if whole else column
    if len(column) and (column.min() < np.iinfo(kind).min or column.max() > np.iinfo(kind).max):
        raise CorruptionError(f"{place}: {table}/{name} has numbers that do not fit into {kind}.")
    return column.astype(kind, copy=False)


def read(file: Path, table: str, names: Sequence[str]) -> Columns:
    """Return columns of a table from a file, of which nothing else is read."""
    keys = {f"{table}/{name}" for name in names}
    return unpacked(tensors.read_some(file, keys), table, names, file)
