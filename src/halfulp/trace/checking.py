"""Whether the rows of a table can have been recorded: who edits a file can make its digest anew.

Every row is of a step of its part, and of a tensor, a grid, a rehearsal and a bound that the manifest knows;
a count is of no more coordinates than its tensor has. The tables of a part are of the same steps, those of
tensors and of grids row by row, because series of both are divided by each other. A row may come twice: in
older traces, of an optimizer that was made anew within a step. What is not a number stays possible, as in any
run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from halfulp.canonical import LARGEST
from halfulp.errors import CorruptionError
from halfulp.trace.recorded import ARRIVED, COUNTS
from halfulp.trace.schema import BOUNDS, LOSSES, REHEARSED, PartDocument

Array = npt.NDArray[Any]
Frame = pl.DataFrame

PHASE_BITS = 16
"""A coordinate adds one to the sum of phases at most, in units of two to the minus this."""
COUNTED = (*COUNTS, "frozen_decay", "frozen_gradient", "zero_proposal", "nonfinite", "expected")
SQUARES = ("weight_sq", "proposal_sq", "written_sq")
NULL = ("phase", "frozen_decay", "frozen_gradient", *ARRIVED)
"""What need not have been counted."""
NULL_IN_CASTS = ("symmetric", "subnormal", "zero_code")


class Rows:
    """The rows of one trace; it remembers what its tables must have in common."""

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
        self._common: dict[tuple[int, str], tuple[str, bytes]] = {}

    def check(self, table: str, parts: Sequence[PartDocument], counts: Sequence[int], frame: Frame) -> None:
        """Refuse what no recording gives, by its file, column and row. The frame has so many rows of each
        part, one part after the other: many small parts are looked at together."""
        ends = np.cumsum(counts)

        def place(row: int) -> tuple[Path, int]:
            """The file of a row, and the row's number in it."""
            k = int(np.searchsorted(ends, row, side="right"))
            return parts[k].folder / f"{table}.parquet", row - int(ends[k]) + counts[k]

        for column in frame:
            if column.null_count() and column.name not in self._null:
                file, row = place(column.is_null().arg_max() or 0)
                raise CorruptionError(f"{file}: {column.name} is null in row {row}, expected a number.")
        for name, least, most in self._limits(table, parts, counts, frame):
            value = pl.col(name).fill_nan(None) if frame.schema[name].is_float() else pl.col(name)
            wrong = frame.select(((value < least) | (value > most)).fill_null(False)).to_series()
            if wrong.any():
                at = wrong.arg_max() or 0
                low, high = (x[at] if isinstance(x, pl.Series) else x for x in (least, most))
                file, row = place(at)
                raise CorruptionError(
                    f"{file}: {name} is {frame[name][at]} in row {row}, expected {low} to {high}."
                )
        if table not in (LOSSES, REHEARSED):
            self._check_common(table, parts, ends, frame, place)

    def _limits(
        self, table: str, parts: Sequence[PartDocument], counts: Sequence[int], frame: Frame
    ) -> Iterator[tuple[str, Any, Any]]:
        """Columns, with the least and the most that may be in them; keys come first: others need them."""
        real = -1 if table == LOSSES else 0  # the run itself, and not a rehearsal
        if table == LOSSES:  # an evaluation may come before the first step, or after the last recorded one
            yield "step", 0, LARGEST
        else:
            first, last = np.array([part.steps or (1, LARGEST) for part in parts]).repeat(counts, axis=0).T
            yield "step", pl.Series(first), pl.Series(last)
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

    def _check_common(
        self,
        table: str,
        parts: Sequence[PartDocument],
        ends: Array,
        frame: Frame,
        place: Callable[[int], tuple[Path, int]],
    ) -> None:
        """Hold the steps of a table, and the rows of tensors and grids, against those of tables before."""
        step = frame["step"].to_numpy()
        if table == "run" and not (np.diff(step) > 0).all():
            file, _ = place(int((np.diff(step) > 0).argmin()) + 1)
            raise CorruptionError(f"{file}: a step is there twice, or before an earlier one.")
        columns = {"steps": [step]}
        each = self._known["grid"] if table == "grids" else 1
        if table != "run":
            tensor, row_of = frame["tensor"].to_numpy(), np.arange(len(frame))
            first = row_of - row_of % each
            alike = (step == step[first]) & (tensor == tensor[first])
            if table == "grids":
                alike &= frame["grid"].to_numpy() == row_of % each
            if not alike.all():
                file, row = place(int(alike.argmin()))
                raise CorruptionError(
                    f"{file}: row {row} is of another step, tensor or grid than those beside it let expect: "
                    f"a tensor has {each} rows a step, one a grid, in the order of the manifest."
                )
            columns["tensors, row by row,"] = [step, tensor]
        for k, (a, b) in enumerate(pairwise([0, *ends.tolist()])):
            for what, found in columns.items():
                own = [column[a:b:each] for column in found]
                content = b"".join((np.unique(own[0]) if what == "steps" else x).tobytes() for x in own)
                digest, where = hashlib.sha256(content).digest(), str(parts[k].folder / f"{table}.parquet")
                other, expected = self._common.setdefault((parts[k].number, what), (where, digest))
                if digest != expected:
                    raise CorruptionError(f"{where}: its {what} are not those of {other}.")
