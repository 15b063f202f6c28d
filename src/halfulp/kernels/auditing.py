"""Audit many tensors in place in one call, as the audit of a run does.

A kernel call costs tens of microseconds before it reads a weight, and a small model has dozens of tensors.
Their weights before a step are copied side by side, each starting on a tile (:class:`Layout`). Their weights
after it are read in place, by address. The numbers equal those of one :func:`halfulp.kernels.audit` call per
tensor, because every count and sum is computed tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import byref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.errors import UsageError
from halfulp.kernels import ARRIVED, AUDIT_COUNTS, TILE, Audited, check_followed, fallback, native, tiles_of
from halfulp.kernels import params as _params
from halfulp.kernels.plan import Plan, as_floats, flat_of, narrowing, plan_for
from halfulp.kernels.scaled import Step
from halfulp.numbers.containers import container
from halfulp.numbers.grids import Grid

Array = npt.NDArray[Any]
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Layout:
    """The layout of tensors side by side, each starting on a tile."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.tiles = np.array([tiles_of(n) for n in sizes], dtype=np.int64)
        self.starts: list[int] = (np.cumsum(self.tiles) - self.tiles).tolist()
        self.total = int(self.tiles.sum())
        self.begins = (np.arange(self.total) - np.repeat(self.starts, self.tiles)) * TILE
        """The offset of each tile in its tensor."""
        self.used = np.minimum(np.repeat(self.sizes, self.tiles) - self.begins, TILE)

    def addresses(self, bases: Sequence[int], itemsize: int) -> Array:
        """Return the address of every tile, given those of the tensors."""
        return np.asarray(np.repeat(np.array(bases, dtype=np.int64), self.tiles) + self.begins * itemsize)


class TileSums:
    """Add up the tiles of an audit into one row per tensor.

    Made ready once for an audit whose results are in the same place at every step: to look up the addresses
    of arrays takes longer than to add up a small model.

    Args:
        audited: What the audit found, on the CPU.
        starts: The first tile of every tensor.
        each: How far apart grids are in a row; counts come first, then phase, expected and ARRIVED.
        width: The length of a row.
    """

    def __init__(self, audited: Audited, starts: Sequence[int], each: int, width: int) -> None:
        a = audited
        parts = (a.counts, a.shared, a.phase, a.expected, a.arrived, a.sums)
        self._parts = [np.ascontiguousarray(x.numpy()) for x in parts]
        self._starts, self._each = np.array(starts, dtype=np.int64), each
        self._shape = (len(starts), width)
        given = (*map(native.at, self._parts), *self._parts[0].shape, each, len(starts))
        self._call = native.STRUCTURES["Audited"](*given, native.at(self._starts), None)

    def __call__(self) -> Array:
        """Return new rows; what nothing is added to is zero."""
        sums = torch.zeros(self._shape, dtype=torch.float64, device="cpu")
        library, rows = native.library(), sums.numpy()
        if library is None:
            fallback.add_tiles(self._parts, self._starts, self._each, rows)
        else:
            self._call.made = sums.data_ptr()
            library.opened.halfulp_add_tiles(byref(self._call))
        return rows


class Together:
    """As :func:`halfulp.kernels.audit` of many tensors, in one call; made ready once, for every step.

    ``before``: the weights before a step as the layout has them, zeros between; ``moved`` and ``stay`` are
    laid out in the same way. What is found is overwritten by the next call.
    """

    def __init__(
        self,
        before: torch.Tensor,
        layout: Layout,
        grids: Sequence[Grid],
        *,
        phase: bool = True,
        moved: torch.Tensor | None = None,
        stay: torch.Tensor | None = None,
    ) -> None:
        plans = [plan_for(g, before.dtype) for g in grids]
        if any(p.scaled for p in plans) or before.dtype == torch.float16:
            raise UsageError(
                "tensors are audited together in float32, float64 or bfloat16, with fixed scales."
            )
        if before.numel() != layout.total * TILE:
            raise UsageError("what is audited together is laid out tile by tile.")
        check_followed(before, len(plans), moved, stay)
        self.layout, self._dtype, self._flat = layout, before.dtype, flat_of(before)
        self._bases: list[int] = []
        self._places = np.zeros((layout.total, 2), dtype=np.int64)
        self._places[:, 1] = layout.used
        none = self._flat[:0]
        self.call = Call(self._flat, none, True, plans, before.dtype, phase, (moved, stay), self._places)
        self._copy = native.call_of("copy", bytes=self._flat.itemsize, places=self._places, into=self._flat)

    def set_aside(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors as they are before a step."""
        plain = self._find(tensors)
        if native.library() is None:
            fallback.set_aside(plain, self.layout.starts, self._flat)
            return
        native.run("copy", self.layout.total, self._copy)

    def audit(self, tensors: Sequence[torch.Tensor]) -> Audited:
        """Audit the step that led to these tensors; tiles are in the order of the layout.

        Tensors are read in place, or from a copy where that is not possible.
        """
        plain = self._find(tensors)
        if native.library() is None:
            for start, x in zip(self.layout.starts, plain, strict=True):
                self.call.run_reference(start, (x.numel(),), flat_of(x))
            return self.call.audited
        audited = self.call()
        del plain
        return audited

    def _find(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Locate every tile. The caller must hold the returned tensors until they have been read."""
        sizes = self.layout.sizes
        if len(tensors) != len(sizes):
            raise UsageError(f"expected {len(sizes)} tensors to audit together, found {len(tensors)}.")
        dtype = self._dtype
        plain = [
            x
            if type(x) in PLAIN and x.dtype == dtype and x.layout == torch.strided and x.is_cpu
            and x.is_contiguous() and x.numel() == size and not x.is_neg()
            else _copied(x, size, dtype)
            for x, size in zip(tensors, sizes, strict=True)
        ]  # fmt: skip
        bases = [x.data_ptr() for x in plain]
        if bases != self._bases:
            self._places[:, 0] = self.layout.addresses(bases, self._flat.itemsize)
            self._bases = bases
        return plain


def _copied(x: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor whose memory is not the plain sequence of its values."""
    if x.numel() != size:
        raise UsageError(f"expected {size} values, as at the first step, found {x.numel()}.")
    return torch.empty(x.shape, dtype=dtype, device="cpu").copy_(x.detach())


class Call:
    """One kernel call with its arguments and its output arrays.

    For grids whose scale moves with the data, it computes only the phase sums.
    """

    def __init__(
        self,
        w: Array,
        d: Array,
        after: bool,
        plans: Sequence[Plan],
        dtype: torch.dtype,
        phase: bool,
        followed: tuple[torch.Tensor | None, torch.Tensor | None],
        places: Array | None = None,
    ) -> None:
        if d.dtype != w.dtype:  # proposals in float32 beside weights of 16 bits
            w, d = as_floats(w), as_floats(d)
        work = _params.working(container(dtype).name)
        n, g = tiles_of(w.size), len(plans)
        counts, arrived = np.zeros((n, g, len(AUDIT_COUNTS)), dtype=np.int32), np.zeros((n, g, len(ARRIVED)))
        shared, sums = np.zeros((n, 2), dtype=np.int32), np.zeros((n, 2))
        phases, expected = np.zeros((n, g), dtype=np.int64), np.zeros((n, g))
        moved, stay = (None if x is None else x.numpy() for x in followed)
        # The phase sum depends on the mantissa alone: the row of a moving grid is there for nothing else.
        rows = [i for i, p in enumerate(plans) if phase or not p.scaled]
        floats, ints = _params.table(tuple(plans[i].grid for i in rows), work)
        self._call = native.call_of(
            "audit", stored=native.OF_ARRAY[w.dtype], after=after, phase=phase, to=narrowing(dtype), before=w,
            now=d, places=places, size=w.size, rows=len(rows), grids=g, kinds=len(AUDIT_COUNTS),
            floats=floats, ints=ints, slots=np.array(rows, dtype=np.int64), moved=moved, stay=stay,
            moved_row=0 if moved is None else moved.shape[1], stay_row=0 if stay is None else stay.shape[1],
            counts=counts, shared=shared, sums=sums, arrived=arrived, expected=expected, phases=phases,
        )  # fmt: skip
        parts = [torch.from_numpy(a) for a in (counts, shared, sums, phases, expected, arrived)]
        self.audited = Audited(parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], w.size)
        """The same tensors at every call."""
        self._tiles, self._w, self._plans, self._dtype = n, w, plans, dtype
        self._followed, self._after, self._phase = (moved, stay), after, phase
        self.nbytes = sum(part.nbytes for part in parts) + (0 if places is None else places.nbytes)
        """The number of bytes kept between calls, without the arrays that were passed in."""

    def __call__(self) -> Audited:
        """Run the kernel and return its result."""
        native.run("audit", self._tiles, self._call)
        return self.audited

    def run_reference(self, start: int, shape: tuple[int, ...], now: Array) -> None:
        """Run the reference on one tensor, whose tiles begin at ``start``."""
        first, numel = start * TILE, math.prod(shape)
        bits, odds = self._followed
        followed = (
            None if bits is None else bits[:, first // 8 : first // 8 + (numel + 7) // 8],
            None if odds is None else odds[:, first : first + numel],
        )
        w, now = self._w[first : first + numel].reshape(shape), now.reshape(shape)
        results = fallback.audit(w, now, self._after, self._plans, self._dtype, self._phase, followed)
        f = self.audited
        for whole, part in zip(
            (f.counts, f.shared, f.sums, f.phase, f.expected, f.arrived), results, strict=True
        ):
            whole[start : start + len(part)] = torch.from_numpy(part)


def audit_alone(
    w: torch.Tensor,
    d: torch.Tensor,
    plans: Sequence[Plan],
    *,
    after: bool,
    phase: bool,
    followed: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Audited:
    """Audit one tensor on the CPU: see :func:`halfulp.kernels.audit`."""
    flat_w, flat_d = flat_of(w), flat_of(d)
    call = Call(flat_w, flat_d, after, plans, w.dtype, phase, followed)
    if native.library() is None:
        call.run_reference(0, tuple(w.shape), flat_d)
        return call.audited
    audited = call()
    for i, plan in enumerate(plans):
        if plan.scaled:
            bits, odds = (None if x is None else x[i].numpy() for x in followed)
            parts = Step(flat_w, flat_w, flat_d, after, plan, w).audit(bits, odds)
            for whole, part in zip((audited.counts, audited.arrived, audited.expected), parts, strict=True):
                whole[:, i] = torch.from_numpy(part)
    return audited
