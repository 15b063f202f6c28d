"""Read the record of an arm, and the tables that it attaches (safetensors; texts are numbers in a list)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp import tensors
from halfulp.errors import CorruptionError
from halfulp.measures.groups import CORE
from halfulp.trace import Columns

Record = Mapping[str, Any]
Array = npt.NDArray[np.float64]

DENSE = "dense"
"""The historical scope: the equal mean of the shares of attention and mlp, not weighted by coordinates."""


def groups_of(record: Record, scope: str) -> list[str]:
    """Return the groups that a scope is the union of: core, all-2d, or a group."""
    known = sorted(record["coordinates"])
    return known if scope == "all-2d" else [g for g in known if g in (CORE if scope == "core" else (scope,))]


def share(record: Record, counts: Mapping[str, Any], scope: str) -> Any:
    """Return counts by group, of one moment or of many, as a share of a scope's coordinates."""
    if scope == DENSE:
        return np.mean([share(record, counts, group) for group in CORE], axis=0)
    groups = groups_of(record, scope)
    total = sum(record["coordinates"][g] for g in groups)
    return np.sum([counts[g] for g in groups], axis=0) / total


def frozen(record: Record, name: str, scope: str, of: str = "frozen") -> Array:
    """Return the share of a scope's coordinates that every update leaves unchanged, weighted by coordinates.

    On a grid, by its name; ``of="rehearsed"``: in a run that was rehearsed, by what it was declared as.
    """
    return np.asarray(share(record, record[of][name], scope), dtype=np.float64)


def rehearsed_losses(record: Record, spec: str) -> dict[str, dict[str, float | None]]:
    """Return the held-out loss of a rehearsal by update and bound; JSON has no numbers for names."""
    return {str(e["update"]): e["rehearsed"][spec]["loss"] for e in record["evaluations"]}


def never_moved(record: Record, scope: str) -> float:
    """Return the share of a scope's coordinates that no update has moved, at the last evaluation."""
    return float(share(record, record["evaluations"][-1]["never_moved"], scope))


def losses(record: Record) -> dict[int, float | None]:
    """Return the held-out loss, which others call validation loss, by update."""
    return {e["update"]: e["loss"] for e in record["evaluations"]}


def loss(record: Record, update: int | None = None) -> float | None:
    """Return the held-out loss after an update; the last by default."""
    return losses(record).get(record["updates"] if update is None else update)


def pack(table: Columns) -> bytes:
    """Return the content of an attached table's file; :func:`unpack` reads it."""
    columns, names = dict(table), {"columns": json.dumps(table.columns)}
    for name, column in columns.items():
        if column.dtype == object:
            known = sorted(set(column.tolist()))
            names[name] = json.dumps(known)
            columns[name] = np.searchsorted(np.array(known), column.astype(str)).astype(np.int16)
    return b"".join(tensors.content({n: torch.from_numpy(c) for n, c in columns.items()}, names))


def unpack(content: bytes, where: str) -> Columns:
    """Return the table in the content of a file; ``where`` is named in errors."""
    arrays, names = tensors.read_stream(BytesIO(content), len(content), Path(where))
    try:
        columns = {n: arrays[n].numpy() for n in json.loads(names["columns"])}
        texts = {n: np.array(json.loads(names[n]), dtype=object)[columns[n]] for n in columns if n in names}
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptionError(f"{where} is not a table of a cell: {error!r}.") from None
    return Columns({**columns, **texts})
