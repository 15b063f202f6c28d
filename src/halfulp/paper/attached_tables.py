"""Tables that a cell attaches to its record: a safetensors file, with texts as numbers in a list of names."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from halfulp import tensors
from halfulp.errors import CorruptionError
from halfulp.trace import Columns

ORDER = "columns"


def pack(table: Columns) -> bytes:
    """Return the content of a file."""
    columns, names = dict(table), {ORDER: json.dumps(table.columns)}
    for name, column in columns.items():
        if column.dtype == object:
            known = sorted(set(column.tolist()))
            names[name] = json.dumps(known)
            columns[name] = np.searchsorted(np.array(known), column.astype(str)).astype(np.int16)
    return b"".join(tensors.content({n: torch.from_numpy(c) for n, c in columns.items()}, names))


def unpack(content: bytes, where: str) -> Columns:
    """Return the table in the content of a file."""
    found, names = tensors.read_stream(BytesIO(content), len(content), Path(where))
    try:
        columns = {n: found[n].numpy() for n in json.loads(names[ORDER])}
        texts = {n: np.array(json.loads(names[n]), dtype=object)[columns[n]] for n in columns if n in names}
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptionError(f"{where} is not a table of a cell: {error!r}.") from None
    return Columns({**columns, **texts})
