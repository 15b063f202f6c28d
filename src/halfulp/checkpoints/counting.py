"""Loop over stored bits to count values.

These loops are separate from the kernels because they know only integers, and no grid.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from halfulp.kernels import native

Array = npt.NDArray[Any]
LANES = 4
"""The number of tables that a loop counts into in turn, so that runs of equal values do not stall."""


def occurrences(codes: Array, out: Array) -> None:
    """Add to ``out[lane, code]``, uint32 or int64, for codes of one byte or two below its width."""
    library = native.library()
    if library is None:
        out[0] += np.bincount(codes, minlength=out.shape[1]).astype(out.dtype)
        return
    codes = np.ascontiguousarray(codes)
    count = library.opened.halfulp_occurrences
    count.argtypes, count.restype = (c_void_p, c_int, c_int64, c_int64, c_void_p, c_int), None
    count(codes.ctypes.data, codes.itemsize, codes.size, out.shape[1], out.ctypes.data, out.itemsize == 8)


def classes(bits: Array, mantissa: int, first: Array, second: Array, out: Array) -> None:
    """Add the bits of wide floats to ``out[lane, class]``.

    The class of a magnitude is its binade (times 16), how many of that binade's ``first`` and ``second`` it
    is at or above (times 4), whether it begins the binade (times 2), and whether it is odd.
    """
    library = native.library()
    first, second = (np.ascontiguousarray(x, dtype=np.int64) for x in (first, second))
    if library is None:
        n = bits.astype(np.int64) & ((first.size << mantissa) - 1)
        e = n >> mantissa
        each = e * 16 + (n & 1) + 4 * (n >= first[e]) + 4 * (n >= second[e])
        each += 2 * (n & ((1 << mantissa) - 1) == 0)
        out[0] += np.bincount(each, minlength=out.shape[1]).astype(out.dtype)
        return
    bits = np.ascontiguousarray(bits)
    count = library.opened.halfulp_classes
    count.argtypes, count.restype = (
        (c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int64, c_void_p),
        None,
    )
    at = (first.ctypes.data, second.ctypes.data, first.size, out.ctypes.data)
    count(bits.ctypes.data, bits.size, mantissa, *at)
