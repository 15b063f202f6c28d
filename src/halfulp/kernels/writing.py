"""Write back to tensors: replace stored values by what a policy makes of the proposed ones.

:func:`prepare` checks its arguments and returns the work to be done. :class:`Writing` is one tensor's part of
it on the CPU, and the only place where a kernel is chosen. For many small tensors, use
:mod:`~halfulp.kernels.many`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from halfulp.errors import UsageError
from halfulp.kernels import fallback, native, reference
from halfulp.kernels.plan import (
    Array,
    Key,
    Plan,
    checked,
    deliver,
    flat_of,
    given_scales,
    key_of,
    on_gpu,
    plan_for,
    same_shape,
    scales_of,
    writable,
    writes_directly,
)
from halfulp.kernels.reference import MODES, WRITE_COUNTS, WRITE_SUMS, tiles_of
from halfulp.numbers.grids import Grid
from halfulp.numbers.streams import Stream

Mode = Literal["nearest", "stochastic", "deadzone"]
Queue = list[Callable[[], Any]]


@dataclass(frozen=True)
class Written:
    """The result of a write-back.

    Args:
        out: The new values.
        counts: Counts per tile, in the order of WRITE_COUNTS.
        sums: Sums per tile, in the order of WRITE_SUMS; zero for tiles whose sums were not requested.
    """

    out: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor


class Carry(NamedTuple):
    """A tensor that takes the rounding error.

    Args:
        rest: The tensor, updated in place.
        add: Add the tensor to the proposal first.
    """

    rest: torch.Tensor
    add: bool = True


class Scales(NamedTuple):
    """Fixed scales of a write-back.

    Args:
        written: The scales of the new values.
        stored: The scales of the stored values, for grids whose scales move with the data.
    """

    written: torch.Tensor | None
    stored: torch.Tensor | None = None


class Prepared(NamedTuple):
    """A write-back that is checked but not yet done; its numbers are valid once ``work`` is done."""

    written: Written
    work: Queue


def prepare(
    q: torch.Tensor,
    z: torch.Tensor,
    grid: Grid | str | torch.dtype,
    mode: Mode = "nearest",
    stream: Stream | None = None,
    *,
    moved: torch.Tensor | None = None,
    sums: bool | int = False,
    scale: torch.Tensor | Scales | None = None,
    carry: torch.Tensor | Carry | None = None,
    out: torch.Tensor | None = None,
) -> Prepared:
    """Check and prepare a :func:`halfulp.kernels.write_back`; its work is to be called later, in order.

    For many tensors this is faster than to go back and forth between Python and kernels.
    """
    q, z = checked(q, "q"), checked(z, "z")
    out = z if out is None else out
    rest, add = carry if isinstance(carry, Carry) else (carry, carry is not None)
    fixed = scale if isinstance(scale, Scales) else Scales(scale)
    plan = _checked_plan(q, z, out, grid, mode)
    if q.dtype != z.dtype and (plan.scaled or not q.is_cpu):
        q = q.float()
    key = key_of(stream, MODES[mode], q.numel())
    _check_moved(moved, q)
    after: Queue = []
    if rest is not None:
        _check_carry(rest, q, z)
        short = rest.dtype == torch.bfloat16 and z.dtype == torch.float32 and z.is_cpu and not plan.scaled
        if rest.dtype != z.dtype and not short:
            narrow, rest = rest, rest.to(z.dtype)
            after.append(partial(narrow.copy_, rest))
    scales, old = (given_scales(s, plan, tuple(q.shape)) for s in fixed)
    if on_gpu(q):
        from halfulp.kernels import gpu

        options = (moved, bool(sums), fixed, None if rest is None else Carry(rest, add))
        counts, totals = gpu.write_back(q, z, out, plan.grid, MODES[mode], stream, *options)
        for work in after:  # a device has a queue of its own
            work()
        return Prepared(Written(out, counts, totals), [])
    flat_q, flat_z = flat_of(q), flat_of(z)
    # Not over q itself: what is stored is still read while results are written.
    direct = writes_directly(out) and out.data_ptr() != q.data_ptr()
    result = (flat_z if out is z else flat_of(out)) if direct else np.empty_like(flat_z)
    writing = Writing(
        plan=plan, shape=tuple(q.shape), dtype=z.dtype, q=flat_q, z=flat_z, out=result, mode=MODES[mode],
        key=key, moved=None if moved is None else moved.numpy(), every=int(sums),
        carry=None if rest is None else flat_of(rest), carry_in=add, scale=scales, stored=old,
    )  # fmt: skip
    if not direct:
        after.insert(0, partial(deliver, result, out))
    return Prepared(writing.written(out), [writing, *after])


def _checked_plan(
    q: torch.Tensor, z: torch.Tensor, out: torch.Tensor, grid: Grid | str | torch.dtype, mode: Mode
) -> Plan:
    same_shape(q=q, z=z)
    same_shape(z=z, out=out)
    narrow = q.dtype == torch.bfloat16 and z.dtype == torch.float32
    if (z.dtype != q.dtype and not narrow) or out.dtype != z.dtype:
        raise UsageError(f"q, z and out must have one dtype, not {q.dtype}, {z.dtype} and {out.dtype}.")
    writable(out, z)
    if mode not in MODES:
        raise UsageError(f"unknown write-back mode {mode!r}: expected one of {', '.join(MODES)}.")
    return plan_for(grid, z.dtype)


def _check_moved(moved: torch.Tensor | None, q: torch.Tensor) -> None:
    size = (q.numel() + 7) // 8
    fits = moved is None or (moved.dtype == torch.uint8 and moved.numel() == size and moved.is_contiguous())
    if not fits:
        raise UsageError(
            f"moved must be a contiguous uint8 tensor of {size} bytes for {q.numel()} coordinates."
        )


def _check_carry(carry: torch.Tensor, q: torch.Tensor, z: torch.Tensor) -> None:
    same_shape(q=q, carry=carry)
    wide = z.dtype in (torch.float32, torch.float64)
    if not (carry.is_floating_point() and carry.is_contiguous() and wide):
        raise UsageError(
            "carry must be a contiguous tensor of floats beside float32 or float64; they are "
            f"{carry.dtype} and {z.dtype}."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Writing:
    """The write-back of one tensor on the CPU, as flat arrays; call it to run it."""

    plan: Plan
    shape: tuple[int, ...]
    dtype: torch.dtype
    q: Array
    z: Array
    out: Array
    mode: int
    key: Key
    moved: Array | None
    every: int
    """The interval, in tiles, at which sums are taken; 0 for none."""
    carry: Array | None
    carry_in: bool
    scale: Array | None = None
    stored: Array | None = None

    @cached_property
    def counts(self) -> Array:
        """WRITE_COUNTS per tile."""
        return np.zeros((tiles_of(self.q.size), len(WRITE_COUNTS)), dtype=np.int32)

    @cached_property
    def totals(self) -> Array:
        """WRITE_SUMS per tile."""
        return np.zeros((len(self.counts), len(WRITE_SUMS)))

    def written(self, out: torch.Tensor) -> Written:
        """Return the numbers, which come when it is done."""
        return Written(out, torch.from_numpy(self.counts), torch.from_numpy(self.totals))

    def __call__(self) -> None:
        """Run the write-back."""
        if native.library() is None:
            fallback.write(self)
            return
        plan, carry = self.plan, self.carry
        places = [native.at(x) or 0 for x in (self.q, self.z, self.out, carry, self.moved)]
        scales = self._scales() if plan.scaled else {}
        call = native.call_of(
            "write", **plan.numbers, **scales, mode=self.mode, carry_in=carry is not None and self.carry_in,
            stored=native.OF_ARRAY[self.q.dtype], proposed=native.OF_ARRAY[self.z.dtype],
            carried=native.OF_ARRAY[np.dtype(plan.work) if carry is None else carry.dtype], tensors=1,
            rows=np.array([[*places, self.q.size, self.key[2], self.every, 0]], dtype=np.int64),
            keys=np.array([self.key[:2]], dtype=np.uint32), counts=self.counts, totals=self.totals,
        )  # fmt: skip
        native.run("write_scaled" if plan.scaled else "write", len(self.counts), call)

    def _scales(self) -> dict[str, Any]:
        """Return the scales of the stored values, or None if they are fixed, and those of the new values."""
        plan, scaling, old, new = self.plan, self.plan.grid.scaling, self.stored, self.scale
        if scaling is None or not scaling.moves:
            old = None
        elif old is None and new is None:
            whole = plan_for(reference.rule_of_stored(plan.grid), self.dtype)
            old = scales_of(self.q, whole, self.shape, self.dtype)
        elif old is None:
            old = new
        if new is None:
            source = self.q if scaling is not None and scaling.from_old else self._asked()
            new = scales_of(source, plan, self.shape, self.dtype)
        return {**plan.segments(self.shape), "now": old, "next": new}

    def _asked(self) -> Array:
        """Return the proposals with their carry, where that is finite."""
        if self.carry is None or not self.carry_in:
            return self.z
        with np.errstate(over="ignore", invalid="ignore"):
            add = np.where(np.isfinite(self.z + self.carry), self.carry, 0).astype(self.z.dtype)
            return np.asarray(self.z + add)
