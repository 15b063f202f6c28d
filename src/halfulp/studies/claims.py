"""What the paper says, beside what our records say.

A claim holds the paper's own number (or word) with the place where it is printed, and a function that
computes ours *from records alone*; the comparison page is made of nothing else, so no number of ours is ever
typed in.

What the paper prints is data: the part ``paper`` of the table beside the module
(:mod:`halfulp.studies.declared`). A row of ``claims`` says what is claimed (``claim``), where (``source``),
the paper's number (``paper``), the name of our quantity (``ours``) and, where there is more to say, the name
of one of the ``notes``; ``source`` and ``note`` above the rows are those of rows that have none. Where
``paper`` is a table itself, ``{}`` in the row stands for its keys, one claim each. Our quantity is one of

    NAME UNIT             an estimand of the study, or a function of its module, for a unit
    NAME                  the same for the whole study
    OVER NAME WORDS ...   over the units that begin or end with one of these words, or over all: the least,
                          the most, the sum, the mean, the range, or the spread (mean and range)
    label                 the label

It gives None where the records at hand do not define it (a smaller scale leaves cells out); the page then
shows a dash, never a substitute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from halfulp.errors import UsageError
from halfulp.studies.declared import table_of
from halfulp.study.protocol import Json, Records, Study
from halfulp.study.verdict import decide, evaluate

Ours = Callable[[Records], float | str | None]

OVER: dict[str, Callable[[list[float]], float | str]] = {
    "least": min, "most": max, "sum": sum, "mean": lambda v: float(np.mean(v)),
    "range": lambda v: f"{min(v):.3f} to {max(v):.3f}",
    "spread": lambda v: f"{sum(v) / len(v):.4g} [{min(v):.4g}, {max(v):.4g}]",
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One row of the comparison page."""

    claim: str
    source: str  # a label or section of the paper
    paper: float | str
    ours: Ours
    note: str = ""


def claims_of(module: ModuleType) -> tuple[Claim, ...]:
    """The claims of the table beside a study's module."""
    study, table = module.STUDY, table_of(str(module.__file__))["paper"]
    known = vars(module) | {e.name: partial(e.compute, **e.args) for e in study.estimands}
    notes = {"": "", **table.get("notes", {})}
    return tuple(
        Claim(claim, row["source"], paper, _ours(study, known, ours), notes[row.get("note", "")])
        for row in ({**table, **row} for row in table["claims"])
        for claim, ours, paper in _rows(row)
    )


def _rows(row: Mapping[str, Json]) -> Iterator[tuple[str, str, float | str]]:
    if not isinstance(row["paper"], Mapping):
        yield row["claim"], row["ours"], row["paper"]
        return
    for key, paper in row["paper"].items():
        yield row["claim"].replace("{}", key), row["ours"].replace("{}", key), paper


def _ours(study: Study, known: Mapping[str, Any], text: str) -> Ours:
    if text == "label":
        return lambda records: decide(study, evaluate(study.estimands, records)).label
    over, words = "", text.split()
    if words[0] not in known and words[0] in OVER:
        over, *words = words
    name, unit, ends = words[0], " ".join(words[1:]), tuple(words[1:]) or ("",)
    if name not in known:
        raise UsageError(f"Study {study.name}: a claim is about {name!r}, which it does not compute.")

    def ours(records: Records) -> float | str | None:
        found: Any = known[name](records)
        if not over:
            return found.get(unit or "study") if isinstance(found, Mapping) else found
        values = [v for u, v in found.items() if (u.startswith(ends) or u.endswith(ends)) and v is not None]
        return OVER[over](values) if values else None

    return ours
