"""Encode positions in a tensor in few bytes: as a bit mask, or as the gaps between them.

A gap is the number of values between two positions (or before the first one), in seven bits per byte, lowest
first; every byte of a gap except the last has its highest bit set. At a density of 1% most gaps take one
byte, where an int32 index takes four; from a density of one eighth, a mask is smaller than either.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Form = Literal["gaps", "mask", "all"]
MOST_BYTES = 9
"""Of one gap; enough for 63 bits."""


def to_gaps(at: Array) -> Array:
    """Return the gaps before ascending positions.

    >>> to_gaps(np.array([0, 2, 300])).tolist()
    [0, 1, 169, 2]
    """
    gaps: Array = np.diff(at.astype(np.int64), prepend=-1) - 1
    sizes = np.ones(gaps.size, dtype=np.int64)
    for k in range(1, MOST_BYTES):
        sizes += gaps >= 1 << 7 * k
    starts = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), dtype=np.uint8)
    for k in range(int(sizes.max(initial=0))):
        some = sizes > k
        more = (sizes[some] > k + 1).astype(np.int64) << 7
        out[starts[some] + k] = (gaps[some] >> 7 * k) & 127 | more
    return out


def from_gaps(coded: Array) -> Array | None:
    """Return the ascending positions, or None if these bytes are not gaps.

    >>> from_gaps(np.array([0, 1, 169, 2], dtype=np.uint8)).tolist()
    [0, 2, 300]
    """
    ends = np.flatnonzero(coded < 128)
    sizes = np.diff(ends, prepend=-1)
    if coded.size and (not ends.size or ends[-1] != coded.size - 1 or sizes.max() > MOST_BYTES):
        return None
    starts = ends - sizes + 1
    gaps = np.zeros(ends.size, dtype=np.int64)
    for k in range(int(sizes.max(initial=0))):
        some = sizes > k
        gaps[some] |= (coded[starts[some] + k].astype(np.int64) & 127) << 7 * k
    if gaps.size and int(gaps.max()) >= 2**62 // gaps.size:  # their sum would not be a place in any tensor
        return None
    return np.cumsum(gaps + 1) - 1


def to_mask(at: Array, numel: int) -> Array:
    """Return the bytes of a mask with these bits set."""
    lit = np.zeros(numel, dtype=bool)
    lit[at] = True
    return np.packbits(lit, bitorder="little")


def smallest(at: Array, numel: int) -> tuple[Form, Array]:
    """Return the form of ascending positions that takes the fewest bytes, and those bytes."""
    mask_bytes = (numel + 7) // 8
    if at.size == numel:
        return "all", np.empty(0, dtype=np.uint8)
    if at.size < mask_bytes and (coded := to_gaps(at)).size < mask_bytes:
        return "gaps", coded
    return "mask", to_mask(at, numel)


def decoded(form: Form, where: Array, numel: int) -> Array:
    """Return the positions that bytes encode in a form; those bytes fit it (:func:`why_unfit`)."""
    if form == "all":
        return np.arange(numel)
    if form == "mask":
        return np.flatnonzero(np.unpackbits(where, bitorder="little"))
    at = from_gaps(where)
    assert at is not None
    return at


def why_unfit(form: Form, where: Array, numel: int, count: int) -> str | None:
    """Return why bytes do not encode ``count`` positions among ``numel``; None if they do."""
    if form == "all":
        return None if count == numel else f"has {count} of {numel} values"
    if form == "mask":
        if where.dtype != np.uint8 or where.shape != ((numel + 7) // 8,):
            return "has a mask of another size"
        lit = np.unpackbits(where, bitorder="little")
        places = int(np.count_nonzero(lit))
        return f"has {places} places for {count} values" if lit[numel:].any() or places != count else None
    at = from_gaps(where) if where.dtype == np.uint8 and where.ndim == 1 else None
    if at is None or at.size != count:
        return f"has gaps that are not {count} places"
    return "has places outside the tensor" if at.size and int(at[-1]) >= numel else None
