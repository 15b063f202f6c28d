"""What the paper says, beside what our records say.

A study's module exports ``PAPER``, a tuple of claims. A claim holds the paper's own number (or word) with the
place where it is printed, and a function that computes ours *from records alone*; the comparison page is made
of nothing else, so no number of ours is ever typed in.

What the paper prints is data: the part ``paper`` of the table beside the module
(:mod:`halfulp.studies.declared`). A row of ``claims`` says what is claimed (``claim``), where (``source``),
the paper's number (``paper``), the name of our quantity (``ours``) and, where there is more to say, the name
of one of the ``notes``; ``source`` and ``note`` above the rows are those of rows that have none. Where
``paper`` is a table itself, ``{}`` in the row stands for its keys, one claim each. Our quantity is one of

    NAME UNIT             an estimand of the study, or a function that its module hands over, for a unit
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
from typing import Any

import numpy as np

from halfulp.errors import UsageError
from halfulp.studies.declared import table_of
from halfulp.study.protocol import Json, Records, Study
from halfulp.study.verdict import decide, evaluate

Ours = Callable[[Records], float | str | None]
Compute = Callable[[Records], Any]

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


def claims_of(study: Study, module: str, *functions: Compute) -> tuple[Claim, ...]:
    """The claims of the table beside a study's module (its ``__file__``); ``functions`` by their names."""
    known: dict[str, Compute] = {e.name: partial(e.compute, **e.args) for e in study.estimands}
    known |= {function.__name__.strip("_"): function for function in functions}
    table = table_of(module)["paper"]
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


def _ours(study: Study, known: Mapping[str, Compute], text: str) -> Ours:
    if text == "label":
        return lambda records: decide(study, evaluate(study.estimands, records)).label
    over, words = "", text.split()
    if words[0] not in known and words[0] in OVER:
        over, *words = words
    name, unit = words[0], " ".join(words[1:])
    if name not in known:
        raise UsageError(f"Study {study.name}: a claim is about {name!r}, which it does not compute.")

    def one(records: Records) -> float | str | None:
        found: float | str | Mapping[str, Any] | None = known[name](records)
        return found.get(unit or "study") if isinstance(found, Mapping) else found

    def all_of_them(records: Records) -> float | str | None:
        ends = tuple(words[1:]) or ("",)
        found = {u: v for u, v in known[name](records).items() if u.startswith(ends) or u.endswith(ends)}
        values = [v for v in found.values() if v is not None]
        return OVER[over](values) if values else None

    return all_of_them if over else one
