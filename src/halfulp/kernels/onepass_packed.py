"""Codes of fewer than eight bits in a one-pass step: unpacked beside the loop, a few tiles at a time.

A tile of 768 codes is whole bytes at every width, and 64 of them stay in the caches while they are unpacked,
moved and packed again, so that memory is read and written once. Bits lie as
:func:`halfulp.writeback.storage.pack_bits` has them: one code after another, lowest bit first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfulp.kernels.reference import TILE
from halfulp.kernels.simd import kernel, span

MANY = 64
"""Tiles at a time. Sums are of every 64th tile at most, and what is moved here counts its tiles from zero."""


@kernel
def unpack(packed: Any, bits: Any, first: Any, n: Any, out: Any) -> None:
    """Codes first .. first + n - 1, of which the first begins a byte."""
    start, mask, width = first * bits // 8, np.uint64((1 << bits) - 1), np.uint64(bits)
    for i in range(0, n, 8):
        word = np.uint64(0)
        for b in range(min(bits, packed.size - start)):
            word |= np.uint64(packed[start + b]) << np.uint64(8 * b)
        for j in range(8):
            out[i + j] = np.uint8(word & mask)
            word >>= width
        start += bits


@kernel
def pack(codes: Any, bits: Any, first: Any, n: Any, packed: Any) -> None:
    """And back; behind the last code there are zeros."""
    start, width = first * bits // 8, np.uint64(bits)
    for i in range(n, (n + 7) // 8 * 8):
        codes[i] = 0
    for i in range(0, n, 8):
        word = np.uint64(0)
        for j in range(7, -1, -1):
            word = (word << width) | np.uint64(codes[i + j])
        for b in range(min(bits, packed.size - start)):
            packed[start + b] = np.uint8((word >> np.uint64(8 * b)) & np.uint64(255))
        start += bits


TENSOR: Any = None
"""And otherwise, in copies of the function below."""


def packed_tensor(given: Any, buffers: Any, size: Any, bits: Any, t0: Any, t1: Any) -> None:
    """The tiles [t0, t1) of a tensor of so many codes: see :func:`halfulp.kernels.onepass_lanes._tensor`."""
    packed, grad, first_, second, kept, moved, counts, sums = given[:8]
    rates, f, k, ft, kt, masks, keys, offset, plain, want_sums = given[8:]
    codes = np.empty(MANY * TILE, np.uint8)
    for t in range(t0 - t0 % MANY, t1, MANY):
        first, a, b = t * TILE, max(t0, t), min(t1, t + MANY)
        last = min(first + MANY * TILE, size)
        at, n = (a - t) * TILE, min(b * TILE, size) - a * TILE
        here = codes[at:]
        unpack(packed, bits, a * TILE, n, here)
        TENSOR(
            (
                codes[: last - first], span(grad, first, last), span(first_, first, last),
                span(second, first, last) if second.size else second,
                span(kept, first, last) if kept.size else kept,
                span(moved, first // 8, (last + 7) // 8) if moved.size else moved, counts[t:], sums[t:],
                rates, f, k, ft, kt, masks, keys, offset + first, plain - first, want_sums,
            ),
            buffers, a - t, b - t,
        )  # fmt: skip
        pack(here, bits, a * TILE, n, packed)
