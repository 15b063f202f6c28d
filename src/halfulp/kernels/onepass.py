"""One optimizer step in one sweep over memory: moments, proposal, policy, codes and counts.

:func:`steps` is the call on tensors; :mod:`~halfulp.kernels.onepass_reference` defines it,
:mod:`~halfulp.kernels.onepass_lanes` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
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
    LION,
    MASTER,
    NESTEROV,
    NOTHING,
    REMAINDER,
    SGD,
    WHOLE,
    Settings,
    proposal,
    rates,
    small,
)
from halfulp.kernels.params import BITS, CUT, EMIN, INVERSE, MAGIC, MANT, SHIFT, params
from halfulp.kernels.plan import key_of, plan_for
from halfulp.kernels.pool import run
from halfulp.kernels.reference import NEAREST, WRITE_COUNTS, WRITE_SUMS, tiles_of
from halfulp.streams import Stream

__all__ = [
    "ADAM",
    "ADAMW",
    "CARRY",
    "ERROR",
    "LION",
    "MASTER",
    "NESTEROV",
    "NOTHING",
    "REMAINDER",
    "SGD",
    "Case",
    "Job",
    "Settings",
    "kind_of",
    "prepared",
    "rates",
    "small",
    "step",
    "steps",
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


def _halved(grid: Grid) -> bool:
    """Whether a grid's codes are cut out of a float16's pattern: sign, then at most five bits of exponent."""
    if kind_of(grid) != FLOAT or grid.bits > 8 or grid.lo != -grid._fixed()[1]:
        return False
    return grid.last_index << (10 - grid.mantissa) < 0x7C00 and abs(grid._fixed()[0] + 14) < 100


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
    if _halved(grid):
        cut, unit = int(k[CUT]), 2.0 ** (14 + grid._fixed()[0])
        floats += [2.0**cut / quantum, unit, 1 / unit]
        ints += [grid.last_index << cut, cut - 16, 0xFFFF << (cut - 16), 16 - grid.bits, 10 - grid.mantissa]
    else:
        floats, ints = floats + [0] * 3, ints + [0] * 5
    return np.array(floats, dtype=np.float32), np.array([int(i) for i in ints], dtype=np.int32)


@dataclass(kw_only=True)
class Case:
    """What tensors that are moved in one call have in common: how, and how everything is stored."""

    grid: Grid
    rule: int
    small: bool
    mode: int = NEAREST
    keeps: int = NOTHING
    short: bool = True
    drawn: bool = False


@dataclass(kw_only=True)
class Job:
    """One contiguous tensor to be moved in place.

    ``stored``: float32, bfloat16, or codes (uint8): a byte each, or packed to the bit. ``keys``: of the
    streams of weights and of moments, two words each. ``offset``: where in the whole tensor this one begins.
    ``plain``: the first element whose second moment is summed in the other order, see
    :mod:`~halfulp.kernels.onepass_reference`. ``sums``: of every how many tiles."""

    stored: torch.Tensor
    grad: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor | None
    kept: torch.Tensor | None
    moved: torch.Tensor | None
    rates: Array
    keys: tuple[int, int, int, int]
    offset: int
    plain: int
    sums: int

    @property
    def types(self) -> tuple[torch.dtype | None, ...]:
        """How everything is stored: the same for all jobs of a call."""
        kept = None if self.kept is None else self.kept.dtype
        return self.stored.dtype, self.grad.dtype, self.first.dtype, kept


EMPTY = {
    None: np.empty(0, np.float32), torch.float32: np.empty(0, np.float32), torch.uint8: np.empty(0, np.uint8),
    torch.bfloat16: np.empty(0, np.uint16), torch.int16: np.empty(0, np.int16),
    torch.int8: np.empty(0, np.int8),
}  # fmt: skip


def steps(case: Case, jobs: list[Job]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One step of tensors of a case and of the same types, in one call; what was counted of each, per tile
    (WRITE_COUNTS), and sums."""
    if jobs[0].stored.device.type != "cpu":
        from halfulp.kernels import gpu_onepass

        return gpu_onepass.steps(case, jobs)
    from halfulp.kernels.onepass_lanes import tiles
    from halfulp.kernels.onepass_stored import HALF, halves

    resolved = plan_for(case.grid, torch.float32)
    kind = kind_of(resolved.grid)
    assert kind is not None
    ends, table, n = [], [], 0
    for job in jobs:
        size = job.first.numel()
        bits = case.grid.bits if job.stored.numel() < size else 8
        table.append((
            job.stored.data_ptr(), job.grad.data_ptr(), job.first.data_ptr(),
            0 if job.second is None else job.second.data_ptr(),
            0 if job.kept is None else job.kept.data_ptr(), 0 if job.moved is None else job.moved.data_ptr(),
            size, job.offset, job.plain, job.sums, n, bits,
        ))  # fmt: skip
        n += tiles_of(size)
        ends.append(n)
    counts, totals = np.zeros((n, len(WRITE_COUNTS)), dtype=np.int32), np.zeros((n, len(WRITE_SUMS)))
    codes = jobs[0].stored.dtype == torch.uint8
    lanes = HALF if halves() and _halved(resolved.grid) else kind
    # Where nothing is drawn, how many digits a draw has makes no other case.
    short = case.short or (case.mode == NEAREST and not case.drawn)
    made = tiles(case.rule, case.mode, case.keeps, lanes, short, case.small, case.drawn, codes)
    stored, grad, moments, kept = (EMPTY[kind] for kind in jobs[0].types)
    run(
        made, n, stored, grad, moments, moments, kept, EMPTY[torch.uint8], np.array(table, dtype=np.int64),
        np.stack([job.rates for job in jobs]), np.array([job.keys for job in jobs], dtype=np.uint32),
        *_coding(resolved.grid, case.short), resolved.floats, resolved.ints, resolved.masks, counts, totals,
    )  # fmt: skip
    found = torch.from_numpy(counts), torch.from_numpy(totals)
    return [(found[0][a:b], found[1][a:b]) for a, b in pairwise([0, *ends])]


def prepared(
    stored: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor | None,
    grid: Grid,
    settings: Settings,
    *,
    mode: int = NEAREST,
    keeps: int = NOTHING,
    kept: torch.Tensor | None = None,
    stream: Stream | None = None,
    drawing: Stream | None = None,
    plain: int | None = None,
    moved: torch.Tensor | None = None,
    sums: int = 0,
) -> tuple[Case, Job]:
    """What :func:`steps` takes for one tensor, from what the reference takes."""
    k0, k1, offset = key_of(stream, mode, stored.numel())
    case = Case(
        grid=grid, rule=settings.rule, small=small(settings), mode=mode, keeps=keeps,
        short=stream is None or stream.bits == 16, drawn=drawing is not None,
    )  # fmt: skip
    job = Job(
        stored=stored, grad=grad, first=first, second=second, kept=kept, moved=moved, rates=rates(settings),
        keys=(int(k0), int(k1), *(drawing.key if drawing else (0, 0))),
        offset=drawing.offset if drawing else offset,
        plain=stored.numel() if plain is None else plain, sums=sums,
    )  # fmt: skip
    return case, job


def step(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`steps` of one tensor, as :func:`halfulp.kernels.onepass_reference.step` has it."""
    case, job = prepared(*tensors, **options)
    return steps(case, [job])[0]


@cache
def torchs_end(rule: int) -> int | None:
    """How many elements torch's fused step takes at a time, so that the rest at the end of a tensor is summed
    otherwise; None if its arithmetic is not the one of the reference (another compiler or processor)."""
    if rule == LION:  # not torch's
        return 1
    made = torch.Generator("cpu").manual_seed(0)
    size = 32 + 15
    kind: Any = {"dtype": torch.float32, "device": "cpu"}
    g, m, w = (torch.randn(size, generator=made, **kind) * 1e-3 for _ in range(3))
    v = torch.rand(size, generator=made, **kind) * 1e-6
    for width in (8, 16, 4):
        if all(_equals_torch(w, g, m, v, rule, beta, width) for beta in (0.9, 0.3)):
            return width
    return None


def _equals_torch(
    w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, rule: int, beta: float, width: int
) -> bool:
    s = Settings(
        lr=1e-3, betas=(beta, 0.99), eps=1e-8, weight_decay=0.1, rule=rule, t=7,
        dampening=0.3 if rule == SGD else 0.0,
    )  # fmt: skip
    p, first, second = w.clone(), m.clone(), v.clone()
    shared: dict[str, Any] = {
        "lr": s.lr, "weight_decay": s.weight_decay, "maximize": False, "grad_scale": None, "found_inf": None
    }  # fmt: skip
    if rule in (ADAMW, ADAM):
        fused = torch._fused_adam_ if rule == ADAM else torch._fused_adamw_
        fused(
            [p], [g.clone()], [first], [second], [], [w.new_tensor(s.t)], beta1=beta,
            beta2=s.betas[1], eps=s.eps, amsgrad=False, **shared,
        )  # fmt: skip
    else:
        torch._fused_sgd_(
            [p], [g.clone()], [first], momentum=beta, dampening=s.dampening, nesterov=rule == NESTEROV,
            is_first_step=False, **shared,
        )  # fmt: skip
    found = proposal(w.numpy(), g.numpy(), m.numpy(), v.numpy(), s, w.numel() - w.numel() % width)
    return all(
        np.array_equal(a.view(np.int32), b.numpy().view(np.int32))
        for a, b in zip(found, (p, first, second), strict=True)
    )
