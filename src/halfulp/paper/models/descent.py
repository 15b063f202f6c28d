"""Whole-batch descent in plain torch, with every update audited, written to a grid, or made in bfloat16.

`mlp.Trainer` is the compiled loop of small networks; here a step costs a network's gradient, and events
and write-back are the library's kernels. In bfloat16 the weights are a ``torch.bfloat16`` tensor, their
gradient is cast to it and ``torch.optim.SGD`` does the update, while the network computes in float64: is
rounding to seven mantissa bits in float64 the same thing?
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from halfulp import kernels
from halfulp.numbers.grids import grid as named
from halfulp.paper.models.digests import packed, unpacked
from halfulp.paper.models.mlp import Array, Series, Trainer
from halfulp.paper.models.teacher import Problem
from halfulp.study.protocol import Json, Running

CHUNK = 100
"""Steps between two checkpoints."""
BFLOAT16 = "m7"
"""The emulator's grid of bfloat16's mantissa."""
CURVE_POINTS = 60

Gradient = Callable[[torch.Tensor], tuple[float, torch.Tensor]]
"""The loss at some weights, and its gradient."""

_AUDITED = [kernels.AUDIT_COUNTS.index(name) for name in ("frozen", "symmetric")]


def descend(
    gradient: Gradient, start: torch.Tensor, *, rate: float, steps: int, store: str | None = None,
    audit: Sequence[str] = (), bfloat16: bool = False, running: Running | None = None,
) -> Series:  # fmt: skip
    """Descend from a start in float64, with every update audited or written to a grid.

    Args:
        gradient: The loss and its gradient at some weights.
        start: The first weights.
        rate: The learning rate.
        steps: Steps to take.
        store: The grid that weights are stored on, if any.
        audit: The grids whose projected events are counted.
        bfloat16: Keep the weights in a bfloat16 tensor under ``torch.optim.SGD``.
        running: The cell, which keeps checkpoints.

    Returns:
        What happened in each step.
    """
    target = None if store is None else named(store)
    grids = [named(name) for name in audit]
    weights = start.clone() if target is None else target.round(start)
    moved, done = torch.zeros(start.numel(), dtype=torch.bool), 0
    loss, squares = np.zeros(steps), np.zeros((steps, 2))
    frozen, never = np.zeros(steps, np.int32), np.zeros(steps, np.int32)
    counts = np.zeros((steps, len(grids), 2), np.int32)
    series: dict[str, Array] = {
        "loss": loss,
        "frozen": frozen,
        "counts": counts,
        "squares": squares,
        "never": never,
    }
    if running is not None and (kept := unpacked(running.load())):
        done = int(kept["done"])
        weights, moved = torch.from_numpy(kept["weights"]), torch.from_numpy(kept["moved"])
        for name, array in series.items():
            array[:] = kept[name]
    for t in range(done, steps):
        loss[t], g = gradient(weights)
        proposal = -rate * g
        if grids:
            audited = kernels.audit(weights, proposal, grids)
            counts[t] = audited.counts[:, :, _AUDITED].sum(dim=0).numpy()
        squares[t] = float(weights.square().sum()), float(proposal.square().sum())
        if bfloat16:
            new = _bfloat16_step(weights, g, rate)
        else:
            new = weights + proposal if target is None else target.round(weights + proposal)
        moved |= new != weights
        frozen[t], never[t] = int((new == weights).sum()), int((~moved).sum())
        weights = new
        if running is not None and (t + 1) % CHUNK == 0 and t + 1 < steps:
            running.progress(t + 1, steps)
            arrays = {"done": t + 1, "weights": weights.numpy(), "moved": moved.numpy()}
            running.save(packed({**arrays, **series}))
    return Series(tuple(audit), start.numel(), loss, np.zeros(0), frozen, counts, squares, never)


def _bfloat16_step(weights: torch.Tensor, gradient: torch.Tensor, rate: float) -> torch.Tensor:
    stored = torch.nn.Parameter(weights.to(torch.bfloat16))
    stored.grad = gradient.to(torch.bfloat16)
    torch.optim.SGD([stored], lr=rate).step()
    return stored.detach().double()


def direct(p: Problem, rate: float, steps: int, cell: Running | None = None) -> Series:
    """Train a small network with bfloat16 weights; the gradient is the compiled one."""
    network = Trainer(p.net, p.train, p.start, rate=rate)
    start = torch.from_numpy(p.start).bfloat16().double()
    return descend(
        lambda w: (0.0, torch.from_numpy(network.gradient(w.numpy()))), start,
        rate=rate, steps=steps, bfloat16=True, running=cell,
    )  # fmt: skip


def apart(direct: Array, emulated: Array) -> dict[str, Json]:
    """Return the distance of two series of frozen counts, in whole numbers, and both curves for a figure."""
    every = max(len(direct) // CURVE_POINTS, 1)
    return {
        "squared_difference": int(((emulated.astype(np.int64) - direct) ** 2).sum()),
        "curve": {"every": every, "direct": direct[::every].tolist(), "emulated": emulated[::every].tolist()},
    }
