"""The allocation scores that an audit sums: the grid, the window of steps, and the size of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfulp.canonical import LARGEST
from halfulp.errors import UsageError
from halfulp.kernels import TILE, checked_tile
from halfulp.numbers.grids import grid as named
from halfulp.text import count


@dataclass(frozen=True)
class Scores:
    """Sum allocation scores on a grid over the steps from first to last, by tiles of a size.

    A tile is a run of consecutive coordinates of one tensor: with the model's width for its size, one row of
    an embedding, so one token.

    >>> Scores.of(("e5m2", 1, 600)).tile, Scores.of(("e5m2", 1, 600, 96)).tile
    (768, 96)
    """

    grid: str
    first: int
    last: int
    tile: int = TILE

    def __post_init__(self) -> None:
        steps = (self.first, self.last)
        if not all(type(step) is int for step in steps) or not 1 <= self.first <= self.last <= LARGEST:
            raise UsageError(
                f"scores= needs 1 <= first <= last <= {LARGEST}; found first={self.first}, last={self.last}."
            )
        named(self.grid)
        if checked_tile(self.tile) > LARGEST:
            raise UsageError(f"scores= takes tiles of at most {LARGEST} weights, not {self.tile}.")

    @classmethod
    def of(cls, given: Scores | Sequence[Any]) -> Scores:
        """Scores as they are, or from (grid, first, last) or (grid, first, last, tile)."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) not in (3, 4):
            raise UsageError(f"scores= takes (grid, first step, last step) or (..., tile), not {given!r}.")
        return cls(*given)

    def check_sample(self, sample: float | None) -> None:
        """Refuse what a sample of an audit's own tiles cannot tell."""
        scaling = named(self.grid).scaling
        if sample is not None and scaling is not None and scaling.moves:
            raise UsageError(
                "sample= sees some tiles only, but this grid's scale follows whole tensors: leave it out."
            )
        if sample is not None and self.tile != TILE:
            raise UsageError(
                f"sample= takes tiles of {TILE} only: leave it out to score tiles of {self.tile}."
            )

    def missed(self, steps: Sequence[int], every: int) -> str | None:
        """Say that steps of the window were not audited; return None if all were.

        Args:
            steps: The audited steps.
            every: The distance between two steps that are to be audited: 1, 1 + every, and so on.

        >>> print(Scores("bf16", 5, 9).missed(range(1, 4), every=1))
        scores were to be summed over steps 5-9, of which none was audited: the run has 3 audited steps, 1-3
        """
        due = (self.last - 1) // every - (self.first - 2) // every
        there = sum(self.first <= step <= self.last for step in steps)
        if there and there >= due:
            return None
        which = f"only {there:,} of {due:,} were" if there else "none was"
        ends = f", {steps[0]}-{steps[-1]}" if len(steps) else ""
        return (
            f"scores were to be summed over steps {self.first}-{self.last}, of which {which} audited: the "
            f"run has {count(len(steps), 'audited step')}{ends}"
        )

    def to_json(self) -> list[Any]:
        """Return what a manifest says; the size of a tile only where it is not 768, once the only one."""
        stated = [self.grid, self.first, self.last]
        return stated if self.tile == TILE else [*stated, self.tile]
