"""How much of the proposals of a tile arrives: :func:`halfulp.kernels.reference.arrival`, compiled.

The halving tree of a tile adds coordinates that are 384 apart, then 192, 96 and 48. Sixteen lanes at a time
that is a tree over 48 vectors, v = c + 3 k, which for each of the three c adds the k that are 8 apart, then
4, 2 and 1. Four nested loops of two turns walk it from its leaves, with one sum a level, so that nothing is
stored on the way; what is left, 48 numbers, is added in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from halfulp.kernels import lanes
from halfulp.kernels.cpu_tile import tree, tree_from
from halfulp.kernels.reference import TILE
from halfulp.kernels.simd import JIT, bits_of, float_like, kernel

LEFT = 3 * lanes.COUNT
"""Partial sums that the lanes leave, of each of the two."""


@kernel
def binade_of(widest: Any, exponent: Any) -> Any:
    """The power of two by which changes are multiplied, from the largest proposal of a tile."""
    if widest == 0:
        return float_like(widest, (exponent >> 1) & exponent)
    unit = exponent & -exponent
    return float_like(widest, max(exponent - unit - (bits_of(widest) & exponent), unit))


@kernel
def arrived_of(left: Any, scale: Any, buffer: Any) -> Any:
    """The two sums of a tile, from what the lanes left."""
    back = 1.0 / np.float64(scale)
    for i in range(LEFT):
        buffer[i] = np.float64(left[i])
    dot = tree_from(buffer, LEFT) + 0.0
    for i in range(LEFT):
        buffer[i] = np.float64(left[LEFT + i])
    return dot * back, (tree_from(buffer, LEFT) + 0.0) * back


def arrival(q: Any, r: Any, d: Any, scale: Any, left: Any, buffer: Any) -> Any:
    """The sums of (r - q) d and (r - q)**2 over whole tiles, filled up with zeros."""
    raise TypeError("for compiled code only")


@overload(arrival, jit_options=JIT)
def _arrival(q: Any, r: Any, d: Any, scale: Any, left: Any, buffer: Any) -> Any:
    if q.dtype == types.float32:

        def in_lanes(q: Any, r: Any, d: Any, scale: Any, left: Any, buffer: Any) -> Any:
            none = lanes.splat(lanes.load(q, 0), 0.0)
            for c in range(0, LEFT, lanes.COUNT):
                dot1 = sq1 = none
                for k1 in range(c, c + 2 * LEFT, LEFT):
                    dot2 = sq2 = none
                    for k2 in range(k1, k1 + 4 * LEFT, 2 * LEFT):
                        dot4 = sq4 = none
                        for k4 in range(k2, k2 + 8 * LEFT, 4 * LEFT):
                            dot8 = sq8 = none
                            for j in range(k4, k4 + 16 * LEFT, 8 * LEFT):
                                u = lanes.load(r, j) - lanes.load(q, j)
                                shifted = u * scale
                                dot8 = dot8 + shifted * lanes.load(d, j)
                                sq8 = sq8 + shifted * u
                            dot4, sq4 = dot4 + dot8, sq4 + sq8
                        dot2, sq2 = dot2 + dot4, sq2 + sq4
                    dot1, sq1 = dot1 + dot2, sq1 + sq2
                lanes.store(left, c, dot1)
                lanes.store(left, LEFT + c, sq1)
            return arrived_of(left, scale, buffer)

        return in_lanes

    def in_passes(q: Any, r: Any, d: Any, scale: Any, left: Any, buffer: Any) -> Any:
        half, back = TILE // 2, 1.0 / np.float64(scale)
        for i in range(half):
            a, b = (r[i] - q[i]) * scale, (r[i + half] - q[i + half]) * scale
            buffer[i] = a * d[i] + b * d[i + half]
        dot = tree(buffer) + 0.0
        for i in range(half):
            a, b = r[i] - q[i], r[i + half] - q[i + half]
            buffer[i] = (a * scale) * a + (b * scale) * b
        return dot * back, (tree(buffer) + 0.0) * back

    return in_passes


@kernel
def sum_arrival(q: Any, z: Any, r: Any, buffer: Any) -> Any:
    """WRITE_SUMS from the third on, of one written tile: in float64 all the way."""
    half = TILE // 2
    for i in range(half):
        a, b = np.float64(z[i]) - np.float64(q[i]), np.float64(z[i + half]) - np.float64(q[i + half])
        buffer[i] = a * a + b * b
    proposed = tree(buffer)
    for i in range(half):
        a, b = np.float64(r[i]) - np.float64(q[i]), np.float64(r[i + half]) - np.float64(q[i + half])
        c, d = np.float64(z[i]) - np.float64(q[i]), np.float64(z[i + half]) - np.float64(q[i + half])
        buffer[i] = a * c + b * d
    arrived = tree(buffer)
    for i in range(half):
        a, b = np.float64(r[i]) - np.float64(q[i]), np.float64(r[i + half]) - np.float64(q[i + half])
        buffer[i] = a * a + b * b
    return proposed, arrived, tree(buffer)
