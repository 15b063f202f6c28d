"""Compare two stored tensors of one name, value by value, in steps of their format.

A *step* is the way from one representable value to the next one, so a move of three steps is three codes far.
Where the two are stored in different types, both are rounded to the narrower one first. Zero and negative
zero are one value. Both are read piece by piece at the same places, so memory does not grow with the tensor.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfulp.checkpoints import counting
from halfulp.checkpoints.stored_tensors import Stored
from halfulp.measures.groups import group_of

Array = npt.NDArray[Any]
PIECE = 1 << 18
"""Values that a thread compares at once: few enough for their arrays to stay in caches."""
CODES = {
    torch.float8_e4m3fn: np.uint8, torch.float8_e5m2: np.uint8, torch.bfloat16: np.uint16,
    torch.float16: np.uint16, torch.float32: np.uint32, torch.float64: np.uint64,
}  # fmt: skip
"""Types of weights, the narrowest first."""
EXACT, PER_BINADE = 4096, 64
"""Moves below so many steps are counted one by one; larger ones in so many classes a binade."""
CLASSES = EXACT + 53 * PER_BINADE


@dataclass(frozen=True)
class Difference:
    """The comparison of one tensor in two checkpoints; the counts are of its weights."""

    name: str
    group: str
    kind: str
    """The type in which it is stored; with an arrow if the two checkpoints differ."""
    weights: int
    same: int
    """Weights whose stored value did not change."""
    at_one: int
    """Unchanged weights that are exactly 1."""
    at_zero: int
    """Unchanged weights that are exactly 0."""
    one_step: int
    """Weights that moved to a neighbouring value."""
    nonfinite: int
    """Weights that are not finite in either file; they are in no other count."""
    largest: int
    """The furthest move, in steps."""
    typical: int
    """The median of the moves that are not zero, in steps; 0 if nothing moved."""
    on_bfloat16: int
    """For a float32 tensor, values of the second file that bfloat16 holds exactly."""

    @property
    def share(self) -> float:
        """The share of finite weights whose stored value did not change."""
        return self.same / max(self.weights - self.nonfinite, 1)

    @property
    def moved(self) -> int:
        """The number of weights whose stored value changed."""
        return self.weights - self.nonfinite - self.same


def unfit(a: Stored, b: Stored) -> str | None:
    """Return why two tensors cannot be compared; None if they can."""
    for x in (a, b):
        if x.dtype not in CODES:
            return f"{x.kind} is not a type of weights that is known here"
    if a.shape != b.shape:
        return f"its shape is {list(a.shape)} in the first and {list(b.shape)} in the second"
    return "it is empty" if a.size == 0 else None


def compared(a: Stored, b: Stored, pool: Executor) -> tuple[Difference, Array]:
    """Compare two tensors.

    Args:
        a: The earlier one.
        b: The later one, of the same shape.
        pool: The threads that compare pieces of them.

    Returns:
        The counts, and the moves by class, of which :func:`together` takes the median of several tensors.
    """
    assert a.dtype is not None and b.dtype is not None
    narrow = min(a.dtype, b.dtype, key=list(CODES).index)
    numel = a.size // a.dtype.itemsize
    jobs = ((a, b, narrow, first, min(PIECE, numel - first)) for first in range(0, numel, PIECE))
    counts, classes, largest = np.zeros(6, dtype=np.int64), np.zeros(CLASSES, dtype=np.int64), 0
    for counted, moved, far in pool.map(lambda job: _piece(*job), jobs):
        counts, classes, largest = counts + counted, classes + moved, max(largest, far)
    kind = a.kind if a.kind == b.kind else f"{a.kind} -> {b.kind}"
    group = group_of(a.name, torch.empty(a.shape, device="meta"))
    same, at_one, at_zero, one, bad, on_bfloat16 = (int(n) for n in counts)
    row = Difference(
        a.name, group, kind, numel, same, at_one, at_zero, one, bad, largest, _median(classes), on_bfloat16
    )
    return row, classes


def _piece(a: Stored, b: Stored, narrow: torch.dtype, first: int, length: int) -> tuple[Array, Array, int]:
    """Compare a stretch: counts as in a Difference, moves by class, and the furthest."""
    mine, theirs = (_codes(x, narrow, first, length) for x in (a, b))
    magnitude, bad = _magnitudes(mine, narrow)
    stays, sizes, many = ~bad, np.empty(0, dtype=mine.dtype), np.empty(0, dtype=np.int64)
    if not np.array_equal(mine, theirs):
        far = _steps(mine, theirs, magnitude, bad, narrow)
        stays, (sizes, many) = far == 0, _moves(far)
    on_bfloat16 = np.count_nonzero(theirs & np.uint32(0xFFFF) == 0) if theirs.dtype == np.uint32 else 0
    same = np.count_nonzero(stays)
    counts = [
        same, np.count_nonzero(stays & (mine == _code_of(1.0, narrow))),
        np.count_nonzero(stays & (magnitude == 0)), many[sizes == 1].sum(),
        length - same - many.sum(), on_bfloat16,
    ]  # fmt: skip
    classes = np.bincount(_classes(sizes), weights=many, minlength=CLASSES).astype(np.int64)
    return np.array(counts, dtype=np.int64), classes, int(sizes.max(initial=0))


def _moves(far: Array) -> tuple[Array, Array]:
    """Count weights by how far they moved, without those that did not move or are not finite."""
    if far.itemsize <= 2:
        each = np.zeros((counting.LANES, 1 << 8 * far.itemsize), dtype=np.uint32)
        counting.occurrences(far, each)
        many = each.sum(axis=0, dtype=np.int64)
        many[[0, -1]] = 0
        sizes = np.flatnonzero(many)
        return sizes, many[sizes]
    sizes = far[(far > 0) & (far != _bad(far))]
    return sizes, np.ones(sizes.size, dtype=np.int64)


def _bad(far: Array) -> Any:
    """Return the code of a move from or to a non-finite value, which is larger than any distance."""
    return np.iinfo(far.dtype).max


def _steps(a: Array, b: Array, x: Array, bad_x: Array, dtype: torch.dtype) -> Array:
    """Count the steps between two values; ``x`` is the distance of the first from zero."""
    y, bad_y = _magnitudes(b, dtype)
    far = np.where((a ^ b) >> _top(dtype) != 0, x + y, np.maximum(x, y) - np.minimum(x, y))
    bad = bad_x | bad_y
    if bad.any():
        far[bad] = _bad(far)
    return far


def _codes(stored: Stored, narrow: torch.dtype, first: int, length: int) -> Array:
    """Read a stretch of a tensor as codes of a type, to which it is rounded if it has another."""
    return stored.values(first, length).to(narrow).view(torch.uint8).numpy().view(CODES[narrow])


def _top(dtype: torch.dtype) -> Any:
    """The number of the bit that is the sign."""
    return CODES[dtype](8 * dtype.itemsize - 1)


def _magnitudes(codes: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Return the distance of each value from zero in steps, and a mask of non-finite values."""
    magnitude = codes & CODES[dtype]((1 << int(_top(dtype))) - 1)
    return magnitude, np.asarray(magnitude > _code_of(torch.finfo(dtype).max, dtype))


@lru_cache
def _code_of(value: float, dtype: torch.dtype) -> Any:
    return torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().view(CODES[dtype])[0]


def _classes(moved: Array) -> Array:
    """Number moves by size: one by one while they are small."""
    classes = moved.astype(np.int64)
    large = moved >= EXACT
    if large.any():
        classes[large] = EXACT + np.floor((np.log2(moved[large]) - 12) * PER_BINADE).astype(np.int64)
    return classes


def _median(classes: Array) -> int:
    """Return the lower median of the moves; a large one is given as the least of its class."""
    total = int(classes.sum())
    if not total:
        return 0
    at = int(np.searchsorted(np.cumsum(classes), (total + 1) // 2))
    return at if at < EXACT else round(2.0 ** (12 + (at - EXACT) / PER_BINADE))


def together(name: str, rows: list[Difference], classes: Array) -> Difference:
    """Sum some tensors to one.

    Args:
        name: What to call it.
        rows: The tensors, at least one.
        classes: The sum of their moves by class.
    """

    def total(column: str) -> int:
        return sum(getattr(t, column) for t in rows)

    kinds = sorted({t.kind for t in rows})
    return Difference(
        name, name, ", ".join(kinds), total("weights"), total("same"), total("at_one"), total("at_zero"),
        total("one_step"), total("nonfinite"), max(t.largest for t in rows),
        _median(classes), total("on_bfloat16"),
    )  # fmt: skip
