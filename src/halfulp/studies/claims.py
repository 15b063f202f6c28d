"""What the paper says, beside what our records say.

A study's module exports ``PAPER``, a tuple of claims. A claim holds the paper's own number (or
word) with the place where it is printed, and a function that computes ours *from records alone*;
the comparison page is made of nothing else, so no number of ours is ever typed in.

`ours` gives None where the records at hand do not define the quantity (a smaller scale leaves
cells out); the page then shows a dash, never a substitute.

>>> claim = Claim(
...     claim="cells that crossed",
...     source="tab:example",
...     paper=3,
...     ours=lambda records: sum(r["crossed"] for r in records["outcome"].values()),
... )
>>> claim.ours({"outcome": {"a": {"crossed": 1}, "b": {"crossed": 0}}})
1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfulp.study.protocol import Json, Records, Study, Values
from halfulp.study.verdict import decide, evaluate


@dataclass(frozen=True)
class Claim:
    """One row of the comparison page."""

    claim: str
    source: str  # a label or section of the paper
    paper: float | str
    ours: Callable[[Records], float | str | None]
    note: str = ""


def of(
    compute: Callable[..., Values], unit: str = "study", **args: Json
) -> Callable[[Records], float | None]:
    """What an estimand's function gives for one unit, for :attr:`Claim.ours`."""
    return lambda records: compute(records, **args).get(unit)


def value_of(study: Study, estimand: str, unit: str) -> Callable[[Records], float | None]:
    """An estimand of one unit, for :attr:`Claim.ours`."""
    found = next(e for e in study.estimands if e.name == estimand)
    return lambda records: found.compute(records, **found.args).get(unit)


Printed = Mapping[str, tuple[str, str, Sequence[float | str]]]
"""By estimand: what the paper calls it, where it is printed, and its numbers, one a unit."""


def printed(
    study: Study, units: Iterable[str], rows: Printed, note: str = "", scope: str = ""
) -> Iterator[Claim]:
    """A claim for every estimand and unit that the paper prints.

    ``scope`` is that of estimands which have a value for every unit and scope; others are of the unit.
    """
    units = list(units)
    for estimand, (what, source, numbers) in rows.items():
        found = next(e for e in study.estimands if e.name == estimand)
        at = f" {scope}" if scope and "scopes" in found.args else ""
        for unit, paper in zip(units, numbers, strict=True):
            yield Claim(
                claim=f"{what}, {unit}{at}", source=source, paper=paper,
                ours=value_of(study, estimand, f"{unit}{at}"), note=note,
            )  # fmt: skip


def worst_of(study: Study, estimand: str, scopes: Sequence[str]) -> Callable[[Records], float | None]:
    """The largest value of an estimand over all units and some scopes, for :attr:`Claim.ours`."""
    found = next(e for e in study.estimands if e.name == estimand)

    def ours(records: Records) -> float | None:
        values = found.compute(records, **found.args)
        known = [v for unit, v in values.items() if unit.rpartition(" ")[2] in scopes and v is not None]
        return max(known, default=None)

    return ours


def spread_of(study: Study, estimand: str, condition: str) -> Callable[[Records], str | None]:
    """Mean and range of an estimand over the units of a condition, or all, for :attr:`Claim.ours`."""
    found = next(e for e in study.estimands if e.name == estimand)

    def ours(records: Records) -> str | None:
        values = found.compute(records, **found.args)
        known = [v for unit, v in values.items() if unit.startswith(condition) and v is not None]
        if not known:
            return None
        return f"{sum(known) / len(known):.4g} [{min(known):.4g}, {max(known):.4g}]"

    return ours


def label_of(study: Study) -> Callable[[Records], str]:
    """The label of a study, for :attr:`Claim.ours`."""
    return lambda records: decide(study, evaluate(study.estimands, records)).label
