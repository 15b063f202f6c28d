"""Refuse rows that no recording gives: somebody who edits a file can also renew its digest.

Steps are those of the part; tensors, grids, rehearsals and bounds are known to the manifest; a count is of no
more coordinates than its tensor has. The tables of a part are of the same steps and tensors, row by row,
because series of both are divided by each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from halfulp.canonical import LARGEST
from halfulp.errors import CorruptionError
from halfulp.trace.columns import COUNTS, Array, Columns
from halfulp.trace.schema import BOUNDS, LOSSES, REHEARSED, PartDocument

COUNTED = (*COUNTS, "frozen_decay", "frozen_gradient", "zero_proposal", "nonfinite", "expected")
MOST = {**dict.fromkeys(COUNTED, 1), "phase": 1 << 16}
"""The most that one coordinate can add to a column."""
SQUARES = ("weight_sq", "proposal_sq", "written_sq")


class RowChecks:
    """Check the tables of one trace, and that those of a part have the same rows."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self._sizes = np.zeros(len(manifest["tensors"]), dtype=np.int64)
        for t in manifest["tensors"]:
            self._sizes[t["id"]] = t["recorded"]
        rehearsed = manifest["options"].get("rehearse") or {"specs": []}
        self._known = {
            "tensor": len(self._sizes),
            "grid": len(manifest["grids"]),
            "rehearsal": len(rehearsed["specs"]),
            "bound": len(BOUNDS),
        }
        self._common: dict[tuple[int, str], bytes] = {}

    def check(self, name: str, part: PartDocument, table: Columns) -> None:
        """Refuse a table of a part, by its file, column and row."""
        where = f"{part.file_of(name)}: {name}"
        if len(table) != part.rows.get(name, len(table)):
            raise CorruptionError(f"{where} has {len(table):,} rows; its part states {part.rows[name]:,}.")
        evaluations = name == LOSSES  # may come before the first step and after the last; -1 is the run
        first, last = (0, LARGEST) if evaluations else part.steps or (1, LARGEST)
        _check_range(where, "step", table["step"], first, last)
        for key in (k for k in self._known if k in table.columns):
            _check_range(where, key, table[key], -1 if evaluations else 0, self._known[key] - 1)
        sizes = self._sizes[table["tensor"]] if "tensor" in table.columns else 0
        for column in (c for c in table.columns if c in MOST):
            _check_range(where, column, table[column], 0, sizes * float(MOST[column]))
        for column in (c for c in SQUARES if c in table.columns):
            _check_range(where, column, table[column], 0, np.inf)
        if name not in (LOSSES, REHEARSED):
            self._check_common(name, part, where, table)

    def _check_common(self, name: str, part: PartDocument, where: str, table: Columns) -> None:
        """Hold the steps and tensors of a table against those of the tables before it."""
        each = self._known["grid"] if name == "grids" else 1
        rows = np.stack([table["step"], table["tensor"] if name != "run" else table["step"]])
        regular = np.array_equal(rows, rows[:, ::each].repeat(each, axis=1)[:, : len(table)])
        if name == "grids":
            regular = regular and np.array_equal(table["grid"], np.arange(len(table)) % each)
        if name == "run":
            regular = bool((np.diff(table["step"]) > 0).all())
        same = {"steps": np.unique(table["step"])} | ({} if name == "run" else {"rows": rows[:, ::each]})
        for what, found in same.items():
            digest = hashlib.sha256(found.tobytes()).digest()
            regular &= digest == self._common.setdefault((part.number, what), digest)
        if not regular:
            raise CorruptionError(
                f"{where}: its steps, tensors or grids are not in the order of the manifest, or not those of "
                "the other tables of its part."
            )


def _check_range(where: str, column: str, values: Array, least: int, most: Any) -> None:
    wrong = (values < least) | (values > most)  # NaN is neither
    if wrong.any():
        at = int(wrong.argmax())
        high = most[at] if isinstance(most, np.ndarray) else most
        raise CorruptionError(f"{where}: {column} is {values[at]} in row {at}, expected {least} to {high}.")
