"""What scores sum up, tile by tile.

Tiles of scores may have any size, and work is best done on some hundred coordinates at a time: enough for
vectors, few enough for the first-level cache. So a *stretch* is one large tile, or as many small ones as
fit into ``TILE`` coordinates; what is done to single coordinates is done to a stretch at once, and only the
sums are of tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfulp.kernels.cpu_tile import tree, tree_from
from halfulp.kernels.reference import TILE
from halfulp.kernels.simd import bits_of, inline, kernel, span, specialised


@inline
def _size(b: Any, g: Any, x: Any, i: Any) -> Any:
    return abs(np.float64(x[i]))


@inline
def _product(b: Any, g: Any, x: Any, i: Any) -> Any:
    return abs(np.float64(g[i]) * np.float64(x[i]))


@inline
def _gain(b: Any, g: Any, x: Any, i: Any) -> Any:
    return -x[i] if x[i] < 0 else 0.0


@inline
def _lost_gain(b: Any, g: Any, x: Any, i: Any) -> Any:
    gain = -x[i] if x[i] < 0 else 0.0
    return gain if b[i] else 0.0


VALUE = _size  # and otherwise, in copies of the function below


def _sums(b: Any, g: Any, x: Any, tile: Any, half: Any, row: Any, out: Any, column: Any) -> None:
    """One sum of every tile of a stretch: the halving tree over at most 2 * half values, and zeros."""
    for t in range(out.shape[0]):
        first, last = t * tile, min((t + 1) * tile, x.size)
        pairs = max(last - first - half, 0)
        ends = min(first + half, last)
        b0, g0, x0 = span(b, first, ends), span(g, first, ends), span(x, first, ends)
        b1, g1, x1 = span(b, ends, last), span(g, ends, last), span(x, ends, last)
        if pairs == TILE // 2 and half == TILE // 2:
            for i in range(TILE // 2):
                row[i] = VALUE(b0, g0, x0, i) + VALUE(b1, g1, x1, i)
            out[t, column] = tree(row)
            continue
        for i in range(x1.size):
            row[i] = VALUE(b0, g0, x0, i) + VALUE(b1, g1, x1, i)
        if pairs < half:
            b0, g0, x0 = span(b0, pairs, b0.size), span(g0, pairs, g0.size), span(x0, pairs, x0.size)
            rest = span(row, pairs, half)
            for i in range(x0.size):
                rest[i] = VALUE(b0, g0, x0, i)
            zeros = span(rest, x0.size, rest.size)
            for i in range(zeros.size):
                zeros[i] = 0.0
        out[t, column] = tree_from(row, half)


sum_sizes = specialised(_sums, "size", VALUE=_size)
sum_products = specialised(_sums, "product", VALUE=_product)
sum_gains = specialised(_sums, "gain", VALUE=_gain)
sum_lost_gains = specialised(_sums, "lost_gain", VALUE=_lost_gain)


@kernel
def score_sums(
    b: Any, w: Any, g: Any, u: Any, tile: Any, half: Any, product: Any, row: Any, out: Any
) -> None:
    """The eight sums of every tile of a stretch, from the freeze flags and the three vectors."""
    for t in range(out.shape[0]):
        part = span(b, t * tile, min((t + 1) * tile, b.size))
        lost = np.int32(0)
        for i in range(part.size):
            lost += np.int32(part[i])
        out[t, 0] = lost
    sum_sizes(b, g, g, tile, half, row, out, 3)
    sum_sizes(b, g, u, tile, half, row, out, 4)
    sum_sizes(b, g, w, tile, half, row, out, 5)
    sum_products(b, g, w, tile, half, row, out, 6)
    for i in range(product.size):
        product[i] = np.float64(g[i]) * np.float64(u[i])
    sum_sizes(b, g, product, tile, half, row, out, 7)
    sum_gains(b, g, product, tile, half, row, out, 1)
    sum_lost_gains(b, g, product, tile, half, row, out, 2)


@kernel
def clean_three(w: Any, g: Any, u: Any, keep: Any, exponent: Any) -> None:
    for i in range(w.size):
        ok = (
            (bits_of(w[i]) & exponent) != exponent
            and (bits_of(g[i]) & exponent) != exponent
            and (bits_of(u[i]) & exponent) != exponent
        )
        keep[i] = ok
        if not ok:
            w[i] = 0
            g[i] = 0
            u[i] = 0
