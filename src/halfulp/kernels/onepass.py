"""One optimizer step in one sweep over memory: moments, proposal, policy, codes and counts.

:func:`step` is the call on tensors; :mod:`~halfulp.kernels.onepass_reference` defines it,
:mod:`~halfulp.kernels.onepass_lanes` does it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.grids import Grid
from halfulp.kernels.onepass_reference import (
    ADAM,
    ADAMW,
    BFLOAT,
    CARRY,
    ERROR,
    FLOAT,
    MASTER,
    NOTHING,
    REMAINDER,
    WHOLE,
    Settings,
    moments,
    proposed,
    rates,
    small,
)
from halfulp.kernels.params import BITS, CUT, EMIN, INVERSE, MAGIC, MANT, SHIFT, params
from halfulp.kernels.plan import flat_of, key_of, plan_for
from halfulp.kernels.pool import run
from halfulp.kernels.reference import NEAREST, WRITE_COUNTS, tiles_of
from halfulp.streams import Stream

__all__ = [
    "ADAM",
    "ADAMW",
    "CARRY",
    "ERROR",
    "MASTER",
    "NOTHING",
    "REMAINDER",
    "Settings",
    "kind_of",
    "step",
    "torchs_end",
]

Array = npt.NDArray[Any]


@lru_cache(maxsize=256)
def kind_of(grid: Grid) -> int | None:
    """How lanes round to a grid in float32; None where they do not (scales that move, other exponents)."""
    if grid.scaling is not None:
        return None
    found = params(grid, "float32")
    if found.kind == MAGIC:
        return WHOLE if grid.integer else FLOAT
    bfloat = found.kind == BITS and found.ints[CUT] == 16 and grid.lo == -grid._fixed()[1]
    return BFLOAT if bfloat and found.ints[4] == 0x7F7F0000 else None


@lru_cache(maxsize=256)
def _coding(grid: Grid, short: bool) -> tuple[Array, Array]:
    """The numbers of :class:`halfulp.kernels.onepass_lanes.Coding`, floats and integers."""
    found = params(grid, "float32")
    k, top = found.ints, 1 << (grid.bits - 1)
    quantum = grid.quantum
    floats = [
        grid.lo,
        grid._fixed()[1],
        quantum,
        1 / quantum if kind_of(grid) != BFLOAT else 1,
        2.0**16 if short else 2.0**31,
    ]
    ints = [k[EMIN], k[SHIFT], k[INVERSE], k[MANT], k[CUT], 1 << grid.mantissa, top, 32 - grid.bits]
    return np.array(floats, dtype=np.float32), np.array([int(i) for i in ints], dtype=np.int32)


def step(
    stored: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    grid: Grid,
    settings: Settings,
    *,
    mode: int = NEAREST,
    keeps: int = NOTHING,
    kept: torch.Tensor | None = None,
    stream: Stream | None = None,
    drawing: tuple[Stream, Stream] | None = None,
    plain: int | None = None,
    moved: torch.Tensor | None = None,
    sums: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of one contiguous tensor, in place; what was counted, per tile (WRITE_COUNTS), and sums.

    ``stored``: float32, bfloat16, or codes of eight bits (uint8). ``plain``: the first element whose second
    moment is summed in the other order, see :mod:`~halfulp.kernels.onepass_reference`; by default none.
    """
    from halfulp.kernels.onepass_lanes import tiles

    resolved = plan_for(grid, torch.float32)
    kind = kind_of(resolved.grid)
    assert kind is not None
    short = stream is None or stream.bits == 16
    k0, k1, offset = key_of(stream, mode, stored.numel())
    keys = [k0, k1, *(drawing[0].key if drawing else (0, 0)), *(drawing[1].key if drawing else (0, 0))]
    if drawing is not None:
        offset = drawing[0].offset
    n = tiles_of(stored.numel())
    counts, totals = np.zeros((n, len(WRITE_COUNTS)), dtype=np.int32), np.zeros((n, 2))
    empty = np.empty(0, dtype=np.float32)
    case = tiles(settings.rule, mode, keeps, kind, short, small(settings), drawing is not None)
    run(
        case, n, flat_of(stored), flat_of(grad), flat_of(first), flat_of(second), empty if kept is None else
        flat_of(kept), rates(settings),
        *_coding(resolved.grid, short), resolved.floats, resolved.ints, resolved.masks,
        np.array([int(key) for key in keys], dtype=np.uint32), offset,
        stored.numel() if plain is None else plain,
        np.empty(0, dtype=np.uint8) if moved is None else moved.numpy(), int(sums), counts, totals,
    )  # fmt: skip
    return torch.from_numpy(counts), torch.from_numpy(totals)


@cache
def torchs_end() -> int | None:
    """How many elements torch's fused step takes at a time, so that the rest at the end of a tensor is summed
    otherwise; None if its arithmetic is not the one of the reference (another compiler or processor)."""
    made = torch.Generator().manual_seed(0)
    size = 32 + 15
    g, m, w = (torch.randn(size, generator=made) * 1e-3 for _ in range(3))
    v = torch.rand(size, generator=made) * 1e-6
    for width in (8, 16, 4):
        if all(_equals_torch(w, g, m, v, rule, beta, width) for rule in (ADAM, ADAMW) for beta in (0.9, 0.3)):
            return width
    return None


def _equals_torch(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, rule: int, beta: float, width: int
) -> bool:
    s = Settings(lr=1e-3, betas=(beta, 0.99), eps=1e-8, weight_decay=0.1, rule=rule, t=7)
    p, first, second = w.clone(), m.clone(), v.clone()
    fused = torch._fused_adam_ if rule == ADAM else torch._fused_adamw_
    fused(
        [p], [g.clone()], [first], [second], [], [torch.tensor(float(s.t))], lr=s.lr, beta1=beta,
        beta2=s.betas[1], weight_decay=s.weight_decay, eps=s.eps, amsgrad=False, maximize=False,
        grad_scale=None, found_inf=None,
    )  # fmt: skip
    decayed, m1, v1 = moments(w.numpy(), g.numpy(), m.numpy(), v.numpy(), s, w.numel() - w.numel() % width)
    made = (proposed(decayed, m1, v1, s), m1, v1)
    return all(
        np.array_equal(a.view(np.int32), b.numpy().view(np.int32))
        for a, b in zip(made, (p, first, second), strict=True)
    )
