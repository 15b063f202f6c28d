"""Keep the moments of any torch optimizer in bfloat16 between steps, written by stochastic rounding.

A step needs float32: with beta2 = .999 nearest rounding to bfloat16 leaves a second moment where it is. So
the states become float32 when a step begins, and bfloat16 when it ends. That halves them while activations
are alive, in forward and backward, but not within the step; :class:`halfulp.AdamW` with ``moments="bf16"`` or
``"int8"`` never has them in float32.

The random bits follow from the seed, the place of the parameter and the number of the step, which is an
option of the first group, so that the optimizer's own checkpoint is complete and a resumed run is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from halfulp import kernels
from halfulp.errors import UsageError
from halfulp.numbers.grids import grid
from halfulp.numbers.streams import Stream
from halfulp.writeback.optimizer import WriteBack
from halfulp.writeback.sharding import local, shard_offset, wrap_like

STEP = "bf16_moments_step"


def bf16_moments(optimizer: torch.optim.Optimizer, *, seed: int = 0) -> Callable[[], None]:
    """Keep an optimizer's moments in bfloat16 between its steps.

    What counts as a moment is a floating-point tensor of the state that is shaped like its parameter.

    Args:
        optimizer: Any torch optimizer; not a write-back, whose optimizers have ``moments=``.
        seed: The seed of the random bits.

    Returns:
        A function that ends it.

    Raises:
        UsageError: If the optimizer is a write-back.

    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.NAdam(model.parameters())
    >>> end = bf16_moments(optimizer)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["exp_avg_sq"].dtype
    torch.bfloat16
    """
    if isinstance(optimizer, WriteBack):
        raise UsageError(
            "this optimizer is a write-back: use halfulp.AdamW(..., moments='bf16'), or another of its kin."
        )

    @torch.no_grad()
    def widen(*_: Any) -> None:
        for state, key, _name, p in _moments(optimizer):
            state[key] = state[key].to(torch.float32 if p.dtype != torch.float64 else p.dtype)

    @torch.no_grad()
    def narrow(*_: Any) -> None:
        step = optimizer.param_groups[0][STEP] = int(optimizer.param_groups[0].get(STEP, 0)) + 1
        for state, key, name, p in _moments(optimizer):
            stream = Stream(seed=seed, name=name, step=step, offset=shard_offset(p))
            written = kernels.round(local(state[key]).float(), grid("bf16"), stochastic=stream).bfloat16()
            state[key] = wrap_like(written, state[key])

    hooks = optimizer.register_step_pre_hook(widen), optimizer.register_step_post_hook(narrow)

    def end() -> None:
        for hook in hooks:
            hook.remove()
        widen()

    return end


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, str, torch.Tensor]]:
    """Yield every moment: the state that it is in, its key there, its name and its parameter."""
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            state = optimizer.state.get(p, {})
            for key, x in list(state.items()):
                if isinstance(x, torch.Tensor) and x.shape == p.shape and x.is_floating_point() and x.dim():
                    yield state, key, f"{i}.{j}.{key}", p
