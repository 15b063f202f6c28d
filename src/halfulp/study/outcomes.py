"""What a study's functions are given to judge by: records, the files beside them, and evidence.

An `Outcomes` is a mapping ``records[stage][cell]`` to what the cell gave back. A plain dict of the same form
does where only that is needed, so typed-in numbers can go through an estimand. Beyond that it has

* ``records.attached(stage, cell, name)``, a file that a cell kept;
* ``records.evidence[name]``, another study that is closed: an `Outcomes` again, with ``estimands``, its
  estimands' values by unit, and its ``label``. Of it there is what the study declares that it uses.

A stage that was not authorised has no records. Asking for them raises `NotRun`, which ends an estimand with
no values: nothing stands in for what did not happen. ``"stage" in records`` asks without that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from halfulp.errors import UsageError

Cells = Mapping[str, Mapping[str, Any]]


class NotRun(UsageError, LookupError):  # noqa: N818  # it is a fact about a study, not a mistake
    """Records were asked for of a stage that was not authorised."""


def _no_files(stage: str, cell: str, name: str) -> bytes:
    raise UsageError(f"These records have no files: {name[:120]!a} of {stage[:120]!a}/{cell[:120]!a}.")


class Outcomes(Mapping[str, Cells]):
    """See the module's docstring."""

    def __init__(
        self,
        cells: Mapping[str, Cells],
        *,
        attached: Callable[[str, str, str], bytes] = _no_files,
        evidence: Mapping[str, Outcomes] | None = None,
        estimands: Mapping[str, Mapping[str, float | None]] | None = None,
        label: str = "",
        not_run: Collection[str] = (),
    ) -> None:
        self._cells = cells
        self.attached = attached
        self.evidence: Mapping[str, Outcomes] = evidence or {}
        self.estimands: Mapping[str, Mapping[str, float | None]] = estimands or {}
        """Of evidence: estimand -> unit -> number, as its result states them."""
        self.label = label
        self.not_run = frozenset(not_run)

    def __getitem__(self, stage: str) -> Cells:
        if stage in self.not_run:
            raise NotRun(f"Stage {stage} was not authorised, so it has no records.")
        if stage not in self._cells:
            known = ", ".join(self._cells) or "none"
            raise UsageError(f"There are no records of stage {stage[:120]!a} here; there are: {known}.")
        return self._cells[stage]

    def __contains__(self, stage: object) -> bool:
        return stage in self._cells

    def get(self, stage: str, default: Any = None) -> Any:
        return self._cells.get(stage, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)

    def of(self, stages: Collection[str]) -> Outcomes:
        """The same, of these stages alone."""
        return Outcomes(
            {stage: cells for stage, cells in self._cells.items() if stage in stages},
            attached=self.attached, evidence=self.evidence, estimands=self.estimands, label=self.label,
            not_run=self.not_run & set(stages),
        )  # fmt: skip
