"""A direct bfloat16 update beside the emulator: is rounding to seven mantissa bits in fp64 the same thing?

The weights are a ``torch.bfloat16`` tensor, their gradient is cast to bfloat16 and ``torch.optim.SGD`` does
the update; all arithmetic of the network stays fp64.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.models.mlp import CHUNK, Trainer
from halfulp.models.teacher import Problem
from halfulp.study.protocol import Json, Running

Array = npt.NDArray[Any]

GRID = "m7"
"""The emulator's grid of bfloat16's mantissa."""
CURVE_POINTS = 60


def direct(p: Problem, rate: float, steps: int, cell: Running | None = None) -> tuple[Array, Array]:
    """Frozen counts and sums of squares (weights, proposals) of training with bfloat16 weights."""
    weights = torch.nn.Parameter(torch.from_numpy(p.start).to(torch.bfloat16))
    frozen, squares = np.zeros(steps, dtype=np.int64), np.zeros((steps, 2))
    done = 0
    if cell is not None and (kept := cell.load()) is not None:
        with np.load(io.BytesIO(kept), allow_pickle=False) as file:
            done = int(file["done"])
            frozen[:], squares[:] = file["frozen"], file["squares"]
            weights.data.copy_(torch.from_numpy(file["weights"]))
    network = Trainer(p.net, p.train, p.start, rate=rate)
    optimizer = torch.optim.SGD([weights], lr=rate)
    for t in range(done, steps):
        before = weights.detach().clone()
        gradient = torch.from_numpy(network.gradient(before.double().numpy()))
        weights.grad = gradient.to(torch.bfloat16)
        optimizer.step()
        frozen[t] = int((weights == before).sum())
        squares[t] = float(before.double().square().sum()), float((rate * gradient).square().sum())
        if cell is not None and (t + 1) % CHUNK == 0 and t + 1 < steps:
            file = io.BytesIO()
            kept_weights = weights.detach().double().numpy()
            np.savez(file, done=t + 1, frozen=frozen, squares=squares, weights=kept_weights)
            cell.progress(t + 1, steps)
            cell.save(file.getvalue())
    return frozen, squares


def apart(direct: Array, emulated: Array) -> dict[str, Json]:
    """How far two series of frozen counts are apart, in whole numbers, and both curves for a figure."""
    every = max(len(direct) // CURVE_POINTS, 1)
    return {
        "squared_difference": int(((emulated.astype(np.int64) - direct) ** 2).sum()),
        "curve": {"every": every, "direct": direct[::every].tolist(), "emulated": emulated[::every].tolist()},
    }
