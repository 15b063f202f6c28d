"""Update exponential averages that are stored in bfloat16, without losing the updates.

An average moves by (1 - decay) times its distance to the weights; at a decay of 0.9999 that is far below half
a gap of bfloat16, and nearest rounding leaves the average where it is. Here each step is computed in float32
and written by stochastic rounding, so it is right on average, at two bytes per value. The price is noise:
about sqrt(gap * distance / 2) in each value, half a gap at most where a weight has come to rest. An average
in float32 has neither problem and takes two bytes more; use it if there is memory.

There is no state: the random numbers follow from seed, position and step, so a resumed run continues bit for
bit, and the checkpoint of torch's ``AveragedModel`` is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.numbers.grids import grid
from halfulp.numbers.streams import Stream
from halfulp.writeback.sharding import is_sharded

Update = Callable[[Any, Any, Any], None]


@torch.no_grad()
def average_(
    averages: Iterable[torch.Tensor],
    weights: Iterable[torch.Tensor],
    decay: float,
    *,
    step: int,
    seed: int = 0,
) -> None:
    """Move averages towards weights, in place: ``average += (1 - decay) * (weight - average)``.

    Averages that are stored in 16 bits are computed in float32 and written by stochastic rounding; wider
    averages are updated as usual.

    Args:
        averages: The stored averages, such as diffusers' ``EMAModel.shadow_params``.
        weights: The weights, in the same order.
        decay: The share of the average that stays, between 0 and 1.
        step: The number of this update; the same number draws the same random bits.
        seed: The seed of the random bits.

    Raises:
        UsageError: If there are not as many averages as weights, if the decay is not between 0 and 1, or if
            averages are shards of a distributed model.

    >>> average = [torch.ones(10_000, dtype=torch.bfloat16)]
    >>> average_(average, [torch.full((10_000,), 2.0)], 0.999, step=1)
    >>> round(average[0].double().mean().item(), 4)  # by nearest rounding it would still be 1
    1.001
    """
    if not 0 <= decay <= 1:
        raise UsageError(f"decay is the share of the average that stays, between 0 and 1, not {decay}.")
    stored, now = list(averages), list(weights)
    if len(stored) != len(now):
        raise UsageError(f"there are {len(stored)} averages and {len(now)} weights: give one of each.")
    if any(is_sharded(x) for x in stored):
        raise UsageError("sharded averages cannot be rounded stochastically: keep them in float32.")
    for i, (average, weight) in enumerate(zip(stored, now, strict=True)):
        if average.dtype not in (torch.bfloat16, torch.float16):
            average.lerp_(weight.to(average.dtype), 1 - decay)
            continue
        moved = average.float()
        moved.lerp_(weight.float(), 1 - decay)
        stream = Stream(seed=seed, name=f"average.{i}", step=step)
        average.copy_(kernels.round(moved, grid(average.dtype), stochastic=stream))


def ema(decay: float = 0.9999, *, seed: int = 0) -> Update:
    """Return :func:`average_` at a decay, as the ``multi_avg_fn`` of torch's ``AveragedModel``.

    Args:
        decay: The share of the average that stays, between 0 and 1.
        seed: The seed of the random bits.

    Returns:
        The update function.

    >>> from torch.optim.swa_utils import AveragedModel
    >>> model = torch.nn.Linear(4, 4).bfloat16()
    >>> averaged = AveragedModel(model, multi_avg_fn=ema(0.999))
    >>> averaged.update_parameters(model)
    """

    def update(averages: Any, weights: Any, averaged: Any) -> None:
        average_(averages, weights, decay, step=int(averaged), seed=seed)

    return update
