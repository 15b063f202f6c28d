"""Compare the float32 masters of a checkpoint with their weights.

A rounded master equals its weight, because every framework writes it so. If it does not, weights and masters
come from different steps, one of the two was not loaded, or the export took the wrong one. Optimizers number
their parameters, and not every file records their names; a master without a name belongs to the weight of its
shape that agrees with it at the first values.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

import numpy as np
import torch

from halfulp.checkpoints.comparing import Difference, compared, unfit
from halfulp.checkpoints.optimizer_state import Kept
from halfulp.checkpoints.stored_tensors import Stored
from halfulp.tensors import raw

SAMPLE = 4096
"""Values by which a master is recognised."""


def beside_weights(
    kept: Kept, weights: Mapping[str, Stored], pool: Executor
) -> tuple[list[Difference], list[str]]:
    """Compare masters with their weights.

    Args:
        kept: The optimizer state in the checkpoint.
        weights: The weights in the checkpoint, by name.
        pool: The threads to use.

    Returns:
        The differences under the names of the weights, and the shapes of masters that belong to no weight.
    """
    left = {name: s for name, s in weights.items() if s.size}
    rows, orphans = [], []
    for name, master in kept.copies:
        dtype = str(master.dtype).removeprefix("torch.")
        stored = Stored(name or "", dtype, master.dtype, tuple(master.shape), 0, master.nbytes, raw(master))
        weight = left.get(name) if name in left else _recognised(stored, left)
        if weight is None or unfit(weight, stored) is not None:
            orphans.append(str(list(master.shape)))
            continue
        del left[weight.name]
        rows.append(compared(weight, stored, pool)[0])
    return rows, orphans


def _recognised(master: Stored, weights: Mapping[str, Stored]) -> Stored | None:
    """Find the weight of a master's shape: the only one, or the one that agrees with it at most values."""
    alike = [s for s in weights.values() if s.shape == master.shape and s.dtype is not None]
    if len(alike) < 2:
        return alike[0] if alike else None
    shares = [_agreement(master, s) for s in alike]
    best = int(np.argmax(shares))
    return alike[best] if shares[best] >= 0.5 else None


def _agreement(master: Stored, weight: Stored) -> float:
    """Return the share of the first values at which the master, rounded, is the weight."""
    assert weight.dtype is not None
    mine, theirs = _first(master), _first(weight)
    return float((mine.to(weight.dtype).double() == theirs.double()).double().mean())


def _first(stored: Stored) -> torch.Tensor:
    assert stored.dtype is not None
    count = min(SAMPLE, stored.size // stored.dtype.itemsize)
    held = np.empty(count * stored.dtype.itemsize, dtype=np.uint8)
    stored.read(0, held)
    return torch.from_numpy(held).view(stored.dtype)
