"""Coordinates that no update of a window would have moved: what the first allocator ranks tensors by.

A coordinate is *silent* while every proposal so far was below the symmetric half-gap of its weight
(:func:`halfulp.measures.events.symmetric_frozen`), the approximation of the paper's whole-tensor study;
it predates the exact event. One flag per coordinate is kept, so it is not among the scores, which are sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from halfulp.measures.events import symmetric_frozen

_KEPT = "silent."


class Silent:
    """Follows some tensors over the first updates of a run."""

    def __init__(self, watched: Mapping[str, torch.Tensor], grid: str, last: int) -> None:
        self.watched, self.grid, self.last = watched, grid, last
        self.flags = {n: torch.ones(p.shape, dtype=torch.bool) for n, p in self.watched.items()}

    @contextlib.contextmanager
    def watching(self, update: int) -> Iterator[None]:
        """Around an update, if it is in the window: who was asked to move far enough."""
        before = {n: p.detach().clone() for n, p in self.watched.items()} if update <= self.last else {}
        yield
        for name, w in before.items():
            d = self.watched[name].detach() - w
            self.flags[name] &= symmetric_frozen(w, d, self.grid).cpu()

    @property
    def shares(self) -> dict[str, float]:
        """By tensor, the share of coordinates that were never asked to."""
        return {n: int(flags.sum()) / flags.numel() for n, flags in self.flags.items()}

    def save(self) -> dict[str, torch.Tensor]:
        """Return the flags, as a run keeps them."""
        return {_KEPT + n: flags for n, flags in self.flags.items()}

    def load(self, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take them up again; what else was kept."""
        self.flags = {n: kept[_KEPT + n] for n in self.flags}
        return {k: t for k, t in kept.items() if not k.startswith(_KEPT)}
