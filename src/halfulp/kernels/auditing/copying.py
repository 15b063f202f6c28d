"""Tensors copied side by side, tile by tile from where they are: one call for dozens of them.

torch copies tensor after tensor, and for each of some size wakes its threads anew.
"""

from __future__ import annotations

from typing import Any

from halfulp.kernels.reference import TILE
from halfulp.kernels.simd import array_at, kernel_of, span

kernel = kernel_of(__file__)


@kernel
def copy_tiles(places: Any, like: Any, into: Any, t0: Any, t1: Any) -> None:
    """``places``: the address of every tile and how much of it is in use, as in the audit of tiles; ``like``:
    an empty array of the values' type."""
    for t in range(t0, t1):
        n = places[t, 1]
        values, copy = array_at(like, places[t, 0], n), span(into, t * TILE, t * TILE + n)
        for i in range(n):
            copy[i] = values[i]
