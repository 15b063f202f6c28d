"""Present the answer of a pilot: the cost of each format with its interval, and the bytes that it saves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halfulp.audit.rehearsal.specs import Rehearse
from halfulp.outputs import finite
from halfulp.pilots.estimates import Estimate, Seen, estimate
from halfulp.text import shown
from halfulp.verdicts.intervals import COVERAGE, shipped
from halfulp.verdicts.loss_costs import FLOAT32, bytes_per_weight, saved


@dataclass(frozen=True, kw_only=True)
class Price:
    """One format: its cost in nats, and the bytes of a weight."""

    spec: str
    estimate: Estimate
    seen: Seen
    bytes_per_weight: float
    """The code and what the policy keeps beside it, when stored packed."""

    @property
    def how(self) -> str:
        """Say where the estimate comes from."""
        twin, forks = self.seen.twin, self.seen.forks
        if self.estimate.kind in ("twin", "raw") and twin is not None:
            return f"twin, {twin.share:.1%} of a run"
        if self.estimate.kind in ("fork", "bracket") and forks is not None:
            return f"{'fork' if self.estimate.kind == 'fork' else 'forks'} for the last {forks.share:.0%}"
        return "rehearsed point, nothing paid"

    @property
    def words(self) -> str:
        """Say the gap and its interval, or that there is none to be seen."""
        e = self.estimate
        if not math.isfinite(e.gap):
            return "diverges"
        if e.zero:
            return f"not distinguishable from zero (floor {e.floor:.3f}, at most {e.high:+.3f})"
        return f"{e.gap:+.3f} ({e.low:+.3f} to {e.high:+.3f})"


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Every format, the cheapest first, with what was paid to know it. ``str()`` is the table."""

    prices: tuple[Price, ...]
    reference: float
    updates: int
    weights: int
    budget: float
    paid: Mapping[str, float]
    """Shares of the run's own compute, by purpose."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ranked = sorted(self.prices, key=lambda p: (p.estimate.gap, p.bytes_per_weight))
        object.__setattr__(self, "prices", tuple(ranked))

    def __getitem__(self, spec: str) -> Price:
        return next(p for p in self.prices if p.spec == spec.removesuffix(":rne"))

    @property
    def lines(self) -> list[str]:
        """The table and what was paid, for a terminal."""
        out = [
            f"What each format costs this run in loss ({self.reference:.3f} at update {self.updates}), with "
            f"{COVERAGE:.0%} intervals, and what it saves:"
        ]
        names = [shown(p.spec, 40) for p in self.prices]
        words_of_each = [p.words for p in self.prices]
        wide = max(map(len, names)), max(map(len, words_of_each))
        for price, name, words in zip(self.prices, names, words_of_each, strict=True):
            told_saved = saved(price.spec, self.weights)
            out.append(f"  {name:{wide[0]}}  {words:{wide[1]}}  {told_saved}; {price.how}")
            out += [f"    {name}: {note}." for note in price.estimate.notes]
        total = sum(self.paid.values())
        parts = ", ".join(f"{what} {share:.1%}" for what, share in self.paid.items())
        out.append(
            f"Paid: {total:.1%} of the run's own compute beside it (budget {self.budget:.0%}): {parts}."
        )
        return out + [f"Note: {note}" for note in self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return {
            "reference": self.reference, "updates": self.updates, "weights": self.weights,
            "budget": self.budget, "paid": dict(self.paid), "coverage": COVERAGE, "notes": list(self.notes),
            "formats": [
                {
                    "format": p.spec, "bytes_per_weight": p.bytes_per_weight,
                    "saved_bytes": round((FLOAT32 - p.bytes_per_weight) * self.weights), "how": p.how,
                    "distinguishable": not p.estimate.zero,
                    **finite(asdict(p.estimate)), "measured": finite(p.seen.to_json()),
                }
                for p in self.prices
            ],
        }  # fmt: skip


def priced(spec: str, seen: Seen) -> Price:
    """Return what a format costs by what was seen of it."""
    rehearsal = Rehearse([spec]).each[0]
    each = bytes_per_weight(rehearsal.name)
    return Price(
        spec=rehearsal.name, estimate=estimate(seen, shipped()), seen=seen,
        bytes_per_weight=rehearsal.grid.bytes_per_weight if each is None else each,
    )  # fmt: skip
