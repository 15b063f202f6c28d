"""Compiled loops over stored bits: how often each occurs, and where two differ.

They stand apart from :mod:`halfulp.kernels`, because they know no grid: only integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

LANES = 4
"""Tables that a loop counts into in turn: equal values in a row do not wait for each other."""

jit = njit(nogil=True, error_model="numpy", boundscheck=False, cache=True)


@jit
def occurrences(codes: Any, out: Any) -> None:
    """Add to ``out[lane, code]``, for unsigned codes below its width."""
    whole = codes.size - codes.size % 4
    for i in range(0, whole, 4):
        out[0, codes[i]] += np.uint32(1)
        out[1, codes[i + 1]] += np.uint32(1)
        out[2, codes[i + 2]] += np.uint32(1)
        out[3, codes[i + 3]] += np.uint32(1)
    for i in range(whole, codes.size):
        out[0, codes[i]] += np.uint32(1)


@jit
def classes(bits: Any, mantissa: Any, first: Any, out: Any) -> None:
    """Add to ``out[lane, class]`` for the bits of wide floats. The class of a magnitude is its binade,
    whether it is at or above that binade's ``first``, begins the binade, and is odd."""
    fraction, magnitude = (1 << mantissa) - 1, (first.size << mantissa) - 1
    for i in range(bits.size):
        n = np.int64(bits[i]) & magnitude
        e = n >> mantissa
        c = e * 8 + (n & 1)
        if n >= first[e]:
            c += 4
        if n & fraction == 0:
            c += 2
        out[i & 3, c] += np.uint32(1)


@jit
def differing(old: Any, new: Any, mask: Any) -> Any:
    """Set a bit of ``mask`` (lowest first) for every place where two arrays of bits differ; how many do."""
    total = 0
    for b in range(mask.size):
        first = b * 8
        byte = 0
        for i in range(first, min(first + 8, new.size)):
            byte |= (old[i] != new[i]) << (i - first)
        mask[b] = byte
        while byte:
            byte &= byte - 1
            total += 1
    return total


@jit
def places(mask: Any, base: Any, out: Any) -> None:
    """The numbers of the bits that are set, in order."""
    at = 0
    for b in range(mask.size):
        byte, bit = np.int64(mask[b]), 0
        while byte:
            if byte & 1:
                out[at] = base + b * 8 + bit
                at += 1
            byte >>= 1
            bit += 1
