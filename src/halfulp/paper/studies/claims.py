"""Compare what the paper prints with what records say: rows of the comparison page (``halfulp paper``).

A study's module has ``CLAIMS``. Each row is the claim in words, the number that the paper prints, and what
gives ours: the name of an estimand of the study or a function of records, and the unit where that gives one
value per unit. :func:`over` makes one number of many units.

Ours is None where the records at hand do not define it (a smaller scale leaves cells out); the page then
shows a dash, never a substitute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from halfulp.errors import UsageError
from halfulp.study.gates import decide, evaluate
from halfulp.study.protocol import Records, Study

Ours = Callable[[Records], float | str | None]


@dataclass(frozen=True)
class Claim:
    """One row of the comparison page."""

    claim: str
    source: str  # a label or section of the paper
    paper: float | str
    ours: Ours
    note: str = ""


Source = str | Callable[[Records], Any]
"""An estimand's name, or a function of records."""


@dataclass(frozen=True)
class Over:
    """One number of the units that begin or end with one of some words, or of all."""

    how: Callable[[list[float]], float | str]
    what: Source
    words: tuple[str, ...] = ("",)

    def __call__(self, values: Mapping[str, float | None]) -> float | str | None:
        """Reduce the values of the units that the words name; None if there is none."""
        chosen = [
            value
            for unit, value in values.items()
            if (unit.startswith(self.words) or unit.endswith(self.words)) and value is not None
        ]
        return self.how(chosen) if chosen else None


def over(how: Callable[[list[float]], float | str], what: Source, *words: str) -> Over:
    """Take one number (``min``, ``max``, ``sum``, `average`, `ends`, `spread`) over units."""
    return Over(how, what, words or ("",))


def average(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def ends(values: list[float]) -> str:
    """Return the least and the largest, as text."""
    return f"{min(values):.3f} to {max(values):.3f}"


def spread(values: list[float]) -> str:
    """Return the mean and the ends, as text."""
    return f"{average(values):.4g} [{min(values):.4g}, {max(values):.4g}]"


class Beside:
    """Makes the claims of a study.

    Args:
        study: Whose estimands claims may name.
        source: Where in the paper its rows are, unless one says otherwise.
        note: The note of rows that have none of their own.
        units: Of `each`, where only the paper's numbers are given.
    """

    def __init__(self, study: Study, source: str, note: str = "", units: Sequence[str] = ()) -> None:
        self.study, self.source, self.note, self.units = study, source, note, tuple(units)
        self.known: dict[str, Any] = {e.name: partial(e.compute, **e.args) for e in study.estimands}

    def __call__(
        self, claim: str, paper: float | str, what: Source | Over, unit: str = "study", *, source: str = "",
        note: str | None = None,
    ) -> Claim:  # fmt: skip
        """Make one row."""
        ours = self._ours(what, unit)
        return Claim(claim, source or self.source, paper, ours, self.note if note is None else note)

    def each(
        self, claim: str, paper: Mapping[str, float | str] | Sequence[float | str], what: Source | Over,
        unit: str = "{}", *, source: str = "", note: str | None = None,
    ) -> Iterator[Claim]:  # fmt: skip
        """Make one row per unit, whose name replaces ``{}`` everywhere."""
        rows = paper if isinstance(paper, Mapping) else dict(zip(self.units, paper, strict=True))
        for name, printed in rows.items():
            words, at = claim.replace("{}", name), unit.replace("{}", name)
            if isinstance(what, Over):
                ends = tuple(word.replace("{}", name) for word in what.words)
                named: Source | Over = Over(what.how, _named(what.what, name), ends)
            else:
                named = _named(what, name)
            yield self(words, printed, named, at, source=source, note=note)

    def label(self, records: Records) -> str:
        """Return the label that the study gives."""
        return decide(self.study, evaluate(self.study.estimands, records)).label

    def _ours(self, what: Source | Over, unit: str) -> Ours:
        source = what.what if isinstance(what, Over) else what
        if isinstance(source, str) and source not in self.known:
            raise UsageError(
                f"Study {self.study.name}: a claim is about {source!r}, which it does not compute."
            )
        compute: Any = self.known[source] if isinstance(source, str) else source

        def ours(records: Records) -> Any:
            values = compute(records)
            if isinstance(what, Over):
                return what(values)
            return values.get(unit) if isinstance(values, Mapping) else values

        return ours


def _named(what: Source, name: str) -> Source:
    return what.replace("{}", name) if isinstance(what, str) else what
