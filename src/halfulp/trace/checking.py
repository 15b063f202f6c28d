"""Whether the rows of a table can have been recorded: who edits a file can make its digest anew.

Every row is of a step of its part, and of a tensor, a grid, a rehearsal and a bound that the manifest knows;
a count is of no more coordinates than its tensor has. The tables of a part are of the same steps, those of
tensors and of grids row by row, because series of both are divided by each other. A row may come twice: an
optimizer that is made anew within a step has two. What is not a number stays possible, as in any run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from halfulp.canonical import LARGEST
from halfulp.errors import CorruptionError
from halfulp.trace.recorded import ARRIVED, COUNTS
from halfulp.trace.schema import BOUNDS, LOSSES, REHEARSED, PartDocument

PHASE_BITS = 16
"""A coordinate adds one to the sum of phases at most, in units of two to the minus this."""
COUNTED = (*COUNTS, "frozen_decay", "frozen_gradient", "zero_proposal", "nonfinite", "expected")
SQUARES = ("weight_sq", "proposal_sq", "written_sq")
NULL = ("phase", "frozen_decay", "frozen_gradient", *ARRIVED)
"""What need not have been counted."""
NULL_IN_CASTS = ("symmetric", "subnormal", "zero_code")


class Rows:
    """The rows of one trace; of each part it remembers what its tables must have in common."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self._sizes = np.zeros(len(manifest["tensors"]), dtype=np.int64)
        for t in manifest["tensors"]:
            self._sizes[t["id"]] = t["recorded"]
        rehearsed = manifest["options"].get("rehearse")
        self._known = {
            "tensor": len(self._sizes), "grid": len(manifest["grids"]),
            "rehearsal": len(rehearsed["specs"]) if rehearsed else 0, "bound": len(BOUNDS),
        }  # fmt: skip
        self._null = {*NULL, *(NULL_IN_CASTS if manifest["run"].get("cast") else ())}
        self._common: dict[tuple[int, str], tuple[str, str]] = {}

    def check(self, part: PartDocument, table: str, frame: pl.DataFrame) -> None:
        """Refuse what no recording gives, by its file, column and row."""
        where = str(part.folder / f"{table}.parquet")
        for column in frame:
            if column.null_count() and column.name not in self._null:
                row = column.is_null().arg_max()
                raise CorruptionError(f"{where}: {column.name} is null in row {row}, expected a number.")
        for name, least, most in self._limits(part, table, frame):
            value = pl.col(name).fill_nan(None) if frame.schema[name].is_float() else pl.col(name)
            wrong = frame.select(((value < least) | (value > most)).fill_null(False)).to_series()
            if wrong.any():
                row = wrong.arg_max() or 0
                highest = most[row] if isinstance(most, pl.Series) else most
                raise CorruptionError(
                    f"{where}: {name} is {frame[name][row]} in row {row}, expected {least} to {highest}."
                )
        if table not in (LOSSES, REHEARSED):
            self._check_common(part.number, table, where, frame)

    def _limits(self, part: PartDocument, table: str, frame: pl.DataFrame) -> Iterator[tuple[str, int, Any]]:
        """Columns, with the least and the most that may be in them; keys come first: others need them."""
        first, last = part.steps or (1, LARGEST)
        real = -1 if table == LOSSES else 0  # the run itself, and not a rehearsal
        # an evaluation may come before the first step, or after the last that is recorded
        yield "step", *((0, LARGEST) if table == LOSSES else (first, last))
        for name, count in self._known.items():
            if name in frame.schema:
                yield name, real, count - 1
        if "tensor" not in frame.schema:
            return
        size = pl.Series(self._sizes[frame["tensor"].to_numpy()])
        for name in frame.columns:
            if name in COUNTED:
                yield name, 0, size
            elif name == "phase":
                yield name, 0, size.clip(upper_bound=LARGEST >> PHASE_BITS) * (1 << PHASE_BITS)
            elif name in SQUARES:
                yield name, 0, float("inf")

    def _check_common(self, part: int, table: str, where: str, frame: pl.DataFrame) -> None:
        """Hold the steps of a table, and the rows of tensors and grids, against those of tables before."""
        step = frame["step"].to_numpy()
        found = {"steps": _digest(np.unique(step))}
        if table == "run" and not (np.diff(step) > 0).all():
            raise CorruptionError(f"{where}: a step is there twice, or before an earlier one.")
        if table != "run":
            each = self._known["grid"] if table == "grids" else 1
            tensor, row = frame["tensor"].to_numpy(), np.arange(len(frame))
            found["tensors, row by row,"] = _digest(step[::each], tensor[::each])
            first = row - row % each
            alike = (step == step[first]) & (tensor == tensor[first])
            if table == "grids":
                alike &= frame["grid"].to_numpy() == row % each
            if not alike.all():
                raise CorruptionError(
                    f"{where}: row {alike.argmin()} is of another step, tensor or grid than those beside it "
                    f"let expect: a tensor has {each} rows a step, one a grid, in the order of the manifest."
                )
        for what, digest in found.items():
            other, expected = self._common.setdefault((part, what), (where, digest))
            if digest != expected:
                raise CorruptionError(f"{where}: its {what} are not those of {other}.")


def _digest(*columns: npt.NDArray[Any]) -> str:
    return hashlib.sha256(b"".join(c.tobytes() for c in columns)).hexdigest()
