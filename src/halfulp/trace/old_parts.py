"""Tables of parts that were written before format 5: a Parquet file for each, read by polars.

polars is no dependency of halfulp: who has an old trace installs it (``pip install 'halfulp[old-traces]'``).
Only files whose digest is the stated one get here. That protects against damage and not against malice: a
file that somebody made on purpose, with its digest, can end the process within polars.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from halfulp import files
from halfulp.errors import CorruptionError, MissingError
from halfulp.trace.columns import ARRIVED, SCHEMAS, Array, Columns
from halfulp.trace.schema import MOST_ROWS

LATER = {"dragged", *ARRIVED}
"""Columns that older formats do not have."""


def read(file: Path, table: str, names: Sequence[str]) -> Columns:
    """Return columns of a table from its Parquet file.

    Raises:
        MissingError: If polars is not installed.
        CorruptionError: If the file is damaged, or has other columns than its table.
    """
    try:
        polars: Any = importlib.import_module("polars")
    except ImportError:
        raise MissingError(
            f"{file} was written by a halfulp before trace format 5; polars reads it, which is not "
            "installed. Run: pip install 'halfulp[old-traces]'"
        ) from None
    content = BytesIO(files.read(file))
    try:
        there = polars.read_parquet_schema(content)
        known = SCHEMAS[table].keys()
        if not known - LATER <= there.keys() <= known or not all(
            kind.is_numeric() for kind in there.values()
        ):
            raise CorruptionError(f"{file} has columns {list(there)}, expected {list(known)}.")
        content.seek(0)
        rows = polars.scan_parquet(content).select(polars.len()).collect().item()
        if rows > MOST_ROWS:
            raise CorruptionError(f"{file} has {rows:,} rows; at most {MOST_ROWS:,} are expected there.")
        content.seek(0)
        frame = polars.read_parquet(content, columns=[name for name in names if name in there])
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError) as error:
        raise CorruptionError(f"{file} cannot be read: {error}.") from None
    return Columns({name: _column(file, table, name, frame) for name in names})


def _column(file: Path, table: str, name: str, frame: Any) -> Array:
    kind = SCHEMAS[table][name]
    if name not in frame.columns:
        return np.full(len(frame), np.nan)
    column = frame[name]
    if column.null_count() and kind is not np.float64:
        row = column.is_null().arg_max()
        raise CorruptionError(f"{file}: {name} is null in row {row}, expected a number.")
    numbers: Array = column.to_numpy().astype(kind)  # null is NaN
    return numbers
