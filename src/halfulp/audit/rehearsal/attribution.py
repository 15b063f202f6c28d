"""Attribute the loss of a rehearsal to individual weights.

Between the reference's weights w and those of a rehearsal s lies a straight path, and along it

    L(s) - L(w) = sum_i (s_i - w_i) * integral over a from 0 to 1 of dL/dw_i at w + a (s - w)

so every coordinate has a share of the forecast gap, and the shares add up to it. The integral is the mean of
the gradient at the midpoints of ``points`` equal pieces of the path. Summed by tile this is the ninth
allocation score, R: what a master for that tile would save, to first order along the path. A gradient at w
alone (scores L, T) says what the first small piece costs; at the minimum of a loss, that is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from halfulp.audit.rehearsal.as_if import ModelAsIf, RandomState
from halfulp.errors import UsageError
from halfulp.kernels import checked_tile, tiles_of

ATTRIBUTED, TILES = "attributed", "attributed.tile"
Path = tuple[torch.Tensor, torch.Tensor]
"""The weights at its two ends: the reference's and the rehearsal's."""


def shares(
    params: Mapping[str, torch.Tensor],
    paths: Mapping[str, Path],
    loss: Callable[[], torch.Tensor],
    points: int,
) -> dict[str, torch.Tensor]:
    """Return every coordinate's share of L(s) - L(w), in float64; parameters are left at the last point.

    ``loss`` computes the loss of the model as it is; a parameter that it does not use has no share.
    """
    if type(points) is not int or points < 1:
        raise UsageError(f"points= is a whole number of at least 1, not {points!r}.")
    costs = {name: torch.zeros_like(w, dtype=torch.float64) for name, (w, _) in paths.items()}
    for i in range(points):
        with torch.no_grad():
            for name, (w, s) in paths.items():
                params[name].copy_(torch.lerp(w, s, (i + 0.5) / points))
        with torch.enable_grad():
            value: Any = loss()
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise UsageError(
                "the loss to attribute is a tensor of one number that depends on the weights: return it from "
                f"the closure as it is, without backward() or .item(). Found {_said(value)}."
            )
        gradients = torch.autograd.grad(value, [params[name] for name in paths], allow_unused=True)
        for (name, (w, s)), gradient in zip(paths.items(), gradients, strict=True):
            if gradient is not None:
                costs[name] += gradient.double() * (s.double() - w.double()) / points
    return costs


class Attributed:
    """The attribution so far, by rehearsal and tensor: sums over tiles."""

    def __init__(self) -> None:
        self.tile: int | None = None
        self.sums: dict[str, torch.Tensor] = {}

    def take_up(self, saved: dict[str, torch.Tensor]) -> None:
        """Restore the sums that a trace saved."""
        for key in [k for k in saved if k.endswith(ATTRIBUTED)]:
            self.sums[key] = saved.pop(key)
        if TILES in saved:
            self.tile = int(saved.pop(TILES))

    def add(self, key: str, sums: torch.Tensor) -> None:
        """Add sums to those kept under ``key``."""
        self.sums[key] = self.sums[key] + sums if key in self.sums else sums

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state that a resumed audit needs, which is also what a trace reports."""
        return {} if self.tile is None else {**self.sums, TILES: torch.tensor([self.tile], device="cpu")}


def attribute(
    stage: ModelAsIf,
    into: Attributed,
    spec: str,
    loss: Callable[[], torch.Tensor],
    *,
    points: int,
    bound: str,
    tile: int,
    step: int,
) -> dict[str, torch.Tensor]:
    """Add every tile's share of the loss that a rehearsal costs; return them by tensor."""
    rehearsals = stage.rehearsals
    j, size = rehearsals.index(spec), checked_tile(tile)
    if into.tile not in (None, size):
        raise UsageError(f"this audit attributes to tiles of {into.tile}, not of {size}.")
    if any(w.sharded for w in rehearsals.tensors):
        raise UsageError("attribute is for whole tensors; this model is sharded.")
    weights = {w: values for w, values in rehearsals.weights(j, bound).items() if w.tensor.requires_grad}
    params = {w.name: w.tensor if w.shown is None else w.shown for w in weights}
    paths = {w.name: (w.tensor.detach().clone(), s) for w, s in weights.items()}
    before = RandomState()
    try:
        with stage.as_if(spec, bound, step):  # which puts the weights back
            costs = shares(params, paths, loss, points)
    finally:
        before.put_back()
    by_name = {name: by_tile(share, size) for name, share in costs.items()}
    into.tile = size
    for w in weights:
        into.add(f"{w.id}.{j}.{ATTRIBUTED}", by_name[w.name])
    return by_name


def by_tile(share: torch.Tensor, tile: int) -> torch.Tensor:
    """Sums over tiles of consecutive coordinates; the last may be short.

    >>> by_tile(torch.arange(5.0), 2).tolist()
    [1.0, 5.0, 4.0]
    """
    flat = share.reshape(-1).cpu()
    padded = torch.zeros(tiles_of(flat.numel(), tile) * tile, dtype=flat.dtype, device="cpu")
    padded[: flat.numel()] = flat
    return padded.view(-1, tile).sum(dim=1)


def _said(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor of {value.numel()} numbers" if value.numel() != 1 else "one that needs no gradient"
