"""One optimizer step in one sweep over memory: moments, proposal, policy, codes and counts.

:func:`steps` is the call on tensors; :mod:`~halfulp.kernels.onepass_reference` defines it,
``native/onepass.cpp`` does it on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from halfulp.kernels import fallback, native
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
    PLAIN,
    REMAINDER,
    SGD,
    WHOLE,
    Policy,
    Settings,
    proposal,
    rates,
    small,
)
from halfulp.kernels.params import BITS, CUT, MAGIC, TOP, params
from halfulp.kernels.plan import Counted, Parts, addresses, key_of, plan_for
from halfulp.kernels.reference import NEAREST, WRITE_COUNTS, WRITE_SUMS, tiles_of
from halfulp.numbers.grids import Grid

__all__ = [
    "ADAM", "ADAMW", "CARRY", "ERROR", "LION", "MASTER", "NESTEROV", "NOTHING", "PLAIN", "REMAINDER", "SGD",
    "Case", "Job", "Jobs", "Policy", "Settings", "kind_of", "prepared", "rates", "small", "step", "steps",
    "torchs_end",
]  # fmt: skip

Array = npt.NDArray[Any]


@lru_cache(maxsize=256)
def kind_of(grid: Grid) -> int | None:
    """Return how lanes round to a grid in float32; None if they cannot (moving scales, other exponents)."""
    if grid.scaling is not None:
        return None
    constants = params(grid, "float32")
    if constants.kind == MAGIC:
        return WHOLE if grid.integer else FLOAT
    bfloat = constants.kind == BITS and constants.ints[CUT] == 16 and grid.lo == -grid._fixed()[1]
    return BFLOAT if bfloat and constants.ints[TOP] == 0x7F7F0000 else None


@dataclass(kw_only=True)
class Case:
    """The settings and the storage types shared by tensors that are moved in one call."""

    grid: Grid
    rule: int
    small: bool
    mode: int = NEAREST
    keeps: int = NOTHING
    short: bool = True
    drawn: bool = False
    torchs_root: bool = False


@dataclass(kw_only=True)
class Job:
    """One contiguous tensor of ``size`` values to be moved in place.

    ``stored``: float32, bfloat16, or codes (uint8): a byte each, or packed to the bit. ``first``, ``second``:
    moments in float32 or bfloat16, or codes of :mod:`~halfulp.kernels.coded_moments`, which have ``scales``.
    ``rates`` and ``keys`` (of the streams of weights and of moments, two words each): for :func:`steps`.
    ``offset``: where in the whole tensor this one begins. ``plain``: the first element whose second moment is
    summed in the other order, see :mod:`~halfulp.kernels.onepass_reference`. ``sums``: of every how many
    tiles.
    """

    stored: torch.Tensor
    size: int
    grad: torch.Tensor
    first: torch.Tensor | None
    second: torch.Tensor | None
    kept: torch.Tensor | None
    moved: torch.Tensor | None
    offset: int
    plain: int
    sums: int
    scales: tuple[torch.Tensor, ...] = ()
    rates: Array = field(default_factory=lambda: np.empty(0, np.float32))
    keys: tuple[int, ...] = (0, 0, 0, 0)

    @property
    def types(self) -> tuple[torch.dtype | None, ...]:
        """The storage types, which are the same for all jobs of a call."""
        first, kept = (None if x is None else x.dtype for x in (self.first, self.kept))
        return self.stored.dtype, self.grad.dtype, first, kept


class Jobs:
    """Tensors of a case and of the same types that one call moves, and where everything of theirs lies.

    What lasts from one step to the next is looked up once. The caller sees to it that it has not changed:
    addresses of memory that is gone would be written to.
    """

    def __init__(self, case: Case, jobs: list[Job]) -> None:
        self.case, self.jobs = case, jobs
        ends, rows, n = [0], [], 0
        for job in jobs:
            bits = case.grid.bits if job.stored.numel() < job.size else 8
            rest = (job.first, job.second, job.kept, job.moved, *(*job.scales, None, None)[:2])
            rows.append((
                job.stored.data_ptr(), 0, *(0 if x is None else x.data_ptr() for x in rest),
                job.size, job.offset, job.plain, job.sums, n, bits,
            ))  # fmt: skip
            n += tiles_of(job.size)
            ends.append(n)
        self._table, self._ends = np.array(rows, dtype=np.int64), ends

    def __call__(self, grads: Sequence[torch.Tensor], rates: Array, keys: Array) -> Counted:
        """Make one step.

        Args:
            grads: Contiguous gradients, of the jobs' type.
            rates: A row of :func:`rates` for each tensor.
            keys: A row for each tensor: of the streams of weights and of moments, two words each.

        Returns:
            What was counted of each tensor, per tile (WRITE_COUNTS), and sums.
        """
        case, jobs = self.case, self.jobs
        if jobs[0].stored.device.type != "cpu":
            from halfulp.kernels import gpu_onepass

            each = zip(jobs, grads, rates, keys.tolist(), strict=True)
            return gpu_onepass.steps(
                case, [replace(job, grad=g, rates=r, keys=tuple(k)) for job, g, r, k in each]
            )
        if native.library() is None:
            return fallback.onepass(case, jobs, grads, rates, keys)
        self._table[:, 1] = addresses(grads)
        n, plan = self._ends[-1], plan_for(case.grid, torch.float32)
        counts, totals = np.zeros((n, len(WRITE_COUNTS)), dtype=np.int32), np.zeros((n, len(WRITE_SUMS)))
        stored, grad, moments, kept = jobs[0].types
        call = native.call_of(
            "onepass", **plan.numbers, rule=case.rule, mode=case.mode, keeps=case.keeps,
            stored=native.STORED[stored], kept=native.STORED[kept], is_short=case.short, small=case.small,
            narrow_grad=grad == torch.bfloat16, moments=native.STORED[moments],
            rounding=kind_of(plan.grid), top=1 << (plan.grid.bits - 1), tensors=len(jobs), rows=self._table,
            root=native.torchs_root() if case.torchs_root else native.ROUNDED,
            rates=np.ascontiguousarray(rates), keys=np.ascontiguousarray(keys), counts=counts, totals=totals,
        )  # fmt: skip
        native.run("onepass", n, call)
        return Parts(torch.from_numpy(counts), torch.from_numpy(totals), self._ends)


def steps(case: Case, jobs: list[Job]) -> Counted:
    """Make one step of tensors of a case and of the same types, in one call: see :class:`Jobs`."""
    numbers = np.stack([job.rates for job in jobs])
    keys = np.array([job.keys for job in jobs], dtype=np.uint32)
    return Jobs(case, jobs)([job.grad for job in jobs], numbers, keys)


def prepared(
    stored: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor | None,
    second: torch.Tensor | None,
    grid: Grid,
    settings: Settings,
    policy: Policy,
    *,
    plain: int | None = None,
    moved: torch.Tensor | None = None,
    sums: int = 0,
) -> tuple[Case, Job]:
    """Convert the reference's arguments to those of :func:`steps`, for one tensor."""
    mode, keeps, kept, stream, drawing = policy
    size = grad.numel()
    k0, k1, offset = key_of(stream, mode, size)
    case = Case(
        grid=grid, rule=settings.rule, small=small(settings), mode=mode, keeps=keeps,
        short=stream is None or stream.bits == 16, drawn=drawing is not None,
        torchs_root=settings.torchs_root,
    )  # fmt: skip
    job = Job(
        stored=stored, size=size, grad=grad, first=first, second=second, kept=kept, moved=moved,
        rates=rates(settings), keys=(int(k0), int(k1), *(drawing.key if drawing else (0, 0))),
        offset=drawing.offset if drawing else offset,
        plain=size if plain is None else plain, sums=sums,
    )  # fmt: skip
    return case, job


def step(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`steps` of one tensor, as :func:`halfulp.kernels.onepass_reference.step` has it."""
    case, job = prepared(*tensors, **options)
    return steps(case, [job])[0]


@cache
def torchs_end(rule: int, *, fused: bool) -> int | None:
    """Return the number of elements that torch's step takes at a time.

    The remainder at the end of a tensor is summed in another way, by torch's fused steps. None if torch's
    arithmetic is not that of the reference (another compiler or processor).
    """
    if rule == LION:  # not torch's
        return 1
    if not fused and native.torchs_root() is None:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    size = 32 + 15
    kind: Any = {"dtype": torch.float32, "device": "cpu"}
    g, m, w = (torch.randn(size, generator=generator, **kind) * 1e-3 for _ in range(3))
    v = torch.rand(size, generator=generator, **kind) * 1e-6
    for width in (8, 16, 4) if fused and rule != PLAIN else (1,):
        if all(
            _equals_torch((w, g, m, v), _settings(rule, beta, fused), fused, width) for beta in (0.9, 0.3)
        ):
            return width
    return None


def _settings(rule: int, beta: float, fused: bool) -> Settings:
    return Settings(
        lr=1e-3, betas=(0.0 if rule == PLAIN else beta, 0.99), eps=1e-8, weight_decay=0.1, rule=rule, t=7,
        dampening=0.3 if rule == SGD else 0.0, torchs_root=not fused and rule in (ADAMW, ADAM),
    )  # fmt: skip


def _equals_torch(tensors: Sequence[torch.Tensor], s: Settings, fused: bool, width: int) -> bool:
    """Compare one step with torch's, by its own functions: an optimizer's step would call hooks."""
    p, g, first, second = (x.clone() for x in tensors)
    options: dict[str, Any] = {"lr": s.lr, "weight_decay": s.weight_decay, "maximize": False}
    options |= {"grad_scale": None, "found_inf": None} if fused else {"foreach": False, "fused": False}
    if s.rule in (ADAMW, ADAM):
        kinds = (torch._fused_adam_, adam) if s.rule == ADAM else (torch._fused_adamw_, adamw)
        step, t = (kinds[0], s.t) if fused else (kinds[1], s.t - 1)  # plain ones count the step themselves
        step(
            [p], [g], [first], [second], [], [p.new_tensor(t)], beta1=s.betas[0], beta2=s.betas[1],
            eps=s.eps, amsgrad=False, **options,
        )  # fmt: skip
    else:
        options |= {"momentum": s.betas[0], "dampening": s.dampening, "nesterov": s.rule == NESTEROV}
        if fused:
            torch._fused_sgd_([p], [g], [] if s.rule == PLAIN else [first], is_first_step=False, **options)
        else:
            sgd([p], [g], [first], **options)
    w, grad, m, v = (x.numpy() for x in tensors)
    expected = proposal(w, grad, m, v, s, w.size - w.size % width)
    return all(
        np.array_equal(a.view(np.int32), b.numpy().view(np.int32))
        for a, b in zip(expected, (p, first, second), strict=True)
    )
